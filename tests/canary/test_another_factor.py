"""A product of an older weight is told from noise, from garbage and from scales that are read wrongly."""

from __future__ import annotations

import pytest
import torch

from fp8watch.layers.another_factor import another_factor
from fp8watch_agent.fault_names import TOLD_SHARE

M, K, N = 700, 96, 160


def product(change, *, dtype=torch.float32, rows=M, moved=0.02):
    """What is said of a·b where the GEMM made what `change` says."""
    g = torch.Generator().manual_seed(0)
    a = torch.randn(rows, K, generator=g) * torch.exp2(2 * torch.randn(rows, 1, generator=g))
    b, bias = torch.randn(K, N, generator=g) * 0.05, torch.randn(N, generator=g)
    older = b - moved * 0.05 * torch.randn(b.shape, generator=g)
    y = change(a, b, older, g).to(dtype) if bias is None else (change(a, b, older, g) + bias).to(dtype)
    found = list(another_factor(y, lambda at: a[at], lambda at: b[:, at], K, bias, torch.tensor(0.005)))
    return {name: float(value) for name, value in found[0].numbers.items()} if found else None


def blocks(b):
    out = b.clone()
    out[:32, :32] *= 2
    return out


def flipped(b, g):
    return torch.where(torch.rand(b.shape, generator=g) < 0.01, b * 64, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_older_weight_is_told_with_its_distance_in_updates(dtype) -> None:
    said = product(lambda a, b, older, g: a @ older, dtype=dtype)
    assert said["share"] >= TOLD_SHARE
    assert said["distance"] == pytest.approx(0.02, rel=0.15)
    assert said["updates"] == pytest.approx(4, rel=0.15)


WRONG = {
    "noise": lambda a, b, older, g: a @ b + 0.02 * torch.randn(len(a), N, generator=g),
    "rows that nobody wrote": lambda a, b, older, g: torch.cat(((a @ b)[:-200], torch.zeros(200, N))),
    "a factor": lambda a, b, older, g: 1.2 * (a @ b),
    "a scale of one block": lambda a, b, older, g: a @ blocks(b),
    "bits": lambda a, b, older, g: a @ flipped(b, g),
    "another weight": lambda a, b, older, g: a @ torch.randn(b.shape, generator=g),
    "another operand": lambda a, b, older, g: a.roll(1, 0) @ b,
}


@pytest.mark.parametrize("what", sorted(WRONG))
def test_what_else_is_wrong_with_a_product_is_no_older_weight(what) -> None:
    assert not product(WRONG[what])["share"] >= TOLD_SHARE


def test_a_weight_that_moved_less_than_the_output_rounds_is_not_told() -> None:
    assert not product(lambda a, b, older, g: a @ older, dtype=torch.bfloat16, moved=5e-4)["share"] >= TOLD_SHARE


def test_with_too_few_rows_nothing_is_said() -> None:
    assert product(lambda a, b, older, g: a @ older, rows=2 * K) is None
