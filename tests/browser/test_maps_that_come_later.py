"""The map of a fault arrives after its incident, the incident after the step: pages that are open show them, without a reload."""

from __future__ import annotations

import time

import pytest
import sqlalchemy as sa
from browser.kit import Collector, drawn, until
from pages import synthetic
from pages.synthetic import FAULT_MODULE, FAULT_STEP, FAULT_TILE
from playwright.sync_api import Page, expect

from fp8watch_server.db import schema
from fp8watch_server.db.dialect import writing

pytestmark = pytest.mark.browser

ID = "a" * 31 + "7"
NAMED = f"({FAULT_TILE[0]}, {FAULT_TILE[1]})"
PATIENCE_MS = 20_000  # what is live comes within two seconds, on a machine that has nothing else to do
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
    expect(page.locator("[data-readout]")).to_contain_text(f"Tile {NAMED}", timeout=PATIENCE_MS)
    expect(page.locator("[data-readout]")).to_contain_text("sentinel")
    link = page.locator("#head").get_by_role("link", name=NAMED)
    expect(link).to_be_visible(timeout=PATIENCE_MS)

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


def test_an_open_page_of_a_site_gets_its_incident_and_the_way_to_its_map(page: Page, collector: Collector) -> None:
    run = synthetic.Run(collector.client, "site-later", "site later", session="a8" * 16).register()
    run.send(range(FAULT_STEP - 3, FAULT_STEP + 1))
    site = run.site(FAULT_MODULE)
    page.goto(collector.url(f"/runs/site-later/sites/{site.id}?sides=one"))
    drawn(page)
    until(page, LIVE)
    page.evaluate("window.loadedOnce = true")
    expect(page.locator("#incidents")).to_be_hidden()
    expect(page.locator("#to-map")).to_have_text("no tile map")

    shapes = "document.getElementById('sqnr').layout.shapes.filter((s) => s.type === 'line').map((s) => s.x0)"
    assert page.evaluate(shapes) == []
    later = {"first_step": FAULT_STEP, "last_step": FAULT_STEP}
    synthetic.add_incident(collector.app.state.engine, "site-later", "a" * 31 + "8", **later)
    expect(page.locator("#incidents a.card")).to_contain_text("inf-laundering", timeout=PATIENCE_MS)
    until(page, f"String({shapes}) === '{FAULT_STEP}'")

    run.send_maps([FAULT_STEP], [site])
    expect(page.locator("#to-map").get_by_role("link", name="Tile map")).to_be_visible(timeout=PATIENCE_MS)
    assert page.evaluate("window.loadedOnce") is True
    page.evaluate(
        "(step) => document.getElementById('sqnr').emit('plotly_click', { points: [{ x: step }] })", FAULT_STEP
    )
    page.wait_for_url(f"**/sites/{site.id}/tile-map?step={FAULT_STEP}")


def test_charts_of_an_incident_that_goes_on_go_on_with_it(page: Page, collector: Collector) -> None:
    run = synthetic.Run(collector.client, "goes-on", "goes on", session="a9" * 16, sites=synthetic.make_sites(1))
    run.register()
    run.send(range(20))
    engine, known = collector.app.state.engine, "a" * 31 + "9"
    site = run.sites[0]
    place = {"ranks": [0], "module": site.module, "operand": "input", "direction": "rowwise"}
    synthetic.add_incident(engine, "goes-on", known, first_step=10, last_step=10, place=place, sites=[site.id])
    page.goto(collector.url(f"/incidents/{known}"))
    drawn(page)
    until(page, LIVE)
    chart = "document.querySelector('[data-evidence=tile_sqnr_db]')"
    assert page.evaluate(f"{chart}.layout.shapes[0].x1") == 10.5

    run.send(range(20, 120))
    with writing(engine) as conn:
        i = schema.incident
        later = {"last_step": 115, "updated_at": time.time()}
        conn.execute(sa.update(i).where(i.c.id == known).values(**later))
    expect(page.locator("#head")).to_contain_text("10 \u2013 115", timeout=PATIENCE_MS)
    until(page, f"{chart}.layout.shapes[0].x1 === 115.5 && {chart}.data[0].x.at(-1) === 119")
