"""Checkpoints that are loaded under another convention than the one they were saved under: every number is there, and means something else.

Severity is in how many layers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from proving.families import parts
from proving.faults._base import one_of, onset, role, some_of
from proving.faults.resume import _Resumed
from proving.training import Expected, Training
from torch import Tensor, nn

_MODES = ("recipe-mismatch", "silent-data-corruption", "scalar-shift", "optimizer-divergence")


def _num_heads(attention: nn.Module, projection: nn.Linear) -> int:
    """Of a projection of queries or keys; 0 where it cannot be told."""
    if isinstance(attention, parts.Attention):
        return attention.num_heads if projection is attention.wq else attention.num_kv_heads
    size = getattr(attention, "head_dim", 0)
    return projection.out_features // size if size else 0


def _of_layers(severity: str, num: int) -> int:
    """In how many of so many layers."""
    return {"mild": 1, "medium": max(1, num // 2 + 1 if num > 2 else 1), "severe": num}[severity]


class HeadsInOtherOrder(_Resumed):
    """Rotary lanes are saved as neighbours and read as halves, or the other way round: rows of q and k are in another order within each head
    (nanotron #427, transformers #25199). The same numbers, turned by other angles. Moments are in the order that was."""

    name = "heads-in-other-order"

    def __init__(self, *, layers: list[int], to_halves: bool, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.layers, self.to_halves = layers, to_halves

    @classmethod
    def projections(cls, t: Training, layer: int) -> dict[str, tuple[int, int]]:
        """Name -> heads, and lanes of each that are turned."""
        attention = t.model.get_submodule(role(t, "attention")[layer])
        found = {}
        for name in (role(t, "attention.q")[layer], role(t, "attention.k")[layer]):
            projection = t.model.get_submodule(name)
            assert isinstance(projection, nn.Linear)
            heads = _num_heads(attention, projection)
            if heads:
                lanes = projection.out_features // heads
                found[name] = heads, int(getattr(attention, "rotary_ndims", lanes))
        return found

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> HeadsInOtherOrder | None:
        rotary = any(
            isinstance(m, parts.Attention) or type(m).__name__.endswith("RotaryEmbedding")
            for m in training.model.modules()
        )
        num = len(role(training, "attention.q"))
        if not rotary or not num or any(len(role(training, r)) != num for r in ("attention", "attention.k")):
            return None
        if training.resume_at or any(len(cls.projections(training, i)) < 2 for i in range(num)):
            return None
        if num == 1 and severity != "severe":
            return None
        layers = sorted(rng.choice(num, size=_of_layers(severity, num), replace=False).tolist())
        names = [name for i in layers for name in cls.projections(training, i)]
        return cls(
            step=onset(rng, training),
            severity=severity,
            expected=Expected(_MODES, tuple(names), None, False),
            drawn={"num_layers": len(layers), "of": num, "module": names[0]},
            layers=layers,
            to_halves=bool(rng.random() < 0.5),
        )

    def loaded(self, t: Training, state: dict[str, Any]) -> dict[str, Any]:
        model = dict(state["model"])
        for layer in self.layers:
            for name, (heads, turned) in self.projections(t, layer).items():
                for key in (f"{name}.weight", f"{name}.bias"):
                    if key in model:
                        model[key] = self.ordered(model[key], heads, turned)
        return state | {"model": model}

    def ordered(self, x: Tensor, heads: int, turned: int) -> Tensor:
        """Rows [heads · lanes, …] in the other order within each head."""
        each = x.unflatten(0, (heads, -1)).clone()
        order = torch.arange(turned)
        order = order.view(2, -1).t().flatten() if self.to_halves else order.view(-1, 2).t().flatten()
        each[:, :turned] = each[:, order]
        return each.flatten(0, 1)


class GainsOfOtherConvention(_Resumed):
    """Gains of norms are saved as they are and read as what is to be added to 1, or the other way round (mlx-vlm #2041: every gain is shifted
    twice; executorch #22444; NeMo #7523). Some norms, or all of them."""

    name = "gains-of-other-convention"

    def __init__(self, *, modules: list[str], shift: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.modules, self.shift = modules, shift

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> GainsOfOtherConvention | None:
        norms = [
            n for n in role(training, "norm") if getattr(training.model.get_submodule(n), "weight", None) is not None
        ]
        if len(norms) < 2 or training.resume_at:
            return None
        how = {"mild": [one_of(rng, norms)], "medium": some_of(rng, norms, 2, max(2, len(norms) // 2)), "severe": norms}
        shift = -1.0 if severity == "severe" and rng.random() < 0.4 else 1.0
        return cls(
            step=onset(rng, training),
            severity=severity,
            expected=Expected(_MODES, None, None, False),
            drawn={"module": how[severity][0], "num_modules": len(how[severity]), "shift": shift},
            modules=how[severity],
            shift=shift,
        )

    def loaded(self, t: Training, state: dict[str, Any]) -> dict[str, Any]:
        gains = {f"{name}.weight" for name in self.modules}
        return state | {"model": {k: v + self.shift if k in gains else v for k, v in state["model"].items()}}
