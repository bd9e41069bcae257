"""Attention that goes wrong: logits that grow, masks that hide everything or too little. BF16 would do the same."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from proving.faults._base import (
    Lasting,
    change_input,
    change_output,
    log_uniform,
    one_of,
    onset,
    role,
    seed,
    trained,
    until,
)
from proving.training import Expected, Training
from torch import Tensor

_GROWTHS = {"mild": (16.0, 60.0), "medium": (60.0, 400.0), "severe": (400.0, 4000.0)}


def _pairs(t: Training) -> list[tuple[str, ...]]:
    """(q, k) or (fused qkv,) of each attention whose logits are not bounded by norms of q and k."""
    pairs: list[tuple[str, ...]] = [(name,) for name in role(t, "attention.qkv")]
    names = set(role(t, "linears"))
    q, k = ([n for n in role(t, f"attention.{r}") if n in names] for r in ("q", "k"))
    if len(q) == len(k):
        pairs += list(zip(q, k, strict=True))
    return [pair for pair in pairs if not _has_norms(t, pair[0])]


def _has_norms(t: Training, name: str) -> bool:
    holder = t.model.get_submodule(name.removesuffix(".base_layer").rpartition(".")[0])
    return any(child in ("q_norm", "k_norm", "q_ln", "k_ln") for child, _ in holder.named_children())


def _places(t: Training, names: tuple[str, ...]) -> tuple[str, ...]:
    """The Linears, and the attention modules that hold them."""
    holders = [a for a in role(t, "attention") if any(n.startswith(f"{a}.") for n in names)]
    return (*names, *holders)


class LogitsGrow(Lasting):
    """The weights of q and k grow by a factor a step, and the logits by its square, until every row attends to one token
    (no QK norm, no clip; Kimi K2: warn at 100, seen above 1000). Severity is the growth of the logits."""

    name = "attention-logits-grow"

    def __init__(self, *, modules: tuple[str, ...], total: float, steps: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.modules, self.rate, self.steps, self.done = modules, total ** (0.5 / steps), steps, 0

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> LogitsGrow | None:
        pairs = [p for p in _pairs(training) if len(trained(training, p)) == len(p)]
        if not pairs:
            return None
        modules, total, steps = one_of(rng, pairs), log_uniform(rng, *_GROWTHS[severity]), int(rng.integers(12, 40))
        return cls(
            step=onset(rng, training),
            severity=severity,
            expected=Expected(("attention-logit-growth",), _places(training, modules), None, False),
            drawn={"module": modules[0], "growth": round(total, 1), "steps": steps},
            modules=modules,
            total=total,
            steps=steps,
        )

    @torch.no_grad()
    def after_update(self, t: Training, step: int) -> None:
        if not self.active(step) or self.done >= self.steps:
            return
        self.done += 1
        for name in self.modules:
            linear = t.model.get_submodule(name)
            rows = linear.weight.shape[0] * 2 // 3 if len(self.modules) == 1 else linear.weight.shape[0]
            linear.weight[:rows] *= self.rate
            if linear.bias is not None:
                linear.bias[:rows] *= self.rate


class SoftmaxTemperature(Lasting):
    """The logits lack their 1/√d, or have another scale twice: the softmax is too sharp. Severity is the factor."""

    name = "softmax-temperature"
    factors: ClassVar[dict[str, tuple[float, float]]] = {
        "mild": (4.0, 12.0),
        "medium": (12.0, 60.0),
        "severe": (60.0, 600.0),
    }

    def __init__(self, *, modules: list[str], factor: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.modules, self.factor = modules, factor

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> SoftmaxTemperature | None:
        pairs = _pairs(training)
        if not pairs:
            return None
        one = one_of(rng, pairs)
        modules = [one[0]] if rng.random() < 0.5 else [pair[0] for pair in pairs]
        step, factor = onset(rng, training), log_uniform(rng, *cls.factors[severity])
        return cls(
            step=step,
            until=until(rng, step, 2, 20, stays=0.5),
            severity=severity,
            expected=Expected(("attention-logit-growth",), _places(training, tuple(modules)), None, False),
            drawn={"module": modules[0], "num_modules": len(modules), "factor": round(factor, 2)},
            modules=modules,
            factor=factor,
        )

    def begin(self, t: Training) -> None:
        fused = set(role(t, "attention.qkv"))
        for name in self.modules:

            def sharpen(y: Tensor, fused: bool = name in fused) -> Tensor:
                gain = torch.ones(y.shape[-1], dtype=y.dtype)
                gain[: y.shape[-1] // 3 if fused else y.shape[-1]] = self.factor
                return y * gain

            self.later(change_output(t.model.get_submodule(name), sharpen))


class RowFullyMasked(Lasting):
    """A query has no key that it may see: its logits are all −Inf and the softmax is 0/0. Seen first where the output
    projection reads it."""

    name = "row-fully-masked"

    def __init__(self, *, module: str, seed: int, num_rows: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.module, self.num_rows = module, num_rows
        self.rng = np.random.default_rng(seed)

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> RowFullyMasked | None:
        names = role(training, "attention.out")
        if severity != "severe" or not names:
            return None
        module, step, num_rows = one_of(rng, names), onset(rng, training), round(log_uniform(rng, 1, 16))
        return cls(
            step=step,
            until=until(rng, step, 1, 4),
            severity=severity,
            expected=Expected(("nan-in-activation", "nan-in-loss"), _places(training, (module,)), None, False),
            drawn={"module": module, "num_rows": num_rows},
            module=module,
            seed=seed(rng),
            num_rows=num_rows,
        )

    def begin(self, t: Training) -> None:
        def mask(x: Tensor) -> Tensor:
            rows = int(np.prod(x.shape[:-1]))
            hit = torch.zeros(rows, dtype=x.dtype)
            hit[torch.from_numpy(self.rng.choice(rows, size=min(self.num_rows, rows), replace=False))] = -math.inf
            logits = hit[:, None].expand(rows, 4)
            weights = logits.softmax(-1).sum(-1)  # 1, or NaN where everything is masked
            return x * weights.view(*x.shape[:-1], 1)

        self.later(change_input(t.model.get_submodule(self.module), mask))


class CausalMaskLeaks(Lasting):
    """The causal mask is off by one for a share of the queries: they see the token that they are to predict. The loss
    falls, and everybody is glad."""

    name = "causal-mask-leaks"
    shares: ClassVar[dict[str, tuple[float, float]]] = {"mild": (0.15, 0.3), "medium": (0.3, 0.7), "severe": (0.7, 1.0)}

    def __init__(self, *, share: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.share = share

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> CausalMaskLeaks | None:
        if not training.notes.get("causal") or not training.notes.get("tokens") or not role(training, "attention"):
            return None
        share = float(rng.uniform(*cls.shares[severity]))
        return cls(
            step=onset(rng, training),
            severity=severity,
            expected=Expected(("scalar-shift", "bad-batch"), None, None, False),
            drawn={"share": round(share, 3)},
            share=share,
        )

    def begin(self, t: Training) -> None:
        attend = F.scaled_dot_product_attention

        def leaky(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            mask = kwargs.get("attn_mask", args[0] if args else None)
            causal = kwargs.get("is_causal", args[2] if len(args) > 2 else False)
            tokens = q.shape[-2]
            if tokens != k.shape[-2] or (mask is None and not causal):
                return attend(q, k, v, *args, **kwargs)
            seen = torch.ones(tokens, tokens, dtype=torch.bool).tril() if mask is None else mask
            seen = seen if seen.dtype == torch.bool else seen == 0
            above = torch.ones(tokens, tokens, dtype=torch.bool).triu(1).tril(1)
            above[int(self.share * tokens) :] = False
            options = {n: kwargs[n] for n in ("dropout_p", "scale", "enable_gqa") if n in kwargs}
            return attend(q, k, v, attn_mask=seen | above, **options)

        F.scaled_dot_product_attention = leaky  # type: ignore[assignment]

        def put_back() -> None:
            F.scaled_dot_product_attention = attend  # type: ignore[assignment]

        self.later(put_back)
