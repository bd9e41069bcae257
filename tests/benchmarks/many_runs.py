"""First paint with 10,000 runs and 5,000 incidents, and frames of the flight recorder, in a headless Chromium.

    python -m benchmarks.many_runs            # both databases, written to docs/benchmarks.md
    python -m benchmarks.many_runs --print

First contentful paint is what the browser itself reports, from the start of the navigation, in a browser with an empty cache.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pages import travelling
from pages.collector import make_app, serving
from pages.many_runs import fill
from playwright.sync_api import Browser, sync_playwright
from support.database import KINDS, fresh_database

from benchmarks import table

NUM_RUNS, NUM_INCIDENTS = 10_000, 5_000
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
PAGES = {
    "runs": "/",
    "runs, searched": "/?q=seed-00017",
    "runs, last page by step": "/?sort=step&page=200",
    "incidents": "/incidents",
    "incidents, not seen yet": "/incidents?state=unseen",
    "a run": "/runs/run-00020",
    "an incident": f"/incidents/{1:032x}",
    "compare, to choose": "/compare",
}
FRAMES = """() => new Promise((done) => {
  const f = document.querySelector("[data-flight]").flight, { rows } = f.data;
  const steps = Array.from({ length: 64 }, (_, j) => f.data.steps[0] + j), of = (v) => steps.map((_, j) => v[j % v.length]);
  const many = Array.from({ length: 300 }, (_, i) => ({ ...rows[i % rows.length], label: `layers.${i >> 2}`, values: of(rows[i % rows.length].values) }));
  f.data = { ...f.data, rows: many, steps, looked: of(f.data.looked), outside: of(f.data.outside) };
  f.step = steps[0]; f.touched = true; f.draw(); f.toggle();
  const at = [];
  const frame = (now) => { at.push(now); if (now - at[0] < 4000 && f.playing) requestAnimationFrame(frame); else done([f.geometry.rows.length, f.geometry.columns, at]); };
  requestAnimationFrame(frame);
})"""


def painted(browser: Browser, url: str) -> float:
    """Milliseconds until the first contentful paint of a visit by a browser that was never here."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    page = context.new_page()
    page.goto(url, wait_until="load")
    found: Any = None
    deadline = time.monotonic() + 20
    while found is None and time.monotonic() < deadline:
        found = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null")
        page.wait_for_timeout(20)
    assert page.locator("h1").count() == 1, url
    context.close()
    return float(found)


def paints(browser: Browser, kind: str, repetitions: int) -> list[list[str]]:
    """Rows of the table: median and slowest of each page."""
    with TemporaryDirectory() as folder, fresh_database(kind) as database:
        app = make_app(Path(folder), database)
        fill(app.state.engine, NUM_RUNS, NUM_INCIDENTS, time.time())
        with serving(app) as client:
            rows = []
            for name, path in PAGES.items():
                took = [painted(browser, f"{client.base_url}".rstrip("/") + path) for _ in range(repetitions)]
                rows.append([kind, name, f"{statistics.median(took):.0f}", f"{max(took):.0f}"])
        app.state.engine.dispose()
    return rows


def frames(browser: Browser) -> str:
    """The film of 300 sites × 64 steps, as it plays by itself."""
    with TemporaryDirectory() as folder:
        app = make_app(Path(folder))
        with serving(app) as client:
            travelling.travelling_run(client, app.state.engine)
            page = browser.new_page(viewport={"width": 1440, "height": 900})
            page.goto(f"{client.base_url}".rstrip("/") + f"/incidents/{travelling.ID}/flight")
            page.locator("[data-flight][data-loaded]").wait_for()
            num_rows, num_steps, at = page.evaluate(FRAMES)
            page.close()
        app.state.engine.dispose()
    apart = sorted(b - a for a, b in itertools.pairwise(at))
    rate = 1000 * len(apart) / (at[-1] - at[0])
    late = sum(ms > 25 for ms in apart) / len(apart)
    return (
        f"The flight recorder of {num_rows} sites × {num_steps} steps plays at {rate:.0f} frames a second, drawn without a GPU "
        f"(median {statistics.median(apart):.1f} ms from frame to frame, 99 % {apart[int(0.99 * len(apart))]:.1f} ms; "
        f"{late:.1%} of {len(apart)} frames came late)."
    )


def main() -> None:
    """Measure, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--print", action="store_true", help="do not write docs/benchmarks.md")
    args = parser.parse_args()
    busy = f"Load average when it began: {os.getloadavg()[0]:.0f}; niceness {os.getpriority(os.PRIO_PROCESS, 0)}."
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        rows = [row for kind in KINDS for row in paints(browser, kind, args.repetitions)]
        played = frames(browser)
        browser.close()
    text = (
        "## First paint with many runs\n\n"
        f"{table.machine('fastapi', 'sqlalchemy', 'playwright')} {args.repetitions} visits a page, each by a browser with an "
        f"empty cache. {NUM_RUNS:,} runs, {NUM_INCIDENTS:,} incidents; browser, collector and database share the cores. {busy} Goal: ≤ 1 s.\n\n"
        + table.table(["database", "page", "first paint, median ms", "slowest ms"], rows)
        + f"\n{played}\n"
    )
    if args.print:
        print(text)
    else:
        table.write("many_runs", text)  # prints it, too


if __name__ == "__main__":
    main()
