"""Data that is not what it was: batches, labels, masks and sources. FP8 has no part in it.

Severity is the share of the rows, tokens or labels that are wrong.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from proving.faults._base import Lasting, log_uniform, onset, seed, until
from proving.training import Expected, Training
from torch import Tensor

_SHARES: dict[str, tuple[float, float]] = {"mild": (0.1, 0.3), "medium": (0.3, 0.7), "severe": (0.7, 1.0)}
_SHIFT = ("scalar-shift", "bad-batch")


class DataFault(Lasting):
    """Changes batches while it lasts. A batch is a dict of tensors; a fault draws nothing where its entries are missing."""

    needs: ClassVar[tuple[str, ...]]
    modes: ClassVar[tuple[str, ...]] = _SHIFT
    lasts: ClassVar[tuple[int, int, float]] = (5, 40, 0.7)
    shares: ClassVar[dict[str, tuple[float, float]]] = _SHARES

    def __init__(self, *, share: float, seed: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.share = share
        self.rng = np.random.default_rng(seed)

    @classmethod
    def fits(cls, t: Training, batch: dict[str, Any]) -> bool:
        """Whether this training has such data."""
        return all(name in batch for name in cls.needs)

    @classmethod
    def draw(cls, rng: np.random.Generator, training: Training, severity: str) -> DataFault | None:
        batch = training.batch(0)
        if not isinstance(batch, dict) or not cls.fits(training, batch):
            return None
        step, share = onset(rng, training), log_uniform(rng, *cls.shares[severity])
        return cls(
            step=step,
            until=until(rng, step, *cls.lasts),
            severity=severity,
            expected=Expected(cls.modes, None, None, False),
            drawn={"share": round(share, 3)},
            share=share,
            seed=seed(rng),
        )

    def on_batch(self, t: Training, step: int, batch: Any) -> Any:
        return self.changed(t, step, dict(batch)) if self.active(step) else batch

    def changed(self, t: Training, step: int, batch: dict[str, Any]) -> dict[str, Any]:
        """The batch as it arrives; the dict may be written, its tensors may not."""
        raise NotImplementedError

    def hits(self, *shape: int) -> Tensor:
        """A share of the places: bool."""
        return torch.from_numpy(self.rng.random(shape) < self.share)


class BadBatch(DataFault):
    """Rows of bytes that mean nothing, for a few steps: a corrupt shard, a binary file among text."""

    name = "bad-batch"
    needs = ("input_ids", "labels")
    modes = ("bad-batch", "scalar-shift")
    lasts = (1, 5, 0.0)

    @classmethod
    def fits(cls, t: Training, batch: dict[str, Any]) -> bool:
        return bool(t.notes.get("tokens")) and super().fits(t, batch)

    def changed(self, t: Training, step: int, batch: dict[str, Any]) -> dict[str, Any]:
        vocab, rows = int(t.notes["vocab"]), self.hits(batch["input_ids"].shape[0])
        rows[0] = True
        for name in ("input_ids", "labels"):
            old = batch[name]
            noise = torch.from_numpy(self.rng.integers(0, vocab, size=tuple(old.shape)))
            batch[name] = torch.where(rows[:, None] & (old >= 0), noise, old)
        return batch


class LabelsCorrupted(DataFault):
    """A share of the labels is drawn at random from here on (the loss rises by +18 % and stays)."""

    name = "labels-corrupted"
    needs = ("labels",)
    shares: ClassVar[dict[str, tuple[float, float]]] = {
        "mild": (0.05, 0.12),
        "medium": (0.12, 0.35),
        "severe": (0.35, 0.9),
    }

    @classmethod
    def fits(cls, t: Training, batch: dict[str, Any]) -> bool:
        return ("vocab" in t.notes and bool(t.notes.get("tokens"))) or ("classes" in t.notes and "noise" not in batch)

    def changed(self, t: Training, step: int, batch: dict[str, Any]) -> dict[str, Any]:
        old, num = batch["labels"], int(t.notes.get("classes", t.notes.get("vocab", 2)))
        wrong = torch.from_numpy(self.rng.integers(0, num, size=tuple(old.shape)))
        batch["labels"] = torch.where(self.hits(*old.shape) & (old >= 0), wrong, old)
        return batch


class TokensShifted(DataFault):
    """Labels of a share of the rows are those of a token further: the shift is made twice, by the data and by the loss."""

    name = "tokens-shifted"
    needs = ("input_ids", "labels")

    @classmethod
    def fits(cls, t: Training, batch: dict[str, Any]) -> bool:
        return bool(t.notes.get("tokens")) and super().fits(t, batch)

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.by = int(self.rng.choice([-2, -1, 1, 2]))
        self.note(by=self.by)

    def changed(self, t: Training, step: int, batch: dict[str, Any]) -> dict[str, Any]:
        old = batch["labels"]
        rows = self.hits(old.shape[0])
        rows[0] = True
        shifted = old.roll(-self.by, -1)
        batch["labels"] = torch.where(rows[:, None] & (old >= 0) & (shifted >= 0), shifted, old)
        return batch


class SourceDegrades(DataFault):
    """A source of the mixture gets worse over some tens of steps: more and more of its tokens are noise (a crawl that is
    filtered less, a tokenizer that falls back to bytes)."""

    name = "source-degrades"
    needs = ("input_ids", "labels")
    shares: ClassVar[dict[str, tuple[float, float]]] = {
        "mild": (0.05, 0.12),
        "medium": (0.12, 0.35),
        "severe": (0.35, 0.9),
    }
    modes = ("scalar-shift", "bad-batch")
    lasts = (1, 1, 1.0)

    @classmethod
    def fits(cls, t: Training, batch: dict[str, Any]) -> bool:
        return bool(t.notes.get("tokens")) and super().fits(t, batch)

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.ramp = int(self.rng.integers(1, 31))
        self.note(ramp_steps=self.ramp)

    def changed(self, t: Training, step: int, batch: dict[str, Any]) -> dict[str, Any]:
        full, self.share = self.share, self.share * min(1.0, (step - self.step + 1) / self.ramp)
        vocab, shape = int(t.notes["vocab"]), tuple(batch["input_ids"].shape)
        noise = torch.from_numpy(self.rng.integers(0, vocab, size=shape))
        hit = self.hits(*shape)
        self.share = full
        old = batch["input_ids"]
        batch["input_ids"] = torch.where(hit, noise, old)
        labels = batch["labels"]
        if labels.shape == old.shape and t.notes.get("causal"):  # what is read at a place is what was to be predicted
            wanted = torch.where(hit, noise, old).roll(-1, -1)
            batch["labels"] = torch.where(hit.roll(-1, -1) & (labels >= 0), wanted, labels)
        return batch


class BatchRepeated(DataFault):
    """The loader gives one batch again and again, or a few in turn: the loss falls because they are learnt by heart."""

    name = "batch-repeated"
    needs = ()
    modes = ("scalar-shift", "bad-batch")
    lasts = (1, 1, 1.0)

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.most = {"mild": 8, "medium": 3, "severe": 1}[self.severity]
        self.kept: list[dict[str, Any]] = []
        self.given = 0
        self.note(num_batches=self.most)

    @classmethod
    def fits(cls, t: Training, batch: dict[str, Any]) -> bool:
        return "reward" not in batch and "rollout" not in t.notes

    def changed(self, t: Training, step: int, batch: dict[str, Any]) -> dict[str, Any]:
        if len(self.kept) < self.most:
            self.kept.append(batch)
            return batch
        self.given += 1
        return dict(self.kept[self.given % self.most])


class PaddingMaskDropped(DataFault):
    """Padding is attended to and scored: the mask of a batch does not reach the model, nor its labels the loss."""

    name = "padding-mask-dropped"
    needs = ("attention_mask",)

    @classmethod
    def fits(cls, t: Training, batch: dict[str, Any]) -> bool:
        return super().fits(t, batch) and bool((batch["attention_mask"] == 0).any())

    def changed(self, t: Training, step: int, batch: dict[str, Any]) -> dict[str, Any]:
        mask, rows = batch["attention_mask"], self.hits(batch["attention_mask"].shape[0])
        rows[-1] = True
        batch["attention_mask"] = torch.where(rows[:, None], torch.ones_like(mask), mask)
        labels, ids = batch["labels"], batch["input_ids"]
        if labels.shape == ids.shape:
            batch["labels"] = torch.where(rows[:, None] & (labels < 0), ids, labels)
        return batch


class PixelsUnnormalised(DataFault):
    """Images come in another range: 0 to 255 in place of −1 to 1, mean and deviation of another data set, or noise."""

    name = "pixels-unnormalised"
    needs = ("pixels",)
    modes = ("bad-batch", "scalar-shift", "outlier-growth")

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        gain = {"mild": (1.5, 3.0), "medium": (3.0, 20.0), "severe": (20.0, 255.0)}[self.severity]
        self.gain, self.offset = log_uniform(self.rng, *gain), float(self.rng.uniform(0, 1))
        self.note(gain=round(self.gain, 2), offset=round(self.offset, 2))

    def changed(self, t: Training, step: int, batch: dict[str, Any]) -> dict[str, Any]:
        batch["pixels"] = (batch["pixels"] + self.offset) * self.gain
        return batch
