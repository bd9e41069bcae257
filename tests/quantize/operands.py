"""Operands that are hard on a quantiser, each kind by name, and the same numbers each time."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

_ROWWISE_SHAPES = ((1, 1), (3, 128), (2, 257), (5, 130), (1, 640), (9, 131), (7, 96))
SHAPES = {
    (1, 128): _ROWWISE_SHAPES,
    (128, 1): tuple((k, m) for m, k in _ROWWISE_SHAPES),
    (128, 128): ((1, 1), (3, 300), (129, 131), (260, 5), (128, 128), (40, 130), (256, 2)),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TILES = ((1, 128), (128, 1), (128, 128))


def _normal(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return rng.standard_normal(shape)


def _with(rng: np.random.Generator, shape: tuple[int, int], values: list[float], share: float = 0.02) -> np.ndarray:
    x = rng.standard_normal(shape)
    hit = rng.random(shape) < share
    hit.flat[0] = True
    return np.where(hit, rng.choice(values, shape), x)


def _random_bits(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return rng.integers(0, 1 << 32, shape, dtype=np.uint32).view(np.float32)


def _ties(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Halfway between two codes and a hair beside it, in tiles whose scale is 1."""
    step = 2.0 ** rng.integers(-12, 7, shape)
    x = rng.integers(8, 32, shape) * step / 2 * (1 + rng.integers(-1, 2, shape) * 2.0**-22)
    x = np.minimum(x, 448.0)
    x.flat[0] = 448.0
    return x * rng.choice([-1.0, 1.0], shape)


KINDS = {
    "normal": _normal,
    "wide": lambda r, s: r.standard_normal(s) * 2.0 ** r.integers(-30, 12, s),
    "gradient": lambda r, s: r.standard_normal(s) * 3e-8,
    "outliers": lambda r, s: _with(r, s, [300.0, -4000.0, 60000.0]),
    "zeros": lambda r, s: np.where(r.random((s[0], 1)) < 0.5, 0.0, _with(r, s, [0.0, -0.0], 0.4)),
    "all-zero": lambda r, s: np.zeros(s),
    "subnormal": lambda r, s: r.standard_normal(s) * 2.0 ** r.integers(-150, -120, s).astype(float),
    "huge": lambda r, s: r.standard_normal(s) * 2.0 ** r.integers(100, 127, s).astype(float),
    "inf": lambda r, s: _with(r, s, [np.inf, -np.inf]),
    "nan": lambda r, s: _with(r, s, [np.nan, -np.nan]),
    "nan-and-inf": lambda r, s: _with(r, s, [np.nan, np.inf, -np.inf, 0.0], 0.3),
    "nan-only": lambda r, s: np.full(s, np.nan),
    "bits": _random_bits,
    "ties": _ties,
    "powers": lambda r, s: 2.0 ** r.integers(-20, 10, s),
}


@contextmanager
def case(*what: object) -> Iterator[None]:
    """Name the case in its failure: where thousands do the same, many are one test."""
    try:
        yield
    except AssertionError as e:
        raise AssertionError(f"{', '.join(map(str, what))}: {e}") from e


def operand(kind: str, dtype: str, shape: tuple[int, int], seed: int = 0) -> torch.Tensor:
    """Return the operand of that kind in that dtype."""
    rng = np.random.default_rng(zlib.crc32(f"{kind} {dtype} {shape} {seed}".encode()))
    with np.errstate(all="ignore"):
        x = KINDS[kind](rng, shape).astype(np.float32)
    return torch.from_numpy(x).to(DTYPES[dtype])
