"""In a window as narrow as a telephone, where the message of an incident is opened: all of it can be read and used."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser.kit import Collector, drawn, until
from pages import synthetic
from pages.synthetic import FAULT_SITE, FAULT_STEP, INCIDENT_ID
from playwright.sync_api import Browser, Page, expect

pytestmark = pytest.mark.browser

RUN = "/runs/demo-inf"
SITE = f"{RUN}/sites/{FAULT_SITE}"
TOO_WIDE = """() => {
  const width = document.documentElement.clientWidth;
  const scrolls = (e) => e && e !== document.body && (/auto|scroll|hidden|clip/.test(getComputedStyle(e).overflowX) || scrolls(e.parentElement));
  return [...document.querySelectorAll("body *")]
    .filter((e) => e.getBoundingClientRect().right > width + 1 && !e.closest("dialog") && !scrolls(e.parentElement))
    .map((e) => `${e.tagName}.${e.getAttribute("class") ?? ""} ${Math.round(e.getBoundingClientRect().right)}`);
}"""


@pytest.fixture
def narrow(page: Page) -> Iterator[Page]:
    """A window of 390 pixels."""
    page.set_viewport_size({"width": 390, "height": 844})
    yield page
    page.set_viewport_size({"width": 1280, "height": 900})


@pytest.mark.parametrize(
    "path",
    ["/", RUN, SITE, f"{SITE}/tile-map?step={FAULT_STEP}", f"/incidents/{INCIDENT_ID}", "/runbooks/inf-laundering"],
)
def test_no_page_is_wider_than_the_window(narrow: Page, collector: Collector, path: str) -> None:
    narrow.goto(collector.url(path))
    drawn(narrow)
    assert narrow.evaluate(TOO_WIDE) == []
    assert narrow.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("path", [SITE, f"{SITE}/tile-map?step={FAULT_STEP}", f"/incidents/{INCIDENT_ID}/flight"])
def test_the_way_up_is_cut_before_it_lies_under_what_stands_beside_it(
    narrow: Page, collector: Collector, path: str
) -> None:
    narrow.goto(collector.url(path))
    until(narrow, "!document.getElementById('live').hidden")
    hidden = narrow.evaluate(
        """() => { const of = document.querySelector(".crumbs"), live = document.getElementById("live").getBoundingClientRect();
          const end = of.getBoundingClientRect().right;
          return [end <= live.left + 1, getComputedStyle(of).overflowX, [...of.children].filter((e) => e.offsetParent).map((e) => e.clientWidth)]; }"""
    )
    assert hidden[:2] == [True, "hidden"]
    assert all(width > 20 for width in hidden[2]), "a crumb that cannot be read or touched"


def test_states_on_a_card_are_whole(narrow: Page, collector: Collector) -> None:
    run = synthetic.Run(collector.client, "states", "states", sites=synthetic.make_sites(1), session="56" * 16)
    run.register().send(range(3), ended=True)
    for first_step, k in ((1, "6"), (2, "9")):
        over = {"status": "resolved", "resolved_at": 1.0, "mode": "stale-weight-scale", "first_step": first_step}
        synthetic.add_incident(collector.app.state.engine, "states", f"5{k}" * 16, **over)
    narrow.goto(collector.url("/runs/states"))
    chips = narrow.locator("#incidents .card .chip")
    assert sorted(chips.all_inner_texts()) == ["broke first", "not seen yet", "not seen yet"]
    assert narrow.evaluate(
        "[...document.querySelectorAll('#incidents .card .chip')].every((e) => e.scrollWidth <= e.clientWidth)"
    )


def test_a_wide_table_scrolls_in_its_panel_and_stays_there_when_it_is_renewed(
    narrow: Page, collector: Collector
) -> None:
    run = synthetic.Run(collector.client, "narrow", "narrow run", sites=synthetic.make_sites(1), session="7" * 32)
    run.register().send(range(5))
    narrow.goto(collector.url("/runs/narrow"))
    worst = "document.getElementById('worst')"
    assert narrow.evaluate(f"{worst}.scrollWidth > {worst}.clientWidth + 60")
    narrow.evaluate(f"{worst}.scrollLeft = 60; {worst}.dataset.before = 1")
    run.send(range(5, 9))
    until(narrow, f"{worst}.dataset.before === undefined")
    assert narrow.evaluate(f"{worst}.scrollLeft") == 60


def test_charts_and_maps_have_room_beside_their_labels(narrow: Page, collector: Collector) -> None:
    narrow.goto(collector.url(RUN))
    drawn(narrow)
    assert narrow.evaluate("document.getElementById('health')._fullLayout.xaxis._length") > 100
    narrow.goto(collector.url(f"{SITE}/tile-map?step={FAULT_STEP}"))
    until(narrow, "document.querySelector('[data-tile-map]').dataset.loaded !== undefined")
    box = narrow.locator("[data-canvas-box]").bounding_box()
    assert box is not None
    assert box["width"] > 250


def test_what_is_wrong_and_what_to_change_is_on_the_first_screen(narrow: Page, collector: Collector) -> None:
    narrow.goto(collector.url("/"))
    incident = narrow.locator(f"#runs a[href$='{INCIDENT_ID}']")
    expect(incident.locator("code")).to_be_in_viewport(ratio=0.5)  # its mode, beside names of any length
    incident.click()
    expect(narrow.locator("#fix li").first).to_be_in_viewport()
    expect(narrow.get_by_role("button", name="Acknowledge")).to_be_in_viewport()


def test_evidence_fits_into_its_column_with_its_longest_words(page: Page, collector: Collector) -> None:
    said = [
        ("scale_ratio_min", 0.4991, "in (0.5, 1]", "ratio"),
        ("num_off_scale_tiles", 1, 0, "of 12288 tiles"),
        ("tile_sqnr_db", 31.55, "28 or more", "dB"),
        ("num_underflow", 123_456_789, 987_654, "elements"),
    ]
    fields = ("field", "value", "baseline", "unit")
    evidence = [dict(zip(fields, e, strict=True)) | {"since_step": 123_456} for e in said]
    run = synthetic.Run(collector.client, "evidence", "e", sites=synthetic.make_sites(1), session="5" * 32)
    run.register().send(range(3), ended=True)
    synthetic.add_incident(collector.app.state.engine, "evidence", "5" * 32, evidence=evidence, status="resolved")
    page.goto(collector.url(f"/incidents/{'5' * 32}"))
    panel = page.locator("#evidence")
    assert panel.evaluate("e => e.scrollWidth - e.clientWidth") <= 0
    baselines = [cell.inner_text() for cell in panel.locator("td:nth-child(3)").all()]
    assert baselines == ["in (0.5, 1]", "0 of 12288 tiles", "28 dB or more", "987\u2009654 elements"]


MARKS = """() => {
  const f = document.querySelector("[data-flight]").flight, at = f.geometry, box = f.canvas.getBoundingClientRect();
  return f.data.marks.map(([i, j, site]) => [box.left + at.x[f.painted.paneOf[i]] + (j + 0.5) * at.cell, box.top + at.rows[i].top + at.rows[i].height / 2, site]);
}"""


def test_a_finger_beside_a_cross_of_the_recorder_opens_its_tiles(browser: Browser, collector: Collector) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    page = context.new_page()
    page.goto(collector.url(f"/incidents/{INCIDENT_ID}/flight"))
    until(page, "document.querySelector('[data-flight]').dataset.loaded !== undefined")
    wide, least = page.evaluate(CROSS)
    assert least >= 11, f"the cross is {wide} × {least} pixels"
    page.evaluate("(y) => scrollBy(0, y - innerHeight / 2)", page.evaluate(MARKS)[0][1])
    x, y, site = max(page.evaluate(MARKS), key=lambda mark: mark[1])  # below the last one is no other
    page.touchscreen.tap(x + 9, y + 9)
    page.wait_for_url(f"**/sites/{site}/tile-map?step={FAULT_STEP}")
    context.close()


CROSS = """() => {
  const f = document.querySelector("[data-flight]").flight, [i] = f.data.marks[0], pane = f.painted.panes[f.painted.paneOf[i]];
  const { data } = pane.getContext("2d").getImageData(0, 0, pane.width, pane.height), probe = document.createElement("canvas").getContext("2d");
  probe.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--critical");
  probe.fillRect(0, 0, 1, 1);
  const red = [...probe.getImageData(0, 0, 1, 1).data].join();
  const xs = [], ys = [];
  for (let k = 0; k < data.length; k += 4) if (data.slice(k, k + 4).join() === red) { xs.push((k / 4) % pane.width); ys.push(Math.floor(k / 4 / pane.width)); }
  const span = (v) => (Math.max(...v) - Math.min(...v) + 1) / f.ratio;
  return [span(xs), span(ys)].sort((a, b) => b - a);
}"""


def test_what_a_finger_presses_on_the_recorder_is_as_broad_as_a_finger(narrow: Page, collector: Collector) -> None:
    for path in (f"/incidents/{INCIDENT_ID}/flight", f"/incidents/{INCIDENT_ID}"):
        narrow.goto(collector.url(path))
        until(narrow, "document.querySelector('[data-flight]').dataset.loaded !== undefined")
        for control in narrow.locator("#flight .head").locator("button, a, input").all():
            box = control.bounding_box()
            assert box is not None
            assert min(box["width"], box["height"]) >= 40, (path, control.evaluate("e => e.outerHTML"), box)
        assert narrow.evaluate(TOO_WIDE) == []


@pytest.mark.parametrize("width", [390, 1280, 1920])
def test_the_recorder_in_a_report_can_be_read(page: Page, collector: Collector, width: int) -> None:
    html = collector.client.get(f"/incidents/{INCIDENT_ID}/report.html").text
    page.set_viewport_size({"width": width, "height": 900})
    page.set_content(html)
    sizes = page.locator(".recorderpicture svg").evaluate(
        "e => [...e.querySelectorAll('text')].map((t) => parseFloat(getComputedStyle(t).fontSize) * e.getScreenCTM().a)"
    )
    fits = page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.set_viewport_size({"width": 1280, "height": 900})
    assert len(sizes) > 10
    assert min(sizes) >= 11
    assert fits
