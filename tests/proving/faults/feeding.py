"""What is fed to the model is not what its author believes: positions, labels among the inputs, ids that wrap, rows that are copies,
a row of NaN that the loss leaves out.

Severity is the share of the rows, ids or steps.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from proving.families import parts
from proving.faults._base import Lasting, change_output, log_uniform, onset, role, seed, until
from proving.faults.data import DataFault
from proving.training import Expected, Training
from torch import Tensor

_SHARES: dict[str, tuple[float, float]] = {"mild": (0.1, 0.3), "medium": (0.3, 0.7), "severe": (0.7, 1.0)}


class PositionsOffset(Lasting):
    """Some rows count their positions from elsewhere (Megatron-LM #5243: packed rows reuse the positions of the first; LlamaFactory
    #7318: they are not begun anew): rotary keys that are turned further than their queries, or other rows of the table. Severity
    is the share of the rows."""

    name = "positions-offset"

    def __init__(self, *, share: float, by: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.share, self.by = share, by

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> PositionsOffset | None:
        rotary = training.notes.get("rotary") or any(isinstance(m, parts.Attention) for m in training.model.modules())
        if not rotary and not role(training, "positions"):
            return None
        share, by, step = log_uniform(rng, *_SHARES[severity]), int(rng.integers(4, 25)), onset(rng, training)
        return cls(
            step=step,
            until=until(rng, step, 5, 40, stays=0.7),
            severity=severity,
            expected=Expected(("scalar-shift", "bad-batch"), None, None, False),
            drawn={"share": round(share, 3), "by": by},
            share=share,
            by=by,
        )

    def rows(self, num: int) -> int:
        """How many of them are off."""
        return max(1, round(self.share * num))

    def begin(self, t: Training) -> None:
        for name in role(t, "positions"):
            table = t.model.get_submodule(name)
            self.later(
                change_output(
                    table, lambda y: torch.cat((y[: self.rows(len(y))].roll(self.by, 1), y[self.rows(len(y)) :]))
                )
            )
        sound, num_calls = parts.rotate, 0

        def turned(x: Tensor) -> Tensor:
            nonlocal num_calls
            num_calls += 1
            if num_calls % 2:  # queries
                return sound(x)
            n = self.rows(len(x))
            later = sound(torch.cat((x[:n, :, :1].expand(-1, -1, self.by, -1), x[:n]), 2))[:, :, self.by :]
            return torch.cat((later, sound(x[n:])))

        parts.rotate = turned
        self.later(lambda: setattr(parts, "rotate", sound))


class LabelsLeak(DataFault):
    """The input shows what is asked for: the target among the features of its row, a token that should have been hidden, the next
    one in the place of this one. The loss falls, and everybody is glad."""

    name = "labels-leak"
    needs = ()

    @classmethod
    def fits(cls, t: Training, batch: dict[str, Any]) -> bool:
        same = "labels" in batch and "input_ids" in batch and batch["labels"].shape == batch["input_ids"].shape
        return same or {"history", "item"} <= set(batch) or ("pixels" in batch and "labels" in batch)

    def changed(self, t: Training, step: int, batch: dict[str, Any]) -> dict[str, Any]:
        if "item" in batch:
            history, item = batch["history"].clone(), batch["item"]
            n = item.shape[1]
            history[:, -n:] = torch.where(self.hits(len(item))[:, None], item, history[:, -n:])
            return batch | {"history": history}
        labels = batch["labels"]
        if "pixels" in batch:
            pixels = batch["pixels"].clone()
            marks = pixels.flatten(1)
            shown = 2.0 * torch.nn.functional.one_hot(labels, 10) - 1
            marks[:, :10] = torch.where(self.hits(len(labels))[:, None], shown, marks[:, :10])
            return batch | {"pixels": marks.view_as(pixels)}
        return batch | {"input_ids": torch.where(self.hits(*labels.shape) & (labels >= 0), labels, batch["input_ids"])}


class IdsWrapped(DataFault):
    """Ids of another vocabulary are stored in too few bits, and those above wrap around (transformers #2825: 45 % of the ids of a
    vocabulary of 119547 in 16 bits; knnlm #6). Inputs and labels wrap alike. Severity is the share of the ids."""

    name = "ids-wrapped"
    needs = ()
    lasts = (10, 40, 0.8)
    shares: ClassVar[dict[str, tuple[float, float]]] = {
        "mild": (0.05, 0.15),
        "medium": (0.15, 0.45),
        "severe": (0.45, 0.9),
    }

    @classmethod
    def fits(cls, t: Training, batch: dict[str, Any]) -> bool:
        return bool(t.notes.get("tokens") or t.notes.get("table_rows")) and not {"number"} & set(batch)

    def begin(self, t: Training) -> None:
        ids = torch.cat([t.batch(number)[name].flatten() for number in range(4) for name in self.names(t)])
        self.last = 256 if t.notes.get("tokens") else int(t.notes["table_rows"])
        ids = ids[(ids >= 0) & (ids < self.last)]
        self.limit = max(1, int(torch.quantile(ids.float(), 1 - self.share)))
        self.note(limit=self.limit)

    @staticmethod
    def names(t: Training) -> tuple[str, ...]:
        return ("input_ids", "labels") if t.notes.get("tokens") else ("history", "item")

    def changed(self, t: Training, step: int, batch: dict[str, Any]) -> dict[str, Any]:
        for name in self.names(t):
            old = batch[name]
            batch[name] = torch.where((old >= 0) & (old < self.last), old % self.limit, old)
        return batch


class RowsOfOneSeed(DataFault):
    """Workers of the loader draw with one seed, so that a batch holds each of a few rows several times (pytorch #5059, fairseq
    #1383). Severity is how many of the rows are copies."""

    name = "rows-of-one-seed"
    needs = ()
    shares: ClassVar[dict[str, tuple[float, float]]] = {"mild": (0.3, 0.5), "medium": (0.5, 0.8), "severe": (0.8, 0.99)}

    @classmethod
    def fits(cls, t: Training, batch: dict[str, Any]) -> bool:
        return "number" not in batch and len({len(value) for value in batch.values()}) == 1

    def changed(self, t: Training, step: int, batch: dict[str, Any]) -> dict[str, Any]:
        num = len(next(iter(batch.values())))
        distinct = max(1, min(num - 1, round((1 - self.share) * num)))
        return {name: value[torch.arange(num) % distinct] for name, value in batch.items()}


class NanRowLeftOut(Lasting):
    """One row of a batch is NaN and the loss leaves it out (WeatherGenerator #2723, pytorch #64305): the loss is finite, and 0·NaN
    makes every gradient NaN. The trainer skips such steps, as most do. Severity is how many of the steps are lost."""

    name = "nan-row-left-out"
    chances: ClassVar[dict[str, tuple[float, float]]] = {
        "mild": (0.05, 0.15),
        "medium": (0.15, 0.5),
        "severe": (0.5, 1.0),
    }

    def __init__(self, *, module: str, chance: float, seed: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.module, self.chance, self.seed = module, chance, seed
        self.now = False

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> NanRowLeftOut | None:
        batch, born = training.batch(0), role(training, "embedding")
        if (
            not isinstance(batch, dict)
            or "labels" not in batch
            or "noise" in batch
            or not born
            or role(training, "router")
        ):
            return None
        step, chance = onset(rng, training), log_uniform(rng, *cls.chances[severity])
        return cls(
            step=step,
            until=until(rng, step, 10, 40, stays=0.6),
            severity=severity,
            expected=Expected(("nan-in-activation",), (born[0], *role(training, "blocks")[:1]), None, False),
            drawn={"module": born[0], "chance": round(chance, 3)},
            module=born[0],
            chance=chance,
            seed=seed(rng),
        )

    def begin(self, t: Training) -> None:
        def spoil(y: Tensor) -> Tensor:
            if not self.now:
                return y
            self.now = False
            lost = torch.zeros(len(y), *[1] * (y.ndim - 1), dtype=torch.bool)
            lost[self.seed % len(y)] = True
            return y.masked_fill(lost, torch.nan)

        self.later(change_output(t.model.get_submodule(self.module), spoil))

    def on_batch(self, t: Training, step: int, batch: Any) -> Any:
        self.now = self.active(step) and (
            step == self.step or np.random.default_rng([self.seed, step]).random() < self.chance
        )
        if not self.now:
            return batch
        labels = batch["labels"].clone()
        labels[self.seed % len(labels)] = -100
        return batch | {"labels": labels}

    def before_update(self, t: Training, step: int) -> None:
        gradients = [p.grad for p in t.model.parameters() if p.grad is not None]
        if self.active(step) and not all(bool(g.isfinite().all()) for g in gradients):
            for p in t.model.parameters():
                p.grad = None
