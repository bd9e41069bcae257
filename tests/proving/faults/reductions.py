"""Gradients on their way from the backward pass to the optimizer: micro-batches that are not added, small numbers that do not survive the
transport, a norm that counts copies, a tied table that hears of one of its two uses.

Severity is the share of the gradient that is lost, or the factor.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from proving.faults._base import Lasting, linears, log_uniform, one_of, onset, role, trained, until
from proving.training import Expected, Training
from torch import Tensor, nn


class MicroBatchLost(Lasting):
    """Of the micro-batches of a step only the first reaches the buffer of a fused wgrad, or only the last is left in it (Primus #1046:
    1 gradient of 32; Fast-LLM #550; Megatron-LM #7186). Biases and norms get all. Severity is the share of the modules."""

    name = "micro-batch-lost"
    shares: ClassVar[dict[str, tuple[float, float]]] = {"mild": (0.05, 0.2), "medium": (0.2, 0.7), "severe": (0.7, 1.0)}

    def __init__(self, *, modules: list[str], left: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.modules, self.left = modules, left
        self.kept: dict[str, Tensor] = {}
        self.num_seen = 0

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> MicroBatchLost | None:
        names = trained(training, linears(training) or role(training, "linears"))
        if training.accumulate < 2 or len(names) < 4:
            return None
        num = max(1, round(rng.uniform(*cls.shares[severity]) * len(names)))
        first, step, left = (
            int(rng.integers(len(names) - num + 1)),
            onset(rng, training),
            one_of(rng, ("first", "last")),
        )
        modules = names[first : first + num]
        return cls(
            step=step,
            until=until(rng, step, 8, 40, stays=0.8),
            severity=severity,
            expected=Expected(("scalar-shift", "kernel-output-fault", "optimizer-divergence"), None, None, None),
            drawn={"left": left, "num_modules": num, "of": len(names), "module": modules[0]},
            modules=modules,
            left=left,
        )

    def before_step(self, t: Training, step: int) -> None:
        super().before_step(t, step)
        self.num_seen, self.kept = 0, {}

    @torch.no_grad()
    def on_batch(self, t: Training, step: int, batch: Any) -> Any:
        """Before the forward pass of a micro-batch: what the buffers hold of those before it."""
        self.num_seen += 1
        wanted = 2 if self.left == "first" else t.accumulate
        if self.active(step) and self.num_seen == wanted:
            for name in self.modules:
                gradient = t.model.get_submodule(name).weight.grad
                if gradient is not None:
                    self.kept[name] = gradient.clone()
        return batch

    @torch.no_grad()
    def after_backward(self, t: Training, step: int) -> None:
        for name, kept in self.kept.items():
            gradient = t.model.get_submodule(name).weight.grad
            if gradient is not None:
                gradient.copy_(kept if self.left == "first" else gradient - kept)


class GradientsFlushedInTransit(Lasting):
    """Gradients are divided by the number of workers before they are summed in FP16, and the small ones are 0 when they arrive
    (horovod #1699, fairscale #565: what is divided first underflows, what is divided last overflows). Severity is the share
    of the elements that are lost."""

    name = "gradients-flushed-in-transit"
    shares: ClassVar[dict[str, tuple[float, float]]] = {
        "mild": (0.1, 0.3),
        "medium": (0.3, 0.8),
        "severe": (0.8, 0.99),
    }

    def __init__(self, *, share: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.share = share
        self.limit = 0.0

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> GradientsFlushedInTransit | None:
        step, share = onset(rng, training), float(rng.uniform(*cls.shares[severity]))
        return cls(
            step=step,
            until=until(rng, step, 8, 40, stays=0.8),
            severity=severity,
            expected=Expected(("gradient-underflow", "scalar-shift"), None, None, False),
            drawn={"share": round(share, 3)},
            share=share,
        )

    @torch.no_grad()
    def after_backward(self, t: Training, step: int) -> None:
        if not self.active(step):
            return
        gradients = [p.grad for p in t.model.parameters() if p.grad is not None]
        if not self.limit:
            sizes = torch.cat([g.detach().float().abs().flatten() for g in gradients])
            sizes = sizes[sizes > 0]
            self.limit = float(sizes.kthvalue(max(1, round(self.share * sizes.numel()))).values)
            self.note(limit=self.limit)
        for g in gradients:
            g.copy_((g / self.limit).round() * self.limit)  # FP16 below its normal numbers: equal steps


class NormCountsReplicas(Lasting):
    """The norm by which gradients are clipped counts what lies on every rank as often as there are ranks (ROCm's Transformer Engine
    #715: ×1.5 of eight, NeMo-RL #3788): it is plotted too large, and more is clipped. Severity is the factor."""

    name = "norm-counts-replicas"
    times: ClassVar[dict[str, tuple[float, float]]] = {"mild": (1.15, 1.6), "medium": (1.6, 4.0), "severe": (4.0, 30.0)}

    def __init__(self, *, factor: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.factor = factor

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> NormCountsReplicas | None:
        if training.clip_norm is None or not training.logs:
            return None
        step, factor = onset(rng, training), log_uniform(rng, *cls.times[severity])
        return cls(
            step=step,
            until=until(rng, step, 8, 40, stays=0.8),
            severity=severity,
            expected=Expected(("scalar-shift",), None, None, False),
            drawn={"times": round(factor, 2)},
            factor=factor,
        )

    def begin(self, t: Training) -> None:
        clip = nn.utils.clip_grad_norm_

        def counted(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Tensor:
            return clip(parameters, max_norm / self.factor, *args, **kwargs) * self.factor

        nn.utils.clip_grad_norm_ = counted

        def put_back() -> None:
            nn.utils.clip_grad_norm_ = clip

        self.later(put_back)


class TiedGradientPart(Lasting):
    """The gradient of a tied table lacks one of its two parts, or some of it: that of the embedding or that of the head, which are
    reduced over other ranks (Megatron-LM #844, #656; entrenar #314). Severity is how much of that part is lost."""

    name = "tied-gradient-part"
    shares: ClassVar[dict[str, tuple[float, float]]] = {"mild": (0.2, 0.5), "medium": (0.5, 0.9), "severe": (0.9, 1.0)}

    def __init__(self, *, table: str, head: str, of: str, share: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.table, self.head, self.of, self.share = table, head, of, share

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> TiedGradientPart | None:
        tables, heads = role(training, "embedding"), role(training, "head")
        if not tables or not heads:
            return None
        table, head = (training.model.get_submodule(names[0]) for names in (tables, heads))
        if not isinstance(table, nn.Embedding) or table.weight is not head.weight:
            return None
        step, share, of = (
            onset(rng, training),
            float(rng.uniform(*cls.shares[severity])),
            one_of(rng, ("table", "head")),
        )
        return cls(
            step=step,
            until=until(rng, step, 10, 40, stays=0.8),
            severity=severity,
            expected=Expected(("silent-data-corruption", "scalar-shift"), (tables[0], heads[0]), None, False),
            drawn={"module": tables[0], "of": of, "share": round(share, 3)},
            table=tables[0],
            head=heads[0],
            of=of,
            share=share,
        )

    def begin(self, t: Training) -> None:
        table, head = t.model.get_submodule(self.table), t.model.get_submodule(self.head)

        def lost(m: nn.Module, args: tuple[Any, ...], y: Tensor) -> Tensor:
            return y - self.share * (y - y.detach())

        def lost_of_head(m: Any, args: tuple[Any, ...], y: Tensor) -> Tensor:
            bias = None if m.bias is None else m.bias.detach()
            beside = F.linear(args[0].to(y.dtype), m.weight.detach().to(y.dtype), bias)  # the way to the input stays
            return lost(m, args, y) + self.share * (beside - beside.detach())

        module, hook = (table, lost) if self.of == "table" else (head, lost_of_head)
        self.later(module.register_forward_hook(hook).remove)
