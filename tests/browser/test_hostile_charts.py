"""Names inside of charts are text: plotly reads a little HTML, and names come from outside."""

from __future__ import annotations

import pytest
from browser.kit import Collector, drawn, until
from pages import synthetic
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.browser

NAME = "<b>m</b><a href='https://elsewhere.example/'>up</a><br>&lt;i&gt;"
RUN = "hostile-charts"


def told_over(page: Page, chart: str, what: str) -> str:
    """The text beside the mouse when it rests on the middle of something in a chart."""
    page.locator(f"#{chart}").evaluate("e => e.scrollIntoView({ block: 'center' })")  # not below the header
    box = page.locator(f"#{chart} {what}").last.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2 - 2, box["y"] + box["height"] / 2)
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.locator(f"#{chart} .hovertext").first.wait_for()
    return " | ".join(page.locator(f"#{chart} .hovertext text").all_text_contents())


@pytest.fixture(scope="module")
def site(collector: Collector) -> int:
    """A run whose modules are called like markup, with a NaN and an incident."""
    sites = synthetic.make_sites(1, prefix=NAME)
    run = synthetic.Run(collector.client, RUN, RUN, sites=sites, session="7" * 32).register()
    run.send(range(40), fault=False, change=lambda steps, rows: rows["num_nan"].__setitem__(5 * len(sites), 1))
    place = {"ranks": [0], "module": sites[0].module, "operand": "input", "direction": "rowwise", "gemm": "fprop"}
    synthetic.add_incident(
        collector.app.state.engine, RUN, "7" * 32, first_step=5, last_step=5, title=f"t {NAME}", mode=f"m {NAME}",
        place={**place, "tile": None, "element": None}, sites=[sites[0].id], num_sites=1,
    )  # fmt: skip
    return sites[0].id


def test_on_the_axis_of_the_health_map(page: Page, collector: Collector, site: int) -> None:
    page.goto(collector.url(f"/runs/{RUN}"))
    drawn(page)
    labels = page.evaluate("[...document.querySelectorAll('#health .ytick text')].map((t) => t.textContent)")
    assert len(labels) == 7
    assert all("<br>&lt;i&gt;" in label for label in labels), labels
    assert page.evaluate("document.querySelectorAll('#health .ytick a').length") == 0


def test_where_the_mouse_rests(page: Page, collector: Collector, site: int) -> None:
    page.goto(collector.url(f"/runs/{RUN}"))
    drawn(page)
    for chart, what in (("health", ".nsewdrag"), ("health", ".points path"), ("training", ".points path")):
        told = told_over(page, chart, what)
        assert NAME in told, f"{what} of {chart}: {told}"
        assert page.locator(".hoverlayer a").count() == 0


def test_in_the_first_chart_and_on_the_page_of_the_site(page: Page, collector: Collector, site: int) -> None:
    page.route("**/assets/plotly-*", lambda route: route.fulfill(content_type="text/javascript", body=""))
    page.goto(collector.url(f"/runs/{RUN}"))
    expect(page.locator("#training svg.first a")).to_have_attribute("href", "/incidents/" + "7" * 32)
    assert NAME in (page.locator("#training svg.first a").get_attribute("aria-label") or "")
    assert page.locator("#training svg.first a").count() == 1
    page.unroute("**/assets/plotly-*")
    page.goto(collector.url(f"/runs/{RUN}/sites/{site}"))
    drawn(page)
    until(page, "document.getElementById('histogram').classList.contains('ready')")
    assert page.locator("a[href*='elsewhere']").count() == 0
    expect(page.locator("h1")).to_contain_text(NAME)
