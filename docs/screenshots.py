"""Screenshots of real runs for README and docs: the demo, healthy and with each of its faults, and a small training that grows out
of its scales, in a headless Chromium.

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


def parts_of(url: str) -> dict[str, tuple[str, str]]:
    """Name of the picture -> address and selector of the part of the page that docs show."""
    (site,) = [
        s["id"]
        for s in get(f"{url}/api/v1/runs/outgrown/sites")["items"]
        if (s["module"], s["operand"]) == ("0", "input")
    ]
    outlier = raised(url, "demo-outlier")[0]["id"]
    return {
        "forecast": (f"{url}/runs/outgrown/sites/{site}", ""),
        "compare": (f"{url}/compare?a=demo-none&b=demo-lr", ""),
        "fix-files": (f"{url}/incidents/{outlier}", "#fix"),
        "checkpoints": (f"{url}/runs/outgrown", "#checkpoints"),
        "costs": (f"{url}/runs/demo-none", "#costs"),
        "precision": (f"{url}/runs/demo-none", "#coverage"),
    }


def outgrown() -> None:
    """One channel of an input doubles each sixty steps under one scale for the tensor, and is Inf in step 330; with checkpoints."""
    import torch

    import fp8watch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    teacher = torch.randn(256, 256) / 16
    with fp8watch.attach(model, recipe="current", optimizer=optimizer, overhead_budget=None) as watch:
        for step in range(340):
            x = torch.randn(256, 256)
            target = x @ teacher
            x[:, 7] *= 2.0 ** (3.0 + step / 60)
            if step == 330:
                x[3, 5] = float("inf")
            loss = (model(x) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            watch.log(loss=loss.detach())
            if step % 60 == 59 or step == 335:
                watch.checkpoint_saved()


def train(url: str, folder: str) -> None:
    """A healthy run of the demo, one for each fault, and the one that grows out of its scales."""
    for fault in ("none", *FAULTS):
        env = {**os.environ, "FP8WATCH_RUN": f"demo-{fault}", "FP8WATCH_SPOOL_DIR": f"{folder}/spool"}
        command = [sys.executable, "-m", "fp8watch", "demo", "--fault", fault, "--exit", "--collector", url]
        subprocess.run([*command, "--steps", "120"], check=True, env=env)
    env = {**os.environ, "FP8WATCH_RUN": "outgrown", "FP8WATCH_SPOOL_DIR": f"{folder}/spool", "FP8WATCH_COLLECTOR": url}
    subprocess.run([sys.executable, __file__, "--outgrown"], check=True, env=env)


def main() -> int:
    """Take them all; 2 where no Chromium is installed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collector", help="URL of a collector that has the runs already")
    parser.add_argument("--outgrown", action="store_true", help="train the run of that name, and nothing else")
    args = parser.parse_args()
    if args.outgrown:
        outgrown()
        return 0
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
                    if name == "flight" and theme == "light":
                        with page.expect_download() as film:
                            page.get_by_role("button", name="GIF").click()
                        film.value.save_as(IMAGES / "flight.gif")
                for name, (address, part) in parts_of(url).items() if theme == "light" else ():
                    page.goto(address, wait_until="load")
                    page.wait_for_timeout(3500)
                    shown = page.locator(part) if part else page
                    shown.screenshot(path=IMAGES / f"{name}.png")
            browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
