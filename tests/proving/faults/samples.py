"""Samples that are read otherwise than they were written: targets of another row, a channel that is stuck, prompts that are scored, ids of
another tokenizer.

Severity is the share of the rows, channels or ids.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from proving.data import IGNORED
from proving.faults._base import log_uniform
from proving.faults.data import DataFault
from proving.training import Training
from torch import Tensor

_SIGNALS = ("frames", "pixels")
_TARGETS = ("actions", "labels")


class TargetsOfOtherRows(DataFault):
    """Inputs and targets are shuffled apart, so that a row has the target of another (DrexelChatbot #15, tensorflow #21033): each is
    sound, and they do not belong together. Severity is the share of the rows."""

    name = "targets-of-other-rows"
    needs = ()

    @classmethod
    def fits(cls, t: Training, batch: dict[str, Any]) -> bool:
        return any(s in batch for s in _SIGNALS) and any(n in batch for n in _TARGETS) and "noise" not in batch

    def changed(self, t: Training, step: int, batch: dict[str, Any]) -> dict[str, Any]:
        name = next(n for n in _TARGETS if n in batch)
        target = batch[name]
        num = min(len(target), max(2, round(self.share * len(target))))
        rows = torch.from_numpy(self.rng.permutation(len(target))[:num])
        moved = target.clone()
        moved[rows] = target[rows.roll(1)]
        return batch | {name: moved}


class ChannelsStuck(DataFault):
    """Some channels of the input stay at one value, as those of a dead sensor do, and are then normalised by a deviation that is no more
    than an eps (LSTM-Neural-Network-for-Time-Series-Prediction #66: a loss of 10^9; numalogic #153, PyPOTS #265). Severity is
    how large they come out, and how many they are."""

    name = "channels-stuck"
    needs = ()
    modes = ("bad-batch", "outlier-growth", "scalar-shift")
    shares: ClassVar[dict[str, tuple[float, float]]] = {
        "mild": (0.05, 0.15),
        "medium": (0.1, 0.3),
        "severe": (0.1, 0.5),
    }
    sizes: ClassVar[dict[str, tuple[float, float]]] = {
        "mild": (0.1, 0.5),
        "medium": (0.5, 8.0),
        "severe": (8.0, 1000.0),
    }

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.size = log_uniform(self.rng, *self.sizes[self.severity])
        self.number = int(self.rng.integers(1 << 31))
        self.note(size=round(self.size, 2))

    @classmethod
    def fits(cls, t: Training, batch: dict[str, Any]) -> bool:
        return any(name in batch for name in _SIGNALS)

    def changed(self, t: Training, step: int, batch: dict[str, Any]) -> dict[str, Any]:
        name = next(n for n in _SIGNALS if n in batch)
        x: Tensor = batch[name]
        random = np.random.default_rng(self.number)  # the same channels each time
        hit = random.random(x.shape[-1]) < self.share
        hit[random.integers(x.shape[-1])] = True
        value = self.size * float(x.abs().max()) * torch.from_numpy(random.choice([-1.0, 1.0], x.shape[-1])).to(x.dtype)
        return batch | {name: torch.where(torch.from_numpy(hit), value, x)}


class PromptsScored(DataFault):
    """The mask of what is scored gets lost on the way, and all that was to be read only is scored too (nanochat #582, open-r1 #517): prompts,
    and of a masked-language model what nobody hid. Severity is the share of the rows."""

    name = "prompts-scored"
    needs = ("input_ids", "labels")

    @classmethod
    def fits(cls, t: Training, batch: dict[str, Any]) -> bool:
        if not t.notes.get("tokens") or not super().fits(t, batch) or batch["labels"].shape != batch["input_ids"].shape:
            return False
        return bool((cls.read_only(batch) & (batch["labels"] == IGNORED)).any())

    @staticmethod
    def read_only(batch: dict[str, Any]) -> Tensor:
        """Real tokens with a next one, padding apart."""
        there = batch["attention_mask"].bool() if "attention_mask" in batch else torch.ones_like(batch["labels"]).bool()
        return there & there.roll(-1, 1)

    def changed(self, t: Training, step: int, batch: dict[str, Any]) -> dict[str, Any]:
        ids, labels = batch["input_ids"], batch["labels"]
        rows = self.hits(len(ids))
        rows[-1] = True
        target = ids.roll(-1, 1) if t.notes.get("causal") else ids
        scored = self.read_only(batch) & (labels == IGNORED) & rows[:, None]
        scored[:, -1] &= not t.notes.get("causal")
        return batch | {"labels": torch.where(scored, target, labels)}


class IdsOfOtherTokenizer(DataFault):
    """Shards were made with another tokenizer: the same texts, whose ids are other ones (tokenizers #191, OpenCoder #21). Inputs and labels
    agree, and the model has to learn it all anew. Severity is the share of the ids that differ, by how often they come."""

    name = "ids-of-other-tokenizer"
    needs = ()
    lasts = (10, 40, 0.8)
    shares: ClassVar[dict[str, tuple[float, float]]] = {"mild": (0.03, 0.1), "medium": (0.1, 0.4), "severe": (0.4, 1.0)}

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.number = int(self.rng.integers(1 << 31))
        self.table = torch.empty(0, dtype=torch.int64)

    @classmethod
    def fits(cls, t: Training, batch: dict[str, Any]) -> bool:
        return bool(t.notes.get("tokens")) and {"input_ids", "labels"} <= set(batch)

    def begin(self, t: Training) -> None:
        ids = torch.cat([t.batch(number)["input_ids"].flatten() for number in range(8)])
        last = min(256, int(t.notes["vocab"]))
        often = torch.bincount(ids[ids < last], minlength=last).double()
        random = np.random.default_rng(self.number)
        order = torch.from_numpy(random.permutation(last))
        num = int((often[order].cumsum(0) / often.sum() < self.share).sum()) + 1
        moved = order[: max(2, num)]
        self.table = torch.arange(last)
        self.table[moved] = moved.roll(1)
        self.note(num_ids=len(moved))

    def changed(self, t: Training, step: int, batch: dict[str, Any]) -> dict[str, Any]:
        for name in ("input_ids", "labels"):
            old, last = batch[name], len(self.table)
            batch[name] = torch.where((old >= 0) & (old < last), self.table[old.clamp(0, last - 1)], old)
        return batch
