"""Things that are done once too often or not well enough on the way through a model: an update that is applied again, the stream that goes
from one stage to the next in a few bits.

Severity is how often the update is applied, and the bits.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from proving.faults._base import (
    Lasting,
    change_output,
    one_of,
    onset,
    relative_error,
    role,
    until,
    with_gradient,
)
from proving.training import Expected, Training
from torch import Tensor


class UpdateAppliedAgain(Lasting):
    """Two parts of a stack both take the optimizer's step, so that each update is applied twice (transformers #45656: the engine in its
    backward, the trainer behind it), or once for each micro-batch and not once for all (ECO-pytorch #1). The rate is what it was.
    Severity is how often."""

    name = "update-applied-again"
    times: ClassVar[dict[str, tuple[int, int]]] = {"mild": (1, 1), "medium": (2, 4), "severe": (7, 15)}

    def __init__(self, *, again: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.again = again
        self.before: list[tuple[Tensor, Tensor]] = []

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> UpdateAppliedAgain | None:
        low, high = cls.times[severity]
        step, again = onset(rng, training), int(rng.integers(low, high + 1))
        return cls(
            step=step,
            until=until(rng, step, 10, 40, stays=0.8),
            severity=severity,
            expected=Expected(("optimizer-divergence", "scalar-shift"), None, None, False),
            drawn={"again": again},
            again=again,
        )

    @torch.no_grad()
    def before_update(self, t: Training, step: int) -> None:
        if self.active(step):
            self.before = [(p, p.detach().clone()) for p in t.model.parameters() if p.requires_grad]

    @torch.no_grad()
    def after_update(self, t: Training, step: int) -> None:
        for p, was in self.before:
            p.add_(self.again * (p - was))
        self.before = []


class BoundaryInFewBits(Lasting):
    """Stages of a pipeline hand their activations on in eight bits, with one scale for all (ColossalAI #5899; vLLM #39783): what a block gives
    is rounded to a mantissa of two bits, or of fewer. Gradients pass as they are. Severity is the bits, and at how many boundaries."""

    name = "boundary-in-few-bits"
    bits: ClassVar[dict[str, tuple[int, ...]]] = {"mild": (2, 1), "medium": (0,)}

    def __init__(self, *, modules: list[str], num_bits: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.modules, self.num_bits = modules, num_bits

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> BoundaryInFewBits | None:
        blocks = role(training, "blocks")
        if severity not in cls.bits or not blocks:
            return None
        step, num_bits = onset(rng, training), one_of(rng, cls.bits[severity])
        modules = [one_of(rng, blocks)] if severity == "mild" else blocks
        return cls(
            step=step,
            until=until(rng, step, 6, 40, stays=0.8),
            severity=severity,
            expected=Expected(("scalar-shift", "bad-batch"), None, None, None),
            drawn={"module": modules[0], "num_modules": len(modules), "num_bits": num_bits},
            modules=modules,
            num_bits=num_bits,
        )

    def rounded(self, x: Tensor) -> Tensor:
        """To a mantissa of so many bits behind the leading one."""
        mantissa, exponent = torch.frexp(x.detach().float())
        steps = 2.0 ** (self.num_bits + 1)
        return torch.ldexp((mantissa * steps).round() / steps, exponent).to(x.dtype)

    def begin(self, t: Training) -> None:
        def handed_on(x: Tensor) -> Tensor:
            self.note(error=relative_error(self.rounded(x), x.detach()))
            return with_gradient(x, self.rounded(x))

        for name in self.modules:
            self.later(change_output(t.model.get_submodule(name), handed_on))
