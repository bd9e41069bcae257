"""Arithmetic between the GEMMs that is done in too small a format, or on the wrong head: norms that overflow, positions that are
rounded, queries that read another group's keys. BF16 would do the same.

Severity is the share of the rows, how many positions become one, or in how many layers.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from proving.families import parts
from proving.faults._base import Lasting, log_uniform, one_of, onset, role, some_of, until
from proving.training import Expected, Training
from torch import Tensor

_LOSS = ("scalar-shift", "bad-batch")


class NormOverflowsInHalf(Lasting):
    """A norm sums its squares in FP16: rows above a limit sum to Inf, 1/√Inf is 0, and they leave as zeros, or as the bias alone
    (LeetCUDA #335, nntrainer #3935, pytorch #133085). Nothing is NaN. Severity is the share of the rows."""

    name = "norm-overflows-in-half"
    shares: ClassVar[dict[str, tuple[float, float]]] = {"mild": (0.02, 0.1), "medium": (0.1, 0.4), "severe": (0.4, 0.9)}

    def __init__(self, *, modules: list[str], share: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.modules, self.share = modules, share
        self.limits: dict[str, float] = {}

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> NormOverflowsInHalf | None:
        names = role(training, "norm")
        if not names:
            return None
        modules = [one_of(rng, names)] if rng.random() < 0.6 else some_of(rng, names, 2, len(names))
        step, share = onset(rng, training), log_uniform(rng, *cls.shares[severity])
        return cls(
            step=step,
            until=until(rng, step, 3, 30, stays=0.7),
            severity=severity,
            expected=Expected((*_LOSS, "dead-layer"), None, None, False),
            drawn={"module": modules[0], "num_modules": len(modules), "share": round(share, 3)},
            modules=modules,
            share=share,
        )

    def begin(self, t: Training) -> None:
        for name in self.modules:
            module = t.model.get_submodule(name)
            bias = getattr(module, "bias", None)

            def overflow(m: Any, args: tuple[Any, ...], y: Tensor, name: str = name, bias: Tensor | None = bias) -> Any:
                sums = args[0].detach().float().square().sum(-1, keepdim=True)
                if name not in self.limits:
                    self.limits[name] = float(torch.quantile(sums.flatten(), 1 - self.share))
                left = torch.zeros((), dtype=y.dtype) if bias is None else bias.to(y.dtype)
                return torch.where(sums > self.limits[name], left, y)

            self.later(module.register_forward_hook(overflow).remove)


class PositionsRounded(Lasting):
    """Rotary positions are counted in BF16, which cannot tell neighbours apart above 256 (gpt-neox #1016, Transformer Engine #1245,
    transformers #29285): so many tokens in a row are turned alike. Severity is how many."""

    name = "positions-rounded"
    lengths: ClassVar[dict[str, tuple[int, int]]] = {"mild": (2, 2), "medium": (4, 8), "severe": (16, 64)}

    def __init__(self, *, alike: int, first: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.alike, self.first = alike, first

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> PositionsRounded | None:
        rotary = training.notes.get("rotary") or any(isinstance(m, parts.Attention) for m in training.model.modules())
        if not rotary and not _rotary_modules(training):
            return None
        low, high = (int(np.log2(n)) for n in cls.lengths[severity])
        alike, step = 2 ** int(rng.integers(low, high + 1)), onset(rng, training)
        return cls(
            step=step,
            until=until(rng, step, 5, 40, stays=0.8),
            severity=severity,
            expected=Expected(_LOSS, None, None, False),
            drawn={"alike": alike},
            alike=alike,
            first=int(rng.integers(0, alike)),
        )

    def rounded(self, positions: Tensor) -> Tensor:
        """Where BF16 takes them, seen from where the row begins."""
        down = torch.div(positions + self.first, self.alike, rounding_mode="floor") * self.alike
        return (down - self.first).clamp_min(0)

    def begin(self, t: Training) -> None:
        sound = parts.rotate

        def turned(x: Tensor) -> Tensor:
            where = self.rounded(torch.arange(x.shape[-2]))
            half = x.shape[-1] // 2
            angle = torch.outer(where, 10000.0 ** -(torch.arange(half) / half))
            cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
            a, b = x[..., :half], x[..., half:]
            return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

        parts.rotate = turned
        self.later(lambda: setattr(parts, "rotate", sound))

        def round_ids(m: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            if "position_ids" in kwargs:
                return args, kwargs | {"position_ids": self.rounded(kwargs["position_ids"])}
            return (args[0], self.rounded(args[1]), *args[2:]), kwargs

        for name in _rotary_modules(t):
            module = t.model.get_submodule(name)
            self.later(module.register_forward_pre_hook(round_ids, with_kwargs=True).remove)


def _rotary_modules(t: Training) -> list[str]:
    """Of transformers' models: what gives cos and sin for the ids of positions."""
    return [name for name, m in t.model.named_modules() if type(m).__name__.endswith("RotaryEmbedding")]


class KvHeadsTiled(Lasting):
    """Keys and values of grouped queries are repeated as a whole and not one by one, so that queries read another group's (onnx #7274,
    candle-vllm #52, VeOmni #162): 0 1 0 1 in place of 0 0 1 1. Mild in one layer, medium in all: a small model does
    not ask much of its groups."""

    name = "kv-heads-tiled"

    def __init__(self, *, layers: list[int], of: int, kv_heads: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.layers, self.of, self.kv_heads = layers, of, kv_heads
        self.num_calls = 0

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> KvHeadsTiled | None:
        own = [m for m in training.model.modules() if isinstance(m, parts.Attention)]
        kv_heads = int(training.notes.get("kv_heads", own[0].num_kv_heads if own else 1))
        num = len(role(training, "attention"))
        if kv_heads < 2 or (own and own[0].num_heads == kv_heads) or severity == "severe" or not num:
            return None
        layers, step = [int(rng.integers(num))] if severity == "mild" else list(range(num)), onset(rng, training)
        return cls(
            step=step,
            until=until(rng, step, 5, 40, stays=0.8),
            severity=severity,
            expected=Expected(_LOSS, None, None, False),
            drawn={"first_layer": layers[0], "num_layers": len(layers), "kv_heads": kv_heads},
            layers=layers,
            of=num,
            kv_heads=kv_heads,
        )

    def begin(self, t: Training) -> None:
        attend = F.scaled_dot_product_attention

        def tiled(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            self.num_calls += 1
            if (self.num_calls - 1) % self.of not in self.layers:
                return attend(q, k, v, *args, **kwargs)
            order = torch.arange(q.shape[1]) % self.kv_heads
            if k.shape[1] == q.shape[1]:  # repeated one by one already
                order = order * (q.shape[1] // self.kv_heads)
            kwargs.pop("enable_gqa", None)
            return attend(q, k[:, order], v[:, order], *args, **kwargs)

        F.scaled_dot_product_attention = tiled  # type: ignore[assignment]

        def put_back() -> None:
            F.scaled_dot_product_attention = attend

        self.later(put_back)
