"""Activations and weights that grow, and residual streams that are not what they should be.

Severity is the size: how many times above everything else a channel or a row stands, or the share of the residual stream
that is lost.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from proving.faults._base import (
    Lasting,
    behind_the_first,
    change_input,
    linears,
    log_uniform,
    one_of,
    onset,
    role,
    seed,
    trained,
    until,
    with_gradient,
)
from proving.training import Expected, Training
from torch import Tensor


class OutlierChannel(Lasting):
    """One channel of an activation stands far above all others (one ×3000: amax 2.9 → 3312, loss 2.24 → 4.51)."""

    name = "outlier-channel"
    sizes: ClassVar[dict[str, tuple[float, float]]] = {
        "mild": (8.0, 40.0),
        "medium": (40.0, 400.0),
        "severe": (400.0, 8000.0),
    }

    def __init__(self, *, module: str, size: float, channel: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.module, self.size, self.channel = module, size, channel

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> OutlierChannel | None:
        names = linears(training) or role(training, "linears")
        if not names:
            return None
        module, step, size = one_of(rng, names), onset(rng, training), log_uniform(rng, *cls.sizes[severity])
        return cls(
            step=step,
            until=until(rng, step, 1, 20, stays=0.5),
            severity=severity,
            expected=Expected(("outlier-growth",), (module,), "input", None),
            drawn={"module": module, "times": round(size, 1)},
            module=module,
            size=size,
            channel=float(rng.random()),
        )

    def begin(self, t: Training) -> None:
        def grow(x: Tensor) -> Tensor:
            at = int(self.channel * x.shape[-1])
            gain = torch.ones(x.shape[-1], dtype=x.dtype)
            gain[at] = self.size * x.detach().abs().amax() / x[..., at].detach().abs().amax().clamp_min(1e-6)
            return x * gain

        self.later(change_input(t.model.get_submodule(self.module), grow))


class SwigluAlignment(Lasting):
    """Rows of gate and up align and grow together, so that their product grows with the square (arXiv 2409.12517: why
    delayed scaling diverged after 200B tokens). Severity is the product's growth."""

    name = "swiglu-alignment"
    growths: ClassVar[dict[str, tuple[float, float]]] = {
        "mild": (30.0, 150.0),
        "medium": (150.0, 1500.0),
        "severe": (1500.0, 30000.0),
    }

    def __init__(self, *, gate: str, up: str, channel: float, total: float, steps: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.gate, self.up, self.channel = gate, up, channel
        self.rate, self.steps, self.done = total ** (0.5 / steps), steps, 0

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> SwigluAlignment | None:
        triples = list(zip(*(role(training, f"mlp.{r}") for r in ("gate", "up", "down")), strict=False))
        triples = [triple for triple in triples if len(trained(training, triple)) == 3]
        if not triples:
            return None
        gate, up, down = one_of(rng, triples)
        total, steps = log_uniform(rng, *cls.growths[severity]), int(rng.integers(15, 45))
        return cls(
            step=onset(rng, training),
            severity=severity,
            expected=Expected(("outlier-growth", "delayed-clip"), (down, gate, up), None, None),
            drawn={"module": down, "growth": round(total, 1), "steps": steps},
            gate=gate,
            up=up,
            channel=float(rng.random()),
            total=total,
            steps=steps,
        )

    @torch.no_grad()
    def begin(self, t: Training) -> None:
        gate, up = (t.model.get_submodule(name).weight for name in (self.gate, self.up))
        self.row = int(self.channel * gate.shape[0])
        up[self.row] = gate[self.row]

    @torch.no_grad()
    def after_update(self, t: Training, step: int) -> None:
        if self._begun and self.done < self.steps:
            self.done += 1
            for name in (self.gate, self.up):
                t.model.get_submodule(name).weight[self.row] *= self.rate


class WeightRowGrows(Lasting):
    """A row of one weight grows by a factor a step, as weights do whose decay was forgotten; nothing jumps."""

    name = "weight-row-grows"
    sizes: ClassVar[dict[str, tuple[float, float]]] = {
        "mild": (8.0, 30.0),
        "medium": (30.0, 300.0),
        "severe": (300.0, 3000.0),
    }

    def __init__(self, *, module: str, total: float, steps: int, row: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.module, self.rate, self.steps, self.at, self.done = module, total ** (1 / steps), steps, row, 0

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> WeightRowGrows | None:
        names = trained(training, linears(training) or role(training, "linears"))
        if not names:
            return None
        module, total, steps = one_of(rng, names), log_uniform(rng, *cls.sizes[severity]), int(rng.integers(10, 40))
        return cls(
            step=onset(rng, training),
            severity=severity,
            expected=Expected(("outlier-growth", "attention-logit-growth"), (module,), "weight", None),
            drawn={"module": module, "growth": round(total, 1), "steps": steps},
            module=module,
            total=total,
            steps=steps,
            row=float(rng.random()),
        )

    @torch.no_grad()
    def after_update(self, t: Training, step: int) -> None:
        if self.active(step) and self.done < self.steps:
            self.done += 1
            weight = t.model.get_submodule(self.module).weight
            weight[int(self.at * weight.shape[0])] *= self.rate


class EmbeddingOverflow(Lasting):
    """The vectors of some inputs are far too large: rows of the table that ran away, or positions scaled twice."""

    name = "embedding-overflow"
    sizes: ClassVar[dict[str, tuple[float, float]]] = {
        "mild": (5.0, 30.0),
        "medium": (30.0, 1000.0),
        "severe": (1000.0, 1e6),
    }

    def __init__(self, *, module: str, size: float, share: float, seed: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.module, self.size, self.share, self.seed = module, size, share, seed

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> EmbeddingOverflow | None:
        names = role(training, "embedding")
        if not names:
            return None
        step, size, share = onset(rng, training), log_uniform(rng, *cls.sizes[severity]), log_uniform(rng, 0.05, 0.5)
        return cls(
            step=step,
            until=until(rng, step, 1, 20, stays=0.5),
            severity=severity,
            expected=Expected(("outlier-growth", "nan-in-activation", "inf-laundering"), None, None, False),
            drawn={"module": names[0], "times": round(size, 1), "share": round(share, 3)},
            module=names[0],
            size=size,
            share=share,
            seed=seed(rng),
        )

    def begin(self, t: Training) -> None:
        def grow(x: Tensor) -> Tensor:
            width = x.shape[-1]
            hit = np.random.default_rng(self.seed).random(width) < self.share
            hit[0] = True
            return x * torch.where(torch.from_numpy(hit), self.size, 1.0).to(x.dtype)

        def grow_channels(x: Tensor) -> Tensor:
            return grow(x.movedim(1, -1)).movedim(-1, 1)

        named = t.model.get_submodule(self.module)
        for module in t.model.modules():  # a shared table has a module for each that reads it
            if module is named or (isinstance(module, torch.nn.Embedding) and module.weight is named.weight):
                grows = grow_channels if isinstance(module, torch.nn.Conv2d) else grow
                self.later(module.register_forward_hook(lambda m, args, y, grows=grows: grows(y)).remove)


class ResidualDropped(Lasting):
    """A block returns its branches and loses a share of the stream that they are added to: a merge or a refactoring that
    scales the wrong term. Severity is the share."""

    name = "residual-dropped"
    shares: ClassVar[dict[str, tuple[float, float]]] = {"mild": (0.2, 0.4), "medium": (0.4, 0.7), "severe": (0.7, 1.0)}

    def __init__(self, *, block: str, share: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.block, self.share = block, share

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> ResidualDropped | None:
        blocks = role(training, "blocks")
        if not blocks:
            return None
        block, step, share = one_of(rng, blocks), onset(rng, training), float(rng.uniform(*cls.shares[severity]))
        return cls(
            step=step,
            until=until(rng, step, 3, 20, stays=0.6),
            severity=severity,
            expected=Expected(("scalar-shift", "bad-batch", "dead-layer"), None, None, False),
            drawn={"module": block, "share": round(share, 3)},
            block=block,
            share=share,
        )

    def begin(self, t: Training) -> None:
        def drop(m: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
            x = args[0] if args else kwargs["hidden_states"]
            if isinstance(out, tuple):
                return (out[0] - self.share * x, *out[1:])
            return out - self.share * x

        self.later(t.model.get_submodule(self.block).register_forward_hook(drop, with_kwargs=True).remove)


class PaddingRowsLarge(Lasting):
    """Rows that belong to no token hold what was in memory, and enter a Linear (Transformer Engine #2892, #2911: padding
    distorts scales and gradients ×40–500). Their outputs are thrown away; their gradient is not."""

    name = "padding-rows-large"
    sizes: ClassVar[dict[str, tuple[float, float]]] = {
        "mild": (10.0, 60.0),
        "medium": (60.0, 600.0),
        "severe": (600.0, 20000.0),
    }

    def __init__(self, *, module: str, size: float, share: float, seed: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.module, self.size, self.share = module, size, share
        self.rng = np.random.default_rng(seed)

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> PaddingRowsLarge | None:
        names = behind_the_first(training, linears(training))
        if not names:
            return None
        module, step, size = one_of(rng, names), onset(rng, training), log_uniform(rng, *cls.sizes[severity])
        share = log_uniform(rng, 0.02, 0.2)
        return cls(
            step=step,
            until=until(rng, step, 2, 20, stays=0.7),
            severity=severity,
            expected=Expected(("outlier-growth", "kernel-output-fault"), (module,), "input", None),
            drawn={"module": module, "times": round(size, 1), "share": round(share, 3)},
            module=module,
            size=size,
            share=share,
            seed=seed(rng),
        )

    def begin(self, t: Training) -> None:
        def fill(x: Tensor) -> Tensor:
            rows = x.flatten(0, -2).clone()
            n = max(1, round(self.share * rows.shape[0]))
            amax = rows.detach().abs().amax()
            garbage = torch.from_numpy(self.rng.standard_normal((n, rows.shape[1]))).to(rows.dtype)
            rows[-n:] = with_gradient(rows[-n:], garbage * amax * self.size)
            return rows.view_as(x)

        self.later(change_input(t.model.get_submodule(self.module), fill))
