"""Parts that no longer take part: layers, experts, routers. FP8 has no part in it.

Severity is how much of the model it is: the share of a layer's output that is left, or of the tokens that go elsewhere.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from proving.faults._base import (
    Lasting,
    change_input,
    change_output,
    linears,
    log_uniform,
    one_of,
    onset,
    role,
    some_of,
    trained,
    until,
)
from proving.training import Expected, Training
from torch import Tensor, nn


class LayerDead(Lasting):
    """What a Linear reads is zero, or nearly: a gate that closed, a residual branch that was switched off. Behind the
    residual the gradient lives on."""

    name = "layer-dead"
    left: ClassVar[dict[str, tuple[float, float]]] = {"mild": (0.01, 0.1), "medium": (1e-5, 0.01), "severe": (0.0, 0.0)}

    def __init__(self, *, module: str, left: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.module, self.left = module, left

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> LayerDead | None:
        inner = set(role(training, "mlp.down", "attention.out", "recurrent"))
        names = [n for n in linears(training) if n in inner]
        if not names:
            return None
        module, step = one_of(rng, names), onset(rng, training)
        low, high = cls.left[severity]
        left_ = log_uniform(rng, low, high) if low else 0.0
        return cls(
            step=step,
            until=until(rng, step, 5, 30, stays=0.6),
            severity=severity,
            expected=Expected(("dead-layer", "dying-tile"), (module,), None, False),
            drawn={"module": module, "left": float(f"{left_:.2g}")},
            module=module,
            left=left_,
        )

    def begin(self, t: Training) -> None:
        self.later(change_input(t.model.get_submodule(self.module), lambda x: x * self.left))


class GradientBlocked(Lasting):
    """A `detach()` where none belongs: everything before a block gets no gradient, or only what comes around it."""

    name = "gradient-blocked"
    leaks: ClassVar[dict[str, tuple[float, float]]] = {
        "mild": (0.01, 0.1),
        "medium": (1e-5, 0.01),
        "severe": (0.0, 0.0),
    }

    def __init__(self, *, modules: list[str], leak: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.modules, self.leak = modules, leak

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> GradientBlocked | None:
        names = trained(training, linears(training) or role(training, "linears"))
        if not names:
            return None
        modules, step = some_of(rng, names, 1, 3), onset(rng, training)
        low, high = cls.leaks[severity]
        leak = log_uniform(rng, low, high) if low else 0.0
        return cls(
            step=step,
            until=until(rng, step, 5, 30, stays=0.6),
            severity=severity,
            expected=Expected(("dead-layer", "gradient-underflow"), tuple(modules), "grad_output", False),
            drawn={"module": modules[0], "num_modules": len(modules), "leak": float(f"{leak:.2g}")},
            modules=modules,
            leak=leak,
        )

    def begin(self, t: Training) -> None:
        def block(y: Tensor) -> Tensor:
            return y.detach() + (y - y.detach()) * self.leak

        for name in self.modules:
            self.later(change_output(t.model.get_submodule(name), block))


def _routers(t: Training) -> list[str]:
    """Routers that return logits, one number an expert, as plain Linears do."""
    return [n for n in role(t, "router") if isinstance(t.model.get_submodule(n), nn.Linear)]


class _Routing(Lasting):
    """Adds to the logits of one expert."""

    add: ClassVar[dict[str, tuple[float, float]]]
    sign: ClassVar[float]

    def __init__(self, *, router: str, expert: int, by: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.router, self.expert, self.by = router, expert, by

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> _Routing | None:
        routers = _routers(training)
        if not routers:
            return None
        router, step = one_of(rng, routers), onset(rng, training)
        layer = router.rpartition(".")[0]
        expert = int(rng.integers(training.model.get_submodule(router).out_features))
        by = cls.sign * log_uniform(rng, *cls.add[severity])
        experts = [e for e in role(training, "experts") if e.startswith(f"{layer}.")]
        starved = experts if cls.sign > 0 else experts[expert : expert + 1]
        return cls(
            step=step,
            until=until(rng, step, 10, 40, stays=0.7),
            severity=severity,
            expected=Expected(("dead-layer",), (*starved, layer), None, False),
            drawn={"module": router, "expert": expert, "logit": round(by, 2)},
            router=router,
            expert=expert,
            by=by,
        )

    def begin(self, t: Training) -> None:
        def tilt(y: Tensor) -> Tensor:
            more = torch.zeros(y.shape[-1], dtype=y.dtype)
            more[self.expert] = self.by
            return y + more

        self.later(change_output(t.model.get_submodule(self.router), tilt))


class ExpertStarved(_Routing):
    """An expert gets few tokens, or none at all."""

    name = "expert-starved"
    add: ClassVar[dict[str, tuple[float, float]]] = {"mild": (1.0, 2.5), "medium": (2.5, 6.0), "severe": (6.0, 40.0)}
    sign = -1.0


class RouterCollapses(_Routing):
    """One expert gets every token, and the others what is left."""

    name = "router-collapses"
    add: ClassVar[dict[str, tuple[float, float]]] = {"mild": (2.0, 4.0), "medium": (4.0, 9.0), "severe": (9.0, 40.0)}
    sign = 1.0
