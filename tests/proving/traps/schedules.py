"""Healthy events of the optimizer: rates that change on purpose, another optimizer, weight decay, more micro-batches."""

from __future__ import annotations

import numpy as np
import torch
from proving.training import Training, Trap
from proving.traps._base import Simple, moment


class RewarmedRate(Trap):
    """The learning rate falls to a tenth or less and warms up again, as after a restart or a change of data."""

    name = "lr-rewarmup"

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training) -> Trap | None:
        if training.schedule is None:
            return None
        share, length = float(rng.uniform(0.0, 0.1)), int(rng.integers(10, 40))
        made = cls(step=moment(rng, training), drawn={"share": share, "length": length})
        made.share, made.length = share, length
        return made

    def before_attach(self, t: Training) -> None:
        usual = t.schedule
        assert usual is not None
        t.schedule = lambda step: (
            usual(step)
            * (1.0 if step < self.step else min(1.0, self.share + (1 - self.share) * (step - self.step) / self.length))
        )


class LargerRate(Trap):
    """A person raises the learning rate by half or to the double; the training bears it."""

    name = "lr-raised"

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training) -> Trap | None:
        factor = float(rng.uniform(1.5, 2.0))
        made = cls(step=moment(rng, training), drawn={"factor": factor})
        made.factor = factor
        return made

    def before_step(self, t: Training, step: int) -> None:
        if (step >= self.step and t.schedule is not None) or step == self.step:
            for options in t.optimizer.param_groups:
                options["lr"] *= self.factor


class RateDropped(Trap):
    """A step schedule: the learning rate falls to a tenth and stays there."""

    name = "lr-dropped"

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training) -> Trap | None:
        return cls(step=moment(rng, training)) if training.schedule is not None else None

    def before_step(self, t: Training, step: int) -> None:
        if step >= self.step:
            for options in t.optimizer.param_groups:
                options["lr"] *= 0.1


class OptimizerChanged(Simple):
    """Another optimizer goes on with the same weights, on purpose and at a fitting rate."""

    name = "optimizer-changed"

    def at(self, t: Training) -> None:
        groups = [{**options} for options in t.optimizer.param_groups]
        rate = groups[0]["lr"]
        if isinstance(t.optimizer, torch.optim.SGD):
            t.optimizer = torch.optim.AdamW([{"params": g["params"]} for g in groups], lr=0.02 * rate)
            return
        t.optimizer = torch.optim.SGD([{"params": g["params"]} for g in groups], lr=20 * rate, momentum=0.9)
        if t.schedule is not None:
            usual, from_ = t.schedule, self.step
            t.schedule = lambda step: usual(step) * (20 if step >= from_ else 1)


class DecaySwitched(Simple):
    """Weight decay is switched off, or on at 0.1."""

    name = "weight-decay-switched"

    def at(self, t: Training) -> None:
        for options in t.optimizer.param_groups:
            options["weight_decay"] = 0.0 if options["weight_decay"] else 0.1


class AccumulationChanged(Simple):
    """Twice as many micro-batches a step."""

    name = "accumulation-changed"

    def at(self, t: Training) -> None:
        t.accumulate *= 2
