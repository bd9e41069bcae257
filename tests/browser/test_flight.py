"""The flight recorder in a browser: it plays, steps, says what is under the pointer, and leads to the tiles."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser.kit import Collector, until
from pages import travelling
from pages.travelling import BORN, GAP, MODULE, UNSEEN_MODULE
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.browser

OWN = f"/incidents/{travelling.ID}/flight"
LOADED = "document.querySelector('[data-flight]')?.dataset.loaded !== undefined"  # between two pages there is none
PLACE = """([label, operand, step]) => {
  const f = document.querySelector("[data-flight]").flight, at = f.geometry;
  const i = f.data.rows.findIndex((r) => r.label === label && (r.operand === operand || r.operand === null));
  const box = f.canvas.getBoundingClientRect(), j = f.data.steps.indexOf(step), row = at.rows[i];
  return [box.left + at.x[f.painted.paneOf[i]] + (j + 0.5) * at.cell, box.top + row.top + row.height / 2];
}"""
PIXEL = """([label, operand, step]) => {
  const f = document.querySelector("[data-flight]").flight, at = f.geometry, pane = f.painted.panes;
  const i = f.data.rows.findIndex((r) => r.label === label && r.operand === operand), j = f.data.steps.indexOf(step);
  const of = pane[f.painted.paneOf[i]], w = Math.floor(at.cell) || 1, h = Math.floor(at.rows[i].height) || 1;
  const copy = Object.assign(document.createElement("canvas"), { width: w, height: h });
  const g = copy.getContext("2d", { willReadFrequently: true });
  g.drawImage(of, -Math.round(j * at.cell), -Math.round(at.rows[i].top - at.top));
  const d = g.getImageData(0, 0, w, h).data;
  const seen = new Set();
  for (let k = 0; k < d.length; k += 4) seen.add([...d.slice(k, k + 4)].join(","));
  return [...seen];
}"""


@pytest.fixture(scope="module", autouse=True)
def run(collector: Collector) -> Iterator[Any]:
    """The run with a fault that travels."""
    return travelling.travelling_run(collector.client, collector.app.state.engine)


def flight(page: Page, collector: Collector, path: str) -> None:
    page.goto(collector.url(path))
    until(page, LOADED)


def test_the_map_of_layers_has_the_scale_of_the_recorder(page: Page, collector: Collector) -> None:
    page.goto(collector.url("/runs/travel?map=amax_deviation"))
    until(page, "document.getElementById('health').data !== undefined")
    low, high, ticks, most = page.evaluate(
        """() => { const { zmin, zmax, colorbar, z } = document.getElementById("health").data[0];
        return [zmin, zmax, colorbar.ticktext, Math.max(...z.flat())]; }"""
    )
    assert (low, high) == (0, 1)
    assert ticks[0] == "1 × band"
    assert ticks[-1] == "32 × band"
    assert 0.3 < most <= 1


def test_the_names_of_layers_that_stand_out_go_before_those_of_others(page: Page, collector: Collector) -> None:
    flight(page, collector, OWN)
    told = page.evaluate("""async () => {
      const url = performance.getEntriesByType("resource").map((e) => e.name).find((name) => name.includes("flight_paint"));
      const { geometry, named } = await import(url);
      const rows = Array.from({ length: 60 }, (_, i) => ({ label: `layer ${i}`, modules: 1, pane: "fprop", values: [0.1, i === 1 ? 9 : i === 6 ? null : 0.2] }));
      const data = { rows, steps: [7, 8], at: 8, marks: [[6, 1, 0, "NaN"]] };
      return named(data, geometry(data, 900, 200)).map(([group]) => group.label);
    }""")
    assert told[:2] == ["layer 1", "layer 6"]
    assert 10 < len(told) < 40


def test_it_opens_on_the_failure_and_a_click_leads_to_the_tiles(page: Page, collector: Collector) -> None:
    flight(page, collector, f"/incidents/{travelling.ID}")
    panel = page.locator("#flight")
    expect(panel.locator("[data-flight-says]")).to_contain_text(
        f"first of these in the order of execution is {MODULE} input"
    )
    spread = collector.client.get(f"/api/v1/runs/travel/flight?at={BORN}").json()["spread"]
    expect(page.locator("#spread dd")).to_have_text(re.compile(rf"^{re.escape(spread['places'][0])}.* steps? {BORN}"))
    expect(page.locator("#spread")).to_be_visible()
    x, y = page.evaluate(PLACE, [MODULE, "input", BORN])
    page.mouse.move(x, y)
    tooltip = page.locator("[data-flight-tooltip]")
    for words in (f"Step {BORN}", MODULE, "× its band", "click: its tiles"):
        expect(tooltip).to_contain_text(words)
    page.mouse.move(*page.evaluate(PLACE, [MODULE, "input", BORN + 4]))
    expect(tooltip).to_contain_text("inside its band")
    expect(tooltip).to_contain_text("no tile map of this step was kept")
    page.mouse.click(x, y)
    page.wait_for_url(f"**/tile-map?step={BORN}*")


def test_keys_step_choose_and_open_and_the_address_holds_the_step(page: Page, collector: Collector) -> None:
    flight(page, collector, f"{OWN}?span=16")
    page.keyboard.press("ArrowRight")
    until(page, f"new URLSearchParams(location.search).get('step') === '{BORN + 1}'")
    expect(page.locator("[data-flight-now]")).to_contain_text(f"Step {BORN + 1}: ")
    page.reload()
    until(page, LOADED)
    expect(page.locator("[data-flight-step]")).to_have_text(str(BORN + 1))
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowDown")
    expect(page.locator("[data-flight-now]")).to_contain_text("× its band")
    page.keyboard.press("?")
    expect(page.locator("#keys")).to_contain_text("play the flight recorder")
    page.keyboard.press("Escape")
    page.get_by_role("link", name="± 64").click()
    until(page, "document.querySelector('[data-flight]')?.flight?.data?.span === 64")
    until(page, LOADED)
    slider = page.get_by_label("Step of the flight recorder")
    slider.fill("3")
    until(page, "new URLSearchParams(location.search).get('step') === '3'")
    page.locator("[data-flight-box] canvas").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_url("**/sites/*?step=3")


def test_space_plays_the_steps_and_on_an_incident_only_where_it_has_the_focus(page: Page, collector: Collector) -> None:
    flight(page, collector, f"{OWN}?span=16&step={BORN - 4}")
    playing = "document.querySelector('[data-flight]').flight.playing"
    page.keyboard.press("Space")
    assert page.evaluate(playing)
    until(page, f"document.querySelector('[data-flight]').flight.step > {BORN - 4}")
    page.keyboard.press("Space")
    assert not page.evaluate(playing)
    flight(page, collector, f"/incidents/{travelling.ID}")
    page.keyboard.press("Space")
    assert not page.evaluate(playing)
    page.locator("[data-flight-box] canvas").focus()
    page.keyboard.press("Space")
    assert page.evaluate(playing)
    page.get_by_role("button", name="Pause").click()
    assert not page.evaluate(playing)
    own = page.get_by_role("link", name="Open alone").get_attribute("href")
    assert own is not None
    assert own.startswith(f"{OWN}?step=")


def test_the_film_follows_the_order_of_execution(page: Page, collector: Collector) -> None:
    """In the first half of a step the playhead runs down fprop, in the second half up through backward."""
    flight(page, collector, f"{OWN}?span=16&theme=dark")
    lit = page.evaluate(
        """() => {
          const f = document.querySelector("[data-flight]").flight, at = f.geometry, out = [];
          const copy = document.createElement("canvas"), g = copy.getContext("2d", { willReadFrequently: true });
          copy.width = 1; copy.height = 9;
          f.playing = true; f.step = 50;
          for (const part of [0.25, 0.5, 0.75]) {
            f.part = part; f.paint();
            for (const k of [0, 1]) for (const share of [0.1, 0.9]) {
              const x = at.x[k] + (f.column + 0.5) * at.cell, y = at.top + share * (at.bottom - at.top);
              g.clearRect(0, 0, 1, 9); g.drawImage(f.canvas, -Math.round(x * f.ratio), -Math.round(y * f.ratio));
              const { data } = g.getImageData(0, 0, 1, 9);
              out.push(Math.max(...[...data].filter((_, i) => i % 4 === 3)) > 200);
            }
          }
          f.playing = false; return out; }"""
    )
    # Of each: fprop near its top and near its bottom, backward near its top and near its bottom.
    assert lit[:4] == [True, False, False, False]
    assert lit[4:8] == [True, True, False, False]
    assert lit[8:] == [True, True, False, True]


def test_what_was_not_looked_at_looks_like_nothing_else(page: Page, collector: Collector) -> None:
    flight(page, collector, f"{OWN}?theme=dark")
    unseen = page.evaluate(PIXEL, [UNSEEN_MODULE, "input", GAP[0] + 1])
    calm = page.evaluate(PIXEL, [UNSEEN_MODULE, "input", GAP[0] - 2])
    loud = page.evaluate(PIXEL, [MODULE, "input", BORN])
    assert len(unseen) > 2, "no hatching"
    assert any(pixel.endswith(",0") for pixel in unseen)
    solid = [{p for p in found if p.endswith(",255")} for found in (unseen, calm, loud)]
    assert solid[1]
    assert solid[2]
    assert not solid[1] & solid[2]
    assert not solid[0] & solid[1]


GIF = """async (bytes) => {
  const made = new ImageDecoder({ data: Uint8Array.from(bytes), type: "image/gif" }), at = document.querySelector("[data-flight]").flight.data;
  await made.tracks.ready;
  await made.completed;
  const { frameCount, repetitionCount } = made.tracks.selectedTrack, canvas = document.createElement("canvas"), shown = [];
  for (const frameIndex of [0, frameCount - 2, frameCount - 1]) {
    const { image } = await made.decode({ frameIndex }), g = canvas.getContext("2d", { willReadFrequently: true });
    Object.assign(canvas, { width: image.displayWidth, height: image.displayHeight });
    g.drawImage(image, 0, 0);
    shown.push([...g.getImageData(0, 0, canvas.width, canvas.height).data].filter((v, i) => i % 4 < 3));
  }
  const unlike = (a, b) => a.reduce((n, v, i) => n + (v !== b[i]), 0) / a.length;
  return { frames: frameCount, again: repetitionCount, steps: at.steps.length, size: [canvas.width, canvas.height],
           first: unlike(shown[0], shown[2]), last: unlike(shown[1], shown[2]), colours: new Set(shown[2]).size };
}"""


def test_the_film_is_had_as_an_animated_gif(page: Page, collector: Collector, tmp_path: Path) -> None:
    """Read back by Chromium's own decoder: a frame a step, more around the failure, and the failure held at the end."""
    flight(page, collector, f"{OWN}?span=16&theme=light")
    with page.expect_download() as found:
        page.get_by_role("button", name="GIF").click()
    assert found.value.suggested_filename == f"flight-step-{BORN}.gif"
    found.value.save_as(tmp_path / "film.gif")
    body = (tmp_path / "film.gif").read_bytes()
    assert body.startswith(b"GIF89a")
    assert len(body) < 1_000_000
    expect(page.get_by_role("button", name="GIF")).to_be_enabled()
    made = page.evaluate(GIF, list(body))
    assert made["frames"] == made["steps"] + 5 * 3 + 1
    assert made["size"][0] == 960
    assert made["again"] is None or made["again"] > 1_000_000, "it ends"
    assert 0.02 < made["first"] < 0.9, "the first frame is faint ahead of the playhead"
    assert made["last"] < 0.02, "what has been played stays"
    assert made["colours"] > 20


def test_a_frame_of_three_hundred_sites_costs_a_fraction_of_its_time(page: Page, collector: Collector) -> None:
    """60 frames a second are 16.7 ms each. The quicker ones of 60, read back from the canvas, with five times the slack."""
    flight(page, collector, OWN)
    num_rows, num_steps, took = page.evaluate(
        """() => { const f = document.querySelector("[data-flight]").flight, { rows } = f.data;
          const steps = Array.from({ length: 65 }, (_, j) => f.data.steps[0] + j), of = (v) => steps.map((_, j) => v[j % v.length]);
          const many = Array.from({ length: 300 }, (_, i) => {
            const row = rows[i % rows.length];
            return { ...row, label: `layers.${i >> 2}`, values: of(row.values) };
          });
          f.data = { ...f.data, rows: many, steps, looked: of(f.data.looked), outside: of(f.data.outside) };
          f.draw();
          f.playing = true;
          const g = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
          const took = [];
          for (let i = 0; i < 60; i += 1) {
            const t = performance.now();
            f.advance(16);
            g.drawImage(f.canvas, 0, 0);
            g.getImageData(0, 0, 1, 1);
            took.push(performance.now() - t);
          }
          f.stop();
          return [f.geometry.rows.length, f.geometry.columns, took.sort((a, b) => a - b)[9]]; }"""
    )
    print(f"{num_rows} sites × {num_steps} steps: {took:.2f} ms a frame, read back")
    assert (num_rows, num_steps) == (300, 65)
    assert took < 80
