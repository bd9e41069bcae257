"""Training text available on every machine: the Python installation's own sources and documentation."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

MAX_BYTES = 4 << 20


def load_text(max_bytes: int = MAX_BYTES) -> Tensor:
    """Bytes of the standard library's modules in name order: uint8 [N].

    Raises:
        FileNotFoundError: this Python keeps no sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    parts: list[bytes] = []
    size = 0
    for path in sorted(root.glob("*.py")) + sorted(root.glob("*/*.py")):
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        parts.append(path.read_bytes())
        size += len(parts[-1])
        if size >= max_bytes:
            break
    if size < 1 << 16:
        raise FileNotFoundError(
            f"{root} holds {size} bytes of Python sources; the demo trains on at least 64 KiB of them"
        )
    return torch.frombuffer(bytearray(b"".join(parts)[:max_bytes]), dtype=torch.uint8)


def batches(text: Tensor, batch: int, tokens: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless pairs (tokens, next tokens), int64 [batch, tokens], from random positions of the text."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        start = torch.randint(len(text) - tokens - 1, (batch, 1), generator=generator)
        window = text[start + torch.arange(tokens + 1)].long()
        yield window[:, :-1], window[:, 1:]
