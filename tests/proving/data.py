"""Data of the proving ground: Python's own sources as text, and the digits that ship in scikit-learn's wheel.

A micro-batch is a function of (seed, its number) alone, so a faulty run, its healthy twin and a resumed leg see the same data.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from fp8watch.demo.text import load_text

IGNORED = -100
"""Label of a position that is not scored."""

NUM_BYTES = 256


@lru_cache(maxsize=1)
def text() -> Tensor:
    """Python's sources: uint8 [N]."""
    return load_text(1 << 21)


@lru_cache(maxsize=1)
def digits() -> tuple[Tensor, Tensor]:
    """Images [1797, 8, 8] float32 in −1…1, labels [1797] int64."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return torch.tensor(found.images, dtype=torch.float32) / 8 - 1, torch.tensor(found.target)


def generator(seed: int, number: int, stream: int = 0) -> torch.Generator:
    """Random numbers of one micro-batch."""
    return torch.Generator().manual_seed((seed * 1_000_003 + number) * 16 + stream)


def windows(seed: int, number: int, batch: int, tokens: int, share: tuple[float, float] = (0.0, 1.0)) -> Tensor:
    """Random windows out of a share of the text: int64 [batch, tokens]."""
    bytes_ = text()
    low, high = int(share[0] * len(bytes_)), int(share[1] * len(bytes_)) - tokens
    start = torch.randint(low, high, (batch, 1), generator=generator(seed, number))
    return bytes_[start + torch.arange(tokens)].long()


Batch = dict[str, Tensor]


def next_bytes(seed: int, batch: int, tokens: int, share: tuple[float, float] = (0.0, 1.0)) -> Callable[[int], Batch]:
    """Batches for a causal language model: labels are the next bytes."""

    def make(number: int) -> Batch:
        window = windows(seed, number, batch, tokens + 1, share)
        return {"input_ids": window[:, :-1].contiguous(), "labels": window[:, 1:].contiguous()}

    return make


def padded(make: Callable[[int], Batch], seed: int, pad: int, shortest: float = 0.4) -> Callable[[int], Batch]:
    """Rows of different lengths: padded on the right, masked, and not scored there."""

    def masked(number: int) -> Batch:
        batch = make(number)
        rows, tokens = batch["input_ids"].shape
        length = torch.randint(int(shortest * tokens), tokens + 1, (rows, 1), generator=generator(seed, number, 1))
        length[0] = tokens
        mask = torch.arange(tokens) < length
        return {
            "input_ids": batch["input_ids"].masked_fill(~mask, pad),
            "labels": batch["labels"].masked_fill(~mask, IGNORED),
            "attention_mask": mask.long(),
        }

    return masked


def images(seed: int, batch: int, held_back: int = 197) -> Callable[[int], Batch]:
    """Batches of digits: {"pixels": [batch, 8, 8], "labels": [batch]}; the last `held_back` images are for evaluation."""

    def make(number: int) -> Batch:
        pixels, labels = digits()
        chosen = torch.randint(0, len(pixels) - held_back, (batch,), generator=generator(seed, number))
        return {"pixels": pixels[chosen], "labels": labels[chosen]}

    return make
