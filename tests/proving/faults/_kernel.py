"""A quantisation kernel that is wrong in some rows of some operand, by as much as its severity says.

A fault says what the GEMM would read if every row were wrong; here is decided which rows are. Their number is found at
the first wrong call: rows are taken, from a drawn one on, until the error of the whole operand is the one that was
drawn. After that their number and their place stay, as those of a bug in a kernel's indexing do, or jump from call to
call, as those of a race do.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, ClassVar

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
    seed,
    trained,
    until,
)
from proving.faults._sites import Operand, WrongKernel, put_kernel
from proving.training import Expected, Training
from torch import Tensor

Key = tuple[str, bool]
"""A module, and whether it is the columnwise copy."""


class KernelFault(Lasting):
    """One operand of one Linear, of those of one role, or of all: a kernel is used wherever its shape is met."""

    operands: ClassVar[tuple[str, ...]] = ("input", "weight", "grad_output")
    directions: ClassVar[tuple[tuple[bool, ...], ...]] = ((False,), (True,), (False, True))
    """Whether columnwise, of the copies that are wrong. An operand with one copy for both GEMMs is rowwise."""
    modes: ClassVar[tuple[str, ...]] = ("quantiser-fault",)
    only: ClassVar[tuple[str, ...]] = ("mild", "medium", "severe")
    """Severities that this fault can have."""

    def __init__(
        self, *, modules: list[str], operand: str, columnwise: tuple[bool, ...], error: float, race: bool, seed: int,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(**kwargs)
        self.modules, self.operand, self.columnwise = modules, operand, columnwise
        self.error, self.race = error, race
        self.rng = np.random.default_rng(seed)
        self.start = float(self.rng.random())
        self.share: dict[Key, float] = {}
        self.before: dict[Key, Operand] = {}
        """Of each copy, what was in memory before."""

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> KernelFault | None:
        operand, columnwise = one_of(rng, cls.operands), one_of(rng, cls.directions)
        shared = is_shared(training, operand)
        if severity not in cls.only or (shared and (False,) not in cls.directions):
            return None
        if shared:
            columnwise = (False,)
        names = kernel_sites(rng, training, operand, columnwise)
        if not names:
            return None
        step, error = onset(rng, training), log_uniform(rng, *ERRORS[severity])
        race = bool(rng.random() < 0.3)
        return cls(
            step=step,
            until=until(rng, step, 3, 30, stays=0.7),
            severity=severity,
            expected=Expected(cls.modes, tuple(names), operand, True),
            drawn={
                "operand": operand,
                "copies": "+".join("columnwise" if c else "rowwise" for c in columnwise),
                "num_modules": len(names),
                "module": names[0],
                "asked_error": round(error, 4),
                "race": race,
            },
            modules=names,
            operand=operand,
            columnwise=columnwise,
            error=error,
            race=race,
            seed=seed(rng),
        )

    def begin(self, t: Training) -> None:
        for name in self.modules:
            module = t.model.get_submodule(name)
            spoil = partial(self.spoil, name)
            self.later(put_kernel(module, self.operand, lambda base, spoil=spoil: WrongKernel(base, spoil)))

    def wrong(self, name: str, operand: Operand) -> Tensor:
        """What the GEMM would read if every row were wrong: float32 [M, K]."""
        raise NotImplementedError

    def spoil(self, name: str, operand: Operand) -> Tensor:
        """What the GEMM reads."""
        key = name, operand.columnwise
        if operand.columnwise not in self.columnwise:
            return operand.right
        wrong = self.wrong(name, operand)
        self.before[key] = operand
        out = self.mixed(key, operand.right, wrong)
        if float(operand.right.abs().max()) > 0:
            self.note(error=relative_error(out, operand.right), at=f"{name} {tuple(out.shape)}")
        return out

    def mixed(self, key: Key, right: Tensor, wrong: Tensor) -> Tensor:
        """The wrong rows in place of the right ones, as many as make the error."""
        num_rows = right.shape[0]
        if self.race:
            order = torch.from_numpy(self.rng.permutation(num_rows))
        else:
            order = (torch.arange(num_rows) + int(self.start * num_rows)) % num_rows
        energy = float(right.double().square().sum())
        if not (energy > 0 and math.isfinite(energy)):
            return right
        errors, enough = (wrong - right).double().square().sum(1)[order], self.error**2 * energy
        if self.severity != "severe":  # a row that alone is worse than was drawn is spared
            order, errors = order[errors <= 2 * enough], errors[errors <= 2 * enough]
        if key not in self.share:
            num = int(torch.searchsorted(errors.cumsum(0), torch.tensor(enough, dtype=torch.float64))) + 1
            self.share[key] = min(1.0, num / num_rows)
        rows = order[: max(1, round(self.share[key] * num_rows))]
        out = right.clone()
        out[rows] = wrong[rows]
        return out


def is_shared(t: Training, operand: str) -> bool:
    """Whether one quantisation of this operand serves both GEMMs that read it."""
    if t.recipe in ("delayed", "current"):
        return True
    return operand == "weight" and t.recipe != "mxfp8"


def kernel_sites(
    rng: np.random.Generator, t: Training, operand: str, columnwise: tuple[bool, ...] = (False,)
) -> list[str]:
    """One Linear, those of the same name in all layers, or all; only such as have the GEMM that reads the copy."""
    names = linears(t)
    if operand == "grad_output" or True in columnwise:
        names = behind_the_first(t, trained(t, names))
    if not names:
        return []
    name, how = one_of(rng, names), rng.random()
    if how < 0.6:
        return [name]
    same = [n for n in names if n.rpartition(".")[2] == name.rpartition(".")[2]]
    return same if how < 0.85 else names
