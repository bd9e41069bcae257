"""Statistics alone, in the interpreter: those of quantising, and nothing of the operand's size is written."""

from __future__ import annotations

import pytest
import torch

from fp8watch.kernels import triton, triton_launch
from fp8watch.numerics.formats import E4M3
from fp8watch.numerics.quantize_job import QuantizeJob


@pytest.mark.parametrize("heavy", [False, True])
@pytest.mark.parametrize("tile", [(1, 128), (128, 1), (128, 128), (48, 160)], ids=str)
def test_statistics_alone_are_those_of_quantising(tile: tuple[int, int], heavy: bool, monkeypatch) -> None:
    x = torch.randn(48, 160, generator=torch.Generator().manual_seed(0)) * 1e-3
    x[3, 5], x[7, :20] = float("nan"), 0
    want = triton.quantize(x, QuantizeJob(tile, E4M3, True, 0.0, heavy=heavy))[2]
    sides = []
    real = triton_launch._Side
    monkeypatch.setattr(triton_launch, "_Side", lambda *a, **k: sides.append(real(*a, **k)) or sides[-1])
    got = triton.measure(x, QuantizeJob(tile, E4M3, True, 0.0, heavy=heavy))
    assert want is not None
    assert repr(got.summary()) == repr(want.summary())
    assert [side.out.numel() for side in sides] == [0]


def test_both_directions_alone() -> None:
    x = torch.randn(48, 160, generator=torch.Generator().manual_seed(1))
    for got, (_, _, want) in zip(
        triton.measure_both(x, QuantizeJob((1, 128), E4M3, True, 0.0)),
        triton.quantize_both(x, QuantizeJob((1, 128), E4M3, True, 0.0)),
        strict=True,
    ):
        assert want is not None
        assert repr(got.summary()) == repr(want.summary())
