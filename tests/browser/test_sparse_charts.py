"""A run with statistics on each 48th step, in a browser: what was not measured is drawn as nothing."""

from __future__ import annotations

import pytest
from browser.kit import Collector, drawn
from pages import synthetic
from pages.synthetic import SPARSE_FULL, SPARSE_ID, SPARSE_MODULE, SPARSE_SPIKE
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.browser

MEASURED = sorted([*SPARSE_FULL, SPARSE_SPIKE])
LINES = """(field) => { const plot = document.querySelector(`[data-evidence="${field}"]`);
    return plot.data.filter((t) => t.mode.includes("lines")).map((t) => [t.x, t.y]); }"""
POINTS = """(field) => { const [t] = document.querySelector(`[data-evidence="${field}"]`).data;
    return [t.mode, t.x.filter((_, i) => t.y[i] !== null), [t.marker.size].flat()]; }"""


@pytest.fixture(scope="module")
def sparse(collector: Collector) -> synthetic.Run:
    """The sparse run, in the collector of all tests."""
    return synthetic.sparse_run(collector.client, collector.app.state.engine)


def segments(x: list[float], y: list[float | None]) -> list[tuple[float, float]]:
    """Pairs of neighbours that a line joins."""
    return [(x[i], x[i + 1]) for i in range(len(x) - 1) if y[i] is not None and y[i + 1] is not None]


def test_no_line_crosses_steps_that_were_not_measured(page: Page, collector: Collector, sparse: synthetic.Run) -> None:
    page.goto(collector.url(f"/incidents/{SPARSE_ID}"))
    drawn(page)
    for field in ("amax_max", "tile_sqnr_db"):
        joined = [pair for x, y in page.evaluate(LINES, field) for pair in segments(x, y)]
        assert joined == [(0, 1), (1, 2), (2, 3), (3, 4)]
        mode, steps, sizes = page.evaluate(POINTS, field)
        assert mode == "lines+markers"
        assert steps == MEASURED
        assert min(sizes) > 0


def test_one_spike_of_a_count_is_one_stem(page: Page, collector: Collector, sparse: synthetic.Run) -> None:
    page.goto(collector.url(f"/incidents/{SPARSE_ID}"))
    drawn(page)
    mode, steps, _ = page.evaluate(POINTS, "num_inf")
    assert mode == "markers"
    assert steps == MEASURED
    assert page.evaluate(LINES, "num_inf") == [[[SPARSE_SPIKE, SPARSE_SPIKE, None], [0, 7, None]]]


def test_a_dense_series_is_one_line_and_a_regular_sparse_one_too(
    page: Page, collector: Collector, sparse: synthetic.Run
) -> None:
    page.goto(collector.url(f"/incidents/{synthetic.INCIDENT_ID}"))
    drawn(page)
    assert page.evaluate(POINTS, "amax_max")[0] == "lines"  # its Inf is no gap
    mode, steps, _ = page.evaluate(POINTS, "loss")
    assert mode == "lines"
    ((x, y),) = page.evaluate(LINES, "loss")[:1]
    assert len(segments(x, y)) == len(steps) - 1
    run = synthetic.Run(collector.client, "each-48th", "each 48th", sites=synthetic.make_sites(1), session="f" * 32)
    run.register()
    run.send(range(0, 481, 48))
    page.goto(collector.url(f"/runs/each-48th/sites/{run.sites[0].id}"))
    drawn(page)
    mode, joined = page.evaluate(
        "() => { const [t] = document.getElementById('sqnr').data; return [t.mode, t.y.every((v) => v !== null)]; }"
    )
    assert (mode, joined) == ("lines+markers", True)


def test_health_map_paints_measured_steps_only(page: Page, collector: Collector, sparse: synthetic.Run) -> None:
    page.goto(collector.url("/runs/sparse"))
    drawn(page)
    painted = page.evaluate(
        """() => { const [t] = document.getElementById("health").data;
           const edge = (j) => (t.x[j] + t.x[j + 1]) / 2;
           return t.x.map((x, j) => [x, t.z.filter((row) => row[j] !== null).length,
             j > 0 ? edge(j - 1) : x - 0.5, j < t.x.length - 1 ? edge(j) : x + 0.5]).filter(([, n]) => n); }"""
    )
    assert [x for x, *_ in painted] == MEASURED
    assert {x: n for x, n, *_ in painted}[SPARSE_SPIKE] == 1
    assert all((low, high) == (x - 0.5, x + 0.5) for x, _, low, high in painted)
    expect(page.locator("#health-gaps")).to_have_text("Blank: not measured (full statistics every 48 steps).")
    page.goto(collector.url("/runs/demo-inf"))
    drawn(page)
    expect(page.locator("#health-gaps")).to_have_text("")


def test_what_was_not_logged_has_no_panel(page: Page, collector: Collector, sparse: synthetic.Run) -> None:
    axes = """() => { const l = document.getElementById("training")._fullLayout;
        return Object.keys(l).filter((k) => /^yaxis/.test(k) && l[k].title?.text && l[k].visible)
            .map((k) => l[k].title.text); }"""
    page.goto(collector.url("/runs/sparse"))
    drawn(page)
    assert page.evaluate(axes) == ["loss"]
    expect(page.locator("#not-logged")).to_contain_text("gradient norm not logged: watch.log(grad_norm=...)")
    page.goto(collector.url("/runs/demo-inf"))
    drawn(page)
    assert page.evaluate(axes) == ["loss", "grad norm", "lr"]


def test_a_fix_is_not_cut_on_its_card(page: Page, collector: Collector, sparse: synthetic.Run) -> None:
    page.goto(collector.url("/runs/sparse"))
    fits = "(e) => [e.scrollHeight <= e.clientHeight + 1, e.scrollWidth <= e.clientWidth, e.clientHeight > 25]"
    assert SPARSE_MODULE in page.locator("a.card.incident").inner_text()
    assert page.locator("a.card.incident .fix").evaluate(fits) == [True, True, True]
