"""Time to the first chart: a real collector, a headless Chromium, and a run with 10 M records.

    python -m benchmarks.pages --database pages.db --build   # once: 10 M records, minutes
    python -m benchmarks.pages --database pages.db           # measure, written to docs/benchmarks.md
    python -m benchmarks.pages --records 1m                       # a smaller one, in a folder that goes away

Cold is a browser that was never here, warm is its second visit; plotly.js is compiled in both.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Browser, BrowserContext, sync_playwright

from benchmarks import table
from benchmarks.store import Database, groups, ingest, register
from fp8watch.demo.collector import running_collector
from fp8watch_server.load.stream import LoadPlan
from fp8watch_server.store import commit
from fp8watch_server.store.compactor import Compactor

RUN = "ten-million"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FIRST_CHART = """
window.firstChart = null;
window.allCharts = 0;
const CHART = "figure.chart svg.first path.line[d], figure.chart.ready";
let asked = false, parsed = false;
const look = () => {
  if (!asked && document.querySelector(CHART)) {
    asked = true; // no frame is made before the style sheet is there; the second one follows the paint of the first
    requestAnimationFrame(() => requestAnimationFrame(() => { window.firstChart = performance.now(); }));
  }
  const open = [...document.querySelectorAll("figure.chart:not(.ready)")].filter((f) => !f.querySelector(".nothing"));
  if (parsed && !open.length) window.allCharts ||= performance.now();
};
new MutationObserver(look).observe(document, {subtree: true, childList: true, attributes: true, attributeFilter: ["class"]});
document.addEventListener("DOMContentLoaded", () => { parsed = true; look(); });
"""


def build(path: Path, num_records: int, num_sites: int, num_ranks: int) -> None:
    """A database with one run, compacted but for its newest steps."""
    database = Database(f"sqlite:///{path}")
    plan = LoadPlan(
        num_ranks=num_ranks, num_sites=num_sites, num_steps=num_records // (num_ranks * num_sites), steps_per_batch=16,
        run=RUN,
    )  # fmt: skip
    streams = register(database.engine, plan, plan.sites)
    known, done, began = commit.KnownSites(), 0, time.monotonic()
    compactor = Compactor(database.engine, clock=time.time)
    for i, bodies in enumerate(groups(plan, streams)):
        done += ingest(database, bodies, known)
        if i % 8 == 7:
            compactor.round()
            print(f"{done:,} records after {time.monotonic() - began:.0f} s", flush=True)
    compactor.round()
    database.engine.dispose()


def measure(context: BrowserContext, url: str) -> dict[str, float]:
    """Milliseconds since the navigation began: what the server rendered, the first chart, all charts."""
    page = context.new_page()
    page.goto(url, wait_until="domcontentloaded")
    deadline = time.monotonic() + 20
    while not page.evaluate("window.firstChart !== null && window.allCharts > 0") and time.monotonic() < deadline:
        page.wait_for_timeout(20)
    timing = page.evaluate(
        "() => { const n = performance.getEntriesByType('navigation')[0];"
        " return { answer: n.responseEnd, first: window.firstChart, all: window.allCharts }; }"
    )
    page.close()
    return {name: float(value) for name, value in timing.items()}


def visits(browser: Browser, url: str, repetitions: int) -> dict[str, dict[str, float]]:
    """Medians of visits by browsers that were never here, and by one that was."""
    cold, warm = [], []
    for _ in range(repetitions):
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        context.add_init_script(FIRST_CHART)
        cold.append(measure(context, url))
        warm.append(measure(context, url))
        context.close()
    return {
        name: {key: statistics.median(visit[key] for visit in of) for key in of[0]}
        for name, of in (("cold", cold), ("warm", warm))
    }


@contextlib.contextmanager
def folder_of(args: argparse.Namespace) -> Iterator[Path]:
    """The folder of the collector, with the database in it under the collector's own name."""
    if args.database is None:
        with tempfile.TemporaryDirectory(prefix="fp8bench-") as folder:
            build(Path(folder) / "fp8watch.sqlite", args.records, args.sites, args.ranks)
            yield Path(folder)
    else:
        yield args.database.parent


def main() -> None:
    """Build where asked, else measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=lambda s: int(s.lower().replace("m", "000000")), default=10_000_000)
    parser.add_argument("--sites", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--database", type=Path, help="a file named fp8watch.sqlite that is kept")
    parser.add_argument("--build", action="store_true", help="make it, and stop")
    parser.add_argument("--print", action="store_true", help="do not write docs/benchmarks.md")
    args = parser.parse_args()
    if args.database is not None and args.database.name != "fp8watch.sqlite":
        parser.error(f"--database {args.database}: the file's name must be fp8watch.sqlite")
    if args.build:
        args.database.parent.mkdir(parents=True, exist_ok=True)
        return build(args.database, args.records, args.sites, args.ranks)
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    rows = []
    with folder_of(args) as folder, running_collector(folder, 0) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        site = LoadPlan(num_sites=args.sites, num_ranks=args.ranks).sites[3].id
        for name, path in (("run", f"/runs/{RUN}"), ("site", f"/runs/{RUN}/sites/{site}")):
            for kind, got in visits(browser, url + path, args.repetitions).items():
                rows.append([f"page of the {name}, {kind}", *(f"{got[key]:.0f}" for key in ("answer", "first", "all"))])
        browser.close()
    text = (
        "## Time to the first chart\n\n"
        f"{table.machine('plotly', 'fastapi', 'playwright')} {args.repetitions} repetitions. One run with "
        f"{args.records:,} records: {args.ranks} ranks × {args.sites} sites × "
        f"{args.records // (args.ranks * args.sites):,} steps, SQLite; browser and collector share the cores. Goal: "
        "first chart ≤ 1 s.\n\nFrom the start of the navigation in headless Chromium, medians. The page is there: its "
        "last byte came. First chart: it has been painted (the second frame after it stands in the page). All charts: plotly "
        "has drawn each of them. Cold: a browser with an empty cache; warm: its second visit.\n\n"
    )
    text += table.table(["milliseconds until", "page is there", "first chart", "all charts"], rows)
    if args.print:
        print(text)
    else:
        table.write("pages", text)  # prints it, too


if __name__ == "__main__":
    main()
