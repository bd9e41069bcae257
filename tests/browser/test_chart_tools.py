"""Tools of the charts: what is chosen stands in the address, all curves are read at once, and what is shown can be taken along."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from browser.kit import Collector, drawn, until
from pages import synthetic
from pages.synthetic import FAULT_SITE, FAULT_STEP
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.browser

RUN = "/runs/logged-run"
ID = "e" * 31 + "1"
STEPS = 60
DATA = "document.getElementById('training').data"
LAYOUT = "document.getElementById('training')._fullLayout"


@pytest.fixture(scope="module", autouse=True)
def run(collector: Collector) -> Any:
    """A run with logged scalars, one of them tokens, one with a name that wants to be a formula; a loss with a 0 in it."""
    found = synthetic.Run(
        collector.client, "logged-run", "logged", sites=synthetic.make_sites(1), session="9" * 32
    ).register()

    def zero(steps: Any, rows: Any) -> None:
        steps["loss"][steps["step"] == 7] = 0.0

    for first in range(0, STEPS, 20):
        steps = range(first, first + 20)
        logs: dict[str, list[float | None]] = {
            "tokens_seen": [4096.0 * (i + 1) ** 2 for i in steps],
            "=z_loss": [0.1 + 0.01 * (i % 7) for i in steps],
        }
        found.send(steps, fault=False, change=zero, logs=logs)
    synthetic.add_incident(collector.app.state.engine, "logged-run", ID, first_step=30, last_step=40)
    return found


def redrawn(page: Page, act: Any) -> None:
    """Do something, and wait until the chart has been drawn anew."""
    before = page.evaluate("document.getElementById('training').dataset.drawn")
    act()
    until(page, f"document.getElementById('training').dataset.drawn !== '{before}'")


def hover(page: Page, figure: str, step: int) -> None:
    """The pointer over a step of a chart."""
    page.locator(f"#{figure}").scroll_into_view_if_needed()
    x, y = page.evaluate(
        """([id, step]) => { const f = document.getElementById(id), l = f._fullLayout, box = f.getBoundingClientRect();
          return [box.left + l.xaxis._offset + l.xaxis.d2p(step), box.top + l.yaxis._offset + l.yaxis._length / 2]; }""",
        [figure, step],
    )
    page.mouse.move(x - 4, y)
    page.mouse.move(x, y)


def test_smoothing_log_y_and_band_stand_in_the_address_and_come_back_with_it(page: Page, collector: Collector) -> None:
    page.goto(collector.url(RUN))
    drawn(page)
    raw = page.evaluate(f"{DATA}[0].y")
    redrawn(page, lambda: page.get_by_label("Smoothing").select_option("0.9"))
    redrawn(page, lambda: page.get_by_role("button", name="log y").click())
    redrawn(page, lambda: page.get_by_role("button", name="band", exact=True).click())
    assert page.evaluate("location.search") == "?smooth=0.9&logy=1&band=1"
    page.reload()
    drawn(page)
    expect(page.get_by_role("button", name="log y")).to_have_attribute("aria-pressed", "true")
    assert page.evaluate(f"[{LAYOUT}.yaxis.type, {LAYOUT}.yaxis2.type, {LAYOUT}.yaxis3.type]") == [
        "log",
        "log",
        "linear",
    ]
    assert page.evaluate(f"{DATA}[0].y") == raw  # what was measured stays
    smooth = page.evaluate(f"{DATA}.find((t) => t.meta === 'smooth').y")
    weight, total, norm, expected = 0.9, 0.0, 0.0, []
    for v in raw:
        total, norm = weight * total + (1 - weight) * v, weight * norm + (1 - weight)
        expected.append(total / norm)
    assert smooth == pytest.approx(expected)
    assert page.evaluate(f"{DATA}.filter((t) => t.meta === 'band').length") == 6
    expect(page.locator("#training-note")).to_contain_text("1 value of 0 or less has no place on a logarithmic axis.")


def test_over_time_and_tokens_every_step_lies_where_it_was(page: Page, collector: Collector, run: Any) -> None:
    page.goto(collector.url(f"{RUN}?x=tokens"))
    drawn(page)
    xs = page.evaluate(f"{DATA}[0].x")
    assert xs == pytest.approx([4096.0 * (i + 1) ** 2 for i in range(STEPS)])
    assert page.evaluate(f"{LAYOUT}.shapes[0].x0") == pytest.approx(4096.0 * 31**2)
    page.evaluate(
        """() => { const f = document.getElementById("training");
          Plotly.relayout(f, { "xaxis.range[0]": 4096 * 11 ** 2, "xaxis.range[1]": 4096 * 21 ** 2 }); }"""
    )
    until(page, "location.search.includes('from=10') && location.search.includes('to=20')")
    page.goto(collector.url(f"{RUN}?x=time"))
    drawn(page)
    times = page.evaluate(f"{DATA}[0].x.map(Number)")
    assert times == pytest.approx([1000 * (run.start + 0.25 * i) for i in range(STEPS)], abs=1.0)
    assert page.evaluate(f"{LAYOUT}.xaxis.type") == "date"
    page.goto(collector.url("/runs/demo-inf"))
    drawn(page)
    assert page.locator("[data-tabs=x] button").all_text_contents() == ["step", "time"]  # no tokens were logged


def test_any_logged_scalar_has_a_panel(page: Page, collector: Collector) -> None:
    page.goto(collector.url(RUN))
    drawn(page)
    height = page.evaluate("document.getElementById('training').clientHeight")
    redrawn(page, lambda: page.locator("button[data-panel='=z_loss']").click())
    assert page.evaluate("new URLSearchParams(location.search).getAll('panel')") == ["=z_loss"]
    found = page.evaluate(f"{DATA}.find((t) => t.name === '=z_loss').y.slice(0, 3)")
    assert found == pytest.approx([0.1, 0.11, 0.12])
    assert page.evaluate("document.getElementById('training').clientHeight") > height + 50
    expect(page.locator("button[data-panel='=z_loss']")).to_have_attribute("aria-pressed", "true")
    redrawn(page, lambda: page.locator("button[data-panel='=z_loss']").click())
    assert page.evaluate("location.search") == ""
    page.goto(collector.url(f"{RUN}?panel=gone"))  # an address may be old
    drawn(page)
    assert page.evaluate(f"{DATA}.some((t) => t.name === 'gone')") is False


def test_all_curves_are_read_at_the_step_under_the_pointer(page: Page, collector: Collector) -> None:
    page.goto(collector.url(f"{RUN}?panel=%3Dz_loss"))
    drawn(page)
    hover(page, "training", 24)
    readout = page.locator("#readout")
    for words in ("step 24", "loss ", "gradient norm ", "learning rate 0.002", "=z_loss 0.13"):
        expect(readout).to_contain_text(words)
    site = f"/runs/demo-inf/sites/{FAULT_SITE}"
    page.goto(collector.url(site))
    drawn(page)
    hover(page, "amax", FAULT_STEP)
    expect(readout).to_contain_text("amax largest, rowwise +Inf")
    expect(readout).to_contain_text("columnwise")
    lines = page.evaluate("[...document.querySelectorAll('.cursorline')].filter((l) => !l.hidden).length")
    assert lines == page.locator("figure.chart.ready").count()


def test_what_is_shown_is_had_as_a_file_a_picture_and_a_table(page: Page, collector: Collector, tmp_path: Path) -> None:
    page.goto(collector.url(f"{RUN}?from=5&to=9&panel=%3Dz_loss"))
    drawn(page)
    menu = page.get_by_label("Picture, file or table: Loss, gradient norm and learning rate over steps")
    menu.click()
    with page.expect_download() as waits:
        page.get_by_role("button", name="CSV").first.click()
    waits.value.save_as(tmp_path / "x.csv")
    rows = list(csv.reader((tmp_path / "x.csv").read_text().splitlines()))
    assert rows[0] == ["step", "loss", "gradient norm", "learning rate", "'=z_loss"]  # no formula
    assert [row[0] for row in rows[1:]] == ["5", "6", "7", "8", "9"]
    assert float(rows[3][1]) == 0.0
    menu.click()
    with page.expect_download() as waits:
        page.get_by_role("button", name="PNG").first.click()
    waits.value.save_as(tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"
    menu.click()
    page.get_by_role("button", name="Table").first.click()
    table = page.get_by_role("region", name="Loss, gradient norm and learning rate over steps, as a table")
    expect(table.locator("tbody tr")).to_have_count(5)
    expect(table.locator("th")).to_have_text(["step", "loss", "gradient norm", "learning rate", "=z_loss"])


def test_zoom_has_buttons_and_keys_of_its_own_and_nothing_lies_over_them(page: Page, collector: Collector) -> None:
    page.goto(collector.url(RUN))
    drawn(page)
    page.get_by_role("button", name="Zoom in").click()
    until(page, "location.search === '?from=15&to=44'")
    drawn(page)
    page.keyboard.press("-")
    until(page, "location.search !== '?from=15&to=44'")
    page.get_by_role("button", name="all", exact=True).click()
    until(page, "location.search === ''")
    assert page.evaluate("document.querySelector('.plotly-notifier')") is None
    spans = page.evaluate(
        "document.getElementById('training').layout.shapes.filter((s) => s.type === 'rect').map((s) => [s.x0, s.x1])"
    )
    assert spans == [[30, 40]]
