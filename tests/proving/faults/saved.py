"""What a Linear keeps of its input for the backward pass, and keeps too coarsely: activations that are compressed with one scale for a whole tensor.

Severity is the relative error of what the wgrad GEMM reads in the place of the input: the forward pass and dgrad have their own copies.
"""

from __future__ import annotations

import math
from typing import Any

from proving.faults._base import relative_error
from proving.faults.products import ProductFault
from torch import Tensor


class SavedWithOneScale(ProductFault):
    """Activations wait for the backward pass in eight bits, with one scale for a whole tensor that some large number has set, so that few of
    the levels are left for all others (COAT, arXiv 2410.19313, takes a scale a group for that; megablocks #23, pytorch #64729). The loss
    of the step is right, and so is the gradient that is passed on; that of the weight is not. How far apart the levels are follows
    from the error that was drawn, at the first wrong call, and then stays; what lies beyond the last level is clipped to it."""

    name = "saved-with-one-scale"
    modes = ("quantiser-fault", "kernel-output-fault", "accumulator-precision")
    gemms = ("wgrad",)
    most = 127
    """Levels to either side."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.steps: dict[tuple[int, ...], float] = {}
        """Of each shape, how far the levels are apart."""

    def levels(self, x: Tensor, step: float) -> Tensor:
        """Rounded to equal steps."""
        return (x.float() / step).round().clamp(-self.most, self.most) * step

    def step_of(self, x: Tensor) -> float:
        """How far apart levels are that give the error; 0 where there is nothing to keep."""
        rms = math.sqrt(float(x.double().square().mean()))
        if not (rms > 0 and math.isfinite(rms)):
            return 0.0
        # for numbers that fill many levels the error is step/√12 of their size; where few are left it is searched for
        steps = [math.sqrt(12) * self.error * rms * 2.0 ** (quarter / 4) for quarter in range(-6, 16)]
        errors = {step: relative_error(self.levels(x, step), x) for step in steps}
        return min(steps, key=lambda step: abs(errors[step] - self.error))

    def wrong(self, out: Tensor, a: Tensor, b: Tensor) -> Tensor:
        key = tuple(b.shape)
        if key not in self.steps and (step := self.step_of(b)):
            self.steps[key] = step
            came_back = self.levels(b, step)
            self.note(
                error_of_input=round(relative_error(came_back, b), 4),
                levels=len(came_back.unique()),
                at=f"[{b.shape[0]}, {b.shape[1]}]",
            )
        if key not in self.steps:
            return out
        return a.float() @ self.levels(b, self.steps[key])
