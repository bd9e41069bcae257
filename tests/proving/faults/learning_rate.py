"""Steps of the wrong size because of what the optimizer was told or can hold: learning rate, decay, clipping, moments.

Severity is the size of the update against that of the healthy run.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from proving.faults._base import Lasting, has_adam, log_uniform, onset, role, until
from proving.training import Expected, Training
from torch import Tensor

_TIMES: dict[str, tuple[float, float]] = {"mild": (4.0, 8.0), "medium": (8.0, 25.0), "severe": (25.0, 200.0)}
_DIVERGES = Expected(("optimizer-divergence",), None, None, False)


class _Rates(Lasting):
    """Multiplies the learning rates, after the schedule has set them."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._before: list[float] | None = None

    def before_step(self, t: Training, step: int) -> None:
        super().before_step(t, step)
        if t.schedule is None and self._before is None:
            self._before = [float(group["lr"]) for group in t.optimizer.param_groups]
        if self.active(step):
            for i, group in enumerate(t.optimizer.param_groups):
                base = group["lr"] if t.schedule is not None or self._before is None else self._before[i]
                group["lr"] = base * self.factor(t, step)
        elif self.until == step and t.schedule is None and self._before is not None:
            for group, lr in zip(t.optimizer.param_groups, self._before, strict=True):
                group["lr"] = lr

    def factor(self, t: Training, step: int) -> float:
        """Of this step."""
        raise NotImplementedError


class LearningRateTimes(_Rates):
    """The learning rate is k times what it was: a schedule with another unit, a scaled batch that scaled it twice."""

    name = "learning-rate-times"

    def __init__(self, *, times: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.times = times

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> LearningRateTimes | None:
        step, times = onset(rng, training), log_uniform(rng, *_TIMES[severity])
        ends = until(rng, step, 3, 30, stays=0.6)
        return cls(
            step=step, until=ends, severity=severity, expected=_DIVERGES, drawn={"times": round(times, 2)}, times=times
        )

    def factor(self, t: Training, step: int) -> float:
        return self.times


class LearningRateClimbs(_Rates):
    """The learning rate climbs by some percent each step instead of falling, until it has reached k times."""

    name = "learning-rate-climbs"

    def __init__(self, *, times: float, rate: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.times, self.rate = times, rate

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> LearningRateClimbs | None:
        times, rate = log_uniform(rng, *_TIMES[severity]), float(rng.uniform(1.08, 1.35))
        return cls(
            step=onset(rng, training),
            severity=severity,
            expected=_DIVERGES,
            drawn={"times": round(times, 2), "a_step": round(rate, 3)},
            times=times,
            rate=rate,
        )

    def factor(self, t: Training, step: int) -> float:
        return float(min(self.times, self.rate ** (step - self.step + 1)))


class LearningRateOfResume(_Rates):
    """After a resume the schedule does not know where it was: it begins anew, or stands at its peak, or at another unit."""

    name = "learning-rate-of-resume"
    resumes = True

    def __init__(self, *, times: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.times = times

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> LearningRateOfResume | None:
        times = log_uniform(rng, *_TIMES[severity])
        return cls(
            step=onset(rng, training),
            severity=severity,
            expected=_DIVERGES,
            drawn={"times_peak": round(times, 2)},
            times=times,
        )

    def factor(self, t: Training, step: int) -> float:
        if t.schedule is None:
            return self.times
        peak = max(t.schedule(s) for s in range(t.steps))
        now = t.schedule(step)
        return self.times * peak / now if now > 0 else 1.0


class NormsDecay(Lasting):
    """Weight decay reaches the norms and biases, a hundred times too strong: all gains of one dimension shrink at every
    step. Severity is what one step takes."""

    name = "norms-decay"
    shrinks: ClassVar[dict[str, tuple[float, float]]] = {
        "mild": (0.005, 0.02),
        "medium": (0.02, 0.08),
        "severe": (0.08, 0.3),
    }

    def __init__(self, *, shrink: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.shrink = shrink

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> NormsDecay | None:
        gains = [p for _, p in training.model.named_parameters() if p.ndim == 1 and p.requires_grad]
        if not gains or not role(training, "norm"):
            return None
        shrink = log_uniform(rng, *cls.shrinks[severity])
        return cls(
            step=onset(rng, training),
            severity=severity,
            expected=Expected(
                ("dead-layer", "dying-tile", "optimizer-divergence", "gradient-underflow"), None, None, False
            ),
            drawn={"a_step": round(shrink, 4)},
            shrink=shrink,
        )

    @torch.no_grad()
    def after_update(self, t: Training, step: int) -> None:
        if self.active(step):
            for p in t.model.parameters():
                if p.ndim == 1 and p.requires_grad:
                    p.mul_(1 - self.shrink)


class ClippingLost(Lasting):
    """Gradients are no longer clipped, and a few steps later come the large ones that clipping is for. Severity is their
    size against the norm that was allowed."""

    name = "clipping-lost"

    def __init__(self, *, times: float, spikes: list[int], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.times, self.spikes = times, spikes

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> ClippingLost | None:
        if training.clip_norm is None:
            return None
        times, step = (
            log_uniform(rng, *{"mild": (5, 20), "medium": (20, 200), "severe": (200, 5000)}[severity]),
            onset(rng, training),
        )
        spikes = [step + int(s) for s in np.sort(rng.integers(0, 8, size=int(rng.integers(1, 4))))]
        return cls(
            step=spikes[0],
            severity=severity,
            expected=Expected(("optimizer-divergence", "bad-batch", "scalar-shift"), None, None, False),
            drawn={"times": round(times, 1), "num_spikes": len(set(spikes))},
            times=times,
            spikes=spikes,
        )

    def begin(self, t: Training) -> None:
        allowed, t.clip_norm = t.clip_norm, None

        def put_back() -> None:
            t.clip_norm = allowed

        self.later(put_back)

    def on_loss(self, t: Training, step: int, loss: Tensor) -> Tensor:
        """A steep place of the loss: the value is what it was, the gradient is not."""
        return loss + (self.times - 1) * (loss - loss.detach()) if step in self.spikes else loss


class EpsilonUnderflows(Lasting):
    """Second moments in a format that cannot hold small numbers: they are 0 where the gradient is not, and Adam divides
    by what is left (torchao #4692; eps 1e-8 is 0 in FP16). Severity is the share of the elements."""

    name = "second-moment-underflows"
    shares: ClassVar[dict[str, tuple[float, float]]] = {
        "mild": (0.02, 0.1),
        "medium": (0.1, 0.4),
        "severe": (0.4, 0.95),
    }

    def __init__(self, *, share: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.share = share

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> EpsilonUnderflows | None:
        if not has_adam(training):
            return None
        step, share = onset(rng, training), log_uniform(rng, *cls.shares[severity])
        return cls(
            step=step,
            until=until(rng, step, 5, 30, stays=0.6),
            severity=severity,
            expected=_DIVERGES,
            drawn={"share": round(share, 3)},
            share=share,
        )

    @torch.no_grad()
    def before_update(self, t: Training, step: int) -> None:
        if not self.active(step):
            return
        for group in t.optimizer.param_groups:
            for p in group["params"]:
                second = t.optimizer.state.get(p, {}).get("exp_avg_sq")
                if second is not None and second.numel() > 1:
                    limit = second.flatten().kthvalue(max(1, round(self.share * second.numel()))).values
                    second[second <= limit] = 0  # this step divides by what (1 − β₂)·g² adds
