"""Rows of one product that are multiplied by the weight of another: Linears that a grouped GEMM computes in one call.

Severity is the relative error of what the GEMM gives: the operands are sound.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from proving.faults._base import (
    ERRORS,
    Lasting,
    behind_the_first,
    linears,
    log_uniform,
    one_of,
    onset,
    relative_error,
    trained,
    until,
)
from proving.faults._sites import change_gemm
from proving.training import Expected, Training
from torch import Tensor, nn


class RowsOfNextGroup(Lasting):
    """A group of rows does not end where a tile ends, and the whole tile is multiplied by the weight of the group that comes next (grouped
    FP8 GEMMs want groups that are padded to a tile: FBGEMM #4314, Primus-Turbo #330). The last rows of a product are those of
    another Linear of the same size. How many they are follows from the error that was drawn."""

    name = "rows-of-next-group"

    def __init__(self, *, module: str, following: str, gemm: str, error: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.module, self.following, self.gemm, self.error = module, following, gemm, error
        self.share = 0.0

    @classmethod
    def pairs(cls, t: Training, names: list[str]) -> list[tuple[str, str]]:
        """Each Linear and the next one whose weight has the same shape."""
        shapes = [tuple(m.weight.shape) for n in names if isinstance(m := t.model.get_submodule(n), nn.Linear)]
        found = []
        for i, name in enumerate(names):
            later = [n for n, shape in zip(names[i + 1 :], shapes[i + 1 :], strict=True) if shape == shapes[i]]
            if later:
                found.append((name, later[0]))
        return found

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> RowsOfNextGroup | None:
        gemm, names = one_of(rng, ("fprop", "dgrad")), linears(training)
        pairs = cls.pairs(training, names)
        if gemm == "dgrad":
            passed_on = behind_the_first(training, trained(training, names))
            pairs = [pair for pair in pairs if pair[0] in passed_on]
        if not pairs:
            return None
        (module, following), step = one_of(rng, pairs), onset(rng, training)
        error = log_uniform(rng, *ERRORS[severity])
        return cls(
            step=step,
            until=until(rng, step, 3, 30, stays=0.7),
            severity=severity,
            expected=Expected(("kernel-output-fault", "accumulator-precision"), (module,), None, True),
            drawn={"gemm": gemm, "module": module, "following": following, "asked_error": round(error, 4)},
            module=module,
            following=following,
            gemm=gemm,
            error=error,
        )

    def begin(self, t: Training) -> None:
        weight = t.model.get_submodule(self.following).weight
        assert isinstance(weight, Tensor)
        self.later(change_gemm(t.model.get_submodule(self.module), self.gemm, partial(self.grouped, weight)))

    def grouped(self, weight: Tensor, out: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """The product with its last rows as the next group's weight makes them."""
        other = weight.detach().to(a.dtype)
        wrong, num_rows = a @ (other.t() if self.gemm == "fprop" else other), len(out)
        wrong = wrong + (out - a @ b)  # a bias is added behind the product, and is the right one
        if not self.share:
            energy = float(out.double().square().sum())
            if not energy > 0:
                return out
            errors = (wrong - out).double().square().sum(1).flip(0).cumsum(0)
            num = int((errors < self.error**2 * energy).sum()) + 1
            self.share = min(1.0, num / num_rows)
        num = max(1, round(self.share * num_rows))
        got = torch.cat((out[: num_rows - num], wrong[num_rows - num :].to(out.dtype)))
        if float(out.abs().max()) > 0:
            self.note(num_rows=num, of=num_rows, error=relative_error(got, out))
        return got
