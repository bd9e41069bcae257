"""Gradients and moments that travel or rest in fewer bits than they were computed in, and are put together wrongly on the other side.

Severity is the relative error of the gradient, or of the first update.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from proving.faults._base import Lasting, has_adam, log_uniform, one_of, onset, relative_error, until
from proving.faults.resume import _Resumed
from proving.training import Expected, Training
from torch import Tensor

_SMALLEST = 64
"""Elements of a gradient from which on it is worth to compress it."""


class ErrorFeedbackLost(Lasting):
    """Of each matrix's gradient only the largest elements are sent, or signs and one size, and what is left behind is to be added in the
    next step; it is not (pytorch #48670, #49418: buckets are rebuilt, and the error begins again as zeros). How many elements are sent
    follows from the error that was drawn, and then stays."""

    name = "error-feedback-lost"
    bands: ClassVar[dict[str, tuple[float, float]]] = {"mild": (0.3, 0.5), "medium": (0.5, 0.8), "severe": (0.8, 0.97)}
    """Of a gradient of which the largest elements are left: its norm falls to √(1 − error²)."""

    def __init__(self, *, way: str, error: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.way, self.error = way, error
        self.num: dict[str, int] = {}

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> ErrorFeedbackLost | None:
        way = one_of(rng, ("largest", "signs")) if severity == "severe" else "largest"
        step, error = onset(rng, training), log_uniform(rng, *cls.bands[severity])
        return cls(
            step=step,
            until=until(rng, step, 8, 40, stays=0.8),
            severity=severity,
            expected=Expected(("scalar-shift", "gradient-underflow", "silent-data-corruption"), None, None, False),
            drawn={"way": way, "asked_error": round(error, 4)},
            way=way,
            error=error,
        )

    @torch.no_grad()
    def after_backward(self, t: Training, step: int) -> None:
        if not self.active(step):
            return
        sent = {n: p.grad for n, p in t.model.named_parameters() if p.grad is not None and p.ndim >= 2}
        before = {name: g.clone() for name, g in sent.items()}
        for name, g in sent.items():
            if g.numel() >= _SMALLEST:
                g.copy_(self.arrived(name, g))
        if sent:
            now, right = (torch.cat([g.flatten() for g in of.values()]) for of in (sent, before))
            self.note(error=relative_error(now, right))

    def arrived(self, name: str, g: Tensor) -> Tensor:
        """What the other ranks hear of a gradient."""
        if self.way == "signs":
            return g.sign() * g.abs().mean()
        sizes = g.abs().flatten()
        if name not in self.num:
            left = sizes.square().double().sort().values.cumsum(0)
            lost = int((left <= self.error**2 * left[-1]).sum()) if float(left[-1]) > 0 else 0
            self.num[name] = max(1, sizes.numel() - lost)
            self.note(first_share=round(self.num[name] / sizes.numel(), 4))
        out = torch.zeros_like(sizes)
        largest = sizes.topk(self.num[name]).indices
        out[largest] = g.flatten()[largest]
        return out.view_as(g)


class MomentBlocksShifted(_Resumed):
    """Adam's moments are kept in 8 bits with a largest number for each block, and after a launch with other shards each block is multiplied by
    that of another one (bitsandbytes #89, #2080: flat shards change what a block is), in one stretch of them. How many blocks follows from the error of the
    update that was drawn."""

    name = "moment-blocks-shifted"
    bands: ClassVar[dict[str, tuple[float, float]]] = {"mild": (0.5, 2.0), "medium": (2.0, 8.0), "severe": (8.0, 40.0)}
    sizes: ClassVar[tuple[int, ...]] = (64, 128, 256)

    def __init__(self, *, size: int, error: float, which: str, parts: list[float], first: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.size, self.error, self.parts, self.first = size, error, parts, first
        moments = {"both": ("exp_avg", "exp_avg_sq"), "first": ("exp_avg",), "second": ("exp_avg_sq",)}
        self.concerned = moments[which]

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> MomentBlocksShifted | None:
        if not has_adam(training) or training.resume_at:
            return None
        size, error = one_of(rng, cls.sizes), log_uniform(rng, *cls.bands[severity])
        # of both at once the errors nearly cancel
        which = one_of(rng, ("both", "first", "second") if severity == "mild" else ("first", "second"))
        return cls(
            step=onset(rng, training),
            severity=severity,
            expected=Expected(("optimizer-divergence", "recipe-mismatch", "silent-data-corruption"), None, None, False),
            drawn={"size": size, "which": which, "asked_error": round(error, 3)},
            size=size,
            error=error,
            which=which,
            parts=rng.uniform(0.02, 0.98, 12).tolist(),
            first=float(rng.random()),
        )

    def shifted(self, x: Tensor, by: int) -> Tensor:
        """A flat moment whose blocks all have the largest numbers of those `by` further on."""
        blocks = self._blocks(x)
        own = blocks.abs().amax(1, keepdim=True)
        return (blocks / own.clamp_min(1e-30) * own.roll(-by, 0)).flatten()[: len(x)]

    def _blocks(self, x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (0, -len(x) % self.size)).view(-1, self.size)

    def loaded(self, t: Training, state: dict[str, Any]) -> dict[str, Any]:
        moments = {i: of for i, of in state["optimizer"]["state"].items() if "exp_avg" in of}
        flat = {k: torch.cat([of[k].flatten() for of in moments.values()]) for k in ("exp_avg", "exp_avg_sq")}
        num_blocks = len(self._blocks(flat["exp_avg"]))
        right = self._update(flat)
        enough = self.error**2 * float(right.double().square().sum())
        by, wrong, errors = 0, flat, torch.zeros(num_blocks, dtype=torch.float64)
        for part in self.parts:  # the first shift that is bad enough, else the worst
            moved = max(1, int(part * num_blocks))
            got = {k: self.shifted(x, moved) if k in self.concerned else x for k, x in flat.items()}
            those = self._blocks(self._update(got) - right).double().square().sum(1)
            if not by or those.sum() > errors.sum():
                by, wrong, errors = moved, got, those
            if errors.sum() > enough:
                break
        # as many blocks, from one on, as make the error
        order = (torch.arange(num_blocks) + int(self.first * num_blocks)) % num_blocks
        spared = errors[order] > 2 * enough  # a block that alone is worse than was drawn
        order = errors.argmin()[None] if spared.all() else order[~spared]
        hit = torch.zeros(num_blocks, dtype=torch.bool)
        hit[order[: int((errors[order].cumsum(0) < enough).sum()) + 1]] = True
        of_elements = hit.repeat_interleave(self.size)[: len(right)]
        got = {k: torch.where(of_elements, wrong[k], x) for k, x in flat.items()}
        self.note(by=by, num_blocks=int(hit.sum()), of=num_blocks, error=relative_error(self._update(got), right))
        begin, changed = 0, {}
        for i, of in moments.items():
            num, shape = of["exp_avg"].numel(), of["exp_avg"].shape
            changed[i] = of | {k: x[begin : begin + num].view(shape).clone() for k, x in got.items()}
            begin += num
        return state | {"optimizer": state["optimizer"] | {"state": state["optimizer"]["state"] | changed}}

    @staticmethod
    def _update(flat: dict[str, Tensor]) -> Tensor:
        """What Adam would add, but for the rate."""
        return flat["exp_avg"] / (flat["exp_avg_sq"].clamp_min(0).sqrt() + 1e-8)
