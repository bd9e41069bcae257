"""What tests/incidents/test_fold.py and others share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from detect.healthy_run import Run

NAN = float("nan")


DOWN = "layers.1.mlp.down_proj"


Change = Callable[[np.ndarray, np.ndarray, int], None]


def inf_at(run: Run, *steps: int, module: str = DOWN) -> Change:
    i = run.index(module, "input")

    def change(rows: np.ndarray, s: np.ndarray, step: int) -> None:
        if step in steps:
            rows["num_inf"][i], rows["num_sentinel_tiles"][i], rows["amax_max"][i] = 1, 1, float("inf")
            rows["first_nonfinite"][i] = (37, 200, 0)

    return change


def nan_from(step0: int, born: int | None = None) -> Change:
    """NaN in every site from step0 on; in step0 itself only behind record `born`."""

    def change(rows: np.ndarray, s: np.ndarray, step: int) -> None:
        if step < step0:
            return
        hit = rows["order"] >= (rows["order"][born] if born is not None and step == step0 else 0)
        if step == step0:
            hit &= rows["num_tiles"] != 4  # weights change only between steps
        rows["num_nan"] = np.where(hit, 9, 0)
        s["loss"] = NAN

    return change
