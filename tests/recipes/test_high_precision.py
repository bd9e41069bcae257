"""An operand in high precision: GEMMs that read it compute as before, the others in FP8."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from fp8watch import recipe as recipes

GEMMS = {"input": {"dgrad"}, "weight": {"wgrad"}, "grad_output": {"fprop"}}
SITES = {
    "input": {("weight", "rowwise"), ("grad_output", "rowwise")},
    "weight": {("input", "columnwise"), ("grad_output", "columnwise")},
    "grad_output": {("input", "rowwise"), ("weight", "rowwise")},
}


def wide(*shape):
    return torch.randn(shape) * torch.exp2(torch.randint(-6, 4, shape))


def gradients(model, x, grad):
    """y, dx, dw, db."""
    x = x.detach().requires_grad_()
    model.zero_grad()
    y = model(x)
    y.backward(grad)
    return y.detach(), x.grad, model[0].weight.grad, model[0].bias.grad


@pytest.fixture
def operands():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(160, 48))
    return model, wide(40, 160), wide(40, 48)


@pytest.mark.parametrize("operand", GEMMS)
@pytest.mark.parametrize("make", [recipes.blockwise, recipes.current, recipes.mxfp8, recipes.rowwise, recipes.nvfp4])
def test_its_gemms_are_those_of_the_plain_linear(attach, operands, operand, make):
    model, x, grad = operands
    plain = gradients(copy.deepcopy(model), x, grad)
    full = copy.deepcopy(model)
    attach(full, recipe=make())
    in_fp8 = gradients(full, x, grad)
    watch = attach(model, recipe=make(high_precision=[operand]))
    got = gradients(model, x, grad)
    for name, mine, as_before, quantised in zip(("fprop", "dgrad", "wgrad"), got, plain, in_fp8, strict=False):
        assert torch.equal(mine, quantised if name in GEMMS[operand] else as_before), name
        assert not torch.equal(as_before, quantised)
    watch.step()
    sites = {(s.operand, s.direction): s for s in watch._recorder.sites if s.recipe != "probe"}
    if make is recipes.blockwise:
        # a weight in blocks has one copy for both directions, under the one that is read
        assert {("weight", "rowwise") if o == "weight" else (o, d) for o, d in sites} == SITES[operand]
    assert {s.gemm for s in sites.values()} == GEMMS[operand]
    assert watch._recorder.session.facts[f"{operand}.format"] == "high precision"
    assert not watch.guard.errors


@pytest.mark.parametrize("operand", GEMMS)
def test_in_bfloat16_under_autocast_too(attach, operands, operand):
    model, x, grad = operands
    model, grad = model.float(), grad.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = gradients(copy.deepcopy(model), x, grad)
        attach(model, recipe=recipes.blockwise(high_precision=[operand]))
        got = gradients(model, x, grad)
    for name, mine, as_before in zip(("fprop", "dgrad", "wgrad"), got, want, strict=False):
        if name not in GEMMS[operand]:
            assert torch.equal(mine, as_before), name
        assert mine.dtype == as_before.dtype


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch traces its own
@pytest.mark.parametrize("operand", GEMMS)
def test_compiled_it_is_one_graph_and_the_same_numbers(attach, operands, operand):
    model, x, grad = operands
    other = copy.deepcopy(model)
    for one in (model, other):
        attach(one, recipe=recipes.blockwise(high_precision=[operand]))
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(other, fullgraph=True, backend=counter)
    want, x = gradients(model, x, grad), x.detach().requires_grad_()
    y = compiled(x)
    y.backward(grad)
    assert counter.frame_count == 1
    assert torch.equal(y, want[0])
    assert torch.equal(x.grad, want[1])
    assert torch.equal(other[0].weight.grad, want[2])


@pytest.mark.parametrize("operand", GEMMS)
def test_observed_it_has_no_site_and_changes_nothing(attach, operands, operand):
    model, x, grad = operands
    want = gradients(copy.deepcopy(model), x, grad)
    watch = attach(model, recipe=recipes.blockwise(high_precision=[operand], observe_only=True))
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, x, grad), want, strict=True))
    watch.step()
    assert operand not in {s.operand for s in watch._recorder.sites}
    assert len(watch._recorder.step(0)[1]) == 2
    assert not watch.guard.errors


def test_delayed_histories_of_the_others_go_on(attach, operands):
    model, x, grad = operands
    watch = attach(model, recipe=recipes.delayed(high_precision=["grad_output"]))
    for _ in range(3):
        gradients(model, x, grad)
        watch.step()
    assert float(watch._recorder.step(2)[1]["0", "input", "rowwise"]["scale_ratio_max"]) == pytest.approx(1, rel=1e-6)
    assert not watch.guard.errors


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own
@pytest.mark.parametrize("operand", ["input", "weight", "grad_output"])
@pytest.mark.parametrize("compiled", [False, True])
def test_steps_end_by_themselves_whatever_is_in_high_precision(attach, operands, operand, compiled):
    model, x, _ = operands
    watch = attach(model, recipe=recipes.blockwise(high_precision=[operand]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    run = torch.compile(model, backend="aot_eager") if compiled else model
    for _ in range(3):
        run(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert watch.summary()["num_steps"] == 3
    assert not watch.guard.errors


def test_formats_are_free_by_operand(attach, operands):
    model, x, grad = operands
    watch = attach(model, recipe=recipes.blockwise(fp8_format=("E5M2", "E4M3", "E4M3")))
    gradients(model, x, grad)
    watch.step()
    assert {s.operand: s.format for s in watch._recorder.sites} == {
        "input": "E5M2", "weight": "E4M3", "grad_output": "E4M3",
    }  # fmt: skip
    apart = recipes.Recipe(
        input=recipes.OperandRecipe((1, 128), "E5M2"),
        weight=recipes.OperandRecipe(recipes.ROW, eps=1e-12),
        grad_output=None,
    )
    assert apart.kind == "mixed"
    assert apart.gemms == (True, False, False)
    y = F.linear(x, model[0].weight)
    assert y.shape == (40, 48)


def test_what_cannot_be_meant_is_refused():
    with pytest.raises(ValueError, match=r"input and weight in high precision: a GEMM is in FP8 where both"):
        recipes.blockwise(high_precision=["input", "weight"])
    with pytest.raises(
        ValueError, match=r"high_precision=\['grad'\]: must be a list of 'input', 'weight', 'grad_output'"
    ):
        recipes.current(high_precision=["grad"])
    with pytest.raises(ValueError, match=r"fp8_format=\('E4M3',\): must be one of 'E4M3', .* or three of E4M3, E5M2"):
        recipes.current(fp8_format=("E4M3",))
