"""Screenshots of a real run for README and docs: the demo with `--fault inf`, pages in a headless Chromium.

make screenshots
"""

from __future__ import annotations

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


def get(url: str) -> Any:
    """JSON of a collector."""
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)


def pages_of(url: str) -> dict[str, str]:
    """Name of the picture -> address of the page that shows the injected failure."""
    (run,) = get(f"{url}/api/v1/runs")["items"]
    (incident,) = get(f"{url}/api/v1/runs/{run['id']}/incidents")["items"]
    step, place = incident["first_step"], incident["place"]
    sites = get(f"{url}/api/v1/runs/{run['id']}/sites")["items"]
    keys = ("module", "operand", "direction")
    (site,) = [s for s in sites if all(s[k] == place[k] for k in keys)]
    tile = ",".join(str(i) for i in place["tile"])
    at = f"{url}/runs/{run['id']}/sites/{site['id']}"
    return {
        "runs": f"{url}/",
        "run": f"{url}/runs/{run['id']}",
        "site": at,
        "tile-map": f"{at}/tile-map?step={step}&rank=0&tile={tile}",
        "incident": f"{url}/incidents/{incident['id']}",
    }


def main() -> int:
    """Take them all; 2 where no Chromium is installed."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        print("no Chromium found; on Debian: apt-get install chromium", file=sys.stderr)
        return 2
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, running_collector(Path(folder), 0) as url:
        env = {**os.environ, "FP8WATCH_RUN": "demo-inf", "FP8WATCH_SPOOL_DIR": f"{folder}/spool"}
        command = [sys.executable, "-m", "fp8watch", "demo", "--fault", "inf", "--exit", "--collector", url]
        subprocess.run(command, check=True, env=env)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
            for theme in ("light", "dark"):
                page = browser.new_page(viewport=SIZE, color_scheme=theme)
                for name, address in pages_of(url).items():
                    page.goto(address, wait_until="load")
                    page.wait_for_timeout(3500)  # charts are drawn after the page
                    suffix = "" if theme == "light" else "-dark"
                    page.screenshot(path=IMAGES / f"{name}{suffix}.png", full_page=name in ("incident", "run"))
            browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
