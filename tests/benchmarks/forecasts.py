"""How often the interval of a forecast held, on trainings of the proving ground's development families: docs/pages.md.

    PYTHONPATH=.:agent:server:tests python -m benchmarks.forecasts record FOLDER
    PYTHONPATH=.:agent:server:tests python -m benchmarks.forecasts score FOLDER

`record` trains each family and keeps amax and underflow of each site and step. `score` stands at every 32nd step, looks back
as the site's page does, and asks when the series passes a level ahead: `AHEAD` octaves above its last median for all of them, and
the limit that the page has, 10 %, for underflow. A forecast has held if the running median of 9 steps passes the level
within its interval; one whose interval the training does not outlast is left out.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fp8watch
from fp8watch_server.detect.trend import forecast

STEPS, STRETCH = 480, 3
EACH = 32
AHEAD = (0.1, 0.25, 0.5)
RECIPES = ("blockwise", "delayed")


class Kept:
    """A mirror of a watch: some columns of each step."""

    def __init__(self) -> None:
        self.amax: list[Any] = []
        self.underflow: list[Any] = []

    def see(self, step: int, rows: Any) -> None:
        measured = rows["measured"] != 0
        self.amax.append(np.where(measured, rows["amax_max"], np.nan))
        with np.errstate(divide="ignore", invalid="ignore"):
            self.underflow.append(np.where(measured, rows["num_underflow"] / rows["num_nonzero"], np.nan))

    def stop(self) -> None:
        pass


def record(family: str, recipe: str, path: Path) -> None:
    """Train it, with its schedule stretched."""
    from proving import families
    from proving.loop import Seams, train_step
    from proving.training import Change

    torch.manual_seed(0)
    t = families.build(family, 0)
    schedule = t.schedule
    if schedule is not None:
        t.schedule = lambda step: schedule(step // STRETCH)
    kept = Kept()
    watch = fp8watch.attach(t.model, run=f"{family}-{recipe}", recipe=recipe, every=1, **t.attach)
    watch._flush.mirrors.append(kept)
    seams = Seams(Change())
    for step in range(STEPS):
        train_step(t, t.model, step, seams, watch)
    watch.detach()
    np.savez_compressed(path, amax=np.array(kept.amax, np.float32), underflow=np.array(kept.underflow, np.float32))


def passes(values: Any, limit: float) -> Any:
    """Index of the first value whose running median of 9 is above; len(values) where there is none."""
    smooth = np.median(np.lib.stride_tricks.sliding_window_view(np.pad(values, 4, mode="edge"), 9), axis=1)
    above = np.flatnonzero(smooth > limit)
    return int(above[0]) if len(above) else len(values)


def outcomes(values: Any, limits: Any) -> Iterator[tuple[str, float]]:
    """(held | early | late, log2 of what it took over what was said) of each forecast of one series."""
    for at in range(EACH * 4, len(values) - EACH, EACH):
        past = values[:at]
        for limit in limits(past):
            said = forecast(np.arange(at), past, limit)
            if said is None:
                continue
            took = passes(values[at:], limit)
            if took == len(values) - at and took <= said.latest:
                continue  # the training ends within the interval
            how = "early" if took < said.soonest else "late" if took > said.latest else "held"
            yield how, float(np.log2(max(took, 1) / max(said.steps, 1)))


def score(folder: Path) -> None:
    """Print the table."""
    print(
        "| family, recipe | amax, an octave or less ahead | held | underflow, to 10 % | held |\n|---|---|---|---|---|"
    )
    totals: dict[str, list[str]] = {"amax": [], "underflow": []}
    for path in sorted(folder.glob("*.npz")):
        kept = np.load(path)
        cells = [path.stem.replace("-", ", ")]
        for name in ("amax", "underflow"):
            with np.errstate(divide="ignore", invalid="ignore"):
                series = np.log2(kept[name].astype(np.float64))
            series[~np.isfinite(series)] = np.nan

            def ahead(past: Any) -> list[float]:
                now = float(np.nanmedian(past[-9:]))
                return [now + d for d in AHEAD]

            def fixed(past: Any) -> list[float]:
                return [float(np.log2(0.1))]

            found = [
                how
                for column in series.T
                if np.isfinite(column).all()
                for how, _ in outcomes(column, ahead if name == "amax" else fixed)
            ]
            totals[name] += found
            cells += [str(len(found)), f"{found.count('held') / len(found):.0%}" if found else "–"]
        print(f"| {' | '.join(cells)} |", flush=True)
    for name, found in totals.items():
        if found:
            parts = ", ".join(f"{how} {found.count(how) / len(found):.1%}" for how in ("held", "early", "late"))
            print(f"{name}: {len(found)} forecasts: {parts}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("do", choices=("record", "score"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--families", nargs="*")
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES))
    args = parser.parse_args()
    if args.do == "score":
        return score(args.folder)
    from proving.split import DEV_FAMILIES

    args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory():
        for family in args.families or DEV_FAMILIES:
            for recipe in args.recipes:
                path = args.folder / f"{family}-{recipe}.npz"
                if not path.exists():
                    record(family, recipe, path)
    return None


if __name__ == "__main__":
    main()
