"""What is kept of an amax until a scale is made from it: in too few bits, or in a history into which other passes write as well.

Severity is how many bits are kept, or how far an operand is clipped.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from proving.faults._base import Lasting, linears, log_uniform, one_of, onset, until
from proving.faults._kernel import kernel_sites
from proving.faults._sites import OtherScale, put_kernel, quantizers
from proving.faults.delayed import DEPTHS
from proving.training import Expected, Training
from torch import Tensor

from fp8watch.numerics.quantize_job import QuantizeJob


class AmaxInFewBits(Lasting):
    """The amax is kept in another format than what is cast, and is cut off on the way (Transformer Engine #2355: an amax of other numbers
    than those that are quantised): the scale is too large, and the largest numbers of a tile are clipped. Scales that are powers of two
    forgive it but where the amax is just below one: those are mild."""

    name = "amax-in-few-bits"
    bits: ClassVar[dict[str, tuple[int, ...]]] = {"mild": (4, 3), "medium": (2,), "severe": (1, 0)}
    """Of the mantissa, behind the leading one."""

    def __init__(self, *, modules: list[str], operand: str, num_bits: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.modules, self.operand, self.num_bits = modules, operand, num_bits

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> AmaxInFewBits | None:
        operand = one_of(rng, ("input", "weight", "grad_output"))
        names = kernel_sites(rng, training, operand)
        if not names or training.recipe == "delayed":  # there the scale is of the steps before
            return None
        whole_blocks = operand == "weight" and training.recipe in (None, "blockwise")  # few tiles: none may be hit
        if training.recipe != "current" and (severity != "mild" or whole_blocks):
            return None
        step, num_bits = onset(rng, training), one_of(rng, cls.bits[severity])
        stale = ("stale-weight-scale",) if operand == "weight" else ()
        return cls(
            step=step,
            until=until(rng, step, 5, 30, stays=0.8),
            severity=severity,
            expected=Expected(("scale-rounding", "quantiser-fault", *stale), tuple(names), operand, True),
            drawn={"operand": operand, "module": names[0], "num_modules": len(names), "num_bits": num_bits},
            modules=names,
            operand=operand,
            num_bits=num_bits,
        )

    def of_kept(self, scale: Tensor, job: QuantizeJob) -> Tensor:
        """The scale that is made from the amax as it was kept; `scale` is FP8_MAX/amax."""
        largest = job.fmt.max_finite
        mantissa, exponent = torch.frexp(largest / scale.double())
        steps = 2.0 ** (self.num_bits + 1)
        kept = torch.ldexp((mantissa * steps).floor() / steps, exponent)
        out = largest / kept
        if job.power_2_scale:
            out = torch.exp2(torch.log2(out).add(1e-9).floor())
        return torch.where(scale == 1.0, scale.double(), out).to(scale.dtype)  # of a tile of zeros

    def begin(self, t: Training) -> None:
        for name in self.modules:
            module = t.model.get_submodule(name)
            make = lambda base: OtherScale(base, self.of_kept, unrounded=True)  # noqa: E731
            self.later(put_kernel(module, self.operand, make))


class HistoryOfDummyPasses(Lasting):
    """Passes over made-up data, for the capture of a graph, to warm up or to measure memory, write into the amax history until nothing
    else is left in it (Transformer Engine #825: histories that roll on in passes without data), and the next batch is cast with a scale
    for what was made up. Every few steps, in one Linear, in those of one name or in all; the batch after is right again."""

    name = "history-of-dummy-passes"
    needs_recipe = "delayed"
    prepares = True

    def __init__(self, *, modules: list[str], depth: float, every: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.modules, self.depth, self.every = modules, depth, every

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> HistoryOfDummyPasses | None:
        if training.recipe not in (None, "blockwise", "delayed") or not linears(training):
            return None
        names = kernel_sites(rng, training, "input")
        step, depth = onset(rng, training), log_uniform(rng, *DEPTHS[severity])
        every = int(rng.integers(2, 7))
        return cls(
            step=step,
            until=until(rng, step, 6, 30, stays=0.7),
            severity=severity,
            expected=Expected(("delayed-clip", "frozen-scale"), tuple(names), "input", True),
            drawn={"module": names[0], "num_modules": len(names), "times": round(depth, 2), "every": every},
            modules=names,
            depth=depth,
            every=every,
        )

    def before_attach(self, t: Training) -> None:
        t.recipe = "delayed"

    @torch.no_grad()
    def before_step(self, t: Training, step: int) -> None:
        super().before_step(t, step)
        if not self.active(step) or (step - self.step) % self.every:
            return
        for name in self.modules:
            (quantizer,) = quantizers(t.model.get_submodule(name), "input")
            state = quantizer.state  # type: ignore[attr-defined]
            made_up = float(state.amax_history.max()) / self.depth
            if made_up > 0:
                state.amax_history.zero_()
                state.record(torch.tensor([made_up]))
                state.roll()
