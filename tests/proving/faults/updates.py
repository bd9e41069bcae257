"""Updates that are not the optimizer's: one group at another rate, decay without a rate, weights that cannot hold what is added to
them, rows of a table that another row's update reaches.

Severity is the factor, what one step takes, or the share of the updates.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from proving.faults._base import Lasting, linears, log_uniform, one_of, onset, role, trained, until
from proving.training import Expected, Training
from torch import Tensor, nn

_TIMES: dict[str, tuple[float, float]] = {"mild": (4.0, 8.0), "medium": (8.0, 25.0), "severe": (25.0, 200.0)}
_SHARES: dict[str, tuple[float, float]] = {"mild": (0.05, 0.2), "medium": (0.2, 0.6), "severe": (0.6, 0.98)}


def rounded(x: Tensor, num_bits: int) -> Tensor:
    """To so many bits of the mantissa, the leading one among them."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.round(mantissa * 2.0**num_bits) / 2.0**num_bits, exponent)


class RateOfOneGroup(Lasting):
    """One group of parameters gets another rate than was meant for it, all others their own (DeepSpeed #7713: a schedule writes one
    rate into Muon's groups and Adam's; sparsify #62: one group outside of the schedule). Severity is the factor."""

    name = "rate-of-one-group"

    def __init__(self, *, modules: list[str], times: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.modules, self.times = modules, times

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> RateOfOneGroup | None:
        names = trained(training, linears(training) or role(training, "linears"))
        groups = [
            [n for n in names if n.rpartition(".")[2] == last]
            for last in dict.fromkeys(n.rpartition(".")[2] for n in names)
        ]
        groups += [found for found in (trained(training, role(training, r)) for r in ("embedding", "head")) if found]
        if len(groups) < 2:
            return None
        modules, times, step = one_of(rng, groups), log_uniform(rng, *_TIMES[severity]), onset(rng, training)
        return cls(
            step=step,
            until=until(rng, step, 4, 30, stays=0.6),
            severity=severity,
            expected=Expected(("optimizer-divergence", "outlier-growth"), tuple(modules), None, False),
            drawn={"times": round(times, 1), "num_modules": len(modules), "module": modules[0]},
            modules=modules,
            times=times,
        )

    def begin(self, t: Training) -> None:
        concerned = {id(p) for name in self.modules for p in t.model.get_submodule(name).parameters()}
        groups, before = t.optimizer.param_groups, list(t.optimizer.param_groups)
        params = [list(group["params"]) for group in groups]
        for group in before:
            taken = [p for p in group["params"] if id(p) in concerned]
            if taken:
                group["params"] = [p for p in group["params"] if id(p) not in concerned]
                scale = self.times * group.get("lr_scale", 1.0)
                groups.append({**group, "params": taken, "lr_scale": scale, "lr": self.times * group["lr"]})

        def put_back() -> None:
            for group, of in zip(before, params, strict=True):
                group["params"] = of
            del groups[len(before) :]

        self.later(put_back)


class DecayWithoutRate(Lasting):
    """Weight decay is no longer multiplied by the learning rate (tensorflow/addons #2282): 0.01 is one percent of every matrix in
    each step. Severity is what one step takes."""

    name = "decay-without-rate"
    shrinks: ClassVar[dict[str, tuple[float, float]]] = {
        "mild": (0.005, 0.02),
        "medium": (0.02, 0.08),
        "severe": (0.08, 0.3),
    }

    def __init__(self, *, shrink: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.shrink = shrink

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> DecayWithoutRate | None:
        shrink, step = log_uniform(rng, *cls.shrinks[severity]), onset(rng, training)
        return cls(
            step=step,
            severity=severity,
            expected=Expected(("optimizer-divergence", "scalar-shift"), None, None, False),
            drawn={"a_step": round(shrink, 4)},
            shrink=shrink,
        )

    @torch.no_grad()
    def after_update(self, t: Training, step: int) -> None:
        if self.active(step):
            for p in t.model.parameters():
                if p.ndim >= 2 and p.requires_grad:
                    p.mul_(1 - self.shrink)


class MasterWeightsLost(Lasting):
    """The optimizer adds to weights of few bits, with no master copy behind them (torchao #1124, speculators #765, Automodel #3444):
    what is smaller than half a step of the format is lost. How few bits follows from the share of the updates that was drawn."""

    name = "master-weights-lost"

    def __init__(self, *, share: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.share = share
        self.num_bits = 0
        self.before: list[Tensor] = []

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> MasterWeightsLost | None:
        share, step = log_uniform(rng, *_SHARES[severity]), onset(rng, training)
        return cls(
            step=step,
            severity=severity,
            expected=Expected(("recipe-mismatch", "scalar-shift"), None, None, None),
            drawn={"asked_share": round(share, 3)},
            share=share,
        )

    @torch.no_grad()
    def before_update(self, t: Training, step: int) -> None:
        if step == self.step:
            self.before = [p.clone() for p in self._matrices(t)]

    @torch.no_grad()
    def after_update(self, t: Training, step: int) -> None:
        if not self.active(step):
            return
        weights = self._matrices(t)
        if not self.num_bits:
            lost = {bits: self._lost(weights, bits) for bits in range(2, 17)}
            self.num_bits = min(lost, key=lambda bits: abs(lost[bits] - self.share))
            self.note(num_bits=self.num_bits, share=round(lost[self.num_bits], 3))
            self.before = []
        for p in weights:
            p.copy_(rounded(p, self.num_bits))

    @staticmethod
    def _matrices(t: Training) -> list[Tensor]:
        return [p for p in t.model.parameters() if p.ndim >= 2 and p.requires_grad]

    def _lost(self, weights: list[Tensor], num_bits: int) -> float:
        moved = [w != b for w, b in zip(weights, self.before, strict=True)]
        lost = [rounded(w, num_bits) == rounded(b, num_bits) for w, b in zip(weights, self.before, strict=True)]
        return sum(int((x & m).sum()) for x, m in zip(lost, moved, strict=True)) / max(
            1, sum(int(m.sum()) for m in moved)
        )


class TableRowsMisplaced(Lasting):
    """Updates of some rows of an embedding land in other rows: an index of 32 bits that wraps, or one that is off by a row (FBGEMM
    #1514, pytorch #188467). Severity is the share of the rows."""

    name = "table-rows-misplaced"

    def __init__(self, *, module: str, share: float, by: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.module, self.share, self.by = module, share, by
        self.before: Tensor | None = None

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> TableRowsMisplaced | None:
        tables = [
            n
            for n in trained(training, role(training, "embedding"))
            if isinstance(training.model.get_submodule(n), nn.Embedding)
        ]
        if not tables:
            return None
        share, step, by = log_uniform(rng, *_SHARES[severity]), onset(rng, training), int(2 ** rng.integers(0, 6))
        return cls(
            step=step,
            until=until(rng, step, 10, 40, stays=0.8),
            severity=severity,
            expected=Expected(("silent-data-corruption", "scalar-shift"), (tables[0],), None, False),
            drawn={"module": tables[0], "share": round(share, 3), "by": by},
            module=tables[0],
            share=share,
            by=by,
        )

    @torch.no_grad()
    def before_update(self, t: Training, step: int) -> None:
        if self.active(step):
            self.before = t.model.get_submodule(self.module).weight.detach().clone()

    @torch.no_grad()
    def after_update(self, t: Training, step: int) -> None:
        if self.active(step) and self.before is not None:
            weight = t.model.get_submodule(self.module).weight
            wrong = (torch.arange(len(weight)) * 37 % 101 < 101 * self.share)[:, None]  # spread over the table
            change = weight - self.before
            weight.copy_(
                self.before + torch.where(wrong, 0.0, change) + torch.where(wrong, change, 0.0).roll(self.by, 0)
            )
