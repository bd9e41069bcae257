"""The walk: somebody who knows training, but not this project, by clicks alone, on what `fp8watch demo` broke.

From the runs page to the tile that broke and to the change that mends it. No address is typed, no script is called: what
cannot be seen and clicked is not there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from browser.kit import drawn
from playwright.sync_api import Browser, Page, expect

from fp8watch.demo.collector import running_collector

pytestmark = pytest.mark.browser
MAX_CLICKS = 4


@dataclass
class Broken:
    """A collector on which a training broke, and the place that its incident names."""

    url: str
    incident: dict[str, Any]


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broken]:
    """A real training with a real failure, seen by the real detectors."""
    folder: Path = tmp_path_factory.mktemp("walk")
    with running_collector(folder, 0) as url:
        env = {**os.environ, "FP8WATCH_RUN": "walk", "FP8WATCH_SPOOL_DIR": str(folder / "spool")}
        command = [sys.executable, "-m", "fp8watch", "demo", "--fault", "stale-weight-scale", "--fault-step", "60"]
        subprocess.run([*command, "--exit", "--collector", url], check=True, env=env, capture_output=True, timeout=300)
        (incident,) = httpx.get(f"{url}/api/v1/runs/walk/incidents").json()["items"]
        yield Broken(url, incident)


@pytest.fixture
def tab(browser: Browser, broken: Broken) -> Iterator[Page]:
    """A browser that was never here."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(broken.url)
    yield page
    context.close()
    assert said == []


@pytest.mark.long
def test_from_the_runs_page_to_the_broken_tile_and_what_to_change(tab: Page, broken: Broken) -> None:
    place = broken.incident["place"]
    row = tab.locator("#runs tbody tr")
    expect(row).to_contain_text("stale-weight-scale")  # what is wrong is said on the first page
    row.get_by_role("link", name="demo stale-weight-scale").click()

    card = tab.locator("a.card.incident").first
    expect(card).to_be_in_viewport()  # nobody scrolls for the worst news
    expect(card).to_contain_text(place["module"])
    card.click()

    fix = tab.locator("#fix li").first
    expect(fix).to_be_in_viewport()
    expect(fix).to_contain_text("what writes weights between forward and backward")  # of the path that computes here
    expect(fix.get_by_role("button", name="Copy")).to_have_count(0)  # a sentence, nothing to paste
    expect(tab.locator("#fix")).not_to_contain_text("--fp8-param-gather")  # of another path

    row_, column = place["tile"]
    tab.locator("#head").get_by_role("link", name=f"({row_}, {column})").click()
    readout = tab.locator("[data-readout]")
    expect(readout).to_be_in_viewport()
    expect(readout).to_contain_text(f"Block ({row_}, {column})")
    expect(readout).to_contain_text("off-scale")
    expect(tab.locator("h1")).to_have_text(place["module"])
    assert tab.evaluate("history.length") - 1 <= MAX_CLICKS


@pytest.mark.long
def test_the_other_way_by_the_map_of_layers(tab: Page, broken: Broken) -> None:
    place = broken.incident["place"]
    tab.get_by_role("link", name="demo stale-weight-scale").click()
    worst = tab.locator("#worst tbody tr")
    expect(worst.first).to_be_visible()
    drawn(tab)
    expect(tab.locator("#coverage")).to_contain_text("lm_head")
    expect(tab.locator("#agents")).to_contain_text("all well")
    tab.locator("a.card.incident").first.click()
    tab.locator(".proofs .hint a").first.click()  # the chart that proves it leads to its site
    expect(tab.locator("h1")).to_have_text(place["module"])
    tab.get_by_role("link", name="Tile map").click()
    tab.get_by_role("button", name="Worst tile").click()
    expect(tab.locator("[data-readout]")).to_contain_text("off-scale")
