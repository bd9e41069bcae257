"""The map of a fault arrives after its incident: pages that are open by then show it, without a reload."""

from __future__ import annotations

import pytest
from browser.kit import Collector, drawn, until
from pages import synthetic
from pages.synthetic import FAULT_MODULE, FAULT_STEP, FAULT_TILE
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.browser

ID = "a" * 31 + "7"
NAMED = f"({FAULT_TILE[0]}, {FAULT_TILE[1]})"
LIVE = "document.getElementById('live').textContent === 'live'"


@pytest.fixture
def run(collector: Collector) -> synthetic.Run:
    """A run with an incident of which no map has come yet."""
    found = synthetic.Run(collector.client, "later", "maps come later", session="a7" * 16).register()
    found.send(range(FAULT_STEP - 3, FAULT_STEP + 1))
    synthetic.add_incident(collector.app.state.engine, "later", ID)
    return found


def test_they_appear_on_the_open_page_of_the_incident_and_on_the_map_itself(
    page: Page, collector: Collector, run: synthetic.Run
) -> None:
    page.goto(collector.url(f"/incidents/{ID}"))
    drawn(page)
    until(page, LIVE)
    page.evaluate("window.loadedOnce = true")
    expect(page.locator("[data-tile-map]")).to_have_count(0)
    expect(page.locator("#head").get_by_role("link", name=NAMED)).to_have_count(0)

    site = run.site(FAULT_MODULE)
    run.send_maps([FAULT_STEP], [site])  # and nothing else: no step, no record
    expect(page.locator("[data-readout]")).to_contain_text(f"Tile {NAMED}")
    expect(page.locator("[data-readout]")).to_contain_text("sentinel")
    link = page.locator("#head").get_by_role("link", name=NAMED)
    expect(link).to_be_visible()

    page.locator("[data-canvas-box] canvas").focus()
    page.keyboard.press("ArrowUp")
    run.send_maps([FAULT_STEP - 1], [site])  # the panel stays as somebody has left it
    until(page, "document.querySelector('[data-slider]').max === '1'")
    expect(page.locator("[data-readout]")).not_to_contain_text(f"Tile {NAMED}")
    assert page.evaluate("window.loadedOnce") is True

    link.click()
    until(page, f"document.querySelector('[data-tile-map]').dataset.loaded === '{FAULT_STEP}'")
    until(page, LIVE)
    run.send_maps([FAULT_STEP + 1], [site])
    until(page, "document.querySelector('[data-slider]').max === '2'")
