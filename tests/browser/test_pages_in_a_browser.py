"""The pages in a real browser: the failure is seen, hovered and reached; names are text; nothing leaves the origin."""

from __future__ import annotations

from urllib.parse import quote

import numpy as np
import pytest
from browser.kit import Collector, Watched, drawn, marks, point_of_tile, until
from pages.synthetic import FAULT_MODULE, FAULT_SITE, FAULT_STEP, HOSTILE, HOSTILE_ID, INCIDENT_ID
from playwright.sync_api import Page, expect

from fp8watch_agent.record import Site, TileFlag, TileMap
from fp8watch_agent.wire import TILE_MAPS_CONTENT_TYPE, encode_tile_maps

pytestmark = pytest.mark.browser

RUN = "/runs/demo-inf"
SITE = f"{RUN}/sites/{FAULT_SITE}"


def test_a_person_finds_the_broken_tile_and_the_flag_from_the_runs_page(page: Page, collector: Collector) -> None:
    page.goto(collector.url("/"))
    page.get_by_role("link", name="tiny-lm blockwise").click()
    page.locator("a.card.incident").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("One Inf in the input of layers.2.mlp.down_proj")
    fix = page.locator("#fix li", has_text="FP8_QUANT_FWD_INP_AMAX_EPS")
    fix.get_by_role("button", name="Copy").click()
    expect(fix.get_by_role("button")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "FP8_QUANT_FWD_INP_AMAX_EPS=1e-12"
    expect(page.locator("[data-readout]")).to_contain_text("Tile (131, 3)")  # the mark of the map on this very page
    page.get_by_role("link", name="(131, 3)").click()
    expect(page.locator("[data-readout]")).to_contain_text("row 131, columns 384–511")
    assert page.url.endswith(f"{SITE}/tile-map?step={FAULT_STEP}&tile=131,3")


def test_a_copy_is_confirmed_on_the_button_that_a_refresh_puts_in_its_place(page: Page, collector: Collector) -> None:
    page.goto(collector.url(f"/incidents/{INCIDENT_ID}"))
    fix = page.locator("#fix li", has_text="FP8_QUANT_FWD_INP_AMAX_EPS")
    expect(page.locator("#live")).to_be_visible()
    said = fix.get_by_role("button", name="Copy").evaluate(
        """async (first) => {
          const { refresh } = await import(document.querySelector("script[src$='/page.js']").src.replace("page.js", "live.js"));
          let said;
          for (let i = 0, button = first; i < 5 && String(said) !== "false,Copied"; i += 1) {  // a refresh may take longer
            button.click();
            while (button.textContent !== "Copied") await new Promise(requestAnimationFrame);
            await refresh();
            const now = [...document.querySelectorAll("#fix [data-copy]")].find((b) => b.dataset.copyText === first.dataset.copyText);
            said = [button.isConnected, now.textContent];
            button = now;
          }
          return said;
        }"""
    )
    assert said == [False, "Copied"]
    expect(fix.get_by_role("button")).to_have_text("Copy")


def test_health_map_marks_the_right_layer_and_step_and_leads_there(page: Page, collector: Collector) -> None:
    page.goto(collector.url(f"{RUN}?map=tile_sqnr_db"))
    drawn(page)
    found = page.evaluate(
        """() => { const plot = document.getElementById("health"); const marks = plot.data[1];
           return [marks.x, marks.y.map((i) => plot.layout.yaxis.ticktext[i]), marks.customdata]; }"""
    )
    assert found[:2] == [[FAULT_STEP], [FAULT_MODULE]]
    assert found[2][0][1:] == ["input / rowwise", "1 non-finite element", FAULT_SITE]
    lowest = page.evaluate(
        """() => { const z = document.getElementById("health").data[0].z; let best = [Infinity];
           z.forEach((row, i) => row.forEach((v, j) => { if (v !== null && v < best[0]) best = [v, i, j]; }));
           const plot = document.getElementById("health");
           return [plot.layout.yaxis.ticktext[best[1]], plot.data[0].x[best[2]]]; }"""
    )
    assert lowest == [FAULT_MODULE, FAULT_STEP]
    page.get_by_role("button", name="Non-finite").click()
    until(page, "new URLSearchParams(location.search).get('map') === null")  # the page opens on it: of the incident
    until(page, "Math.max(...document.getElementById('health').data[0].z.flat()) === 1")


def test_incident_is_a_line_on_the_loss_that_can_be_clicked(page: Page, collector: Collector) -> None:
    page.goto(collector.url(RUN))
    drawn(page)
    shapes = page.evaluate("document.getElementById('training').layout.shapes.map(s => s.x0)")
    assert shapes == [FAULT_STEP]
    x, y = page.evaluate(
        """(step) => { const plot = document.getElementById("training"), l = plot._fullLayout;
           const box = plot.getBoundingClientRect();
           const x = l.xaxis._offset + l.xaxis.d2p(step), y = l.yaxis9._offset + l.yaxis9._length / 2;
           return [box.left + x, box.top + y]; }""",
        FAULT_STEP,
    )
    page.mouse.move(x - 3, y)
    page.mouse.move(x, y)
    expect(page.locator("#training .hoverlayer")).to_contain_text("inf-laundering")
    page.mouse.click(x, y)
    page.wait_for_url(f"**/incidents/{INCIDENT_ID}")


def test_hover_on_the_broken_tile_says_what_it_is(page: Page, collector: Collector) -> None:
    page.goto(collector.url(f"{SITE}/tile-map?step={FAULT_STEP}"))
    page.mouse.move(*point_of_tile(page, 131, 3))
    tooltip = page.locator("[data-tooltip]")
    expect(tooltip).to_be_visible()
    for words in ("Tile (131, 3)", "row 131, columns 384–511", "Inf", "sentinel: scale forced to 1", "amax+Inf", "96"):
        expect(tooltip).to_contain_text(words)
    page.mouse.move(*point_of_tile(page, 10, 0))
    expect(tooltip).to_contain_text("Tile (10, 0)")
    expect(tooltip).not_to_contain_text("sentinel")


def test_broken_tile_is_drawn_in_the_colour_of_alarms(page: Page, collector: Collector) -> None:
    page.goto(collector.url(f"{SITE}/tile-map?step={FAULT_STEP}&theme=dark"))
    point_of_tile(page, 131, 3)
    colours = page.evaluate(
        """(tiles) => {
            const view = document.querySelector("[data-tile-map]").tileMap, { width, height } = view.base;
            const pixels = view.base.getContext("2d").getImageData(0, 0, width, height).data;
            return tiles.map(([r, c]) => {
                const [x, y] = view.at.place(r * view.map.shape[1] + c).map((v) => v * devicePixelRatio);
                const at = 4 * (Math.round(y + 3) * width + Math.floor(x + view.at.cellX / 2));
                return [...pixels.slice(at, at + 3)];
            }); }""",
        [[131, 3], [100, 3]],
    )
    assert colours[0] == [0xFF, 0x7A, 0x45]
    assert colours[1] != [0xFF, 0x7A, 0x45]


def test_step_slider_keyboard_and_next_flagged_tile(page: Page, collector: Collector) -> None:
    page.goto(collector.url(f"{SITE}/tile-map?step={FAULT_STEP - 1}"))
    point_of_tile(page, 0, 0)
    page.get_by_role("button", name="Next flagged tile").click()
    expect(page.locator("[data-readout]")).to_contain_text("No tile stands out")
    page.keyboard.press(".")
    until(page, f"document.querySelector('[data-tile-map]').dataset.loaded === '{FAULT_STEP}'")
    expect(page.locator("output[data-map-step]")).to_have_text(str(FAULT_STEP))
    expect(page.locator("[data-map-flagged] tr")).to_contain_text("(131, 3)")
    page.keyboard.press("n")
    expect(page.locator("[data-readout]")).to_contain_text("Tile (131, 3)")
    until(page, "location.search === '?step=90&tile=131,3'")
    page.locator("[data-canvas-box] canvas").focus()
    page.keyboard.press("ArrowLeft")  # the map lies on its side: left is one row up
    expect(page.locator("[data-readout]")).to_contain_text("Tile (130, 3)")
    page.get_by_role("button", name="scale_inv").click()
    expect(page.locator("[data-legend-low]")).to_contain_text("scale_inv 2^")


def test_a_map_past_512_squared_is_drawn_at_once_and_loses_no_tile(page: Page, collector: Collector) -> None:
    n = 540
    run = collector.runs["faulty"]
    site = run.site("layers.0.attention.wq")
    big = Site(**{**site.__dict__, "shape": (n, n * 128)})
    run.sites[run.sites.index(site)] = big
    run.register()
    flags = np.zeros((n, n), np.uint8)
    flags[333, 444] = TileFlag.INF | TileFlag.SENTINEL
    amax = (2.0 ** (np.arange(n) / 64))[None, :].repeat(n, 0).astype(np.float32)
    bits = (amax.view(np.uint32) >> 16).astype(np.uint16).ravel()
    zeros = np.zeros(n * n, np.uint16)
    tile_map = TileMap(big.id, 5, (n, n), bits, np.ones(n * n, np.float32), flags.ravel(), zeros, zeros)
    body = encode_tile_maps(run.run_id, run.session, 0, run.map_seq, [tile_map])
    headers = {"content-type": TILE_MAPS_CONTENT_TYPE, "content-encoding": "zstd"}
    assert collector.client.post("/v1/tile-maps", content=body, headers=headers).status_code == 200
    run.map_seq += 1
    page.goto(collector.url(f"{RUN}/sites/{big.id}/tile-map?step=5"))
    x, y = point_of_tile(page, 333, 444)
    page.mouse.move(x + 2, y - 2)  # tiles are smaller than a pixel here: the one that stands out is meant
    expect(page.locator("[data-tooltip]")).to_contain_text("Tile (333, 444)")
    took = page.evaluate(
        "() => { const v = document.querySelector('[data-tile-map]').tileMap; const took = [];"
        " for (let i = 0; i < 5; i++) { const t = performance.now(); v.draw(); took.push(performance.now() - t); }"
        " return Math.min(...took); }"
    )
    assert took < 4000


def test_non_finite_values_are_marked_above_their_curves(page: Page, collector: Collector) -> None:
    page.goto(collector.url("/runs/demo-nan"))
    drawn(page)
    expected = [[10, "NaN"], [11, "+Inf"], [12, "−Inf"], [29, "NaN"], [13, "+Inf"], [14, "NaN"]]
    assert marks(page, "training") == expected
    site = collector.runs["nonfinite"].sites[0].id
    page.goto(collector.url(f"/runs/demo-nan/sites/{site}"))
    drawn(page)
    assert marks(page, "amax") == [[10, "NaN"], [11, "+Inf"], [12, "−Inf"]]
    page.goto(collector.url(f"{SITE}?step={FAULT_STEP}"))
    drawn(page)
    assert marks(page, "amax") == [[FAULT_STEP, "+Inf"]]


def test_hostile_names_are_text(page: Page, collector: Collector) -> None:
    run = f"/runs/{quote(HOSTILE.replace('/', '~'), safe='')}"
    site = collector.runs["hostile"].sites[0].id
    for path in ("/", run, f"{run}/sites/{site}", f"{run}/sites/{site}/tile-map", f"/incidents/{HOSTILE_ID}"):
        page.goto(collector.url(path))
        drawn(page)
        expect(page.locator("body")).to_contain_text("<script>alert('name')")
        assert page.locator("main img").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{path} is wider than the window"


def test_theme_follows_the_system_the_button_and_the_address(page: Page, collector: Collector) -> None:
    theme = "document.documentElement.dataset.theme"
    ground = "getComputedStyle(document.body).backgroundColor"
    page.goto(collector.url(RUN))
    page.evaluate("() => { localStorage.clear(); sessionStorage.clear(); }")
    page.goto(collector.url(RUN))
    drawn(page)
    assert page.evaluate(theme) == "dark"
    dark = page.evaluate(ground)
    line = "document.getElementById('training').data[0].line.color"
    dark_line = page.evaluate(line)
    page.get_by_role("button", name="Switch to the light theme").click()
    assert page.evaluate(theme) == "light"
    assert page.evaluate(ground) != dark
    until(page, f"{line} !== '{dark_line}'")
    page.reload()
    assert page.evaluate(theme) == "light"
    page.goto(collector.url("/?theme=dark"))
    assert page.evaluate(theme) == "dark"
    page.goto(collector.url("/"))
    assert page.evaluate(theme) == "dark"  # ?theme= holds for the tab
    page.evaluate("() => { localStorage.clear(); sessionStorage.clear(); }")
    page.emulate_media(color_scheme="light")
    page.reload()
    assert page.evaluate(theme) == "light"
    page.emulate_media(color_scheme="dark")


def test_unknown_run_is_a_page_and_only_its_own_status_is_on_the_console(
    page: Page, collector: Collector, watched: Watched
) -> None:
    page.goto(collector.url("/runs/nope"))
    expect(page.get_by_role("heading", level=1)).to_have_text("No such run")
    page.get_by_role("link", name="All runs").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Runs")
    assert len(watched.errors) == 1
    assert "404" in watched.errors.pop()
