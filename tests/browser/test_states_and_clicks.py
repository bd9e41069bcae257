"""Every state has an address that leads back to it, and every chart leads to what lies behind a point of it."""

from __future__ import annotations

import dataclasses
import re

import pytest
from browser.kit import Collector, Watched, drawn, point_of_tile, until
from pages import synthetic
from pages.synthetic import FAULT_MODULE, FAULT_SITE, FAULT_STEP, FAULT_TILE
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.browser

RUN = "/runs/demo-inf"
SITE = f"{RUN}/sites/{FAULT_SITE}"
MAP = f"{SITE}/tile-map?step={FAULT_STEP}"
LOADED = f"document.querySelector('[data-tile-map]').dataset.loaded === '{FAULT_STEP}'"
POINT = """([id, x, y]) => { const plot = document.getElementById(id), l = plot._fullLayout;
    plot.scrollIntoView({ block: "center" });
    const box = plot.getBoundingClientRect();
    return [box.left + l.xaxis._offset + l.xaxis.d2p(x), box.top + l.yaxis._offset + l.yaxis.d2p(y)]; }"""


def click(page: Page, chart: str, x: float, y: float) -> None:
    """Click on a point of a chart, in its own coordinates."""
    left, top = page.evaluate(POINT, [chart, x, y])
    page.mouse.move(left - 2, top)
    page.mouse.move(left, top)
    page.locator(f"#{chart} .hoverlayer .hovertext").first.wait_for()
    page.mouse.click(left, top)


def test_a_cell_of_the_health_map_leads_to_the_site_and_a_point_of_a_site_to_its_tiles(
    page: Page, collector: Collector
) -> None:
    page.goto(collector.url(RUN))
    drawn(page)
    row = page.evaluate("(m) => document.getElementById('health').layout.yaxis.ticktext.indexOf(m)", FAULT_MODULE)
    click(page, "health", FAULT_STEP, row)
    page.wait_for_url(f"**{SITE}?step={FAULT_STEP}")
    drawn(page)
    assert FAULT_STEP in page.evaluate("document.getElementById('amax').layout.shapes.map((s) => s.x0)")
    dashes = page.evaluate(
        "document.getElementById('amax').data.filter((t) => t.mode === 'lines' && t.meta !== 'band').map((t) => t.line.dash)"
    )
    assert len(dashes) == len(set(dashes)) == 2, "lines differ in more than their colour"
    sqnr = page.evaluate(
        "(step) => { const [t] = document.getElementById('sqnr').data; return t.y[t.x.indexOf(step)]; }", FAULT_STEP
    )
    click(page, "sqnr", FAULT_STEP, sqnr)
    page.wait_for_url(f"**{SITE}/tile-map?step={FAULT_STEP}")
    until(page, LOADED)


def test_the_histogram_says_how_many_tiles_had_which_amax_at_each_step(page: Page, collector: Collector) -> None:
    page.goto(collector.url(SITE))
    drawn(page)
    for chart, site in (("histogram", FAULT_SITE), ("histogram-other", None)):
        steps, buckets, counts = page.evaluate(
            """(id) => { const plot = document.getElementById(id), [t] = plot.data;
                return [t.x, t.customdata.map((row) => row[0][0]), t.customdata.map((row) => row.map((c) => c[1]))]; }""",
            chart,
        )
        assert steps == list(range(120))
        assert buckets == sorted(buckets, key=lambda b: float(b.removeprefix("2^").replace("\u2212", "-")))
        if site is not None:
            told = collector.client.get(f"/api/v1/runs/demo-inf/sites/{site}/histogram?points=300").json()
            first = told["buckets"].index(buckets[0])
            assert [row[FAULT_STEP] for row in counts] == [
                round(c) for c in told["counts"][FAULT_STEP][first : first + len(buckets)]
            ]
        assert sum(row[7] for row in counts) > 100
    drawn_as = page.evaluate(
        "() => { const [t] = document.getElementById('histogram').data; return [t.z.flat(), t.customdata.flat()]; }"
    )
    assert all((z is None) == (said[1] in (0, "\u2013")) for z, said in zip(*drawn_as, strict=True))


@pytest.mark.parametrize(
    ("address", "state"),
    [
        (f"{RUN}?map=underflow_ratio&operand=weight", {"map": "underflow_ratio", "operand": "weight"}),
        (f"{RUN}?map=nope&operand=nope", {"map": "num_nonfinite", "operand": ""}),
        (f"{MAP}&show=scale_inv&tile=7,2", {"show": "scale_inv", "tile": "Tile (7, 2)"}),
        (f"{MAP}&show=nope&tile=999,999", {"show": "amax", "tile": "outside this map of 256 \u00d7 6"}),
    ],
)
def test_an_address_leads_back_to_what_was_chosen(
    page: Page, collector: Collector, address: str, state: dict[str, str]
) -> None:
    page.goto(collector.url(address))
    pressed = "(group) => document.querySelector(`${group} [aria-pressed='true']`).dataset.value"
    if "map" in state:
        drawn(page)
        assert page.evaluate(pressed, "[data-tabs='map']") == state["map"]
        assert page.evaluate(pressed, "[data-tabs='operand']") == state["operand"]
        operands = page.evaluate(
            "[...new Set(document.getElementById('health').data[0].customdata.flat().map((c) => c[1].split(' ')[0]))]"
        )
        assert not state["operand"] or operands == [state["operand"]]
    else:
        until(page, LOADED)
        assert page.evaluate(pressed, "[data-quantity]") == state["show"]
        expect(page.locator("[data-readout]")).to_contain_text(state["tile"])


def test_the_slider_goes_over_the_steps_that_were_kept_and_no_others(page: Page, collector: Collector) -> None:
    page.goto(collector.url(MAP))
    until(page, LOADED)
    slider = page.get_by_role("slider", name="Step")
    slider.focus()
    page.keyboard.press("Home")
    expect(page.locator("output[data-map-step]")).to_have_text(str(FAULT_STEP - 6))
    page.keyboard.press("ArrowRight")
    until(page, f"document.querySelector('[data-tile-map]').dataset.loaded === '{FAULT_STEP - 5}'")
    page.keyboard.press("End")
    until(page, f"document.querySelector('[data-tile-map]').dataset.loaded === '{FAULT_STEP + 4}'")
    assert f"step={FAULT_STEP + 4}" in page.url


def test_hover_says_amax_scale_inv_and_counts_as_the_collector_has_them(page: Page, collector: Collector) -> None:
    path = f"/api/v1{SITE}/tile-map?step={FAULT_STEP}"
    told = collector.client.get(path).json()
    page.goto(collector.url(MAP))
    for tile in ((20, 4), FAULT_TILE):
        page.mouse.move(*point_of_tile(page, *tile))
        at = tile[0] * told["shape"][1] + tile[1]
        tooltip = page.locator("[data-tooltip]")
        expect(tooltip).to_contain_text(f"Tile ({tile[0]}, {tile[1]})")
        said = dict(zip(*(tooltip.locator(of).all_inner_texts() for of in ("dt", "dd")), strict=True))
        special = dict(told["nonfinite"]).get(at)
        amax = said["amax"].split()[0]
        assert amax == "+Inf" if special == "inf" else float(amax) == pytest.approx(told["amax"][at], rel=1e-3)
        assert float(said["scale_inv"].split()[0]) == pytest.approx(told["scale_inv"][at], rel=1e-5)
        for name, field in (("non-finite", "num_nonfinite"), ("underflow", "num_underflow")):
            assert int(said[name].split()[0]) == told[field][at]


def test_colours_are_octaves_and_follow_the_theme(page: Page, collector: Collector) -> None:
    """A doubling is as far on the ramp wherever it is; the largest is its end, the smallest its beginning."""
    page.goto(collector.url(f"{MAP}&theme=dark"))
    until(page, LOADED)
    colours = page.evaluate(
        """async () => {
            const { geometry, paint, MARGIN } = await import(document.querySelector('script[src$="/tile_map.js"]').src
                .replace("tile_map.js", "tile_paint.js"));
            const n = 9, at = geometry([1, n], 600), none = new Map(), zeros = Array(n).fill(0);
            const map = { shape: [1, n], flags: zeros, special: none, amax: zeros.map((_, i) => 2 ** (i - 4)) };
            const size = { width: at.width + MARGIN.left + MARGIN.right, height: at.height + MARGIN.top + MARGIN.bottom };
            const { base, ramp } = paint(map, "amax", at, size, 1, []);
            const strip = base.getContext("2d").getImageData(0, MARGIN.top + 3, size.width, 1).data;
            const seen = map.amax.map((_, i) => [...strip.slice(4 * Math.round(at.place(i)[0] + 3)).slice(0, 3)]);
            return [seen, map.amax.map((_, i) => ramp[Math.round((i / (n - 1)) * 255)])]; }"""
    )
    assert colours[0] == colours[1]
    copied = """(of) => { const view = document.querySelector("[data-tile-map]").tileMap, [x, y] = view.at.place(0);
        const [source, left, top] = of === "legend" ? [document.querySelector("canvas[data-legend]"), 1, 1]
            : [view.base, (x + 2) * devicePixelRatio, (y + 2) * devicePixelRatio];
        const g = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
        g.drawImage(source, -left, -top);
        return g.getImageData(0, 0, 1, 1).data.join(); }"""
    before = [page.evaluate(copied, of) for of in ("legend", "map")]
    page.keyboard.press("t")
    assert "theme=light" in page.url
    until(page, f"({copied})('legend') !== '{before[0]}'")
    assert page.evaluate(copied, "map") != before[1]


def test_keys_of_a_map_and_of_charts(page: Page, collector: Collector) -> None:
    page.goto(collector.url(f"{SITE}/tile-map?step={FAULT_STEP + 2}"))
    until(page, "document.querySelector('[data-tile-map]').dataset.badSteps === '1'")
    page.keyboard.press(",")
    expect(page.locator("output[data-map-step]")).to_have_text(str(FAULT_STEP + 1))
    page.keyboard.press("w")
    expect(page.locator("[data-readout]")).to_contain_text(f"Tile ({FAULT_TILE[0]}, {FAULT_TILE[1]})")
    expect(page.locator("output[data-map-step]")).to_have_text(str(FAULT_STEP))
    page.goto(collector.url(f"{SITE}?from=80&to=100"))
    drawn(page)
    expect(page.locator("#range")).to_be_visible()
    page.keyboard.press("0")
    until(page, "document.getElementById('amax').data[0].x.length === 120")
    assert "from" not in page.url


def test_a_chart_with_nothing_to_show_shows_nothing_of_before(
    page: Page, collector: Collector, watched: Watched
) -> None:
    of_norm = {"module": "norm", "operand": "output", "gemm": "probe", "format": "", "id": 77, "order": 99}
    sites = synthetic.make_sites(1)
    probe = dataclasses.replace(sites[0], **of_norm)
    run = synthetic.Run(collector.client, "probed", "probed run", sites=[*sites, probe], session="6" * 32).register()
    run.send(range(8), fault=False)
    page.goto(collector.url("/runs/probed"))
    drawn(page)
    health, maps, operands = (
        page.locator("#health"),
        page.locator("[data-tabs=map]"),
        page.locator("[data-tabs=operand]"),
    )
    labels = "document.getElementById('health').layout?.yaxis.ticktext.join()"
    operands.locator("[data-value=output]").click()
    until(page, f"{labels} === 'norm'")
    maps.locator("[data-value=tile_sqnr_db]").click()
    expect(health.locator(".nothing")).to_have_text("No site was measured here.")
    expect(health.locator(".plotly")).to_have_count(0)
    assert page.locator("#health").evaluate("e => e.closest('.panel').querySelector('.chartmenu') === null")

    maps.locator("[data-value=amax_max]").click()
    until(page, f"{labels} === 'norm'")
    expect(health.locator(".nothing")).to_have_count(0)
    click(page, "health", 5, 0)  # a point of it leads to its site again
    page.wait_for_url("**/sites/77?step=5")

    page.goto(collector.url("/runs/probed?map=amax_max"))
    drawn(page)
    broken = re.compile("health.json")
    page.route(broken, lambda route: route.fulfill(status=503))
    page.evaluate("document.dispatchEvent(new CustomEvent('fp8watch:live'))")
    page.wait_for_timeout(300)
    expect(health.locator(".nothing")).to_have_count(0)  # the same again: what was drawn stays
    maps.locator("[data-value=underflow_ratio]").click()
    expect(health.locator(".nothing")).to_contain_text("No data for this chart")
    page.unroute(broken)
    maps.locator("[data-value=num_nonfinite]").click()
    until(page, "document.querySelector('#health.js-plotly-plot') !== null")
    assert all("503" in e for e in watched.errors)
    watched.errors.clear()
