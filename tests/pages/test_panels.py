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
from fp8watch_server.pages import panels

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
