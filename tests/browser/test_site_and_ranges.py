"""A site over steps: what was usual, both directions, clip depth; and the steps that all charts show."""

from __future__ import annotations

import pytest
from browser.kit import Collector, drawn, until
from pages.synthetic import FAULT_MODULE, FAULT_SITE, FAULT_STEP
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.browser

RUN = "/runs/demo-inf"
SITE = f"{RUN}/sites/{FAULT_SITE}"
STEPS = "(id) => { const x = document.getElementById(id).data[0].x; return [x[0], x.at(-1)]; }"


def test_a_band_says_what_was_usual_and_the_fault_is_outside_of_it(page: Page, collector: Collector) -> None:
    page.goto(collector.url(SITE))
    drawn(page)
    low, high, value, after = page.evaluate(
        """(step) => { const [line] = document.getElementById("sqnr").data;
            const [low, high] = document.getElementById("sqnr").data.filter((t) => t.meta === "band");
            const k = low.x.indexOf(step), j = line.x.indexOf(step);
            return [low.y[k], high.y[k], line.y[j], high.y[k + 1] - low.y[k + 1]]; }""",
        FAULT_STEP,
    )
    assert value < low < 31.7 < high
    assert after == pytest.approx(high - low, rel=0.2)  # a fault does not become usual
    expect(page.locator("#clip")).to_be_visible()
    assert page.evaluate("document.getElementById('clip').data[0].y.every((v) => v < 0.1)")


def test_a_band_feeds_on_what_was_usual_only(page: Page, collector: Collector) -> None:
    """As a function: a level, a fault of a few steps, the level again; and a new level, which is usual in the end."""
    page.goto(collector.url(SITE))
    found = page.evaluate(
        """async () => {
            const script = document.querySelector('script[src$="/site.js"]').src.replace("site.js", "baseline.js");
            const { band } = await import(script);
            const value = (i) => (i >= 40 && i < 60 ? 9 : i < 80 ? 1 : 5) + 0.01 * (i % 3);
            const steps = Array.from({ length: 200 }, (_, i) => i);
            const { x, low, high } = band(steps, steps.map(value), 0.1);
            return [30, 59, 62, 85, 199].map((at) => { const k = x.indexOf(at); return [low[k], high[k]]; }); }"""
    )
    middles = [sum(edges) / 2 for edges in found]
    assert middles == pytest.approx([1, 1, 1, 1, 5], abs=0.1)
    assert max(high - low for low, high in found) < 1


def test_both_directions_stand_side_by_side_on_one_scale(page: Page, collector: Collector) -> None:
    page.goto(collector.url(SITE))
    drawn(page)
    for chart in ("amax", "scale_inv", "sqnr", "underflow", "clip"):
        ranges = page.evaluate(
            "(ids) => ids.map((id) => document.getElementById(id).layout.yaxis.range)", [chart, f"{chart}-other"]
        )
        assert ranges[0] == ranges[1]
        left, right = (page.locator(f"#{name}").bounding_box() for name in (chart, f"{chart}-other"))
        assert left
        assert right
        assert left["y"] == right["y"]
        assert left["x"] + left["width"] <= right["x"]
    assert page.evaluate("document.getElementById('sqnr').data[0].y.some((v) => v < 30)")
    assert not page.evaluate("document.getElementById('sqnr-other').data[0].y.some((v) => v < 30)")
    page.get_by_role("link", name="rowwise only").click()
    drawn(page)
    assert page.locator("#amax-other").count() == 0
    weight = collector.runs["faulty"].site(FAULT_MODULE, "weight")
    page.goto(collector.url(f"{RUN}/sites/{weight.id}"))
    drawn(page)
    assert page.locator("#amax-other").count() == 0


def test_a_zoom_is_of_all_charts_in_the_address_and_read_anew(page: Page, collector: Collector) -> None:
    page.goto(collector.url(RUN))
    drawn(page)
    box = page.locator("#training .nsewdrag[data-subplot='xy']").bounding_box()
    assert box
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 22, steps=5)
    page.mouse.up()
    until(page, "new URLSearchParams(location.search).has('from')")
    low, high = page.evaluate("['from', 'to'].map((n) => Number(new URLSearchParams(location.search).get(n)))")
    assert 25 <= low <= 33
    assert 55 <= high <= 63
    for chart in ("training", "health"):  # each is read anew by itself
        until(page, f"JSON.stringify(({STEPS})('{chart}')) === '[{low},{high}]'")
    assert any("health.json" in url and f"from={low}" in url for url in asked)

    page.goto(page.url)  # a deep link
    drawn(page)
    until(page, f"JSON.stringify(({STEPS})('training')) === '[{low},{high}]'")
    page.locator("#range").click()
    until(page, "document.getElementById('training').data[0].x.at(-1) === 119")
    until(page, "document.getElementById('health').data[0].x[0] === 0")
    assert "from" not in page.url
    expect(page.locator("#range")).to_be_hidden()


def test_a_range_that_makes_no_sense_shows_what_there_is(page: Page, collector: Collector) -> None:
    page.goto(collector.url(f"{SITE}?from=80&to=20"))  # the wrong way round
    drawn(page)
    assert page.evaluate(STEPS, "amax") == [20, 80]
    page.goto(collector.url(f"{SITE}?from=abc&to=-1"))
    drawn(page)
    assert page.evaluate(STEPS, "amax") == [0, 119]
    page.goto(collector.url(f"{SITE}?from=100000&to=200000"))  # beyond the data
    drawn(page)
    expect(page.locator("#amax")).to_contain_text("Not measured")


def test_keys_are_listed_and_work(page: Page, collector: Collector) -> None:
    page.goto(collector.url(f"{SITE}/tile-map?step={FAULT_STEP}"))
    page.keyboard.press("?")
    expect(page.locator("#keys")).to_be_visible()
    expect(page.locator("#keys")).to_contain_text("the worst tile of the worst step")
    page.keyboard.press("Escape")
    expect(page.locator("#keys")).to_be_hidden()
    page.keyboard.press("u")
    page.wait_for_url(f"**{SITE}")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()


def test_a_click_leads_to_the_map_of_the_nearest_step_that_was_kept(page: Page, collector: Collector) -> None:
    page.goto(collector.url(f"{SITE}?step=10"))
    drawn(page)
    page.evaluate("document.getElementById('clip').emit('plotly_click', { points: [{ x: 119 }] })")
    page.wait_for_url(f"**{SITE}/tile-map?step={FAULT_STEP + 4}")
    page.goto(collector.url(f"{SITE}?step=10"))
    page.get_by_role("link", name="Tile map").click()
    page.wait_for_url(f"**{SITE}/tile-map?step={FAULT_STEP - 6}")
