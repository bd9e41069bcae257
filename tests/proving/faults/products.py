"""GEMMs whose operands are right and whose product is not.

The operands quantise well, so that nothing about them is unusual; what is wrong is the kernel that multiplies them.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import torch
from proving.faults._base import (
    ERRORS,
    Lasting,
    log_uniform,
    one_of,
    onset,
    relative_error,
    seed,
    until,
)
from proving.faults._kernel import kernel_sites
from proving.faults._sites import change_gemm
from proving.training import Expected, Training
from torch import Tensor

_READS = {"fprop": "input", "dgrad": "grad_output", "wgrad": "grad_output"}
"""The operand under whose site the output of a GEMM is filed."""


class ProductFault(Lasting):
    """One GEMM of some Linears gives something else."""

    modes: ClassVar[tuple[str, ...]]
    gemms: ClassVar[tuple[str, ...]] = ("fprop", "dgrad", "wgrad")
    bands: ClassVar[dict[str, tuple[float, float]]] = ERRORS

    def __init__(self, *, modules: list[str], gemm: str, error: float, seed: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.modules, self.gemm, self.error = modules, gemm, error
        self.rng = np.random.default_rng(seed)

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> ProductFault | None:
        gemm = one_of(rng, cls.gemms)
        names = kernel_sites(rng, training, "input" if gemm == "fprop" else "grad_output", (gemm == "wgrad",))
        if not names or severity not in cls.bands:
            return None
        step, error = onset(rng, training), log_uniform(rng, *cls.bands[severity])
        return cls(
            step=step,
            until=until(rng, step, 3, 30, stays=0.7),
            severity=severity,
            expected=Expected(cls.modes, tuple(names), None, True),
            drawn={"gemm": gemm, "module": names[0], "num_modules": len(names), "asked_error": round(error, 5)},
            modules=names,
            gemm=gemm,
            error=error,
            seed=seed(rng),
        )

    def begin(self, t: Training) -> None:
        for name in self.modules:
            self.later(change_gemm(t.model.get_submodule(name), self.gemm, self._measured))

    def _measured(self, out: Tensor, a: Tensor, b: Tensor) -> Tensor:
        wrong = self.wrong(out, a, b)
        if float(out.abs().max()) > 0:
            self.note(error=relative_error(wrong, out))
        return wrong

    def wrong(self, out: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """The product as the kernel gives it; `out` is the right one."""
        raise NotImplementedError


class AccumulatorNarrow(ProductFault):
    """The accumulator keeps few bits and is not promoted every 128 terms (Hopper's tensor cores: 14 bits, DeepSeek-V3
    section 3.3). At K = 4096 they cost 0.35 %; at the K of a small model the same error needs fewer bits, and the number
    of bits is what follows from the error that was drawn."""

    name = "accumulator-narrow"
    modes = ("accumulator-precision", "kernel-output-fault")
    bands: ClassVar[dict[str, tuple[float, float]]] = {
        "mild": (0.002, 0.01),
        "medium": (0.01, 0.05),
        "severe": (0.05, 0.2),
    }
    """A quarter of `ERRORS`: the quantisation is in the operands, not in the product."""

    def wrong(self, out: Tensor, a: Tensor, b: Tensor) -> Tensor:
        pieces = max(2, min(16, a.shape[1] // 16))
        # each addition cuts the sum towards 0; half an ulp a time adds up over the pieces
        bits = max(1, min(20, round(-math.log2(2 * self.error / math.sqrt(pieces)))))
        self.note(bits=bits)
        total = torch.zeros_like(out, dtype=torch.float32)
        for part_a, part_b in zip(a.chunk(pieces, 1), b.chunk(pieces, 0), strict=True):
            mantissa, exponent = torch.frexp(total + part_a @ part_b)
            total = torch.ldexp(torch.trunc(mantissa * 2.0**bits) / 2.0**bits, exponent)
        bias = out.float() - a @ b if self.gemm == "fprop" else 0.0
        return total + bias


class ProductOfFewerTerms(ProductFault):
    """A part of the contraction is never added: the last, ragged slice of K is left out, or a split of it is lost."""

    name = "terms-dropped"
    modes = ("kernel-output-fault", "accumulator-precision")

    def wrong(self, out: Tensor, a: Tensor, b: Tensor) -> Tensor:
        num_terms = a.shape[1]
        n = max(1, min(num_terms, round(self.error**2 * num_terms)))
        return out - (a[:, num_terms - n :] @ b[num_terms - n :]).to(out.dtype)


class RowsUnwritten(ProductFault):
    """Rows of the output are not written (Primus-Turbo #397, MSLK #158: experts without tokens, padded rows): they hold
    what was there before, or whatever bits the memory has."""

    name = "rows-unwritten"
    modes = ("kernel-output-fault", "nan-in-activation")

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.left = one_of(self.rng, ("nan", "huge")) if self.severity == "severe" else "before"
        self.start = float(self.rng.random())
        self.before: Tensor | None = None
        self.note(holds=self.left)

    def wrong(self, out: Tensor, a: Tensor, b: Tensor) -> Tensor:
        num_rows = out.shape[0]
        share = self.error**2 / 2 if self.left == "before" else 0.01  # of two unlike tensors the error is √2
        order = (torch.arange(num_rows) + int(self.start * num_rows)) % num_rows
        rows = order[: max(1, round(share * num_rows))]
        before, self.before = self.before, out.clone()
        got = out.clone()
        if self.left == "nan":
            got[rows] = torch.nan
        elif self.left == "huge":
            got[rows] = float(torch.finfo(out.dtype).max) ** 0.5
        else:
            got[rows] = before[rows] if before is not None and before.shape == out.shape else out.roll(1, 0)[rows]
        return got


class GradientOfWeightNan(ProductFault):
    """One wgrad has a NaN at one step (marin #7480: `w_down`, step 2); all operands are finite, and the job goes on."""

    name = "wgrad-nan"
    modes = ("kernel-output-fault",)
    gemms = ("wgrad",)
    bands: ClassVar[dict[str, tuple[float, float]]] = {"severe": (1.0, 1.0)}

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> ProductFault | None:
        fault = super().draw(rng, training, severity)
        if fault is not None:
            fault.until = fault.step + 1
        return fault

    def wrong(self, out: Tensor, a: Tensor, b: Tensor) -> Tensor:
        got = out.clone()
        got.view(-1)[int(self.rng.integers(got.numel()))] = torch.nan
        return got
