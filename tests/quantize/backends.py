"""The backends that can serve CPU tensors here; every test of the numbers runs against each of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8watch.kernels import BACKEND_NAMES, Backend, available, reference, resolve
from fp8watch.numerics.quantize_job import QuantizeJob
from fp8watch_agent.record import EVERY_CALL, Field

REASONS = available("cpu")
USABLE: tuple[str, ...] = tuple(name for name in BACKEND_NAMES if REASONS[name] is None)


def compared(field: Field, *measured: int) -> bool:
    """Whether records may be held against each other in this field: a later one is filled by some backends only."""
    group = int(field.group & EVERY_CALL)  # what the codes alone tell (CAST) is no bit of a record
    return all(bits & group == group for bits in measured)


def shared(measured: Any) -> Any:
    """`measured` without the groups that some backends do not fill."""
    return measured & ~int(EVERY_CALL)


def backends() -> list[Backend]:
    """All that can serve, the judge last."""
    return [resolve(name, "cpu") for name in USABLE]


def scale_of(x: torch.Tensor, tile: tuple[int, int], fmt: object, power_2: bool, eps: float = 0.0) -> torch.Tensor:
    """The scale that is computed for each tile."""
    stats = reference.quantize(x, QuantizeJob(tile, fmt, power_2, eps))[2]
    assert stats is not None
    assert stats.tiles is not None
    return stats.tiles.scale


each_backend = pytest.mark.parametrize("backend", [resolve(name, "cpu") for name in USABLE], ids=USABLE)
