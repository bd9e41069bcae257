"""What a GEMM does wrongly at its edges: scales that belong to another part of K, biases, fragments and columns that its epilogue puts
where they do not belong, noise of a rounding that is meant to be stochastic.

Severity is the relative error of what the GEMM reads or gives.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import torch
from proving.faults._base import ERRORS, behind_the_first, linears, log_uniform, one_of, onset, seed, trained, until
from proving.faults._kernel import KernelFault
from proving.faults._sites import Operand, change_gemm
from proving.faults.products import ProductFault
from proving.training import Expected, Training
from torch import Tensor

_MANTISSA_BITS = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}
_MOST_SPLITS = 64


class ScalesOfOtherKBlock(KernelFault):
    """Along K the GEMM takes the scale of another block: that of the first for all (TIRx-kernels #5: the slice is not moved on), or
    counts the blocks in halves of their size (TileOPs #1666: a loop over 64 with scales of 128)."""

    name = "scales-of-other-k-block"
    operands = ("input", "grad_output")  # blocks of a weight have nearly equal scales
    directions = ((False,),)

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.way = one_of(self.rng, ("first", "halves"))
        self.note(way=self.way)

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> KernelFault | None:
        operand, step, error = one_of(rng, cls.operands), onset(rng, training), log_uniform(rng, *ERRORS[severity])
        if training.recipe not in (None, "blockwise", "mxfp8"):
            return None
        names = cls._long(training, operand)
        if not names:
            return None
        name, how = one_of(rng, names), rng.random()
        same = [n for n in names if n.rpartition(".")[2] == name.rpartition(".")[2]]
        modules = [name] if how < 0.6 else same if how < 0.85 else names
        return cls(
            step=step,
            until=until(rng, step, 3, 30, stays=0.7),
            severity=severity,
            expected=Expected(cls.modes, tuple(modules), operand, True),
            drawn={
                "operand": operand,
                "module": modules[0],
                "num_modules": len(modules),
                "asked_error": round(error, 4),
            },
            modules=modules,
            operand=operand,
            columnwise=(False,),
            error=error,
            race=False,
            seed=seed(rng),
        )

    @staticmethod
    def _long(t: Training, operand: str) -> list[str]:
        """Linears whose K has several blocks."""
        names = linears(t) if operand == "input" else behind_the_first(t, trained(t, linears(t)))
        width, axis = 32 if t.recipe == "mxfp8" else 128, "in_features" if operand == "input" else "out_features"
        return [n for n in names if int(getattr(t.model.get_submodule(n), axis)) > width]

    def wrong(self, name: str, operand: Operand) -> Tensor:
        num_rows, num_columns = operand.codes.shape
        width = operand.job.tile[1]
        block = torch.arange(num_columns) // (width // 2 if self.way == "halves" else num_columns)
        per_row = operand.scale_inv.repeat_interleave(operand.job.tile[0], 0)[:num_rows]
        spread = per_row[:, block.clamp(max=operand.scale_inv.shape[1] - 1)]
        return operand.codes.view(operand.job.fmt.dtype).float() * spread


class RoundingNoiseShifted(KernelFault):
    """The random bits of a stochastic rounding lie some places too high, so that the noise that is added to a gradient spans several
    steps of the format in place of one (Primus-Turbo #430: the seed and the pairs of the converter are off by a bit). It has no
    bias, and its size is what nobody looks at."""

    name = "rounding-noise-shifted"
    operands = ("grad_output",)

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.random = torch.Generator().manual_seed(int(self.rng.integers(1 << 31)))
        self.num_places = 0

    def wrong(self, name: str, operand: Operand) -> Tensor:
        bits = _MANTISSA_BITS.get(operand.job.fmt.dtype, 2)
        _, exponent = torch.frexp(operand.right)
        step = torch.ldexp(torch.ones_like(operand.right), exponent - 1 - bits)
        noise = torch.where(operand.right == 0, 0.0, step) * (
            torch.rand(step.shape, generator=self.random, dtype=torch.float32) - 0.5
        )
        energy = float(operand.right.double().square().sum())
        if not self.num_places and energy > 0:
            one_place = math.sqrt(float(noise.double().square().sum()) / energy)
            self.num_places = max(1, math.ceil(math.log2(max(2.0, self.error / one_place))))
            self.note(num_places=self.num_places)
        noisy = operand.right + noise * 2.0**self.num_places
        return operand.sound.quantize_dequantize(noisy, operand.job, (1.0 / operand.scale_inv).contiguous())[0]


class BiasOfEverySplit(ProductFault):
    """Each split of K adds the bias before the parts are summed (TensorRT-LLM #12686; xFormers #317 adds it twice). How many splits
    there are follows from the error that was drawn."""

    name = "bias-of-every-split"
    modes = ("kernel-output-fault", "accumulator-precision")
    gemms = ("fprop",)

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.found: dict[str, tuple[int, int]] = {}

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> ProductFault | None:
        names = [n for n in linears(training) if training.model.get_submodule(n).bias is not None]
        step, error = onset(rng, training), log_uniform(rng, *cls.bands[severity])
        if not names:
            return None
        name = one_of(rng, names)
        same = [n for n in names if n.rpartition(".")[2] == name.rpartition(".")[2]]
        modules = [name] if rng.random() < 0.6 else same
        return cls(
            step=step,
            until=until(rng, step, 3, 30, stays=0.7),
            severity=severity,
            expected=Expected(cls.modes, tuple(modules), None, True),
            drawn={"module": modules[0], "num_modules": len(modules), "asked_error": round(error, 4)},
            modules=modules,
            gemm="fprop",
            error=error,
            seed=seed(rng),
        )

    def begin(self, t: Training) -> None:
        for name in self.modules:
            module = t.model.get_submodule(name)
            self.later(change_gemm(module, "fprop", partial(self._added, name, module.bias)))

    def _added(self, name: str, bias: Tensor, out: Tensor, a: Tensor, b: Tensor) -> Tensor:
        own, whole = float(bias.detach().double().norm()) * math.sqrt(out.shape[0]), float(out.double().norm())
        if name not in self.found:
            times = self.error * whole / max(own, 1e-12)
            num_splits = 1 + max(1, min(_MOST_SPLITS - 1, round(times)))
            # where two are too many already, not all columns are of a tile that is split
            self.found[name] = num_splits, max(1, round(min(1.0, times) ** 2 * out.shape[1]))
            self.note(num_splits=num_splits, num_columns=self.found[name][1])
        num_splits, num_columns = self.found[name]
        wrong = out.clone()
        wrong[:, :num_columns] += ((num_splits - 1) * bias.detach()[:num_columns]).to(out.dtype)
        return self._measured_as(out, wrong)

    def _measured_as(self, out: Tensor, wrong: Tensor) -> Tensor:
        self.note(error=float((wrong - out).double().norm() / out.double().norm().clamp_min(1e-30)))
        return wrong


class OutputFragmentsTransposed(ProductFault):
    """The store of the epilogue is that of another architecture, and fragments of 8 × 8 leave their registers transposed
    (flash-attention #2439: `stmatrix` where the device has none)."""

    name = "output-fragments-transposed"
    modes = ("kernel-output-fault", "accumulator-precision")

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.start = float(self.rng.random())
        self.misplaced: dict[tuple[int, ...], Tensor] = {}
        """Of a shape, those that are stored wrongly."""

    def wrong(self, out: Tensor, a: Tensor, b: Tensor) -> Tensor:
        bands, num_columns = out.shape[0] // 8, out.shape[1] // 8 * 8
        energy = float(out.double().square().sum())
        if not bands or not num_columns or not energy > 0:
            return out
        got = out.clone()
        view = got[: bands * 8, :num_columns].unflatten(0, (bands, 8)).unflatten(2, (-1, 8))
        wrong, order = view.transpose(1, 3), (torch.arange(bands) + int(self.start * bands)) % bands
        if (key := tuple(out.shape)) not in self.misplaced:
            errors, enough = (wrong - view).double().square().sum((1, 2, 3))[order], self.error**2 * energy
            spared = errors > 2 * enough  # a band that alone is worse than was drawn
            if self.severity != "severe" and not spared.all():
                order, errors = order[~spared], errors[~spared]
            self.misplaced[key] = order[: int((errors.cumsum(0) < enough).sum()) + 1]
        chosen = self.misplaced[key]
        view[chosen] = wrong[chosen].clone()
        return got


class StoreOverhangs(ProductFault):
    """Tiles that reach beyond N are stored without a mask: what lies behind the weight is multiplied too, and lands in the first
    columns of the rows below, unless those are stored later (kernels-community #1153: who comes last is not determined)."""

    name = "store-overhangs"
    modes = ("kernel-output-fault", "accumulator-precision")
    gemms = ("fprop", "dgrad")

    def wrong(self, out: Tensor, a: Tensor, b: Tensor) -> Tensor:
        num_rows, num_columns = out.shape
        late = float(self.rng.uniform(0.35, 0.65))
        width = max(1, min(num_columns, round(self.error**2 / (2 * late) * num_columns)))
        behind = a[:-1] @ b.flip(0)[:, :width]  # of the right size, and of nothing
        hit = torch.from_numpy(self.rng.random(num_rows - 1) < late)
        got = out.clone()
        got[1:][hit, :width] = behind[hit].to(out.dtype)
        return got
