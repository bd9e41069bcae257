"""The steps of a tile map: what was kept, what was wrong, played, and the worst of all."""

from __future__ import annotations

import contextlib

import pytest
from browser.kit import Collector, until
from pages import synthetic
from pages.synthetic import FAULT_MODULE, FAULT_SITE, FAULT_STEP
from playwright.sync_api import Browser, Page, expect

from fp8watch_server.store import tile_maps

pytestmark = pytest.mark.browser

SITE = f"/runs/demo-inf/sites/{FAULT_SITE}"
LOADED = "document.querySelector('[data-tile-map]').dataset.loaded"


def test_worst_tile_is_found_from_any_step(page: Page, collector: Collector) -> None:
    page.goto(collector.url(f"{SITE}/tile-map?step={FAULT_STEP + 3}"))
    until(page, f"{LOADED} === '{FAULT_STEP + 3}'")
    until(page, "document.querySelector('[data-tile-map]').dataset.badSteps === '1'")
    page.get_by_role("button", name="Worst tile").click()
    expect(page.locator("[data-readout]")).to_contain_text("Tile (131, 3)")
    expect(page.locator("output[data-map-step]")).to_have_text(str(FAULT_STEP))
    assert page.url.endswith(f"step={FAULT_STEP}&tile=131,3")


@pytest.mark.parametrize("slow", ["tile-map", "series"])
def test_a_click_that_is_faster_than_the_data_waits_for_it(browser: Browser, collector: Collector, slow: str) -> None:
    """On a busy machine the buttons are there long before the map, and before it is known which steps are bad."""
    tab = browser.new_page()  # the script stays in it, and is not for the tests after this one
    tab.add_init_script(
        f"""const fast = window.fetch; window.fetch = async (url, ...rest) => {{
            if (String(url).includes("/{slow}")) await new Promise((done) => setTimeout(done, 700));
            return fast(url, ...rest); }};"""
    )
    tab.goto(collector.url(f"{SITE}/tile-map?step={FAULT_STEP + 3}"))
    tab.get_by_role("button", name="Worst tile").click()
    expect(tab.locator("[data-readout]")).to_contain_text("Tile (131, 3)")
    tab.goto(collector.url(f"{SITE}/tile-map?step={FAULT_STEP}"))
    tab.keyboard.press("n")
    expect(tab.locator("[data-readout]")).to_contain_text("Tile (131, 3)")
    tab.close()


def test_play_goes_through_the_steps_and_stops_at_the_last(page: Page, collector: Collector) -> None:
    last = FAULT_STEP + 4
    page.goto(collector.url(f"{SITE}/tile-map?step={last - 2}"))
    until(page, f"{LOADED} === '{last - 2}'")
    page.get_by_role("button", name="Play").click()
    expect(page.get_by_role("button", name="Pause")).to_have_attribute("aria-pressed", "true")
    until(page, f"{LOADED} === '{last}'")
    expect(page.get_by_role("button", name="Play")).to_be_visible()
    page.keyboard.press("p")  # at the end it begins anew
    until(page, f"{LOADED} === '{FAULT_STEP - 6}'")
    page.keyboard.press("p")
    expect(page.get_by_role("button", name="Play")).to_be_visible()


def test_weights_are_blocks_with_their_values(page: Page, collector: Collector) -> None:
    weight = collector.runs["faulty"].site(FAULT_MODULE, "weight")
    page.goto(collector.url(f"/runs/demo-inf/sites/{weight.id}/tile-map?step={FAULT_STEP}&tile=1,2"))
    until(page, f"{LOADED} !== undefined")
    expect(page.locator(".title")).to_contain_text("2 × 6 blocks of 128 × 128")
    expect(page.locator("[data-readout]")).to_contain_text("Block (1, 2)")
    expect(page.locator("[data-readout]")).to_contain_text("rows 128–255, columns 256–383")
    assert page.evaluate(
        "(() => { const a = document.querySelector('[data-tile-map]').tileMap.at; return a.cellX > 46; })()"
    )


def test_what_is_off_scale_is_seen_on_any_colour(
    page: Page, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dark and light side by side: a frame in one colour drowns in the ramp where the ramp has that colour."""
    run = synthetic.Run(collector.client, "offscale", "off-scale", sites=synthetic.make_sites(1), session="7" * 32)
    run.register()
    run.send(range(3), fault=False)
    weight = run.site("layers.0.mlp.up_proj", "weight")
    made = synthetic.make_tile_map

    def off_scale(site, step, rng, *, fault):  # type: ignore[no-untyped-def]
        found = made(site, step, rng, fault=fault)
        found.flags[:] = 32
        return found

    monkeypatch.setattr(synthetic, "make_tile_map", off_scale)
    run.send_maps([2], [weight])
    page.goto(collector.url(f"/runs/offscale/sites/{weight.id}/tile-map?step=2"))
    until(page, f"{LOADED} === '2'")
    seen = page.evaluate(
        """() => { const view = document.querySelector("[data-tile-map]").tileMap, { width, height } = view.base;
            const pixels = view.base.getContext("2d").getImageData(0, 0, width, height).data;
            return view.flagged.map((i) => { const [x, y] = view.at.place(i).map((v) => v * devicePixelRatio);
                const row = []; for (let k = 0; k < 9; k += 1) {
                    const at = 4 * (Math.round(y + view.at.cellY / 2 + 12) * width + Math.floor(x) + k);
                    row.push((pixels[at] + pixels[at + 1] + pixels[at + 2]) / 3); }
                return [Math.min(...row), Math.max(...row)]; }); }"""
    )
    assert len(seen) == 12
    assert all(dark < 60 and light > 200 for dark, light in seen)


def test_a_map_that_comes_in_parts_leads_to_each_of_its_tiles(
    page: Page, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tile_maps, "MAX_SHOWN_TILES", 600)
    page.goto(collector.url(f"{SITE}/tile-map?step={FAULT_STEP}&tile=9,2"))
    readout, hint = page.locator("[data-readout]"), page.locator("[data-map-cut]")
    expect(readout).to_contain_text("Tile (9, 2)")
    expect(readout).to_contain_text("row 9, columns 256–383")
    expect(hint).to_have_text(
        "Rows 0 to 99 of a map of 256 × 6 tiles are drawn; 1 of the other tiles is non-finite, sentinel or off-scale."
    )
    page.locator("[data-map-flagged] a", has_text="(131, 3)").click()
    expect(readout).to_contain_text("Tile (131, 3)")
    expect(readout).to_contain_text("+Inf")
    expect(hint).to_contain_text("Rows 81 to 180 of")
    expect(hint).to_contain_text("0 of the other tiles are")
    page.goto(collector.url(f"{SITE}/tile-map?step={FAULT_STEP + 1}&tile=99,0"))
    expect(readout).to_contain_text("Tile (99, 0)")
    expect(hint).to_contain_text("0 of the other tiles are")  # in this step
    page.get_by_role("button", name="Worst tile").click()
    expect(readout).to_contain_text("Tile (131, 3)")
    assert page.url.endswith(f"step={FAULT_STEP}&tile=131,3")


def test_the_list_of_tiles_is_of_the_step_that_is_shown_however_early_it_moves(
    browser: Browser, collector: Collector
) -> None:
    tab = browser.new_page()
    tab.add_init_script(
        """const fast = window.fetch; window.fetch = async (url, ...rest) => {
            if (String(url).includes("/api/v1/") && String(url).includes("/tile-map")) await new Promise((done) => setTimeout(done, 700));
            return fast(url, ...rest); };"""
    )
    tab.goto(collector.url(f"{SITE}/tile-map?step={FAULT_STEP}"))
    tab.keyboard.press(".")
    until(tab, f"{LOADED} === '{FAULT_STEP + 1}'")
    expect(tab.locator("[data-map-flagged]")).to_contain_text("No tile is non-finite")
    tab.route(
        "**/sites/*/tile-map?*",
        lambda route: route.fulfill(status=503) if "/api/" not in route.request.url else route.continue_(),
    )
    told = f"The tiles of step {FAULT_STEP} could not be listed (503)."
    for _ in range(5):  # a renewal of the page that was under way may put its own list in the place of this
        tab.keyboard.press(",")
        until(tab, f"{LOADED} === '{FAULT_STEP}'")
        with contextlib.suppress(AssertionError):
            expect(tab.locator("[data-map-flagged]")).to_contain_text(told, timeout=4_000)
            break
        tab.keyboard.press(".")
        until(tab, f"{LOADED} === '{FAULT_STEP + 1}'")
    expect(tab.locator("[data-map-flagged]")).to_contain_text(told)
    tab.close()


def test_a_map_of_one_attempt_asks_for_that_attempt_at_each_step(page: Page, collector: Collector) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(collector.url(f"{SITE}/tile-map?step={FAULT_STEP + 3}&attempt=1"))
    until(page, f"{LOADED} === '{FAULT_STEP + 3}'")
    page.get_by_role("button", name="One step back").click()
    until(page, f"{LOADED} === '{FAULT_STEP + 2}'")
    until(page, f"document.querySelector('[data-map-step]').textContent === '{FAULT_STEP + 2}'")
    maps = [url for url in asked if "/tile-map?" in url]
    assert {"/api/" in url for url in maps} == {True, False}
    assert [url for url in maps if "attempt=1" not in url] == []
    assert page.url.endswith(f"step={FAULT_STEP + 2}&attempt=1")
