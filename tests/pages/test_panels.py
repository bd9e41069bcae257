"""A panel of the page of a run is one row: the one of docs/how-to is added, and the page has it everywhere."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from pages import synthetic
from pages.collector import make_app, serving

from fp8watch_server.db.schema import SCALAR_NAMES
from fp8watch_server.pages import health_maps, panels, site_charts
from fp8watch_server.store import deviation
from fp8watch_server.store.fields import SERIES_FIELDS

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "add-a-run-page-panel.md"


@pytest.fixture
def with_a_row_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[httpx.Client]:
    row = PAGE.read_text().split("<!-- example -->\n```python\n")[1].split("\n```\n<!-- /example -->")[0]
    monkeypatch.setattr(panels, "PANELS", (*panels.PANELS, eval(row, {"Panel": panels.Panel})))
    with serving(make_app(tmp_path)) as client:
        run = synthetic.Run(client, "scaled", "scaled", sites=synthetic.make_sites(1)).register()
        run.send(range(40), fault=False, change=synthetic.with_loss_scale)
        synthetic.Run(client, "plain", "plain", sites=synthetic.make_sites(1)).register().send(range(8), fault=False)
        yield client


def test_a_row_is_a_panel_everywhere_on_the_page(with_a_row_more: httpx.Client) -> None:
    page = with_a_row_more.get("/runs/scaled").text
    assert "Loss, gradient norm, learning rate and loss scale over steps" in page
    assert re.search(r'<path class="line loss_scale series-2" d="M', page)
    assert "<dt>Loss scale</dt><dd" in page
    served = json.loads(html.unescape(page.split("data-panels='")[1].split("'")[0]))
    assert [p["field"] for p in served] == ["loss", "grad_norm", "lr", "loss_scale"]
    series = with_a_row_more.get("/runs/scaled/training.json").json()["series"]["loss_scale"]
    assert series["values"][0] == 1024.0
    assert "loss scale not logged: <code>watch.log(loss_scale=...)</code>" in with_a_row_more.get("/runs/plain").text


def test_every_panel_has_a_scalar_and_a_colour() -> None:
    colours = (Path(panels.__file__).parent / "static" / "fp8watch.css").read_text()
    for panel in panels.PANELS:
        assert panel.field in SCALAR_NAMES
        assert f".first .{panel.stroke} {{ --c: var(--{panel.stroke}); }}" in colours


def test_nothing_else_lists_them() -> None:
    """A second list would be forgotten: scripts and templates name no panel of their own."""
    folder = Path(panels.__file__).parent
    for name in ("static/run.js", "templates/run.html", "templates/first_chart.html", "first_chart.py"):
        text = (folder / name).read_text()
        assert not re.search(r"grad_norm|learning rate|series-\d", text), name


def test_a_chart_of_a_site_is_one_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    curve = site_charts.Curve("kurtosis", "kurtosis", "series-1")
    more = site_charts.SiteChart("tails", "Tails", "how heavy", "octaves", (curve,))
    monkeypatch.setattr(site_charts, "CHARTS", (*site_charts.CHARTS, more))
    with serving(make_app(tmp_path)) as client:
        run = synthetic.Run(client, "one", "one", sites=synthetic.make_sites(1)).register()
        run.send(range(8), fault=False)
        site = run.sites[0].id
        page = client.get(f"/runs/one/sites/{site}").text
        assert '<h2>Tails</h2><p class="hint" title="how heavy">' in page
        assert 'id="tails"' in page
        served = json.loads(html.unescape(page.split('data-charts="')[1].split('"')[0]))
        assert served[-1]["curves"][0]["field"] == "kurtosis"
        assert [c["floor"] for c in served if c["has_floor"]] == [28.0]
        assert "kurtosis" in client.get(f"/runs/one/sites/{site}/charts.json").json()


def test_a_health_map_is_one_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    more = health_maps.HealthMap("kurtosis", "Tails", "kurtosis", log2=True, of_quantiser=True)
    monkeypatch.setattr(health_maps, "MAPS", (*health_maps.MAPS, more))
    with serving(make_app(tmp_path)) as client:
        run = synthetic.Run(client, "one", "one", sites=synthetic.make_sites(1)).register()
        run.send(range(8), fault=False)
        page = client.get("/runs/one").text
        assert '<button type="button" data-value="kurtosis">Tails</button>' in page
        assert json.loads(page.split("data-maps='")[1].split("'")[0])[-1]["label"] == "kurtosis"
        assert client.get("/runs/one/health.json?field=kurtosis").status_code == 200
        assert client.get("/runs/one/health.json?field=moment2").status_code == 422


def test_every_chart_and_map_has_a_field_and_a_colour() -> None:
    colours = (Path(panels.__file__).parent / "static" / "fp8watch.css").read_text()
    assert {deviation.OF.get(m.field, m.field) for m in health_maps.MAPS} <= set(SERIES_FIELDS)
    for chart in site_charts.CHARTS:
        for curve in chart.curves:
            assert curve.field in SERIES_FIELDS
            assert f"--{curve.stroke}:" in colours


def test_no_script_or_template_lists_fields_of_its_own() -> None:
    folder = Path(panels.__file__).parent
    for name in ("static/site.js", "static/health.js", "templates/site.html"):
        text = (folder / name).read_text().replace('field === "tile_sqnr_db"', "")  # +Inf is shown in words there
        named = re.findall(r"scale_inv_max|tile_sqnr_db|underflow_ratio|clip_depth|amax_max", text)
        assert not named, (name, named)
