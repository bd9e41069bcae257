"""A run of many sites, and one of many steps, stay usable: what is sent is bounded, and the page answers to keys."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from benchmarks.store import Database, groups, ingest, register
from browser.kit import drawn, until
from pages.collector import make_app, serving
from playwright.sync_api import Browser, expect
from support.counts import in_full

from fp8watch_server.load.stream import LoadPlan
from fp8watch_server.store import commit
from fp8watch_server.store.compactor import Compactor

pytestmark = [pytest.mark.browser, pytest.mark.long, pytest.mark.timeout(600)]

NOT_OF_THE_RUN = re.compile(r"/(static|assets|live)[/?]")
MAX_BYTES = {"training.json": 250_000, "health.json": 3_000_000, "charts.json": 600_000, "": 400_000}
"""Of an answer, by how its address ends, however large the run is."""


@dataclass(frozen=True)
class Size:
    """Two runs: one that is wide, one that is long."""

    num_sites: int
    num_steps: int


SMALL = Size(640, 3_000)
FULL = Size(10_000, 100_000)


def filled(path: Path, size: Size) -> None:
    """Both runs, compacted but for their newest steps."""
    database = Database(f"sqlite:///{path}")
    compactor = Compactor(database.engine, clock=time.time)
    wide = LoadPlan(num_ranks=1, num_sites=size.num_sites, num_steps=24, steps_per_batch=4, run="wide")
    long = LoadPlan(num_ranks=1, num_sites=1, num_steps=size.num_steps, steps_per_batch=500, run="long")
    for plan in (wide, long):
        streams, known = register(database.engine, plan, plan.sites), commit.KnownSites()
        for i, bodies in enumerate(groups(plan, streams)):
            ingest(database, bodies, known)
            if i % 8 == 7:
                compactor.round()
    compactor.round()
    database.engine.dispose()


@pytest.fixture(params=[SMALL, in_full(FULL)], ids=["small", "full"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[httpx.Client, Size]]:
    """Where a collector with both runs is."""
    filled(tmp_path / "fp8watch.db", request.param)
    with serving(make_app(tmp_path)) as client:
        yield client, request.param


def test_what_a_browser_is_sent_is_bounded_and_the_page_answers(
    browser: Browser, address: tuple[httpx.Client, Size]
) -> None:
    client, size = address
    url = str(client.base_url).rstrip("/")
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="dark")
    page = context.new_page()
    page.set_default_timeout(60_000)
    answers: list[str] = []
    errors: list[str] = []
    page.on("request", lambda r: answers.append(r.url))
    page.on("pageerror", lambda e: errors.append(str(e)))
    try:
        page.goto(f"{url}/runs/wide")
        drawn(page)
        assert page.evaluate("document.querySelectorAll('#health .ytick').length") <= 120
        assert len(page.evaluate("document.getElementById('health').data[0].y")) <= 120
        expect(page.locator("#worst tbody tr")).to_have_count(12)
        page.keyboard.press("t")
        until(page, "document.documentElement.dataset.theme === 'light'")

        page.goto(f"{url}/runs/long")
        drawn(page)
        last = size.num_steps - 1
        assert page.evaluate("document.getElementById('training').data[0].x.at(-1)") > 0.99 * last
        assert page.evaluate("document.getElementById('training').data[0].x.length") <= 1100
        page.goto(f"{url}/runs/long?from={last - 99}&to={last}")  # a zoom is asked for anew: every step is there
        drawn(page)
        assert page.evaluate("document.getElementById('training').data[0].x.length") == 100
        page.locator("#worst a.rowlink").first.click()
        page.wait_for_url("**/sites/**")
        drawn(page)
        page.wait_for_load_state("load")  # keys are heard from then on
        page.keyboard.press("u")
        expect(page).to_have_url(f"{url}/runs/long")
        drawn(page)

        sizes = {
            urlsplit(asked).path: len(client.get(asked).content)
            for asked in dict.fromkeys(answers)
            if NOT_OF_THE_RUN.search(asked) is None
        }
        assert {path.rpartition("/")[2] for path in sizes} >= {"training.json", "health.json", "charts.json"}
        for path, num_bytes in sizes.items():
            end = next(end for end in MAX_BYTES if path.endswith(end))
            assert num_bytes <= MAX_BYTES[end], path
        assert errors == []
    finally:
        context.close()
