"""The walk without a mouse: from the runs page to the broken tile and the change that mends it, by keys alone."""

from __future__ import annotations

import pytest
from browser.kit import Collector, drawn, until
from pages.synthetic import FAULT_SITE, FAULT_STEP, INCIDENT_ID
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.browser

FOCUSED = "(css) => document.activeElement.matches(css)"
SEEN = """() => { const e = document.activeElement, style = getComputedStyle(e), box = e.getBoundingClientRect();
    return [style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 1,
            box.top < innerHeight && box.bottom > 0 && box.width > 0]; }"""
ACTIVE = "a[href], button, select, input, summary, canvas[tabindex], [data-value], [data-copy], [data-act]"


def tab_to(page: Page, css: str, most: int = 60) -> None:
    """Press Tab until something has the focus, and see that it shows where it is."""
    for _ in range(most):
        page.keyboard.press("Tab")
        if page.evaluate(FOCUSED, css):
            assert page.evaluate(SEEN) == [True, True], f"who presses Tab does not see that {css} has the focus"
            return
    pytest.fail(f"{css} is not reached by {most} tabs")


@pytest.mark.heavy(8, "server/fp8watch_server/pages", first=True)
def test_from_the_runs_page_to_the_broken_tile_and_the_fix(page: Page, collector: Collector) -> None:
    page.goto(collector.url("/"))
    tab_to(page, "a.rowlink[href='/runs/demo-inf']")
    page.keyboard.press("Enter")
    page.wait_for_url("**/runs/demo-inf")
    drawn(page)
    tab_to(page, "#main a.card.incident")
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/incidents/{INCIDENT_ID}")
    drawn(page)

    tab_to(page, f"a[href*='{FAULT_SITE}/tile-map']")
    tab_to(page, "#fix li:nth-child(2) [data-copy]")
    page.keyboard.press("Enter")
    until(page, "document.activeElement.textContent === 'Copied'")
    assert page.evaluate("navigator.clipboard.readText()") == "FP8_QUANT_FWD_INP_AMAX_EPS=1e-12"
    for _ in range(60):  # and back again
        page.keyboard.press("Shift+Tab")
        if page.evaluate(FOCUSED, f"a[href*='{FAULT_SITE}/tile-map']"):
            break
    page.keyboard.press("Enter")
    page.wait_for_url("**/tile-map?step=*")
    until(page, f"document.querySelector('[data-tile-map]').dataset.loaded === '{FAULT_STEP}'")
    tab_to(page, "[data-quantity] button:nth-child(2)")
    page.keyboard.press("Space")
    expect(page.locator("[data-legend-low]")).to_contain_text("scale_inv")
    tab_to(page, "[data-worst]")
    page.keyboard.press("Enter")
    tab_to(page, "[data-canvas-box] canvas")
    expect(page.locator("[data-readout]")).to_contain_text("Tile (131, 3)")
    page.keyboard.press("ArrowDown")
    expect(page.locator("[data-readout]")).to_contain_text("Tile (131, 4)")


@pytest.mark.parametrize(
    "path", ["/", "/runs/demo-inf", f"/runs/demo-inf/sites/{FAULT_SITE}", f"/incidents/{INCIDENT_ID}"]
)
def test_what_can_be_clicked_can_have_the_focus_and_has_a_name(page: Page, collector: Collector, path: str) -> None:
    page.goto(collector.url(path))
    drawn(page)
    found = page.evaluate(
        """(css) => [...document.querySelectorAll(css)].filter((e) => e.checkVisibility()).map((e) => [e.outerHTML.slice(0, 90),
            e.tabIndex, (e.getAttribute("aria-label") ?? e.getAttribute("title") ?? e.innerText
                ?? e.textContent ?? "").trim()])""",
        ACTIVE,
    )
    assert len(found) >= 4
    assert [what for what, tab, name in found if tab < 0 or not name] == []
