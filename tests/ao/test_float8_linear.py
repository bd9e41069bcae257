"""torchao's own Float8Linear: observed by its configuration, computing as before, its casts and GEMMs held to account."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from canary.conftest import Small
from canary.healthy_runs import LONG, Tiny
from canary.wrong_outputs import elsewhere, garbage, zeroed
from support.counts import part_of

from fp8watch_agent.record import Measured

pytest.importorskip("torchao.float8", reason="torchao is not installed")

from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from fp8watch.layers.torchao_casts import FUNCTION, MODULE, unwatch_casts
from fp8watch.recipe.spec import TILES
from fp8watch.recipe.torchao import ROW

ROWS = ROW in TILES
RECIPES = ("tensorwise", *(("rowwise", "rowwise_with_gw_hp") if ROWS else ()))


@pytest.fixture(autouse=True)
def torchao_as_it_was():
    yield
    unwatch_casts()


def converted(name="tensorwise"):
    model = Small()
    convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(name))
    return model


def broken_cast(monkeypatch, role, number, shape, fault):
    """Break one cast of an operand: the `number`-th of a call that casts an operand of this shape in this role."""
    module = sys.modules[MODULE]
    right, seen = getattr(module, FUNCTION), []

    def cast(x, *args, gemm_input_role, **kwargs):
        made = right(x, *args, gemm_input_role=gemm_input_role, **kwargs)
        if gemm_input_role.value == role and tuple(x.shape) == shape:
            seen.append(1)
            if len(seen) % 2 == number:
                made._data, scale_inv = fault(made._data, 1 / made._scale)
                made._scale = 1 / scale_inv
        return made

    monkeypatch.setattr(module, FUNCTION, cast)


def powers_of_two(codes, scale_inv):
    return codes, torch.exp2(torch.floor(torch.log2(scale_inv)))


def of_the_padding(codes, scale_inv):
    wrong = scale_inv.clone()
    wrong.view(-1)[-1] = 1.0
    return codes, wrong


CASTS = {  # recipe, module, operand, role, which cast of it, shape, fault, what counts it
    "codes at the wrong place": ("tensorwise", "b", "input", 1, (96, 272), elsewhere, "num_off_grid"),
    "a transposed copy that is garbage": ("tensorwise", "b", "input", 0, (96, 272), garbage, "num_off_grid"),
    "codes of gradients all zero": ("tensorwise", "c", "grad_output", 1, (96, 160), zeroed, "num_zeroed_tiles"),
    "FP32 scales as powers of two": ("tensorwise", "b", "weight", 1, (272, 144), powers_of_two, "num_wrong_scales"),
    "stale scales of the padding": ("rowwise", "b", "input", 1, (96, 272), of_the_padding, "num_wrong_scales"),
}  # fmt: skip
if not ROWS:
    del CASTS["stale scales of the padding"]


@pytest.mark.parametrize("name", CASTS)
def test_a_broken_cast_is_named_at_its_site(train, monkeypatch, name) -> None:
    recipe, fqn, role, number, shape, fault, count = CASTS[name]
    broken_cast(monkeypatch, role, number, shape, fault)
    line, _ = train(3, model=converted(recipe))
    step = ["a", "b", "c"].index(fqn)
    assert line.said()[0][:5] == ("quantiser-fault", "critical", step, fqn, role)
    assert {e.field for e in line.findings[0].evidence} >= {count, "num_checked_tiles"}
    assert {f.mode for f in line.findings if f.step <= step} == {"quantiser-fault"}


@pytest.mark.parametrize("fault", ["powers of two", "rows that nobody wrote"])
def test_a_broken_gemm_is_told_from_a_broken_cast(train, monkeypatch, fault) -> None:
    ops = sys.modules["torchao.float8.float8_ops"]
    right = ops.addmm_float8_unwrapped

    def product(a, a_scale, b, b_scale, *args, **kwargs):
        hit = a.shape[0] == 96 and b.shape[1] == 144  # fprop of b, dgrad of c
        if hit and fault == "powers of two":
            a_scale = torch.exp2(torch.floor(torch.log2(a_scale)))
        out = right(a, a_scale, b, b_scale, *args, **kwargs)
        if hit and fault != "powers of two":
            out[-20:] = out[:20]
        return out

    monkeypatch.setattr(ops, "addmm_float8_unwrapped", product)
    line, _ = train(3, model=converted())
    assert line.said()[0] == ("kernel-output-fault", "critical", 1, "b", "input", "rowwise")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RECIPES)
def test_it_computes_as_before_by_its_own_recipe_and_nothing_is_raised(train, capsys, name, dtype) -> None:
    model = converted(name).to(dtype)
    plain = copy.deepcopy(model)
    line, watch = train(20, model=model, dtype=dtype, share=1.0)
    assert type(model.a).__name__ == "Float8Linear"
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for _ in range(20):
        optimizer.zero_grad()
        plain(torch.randn(96, 160, dtype=dtype)).backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    assert line.said() == []
    kind = "current" if name == "tensorwise" else "rowwise"
    assert f"3 of them observed by their own configuration ({kind})" in capsys.readouterr().err
    sites = line.sites.values()
    assert {(s.recipe, s.backend) for s in sites} == {(kind, "torchao")}
    assert {s.format for s in sites if s.operand == "grad_output"} == {"E5M2" if name == "tensorwise" else "E4M3"}
    checked = {
        (line.sites[i].operand, line.sites[i].direction)
        for rows in line.rows[:3] for i, row in rows.items() if row["measured"] & Measured.QUANTISER
    }  # fmt: skip
    assert {("input", "rowwise"), ("weight", "rowwise"), ("grad_output", "rowwise")} <= checked
    watch.detach()
    assert "__fp8watch" not in str(vars(model.a))


def test_converting_after_attach_drops_no_site_in_silence(train, capsys) -> None:
    line, watch = train(0)
    capsys.readouterr()
    convert_to_float8_training(watch._model, config=Float8LinearConfig())
    optimizer = torch.optim.SGD(watch._model.parameters(), lr=0.05)
    for _ in range(4):
        optimizer.zero_grad()
        watch._model(torch.randn(96, 160)).backward()
        optimizer.step()
    said = capsys.readouterr().err
    assert said.count("3 Linears were replaced by torchao Float8Linear after attach: observed as they are") == 1
    assert {s.module for s in line.sites.values()} == {"a", "b", "c"}
    assert {s.backend for s in line.sites.values()} == {"torchao"}
    assert line.facts["gemm_flops_observed"] == 1.0
    assert line.facts["replaced"] == "3 by torchao Float8Linear, observed"
    assert len(line.rows) >= 3
    watch.detach()
    assert "fp8watch" not in str(vars(watch._model.a))


@pytest.mark.heavy(5, "fp8watch/layers", "fp8watch/observer")
@pytest.mark.parametrize("share", [None, 1.0])
@pytest.mark.parametrize("name", RECIPES)
def test_a_long_healthy_run_is_silent(train, name, share) -> None:
    model = Tiny(torch.nn.Linear)
    convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(name))
    line, _ = train(part_of(LONG), model=model, tokens=32, share=share)
    assert line.said() == []
