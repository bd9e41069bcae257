"""Screenshots of real runs for README and docs: the demo, healthy and with each of its faults, in a headless Chromium.

make screenshots
make screenshots ARGS="--collector URL"    # of a collector to which `train` has sent its runs
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from fp8watch.demo.collector import running_collector

IMAGES = Path(__file__).parent / "images"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
SIZE = {"width": 1280, "height": 900}
FAULTS = ("inf", "zero-tile", "stale-weight-scale", "outlier", "lr")
"""Of the demo: each has a picture in docs/failures.md."""


def get(url: str) -> Any:
    """JSON of a collector."""
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)


def pages_of(url: str, run_id: str | None = None) -> dict[str, str]:
    """Name of the picture -> address of the page that shows the injected failure of a run, or of the only one."""
    (run,) = [r for r in get(f"{url}/api/v1/runs")["items"] if run_id in (None, r["id"])]
    incident = raised(url, run["id"])[0]
    step, place = incident["first_step"], incident["place"]
    sites = get(f"{url}/api/v1/runs/{run['id']}/sites")["items"]
    keys = ("module", "operand", "direction")
    (site,) = [s for s in sites if all(s[k] == place[k] for k in keys)]
    tile = ",".join(str(i) for i in place["tile"])
    at = f"{url}/runs/{run['id']}/sites/{site['id']}"
    return {
        "runs": f"{url}/",
        "incidents": f"{url}/incidents",
        "run": f"{url}/runs/{run['id']}",
        "site": at,
        "tile-map": f"{at}/tile-map?step={step}&rank=0&tile={tile}",
        "incident": f"{url}/incidents/{incident['id']}",
        "flight": f"{url}/incidents/{incident['id']}/flight",
    }


def raised(url: str, run_id: str) -> list[dict[str, Any]]:
    """Incidents of a run that notify somebody, the earliest first."""
    found = get(f"{url}/api/v1/runs/{run_id}/incidents")["items"]
    return sorted((i for i in found if i["severity"] != "info"), key=lambda i: i["first_step"])


def failures_of(url: str) -> dict[str, str]:
    """Name of the picture -> address of the incident, for each fault of the demo."""
    return {f"failure-{fault}": f"{url}/incidents/{raised(url, f'demo-{fault}')[0]['id']}" for fault in FAULTS}


def train(url: str, folder: str) -> None:
    """A healthy run of the demo, and one for each fault."""
    for fault in ("none", *FAULTS):
        env = {**os.environ, "FP8WATCH_RUN": f"demo-{fault}", "FP8WATCH_SPOOL_DIR": f"{folder}/spool"}
        command = [sys.executable, "-m", "fp8watch", "demo", "--fault", fault, "--exit", "--collector", url]
        subprocess.run([*command, "--steps", "120"], check=True, env=env)


def main() -> int:
    """Take them all; 2 where no Chromium is installed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collector", help="URL of a collector that has the runs already")
    args = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        print("no Chromium found; on Debian: apt-get install chromium", file=sys.stderr)
        return 2
    IMAGES.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        url = args.collector
        if url is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            url = stack.enter_context(running_collector(Path(folder), 0))
            train(url, folder)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
            for theme in ("light", "dark"):
                page = browser.new_page(viewport=SIZE, color_scheme=theme)
                gallery = failures_of(url) if theme == "light" else {}
                for name, address in (pages_of(url, "demo-inf") | gallery).items():
                    page.goto(address, wait_until="load")
                    page.wait_for_timeout(3500)  # charts are drawn after the page
                    suffix = "" if theme == "light" else "-dark"
                    page.screenshot(path=IMAGES / f"{name}{suffix}.png", full_page=name in ("incident", "run"))
            browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
