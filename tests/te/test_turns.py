"""In its turn a module of Transformer Engine has its codes held against its operands, and its products against the codes."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from fp8watch_agent.record import QUANTISER_FAULTS, Measured

IN, OUT, TOKENS = 256, 128, 34
Row = Any


def first_step(te: ModuleType, attach: Any) -> dict[tuple[str, str], Row]:
    """Rows of a module in the first step, in which each has its turn, by operand and direction."""
    torch.manual_seed(0)
    model = nn.Sequential(te.Linear(IN, OUT))
    watch = attach(model)
    model(torch.randn(TOKENS, IN, requires_grad=True)).square().mean().backward()
    watch.step()
    assert dict(watch.guard.errors) == {}
    _, rows = watch._recorder.step(0)
    return {(operand, direction): row for (module, operand, direction), row in rows.items() if module == "0"}


def products(te: ModuleType, monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Change what the products of a Linear return. change(result, layout) -> result."""
    module = sys.modules[te.Linear.__module__]
    right = module.general_gemm

    def gemm(*args: Any, layout: str = "TN", **kwargs: Any) -> Any:
        out, *rest = right(*args, layout=layout, **kwargs)
        return (change(out, layout), *rest)

    monkeypatch.setattr(module, "general_gemm", gemm)


def multiplied(rows: dict[tuple[str, str], Row]) -> set[tuple[str, str]]:
    return {place for place, row in rows.items() if row["measured"] & Measured.GEMM}


def test_a_healthy_module_is_looked_at_whole_and_silent(te: ModuleType, attach: Any) -> None:
    rows = first_step(te, attach)
    assert not any(row[name] for row in rows.values() for name in QUANTISER_FAULTS)
    checked = {operand for (operand, _), row in rows.items() if row["measured"] & Measured.QUANTISER}
    assert checked == {"input", "weight", "grad_output"}
    assert multiplied(rows) == {("input", "rowwise"), ("grad_output", "rowwise"), ("grad_output", "columnwise")}
    assert all(rows[p]["gemm_error"] < 1e-6 for p in multiplied(rows))
    assert {float(rows[p]["gemm_gain_max"]) for p in multiplied(rows)} == {1.0}


def test_codes_of_a_gradient_that_are_all_zero_are_counted_there(
    te: ModuleType, attach: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantised = sys.modules["transformer_engine.pytorch.quantized_tensor"]
    right = quantised.Float8BlockQuantizer.quantize_impl

    def quantize(self: Any, tensor: torch.Tensor) -> Any:
        made = right(self, tensor)
        if tuple(tensor.shape) == (TOKENS, OUT):
            made._rowwise_data.zero_()
        return made

    monkeypatch.setattr(quantised.Float8BlockQuantizer, "quantize_impl", quantize)
    rows = first_step(te, attach)
    assert rows["grad_output", "rowwise"]["num_zeroed_tiles"] > 0
    assert rows["input", "rowwise"]["num_zeroed_tiles"] == rows["weight", "rowwise"]["num_zeroed_tiles"] == 0


@pytest.mark.parametrize(
    ("layout", "place"),
    [("TN", ("input", "rowwise")), ("NN", ("grad_output", "rowwise")), ("NT", ("grad_output", "columnwise"))],
)
def test_a_product_that_is_wrong_is_wrong_in_its_own_row(
    te: ModuleType, attach: Any, monkeypatch: pytest.MonkeyPatch, layout: str, place: tuple[str, str]
) -> None:
    products(te, monkeypatch, lambda out, which: 1.5 * out if which == layout else out)
    rows = first_step(te, attach)
    assert rows[place]["gemm_gain_max"] == pytest.approx(1.5)
    assert all(float(rows[p]["gemm_gain_max"]) == 1.0 for p in multiplied(rows) - {place})


def test_the_transposed_copy_of_a_weight_is_held_against_the_weight(
    te: ModuleType, attach: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """dgrad alone reads it; its product is right of the codes that it reads."""
    quantised = sys.modules["transformer_engine.pytorch.quantized_tensor"]
    right = quantised.Float8BlockQuantizer.quantize_impl

    def quantize(self: Any, tensor: torch.Tensor) -> Any:
        made = right(self, tensor)
        if tuple(tensor.shape) == (OUT, IN):
            made._columnwise_data[::40, ::40] = 0x31
        return made

    monkeypatch.setattr(quantised.Float8BlockQuantizer, "quantize_impl", quantize)
    rows = first_step(te, attach)
    assert rows["weight", "rowwise"]["num_off_grid"] > 0
    assert tuple(rows["weight", "rowwise"]["fault_tile"]) == (0, 0)
    assert rows["grad_output", "rowwise"]["gemm_error"] < 1e-6
    assert not any(row["num_off_grid"] for place, row in rows.items() if place[0] != "weight")


def test_a_product_that_is_not_finite_is_counted_where_it_was_born(
    te: ModuleType, attach: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(out: torch.Tensor, which: str) -> torch.Tensor:
        if which == "TN":
            out = out.clone()
            out[3, 5] = torch.nan
        return out

    products(te, monkeypatch, spoil)
    rows = first_step(te, attach)
    assert rows["input", "rowwise"]["num_nonfinite_outputs"] == 1
    assert rows["input", "rowwise"]["num_nan"] == 0


@pytest.mark.parametrize("wrong", [False, True])
def test_each_expert_has_its_products_looked_at_and_one_without_tokens_its_weight_gradient(
    te: ModuleType, attach: Any, monkeypatch: pytest.MonkeyPatch, wrong: bool
) -> None:
    module = sys.modules[te.GroupedLinear.__module__]
    right = module.general_grouped_gemm

    def gemm(*args: Any, layout: str = "TN", **kwargs: Any) -> Any:
        out = right(*args, layout=layout, **kwargs)
        if wrong and layout == "NT":
            out[1].fill_(1e-3)
        return out

    monkeypatch.setattr(module, "general_grouped_gemm", gemm)

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.of = te.GroupedLinear(3, IN, OUT)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.of(x, [16, 0, 16])  # type: ignore[no-any-return]

    model = Experts()
    watch = attach(model)
    model(torch.randn(32, IN, requires_grad=True)).square().mean().backward()
    watch.step()
    assert dict(watch.guard.errors) == {}
    _, rows = watch._recorder.step(0)
    errors = {place: float(row["gemm_error"]) for place, row in rows.items() if row["measured"] & Measured.GEMM}
    gemms = [("input", "rowwise"), ("grad_output", "rowwise"), ("grad_output", "columnwise")]
    assert set(errors) == {(f"of.{i}", *g) for i in (0, 2) for g in gemms} | {("of.1", *gemms[2])}
    empty = errors.pop(("of.1", *gemms[2]))
    assert empty == (float("inf") if wrong else 0)
    assert max(errors.values()) < 1e-6
