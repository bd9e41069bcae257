"""The panel of logged scalars: every name that watch.log was given, with its newest value; what is wrong comes first."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from pages import synthetic
from pages.collector import make_app, serving

from fp8watch_server.pages.logged_scalars import MAX_SHOWN

HOSTILE = '<script>alert("x")</script>'


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder: Path = tmp_path_factory.mktemp("logged")
    app = make_app(folder)
    with serving(app) as client:
        sites = synthetic.make_sites(1)
        run = synthetic.Run(client, "rl", "rl", sites=sites).register()
        for first in (0, 20):
            steps = range(first, first + 20)
            kl = [float("inf") if s == 39 else 1e-3 + 1e-5 * (s % 3) for s in steps]
            logs = {"zz/rollout_kl": kl, "actor/entropy": [1.0 - s / 1000 for s in steps], HOSTILE: [1.5] * 20}
            run.send(steps, fault=False, logs=logs)
        told = {"field": "zz/rollout_kl", "value": float("inf"), "baseline": 1e-3, "unit": "", "since_step": 39}
        place = dict.fromkeys(("module", "gemm", "operand", "direction", "tile", "element")) | {"ranks": [0]}
        said = {
            "mode": "scalar-shift",
            "severity": "warning",
            "title": "zz/rollout_kl is Inf",
            "first_step": 39,
            "last_step": 39,
        }
        synthetic.add_incident(
            app.state.engine, "rl", "i-kl", **said, evidence=[told], place=place, sites=[], num_sites=0
        )
        many = synthetic.Run(client, "many", "many", sites=sites).register()
        many.send(range(8), fault=False, logs={f"m{k:03d}": [float(k)] * 8 for k in range(50)})
        synthetic.Run(client, "plain", "plain", sites=sites).register().send(range(8), fault=False)
        yield client


def panel(client: httpx.Client, run: str) -> str:
    page = client.get(f"/runs/{run}").text
    return page.split('id="logged"')[1].split("</section>")[0]


def test_a_scalar_that_is_no_number_stands_first_with_its_incident_and_its_mark(client: httpx.Client) -> None:
    shown = panel(client, "rl")
    first, second, *_ = re.findall(r"<li.*?</li>", shown, re.S)
    assert "zz/rollout_kl" in first
    assert 'class="warning"' in first
    assert "+Inf" in first
    assert 'class="mark"' in first
    assert "/incidents/i-kl" in first
    assert "zz/rollout_kl" not in second


def test_each_name_has_its_newest_value_with_its_step_and_a_line(client: httpx.Client) -> None:
    [entropy] = [li for li in re.findall(r"<li.*?</li>", panel(client, "rl"), re.S) if "actor/entropy" in li]
    assert 'title="step 39">0.961<' in entropy
    assert '<path d="M' in entropy


def test_names_from_outside_are_text(client: httpx.Client) -> None:
    shown = panel(client, "rl")
    assert HOSTILE not in shown
    assert html.escape(HOSTILE, quote=False).split("(")[0] in shown.replace("&#34;", '"')


def test_more_names_than_fit_are_listed_by_name(client: httpx.Client) -> None:
    shown = panel(client, "many")
    assert len(re.findall(r"<li", shown)) == MAX_SHOWN
    assert f"and {50 - MAX_SHOWN}:" in shown
    assert "m049" in shown


def test_a_run_that_logs_nothing_has_no_panel(client: httpx.Client) -> None:
    page = client.get("/runs/plain").text
    assert re.search(r'id="logged" data-live hidden', page)
    assert "Logged scalars" not in page
