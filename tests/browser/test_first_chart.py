"""The chart that the server draws: there before scripts, there without them, and gone when plotly has drawn over it."""

from __future__ import annotations

import pytest
from browser.kit import Collector, Watched, drawn, until
from pages.synthetic import INCIDENT_ID
from playwright.sync_api import Browser, Page, expect

pytestmark = pytest.mark.browser

PLACE = """() => {
    const figure = document.getElementById("training").getBoundingClientRect();
    const path = document.querySelector("#training svg.first path.line.loss");
    const box = path.getBoundingClientRect(), colour = getComputedStyle(path).stroke;
    return { inside: box.left >= figure.left && box.right <= figure.right && box.top >= figure.top && box.bottom <= figure.bottom,
             share: box.width / figure.width, tall: box.height, colour };
}"""


@pytest.mark.parametrize("theme", ["dark", "light"])
@pytest.mark.parametrize("width", [700, 1600])
def test_it_needs_no_script(browser: Browser, collector: Collector, theme: str, width: int) -> None:
    context = browser.new_context(java_script_enabled=False, viewport={"width": width, "height": 900})
    try:
        page = context.new_page()
        page.goto(collector.url(f"/runs/demo-inf?theme={theme}"))
        page.wait_for_selector("#training svg.first path.line.loss")
        place = page.evaluate(PLACE)
        assert place["inside"]
        assert place["share"] > 0.8
        assert place["tall"] > 60
        assert place["colour"] == {"dark": "rgb(98, 182, 238)", "light": "rgb(11, 108, 179)"}[theme]
        link = page.locator("#training a")
        expect(link).to_have_attribute("href", f"/incidents/{INCIDENT_ID}")
        link.focus()
        page.keyboard.press("Enter")
        expect(page).to_have_url(collector.url(f"/incidents/{INCIDENT_ID}"))
    finally:
        context.close()


def test_plotly_takes_its_place_and_the_chart_does_not_jump(page: Page, collector: Collector) -> None:
    page.route("**/assets/plotly-*", lambda route: route.fulfill(content_type="text/javascript", body=""))
    page.goto(collector.url("/runs/demo-inf"))
    before = page.locator("#training svg.first path.line.loss").bounding_box()
    page.unroute("**/assets/plotly-*")
    page.goto(collector.url("/runs/demo-inf"))
    drawn(page)
    expect(page.locator("#training svg.first")).to_have_count(0)
    after = page.locator("#training .trace path.js-line").first.bounding_box()
    assert before is not None
    assert after is not None
    assert before["y"] == pytest.approx(after["y"], abs=6)
    assert before["height"] == pytest.approx(after["height"], abs=6)


def test_it_stays_where_plotly_does_not_come(page: Page, collector: Collector, watched: Watched) -> None:
    page.route("**/assets/plotly-*", lambda route: route.abort())
    page.goto(collector.url("/runs/demo-inf"))
    until(page, "document.querySelector('#health .nothing') !== null")
    expect(page.locator("#health .nothing")).to_contain_text("plotly.js did not load")
    assert page.evaluate(PLACE)["tall"] > 60
    page.unroute("**/assets/plotly-*")
    assert watched.errors
    assert all("ERR_FAILED" in e for e in watched.errors)
    watched.errors.clear()
