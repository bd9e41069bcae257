"""A Linear that multiplies codes gives what the emulated one gives, through the same sites."""

from __future__ import annotations

import copy
import gc
import math

import pytest
import torch
from scaled_mm.strict import scaled_mm as strict
from support.saved_graphs import as_it_is, nodes_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8watch
from fp8watch import recipe as recipes
from fp8watch.kernels import scaled_mm
from fp8watch.layers import scaled_linear
from fp8watch_agent.record import Measured


@pytest.fixture
def attach(monkeypatch, tmp_path):
    monkeypatch.setenv("FP8WATCH_SPOOL_DIR", str(tmp_path))
    monkeypatch.setattr(torch, "_scaled_mm", strict)
    monkeypatch.setattr(scaled_mm, "probe", lambda device: None)
    made = []

    def run(model, **how):
        made.append(fp8watch.attach(model, **how))
        return made[-1]

    yield run
    for watch in made:
        watch.detach()


def gradients(model, x, g, call=None):
    x = x.clone().requires_grad_()
    y = (call or model)(x)
    y.backward(g)
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


def rows(watch):
    return {
        (s.fqn, s.operand, s.direction): r for s, r in zip(watch._table, watch._plan.slab.copy_rows(), strict=False)
    }


@pytest.mark.parametrize("name", ["E4M3", "HYBRID"])
@pytest.mark.parametrize("shape", [(3, 48, 96), (256, 96), (40, 96)])
def test_codes_multiply_to_what_they_stand_for(attach, name, shape):
    torch.manual_seed(0)
    emulated = nn.Sequential(nn.Linear(96, 160), nn.Tanh(), nn.Linear(160, 32, bias=False))
    scaled = copy.deepcopy(emulated)
    recipe = recipes.blockwise(fp8_format=name, environ={})
    a, b = attach(emulated, recipe=recipe), attach(scaled, recipe=recipe, gemm="scaled_mm")
    x, g = torch.randn(shape), torch.randn(*shape[:-1], 32)
    for want, got in zip(gradients(emulated, x, g), gradients(scaled, x, g), strict=True):
        assert got.dtype == want.dtype
        assert (got - want).square().mean().sqrt() < 2e-3 * want.square().mean().sqrt()
    first, second = rows(a), rows(b)
    assert first.keys() == second.keys()
    for key, row in first.items():
        for field in ("num_elements", "num_tiles", "num_calls", "measured"):
            assert row[field] == second[key][field], (key, field)
        assert row["amax_max"] == pytest.approx(second[key]["amax_max"], rel=1e-2)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch traces its own
def test_shadow_checkpoint_and_compile_and_an_empty_batch(attach, monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    watch = attach(model, gemm="scaled_mm")
    watch.shadow("2")
    watch._plan.canary.turn = frozenset()
    x, g = torch.randn(48, 64), torch.randn(48, 64)
    want = gradients(model, x, g)
    model.zero_grad()
    got = gradients(model, x, g, lambda x: checkpoint(model, x, use_reentrant=False))
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    for (fqn, operand, direction), row in rows(watch).items():
        assert row["num_calls"] == 2
        checked = fqn == "2" and (operand, direction) not in (("input", "columnwise"), ("weight", "rowwise"))
        assert bool(row["measured"] & Measured.GEMM) == checked
        assert row["gemm_error"] < 1e-6
    assert model(torch.zeros(0, 64)).shape == (0, 64)
    monkeypatch.setattr(
        scaled_mm, "_mm", lambda a, b, *, block_b, dtype: (a.data.float() @ b.data.float().t()).to(dtype)
    )
    model.zero_grad()
    plain = gradients(model, x, g)
    model.zero_grad()
    compiled = gradients(model, x, g, torch.compile(model, fullgraph=True, backend="aot_eager"))
    assert all(torch.equal(a, b) for a, b in zip(plain, compiled, strict=True))


SITES = {"fprop": ("input", "rowwise"), "dgrad": ("grad_output", "rowwise"), "wgrad": ("grad_output", "columnwise")}


def break_product(monkeypatch, which, product=strict):
    """torch._scaled_mm whose products of this shape, those of one GEMM of Linear(64, 96) with 32 tokens, hold two NaN
    and an Inf; returns how often it was called."""
    shape = {"fprop": (32, 96), "dgrad": (32, 64), "wgrad": (96, 64)}[which]
    calls = []

    def broken(a, b, **how):
        out = product(a, b, **how)
        calls.append(tuple(out.shape))
        if tuple(out.shape) == shape:
            out[3, 5] = out[4, 6] = math.nan
            out[5, 7] = math.inf
        return out

    monkeypatch.setattr(torch, "_scaled_mm", broken)
    return calls


def nonfinite_outputs(watch):
    found = {
        (operand, direction): int(r["num_nonfinite_outputs"]) for (_, operand, direction), r in rows(watch).items()
    }
    return {key: count for key, count in found.items() if count}


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("which", sorted(SITES))
def test_a_product_that_is_not_finite_is_counted_once_at_its_site(attach, monkeypatch, which, recomputed):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96))
    watch = attach(model, gemm="scaled_mm")
    calls = break_product(monkeypatch, which)
    x, g = torch.randn(32, 64), torch.randn(32, 96)
    gradients(model, x, g, (lambda x: checkpoint(model, x, use_reentrant=False)) if recomputed else None)
    assert len(calls) == (4 if recomputed else 3)
    assert nonfinite_outputs(watch) == {SITES[which]: 3}
    table = rows(watch)
    assert table[("0", *SITES[which])]["measured"] & Measured.OUTPUTS
    assert all(row["num_nan"] == row["num_inf"] == 0 for row in table.values())


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch traces its own
@pytest.mark.parametrize("which", sorted(SITES))
def test_compiled_products_are_looked_at_too(attach, monkeypatch, which):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96))
    watch = attach(model, gemm="scaled_mm")

    def broken(a, b, *, block_b, dtype):
        out = (a.data.float() @ b.data.float().t()).to(dtype)
        shape = {"fprop": (32, 96), "dgrad": (32, 64), "wgrad": (96, 64)}[which]
        return torch.full_like(out, math.nan) if tuple(out.shape) == shape else out

    monkeypatch.setattr(scaled_mm, "_mm", broken)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    gradients(model, torch.randn(32, 64), torch.randn(32, 96), compiled)
    size = {"fprop": 32 * 96, "dgrad": 32 * 64, "wgrad": 96 * 64}[which]
    assert nonfinite_outputs(watch) == {SITES[which]: size}


def test_finite_products_and_evaluation_leave_no_count(attach, monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96))
    watch = attach(model, gemm="scaled_mm")
    gradients(model, torch.randn(32, 64), torch.randn(32, 96))
    assert not any(row["measured"] & Measured.OUTPUTS for row in rows(watch).values())
    break_product(monkeypatch, "fprop")
    model.eval()
    assert model(torch.randn(32, 64)).isnan().sum() == 2
    assert nonfinite_outputs(watch) == {}


def train(model, steps=4):
    """Losses and weights of a short training."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(48, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(p.detach() for p in model.parameters())]


def test_training_has_the_same_bits_without_the_observer(attach, monkeypatch):
    torch.manual_seed(0)
    observed = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 32))
    alone = copy.deepcopy(observed)
    attach(observed, gemm="scaled_mm")
    looks = []
    right = scaled_linear.look_at_output
    monkeypatch.setattr(scaled_linear, "look_at_output", lambda *args: (looks.append(args), right(*args))[1])
    got = train(observed)
    assert len(looks) == 4 * (3 + 3) - 4  # the first Linear's input asks for no gradient
    monkeypatch.setenv("FP8WATCH_DISABLED", "stats")
    monkeypatch.setattr(scaled_linear, "look_at_output", lambda *args: None)
    attach(alone, gemm="scaled_mm")
    for ours, theirs in zip(got, train(alone), strict=True):
        assert torch.equal(ours, theirs)


def test_what_cannot_be_is_refused_or_left_out(attach, monkeypatch, capsys):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 48))
    with pytest.raises(ValueError, match="gemm='fast': must be one of 'auto', 'emulated', 'scaled_mm'"):
        attach(model, gemm="fast")
    for recipe in ("current", "observe", "mxfp8"):
        with pytest.raises(ValueError, match=f"'{recipe}' has no 1×128 and 128×128 scales"):
            attach(model, gemm="scaled_mm", recipe=recipe)
    attach(model, gemm="scaled_mm", recipe=recipes.blockwise(fp8_format="E5M2", environ={}))
    assert "left out: 0 (fprop would multiply E5M2 by E5M2" in capsys.readouterr().err
    monkeypatch.undo()
    with pytest.raises(ValueError, match="serves cuda tensors, not cpu; gemm='emulated' runs everywhere"):
        fp8watch.attach(model, gemm="scaled_mm")


class Stop(torch.autograd.Function):
    """Gives its input no gradient at all, which is not one of zeros."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


def test_a_second_derivative_is_refused_and_where_no_gradient_comes_none_goes_on(attach):
    model, x = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128)), torch.randn(32, 128)
    watch = attach(model, gemm="scaled_mm")
    parameters = list(model.parameters())
    z = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(z).square().sum(), z, create_graph=True)
    for asked in (parameters, [z]):
        with pytest.raises(RuntimeError, match=r"differentiated again .*filter_fn"):
            torch.autograd.grad(slope.square().sum(), asked, retain_graph=True)
    with torch.autograd.graph.saved_tensors_hooks(as_it_is, as_it_is):
        nodes = nodes_of(model(x))  # no backward comes
    gc.collect()
    assert len(nodes) == 2
    assert not any(node() for node in nodes)
    Stop.apply(model(x)).sum().backward()
    assert all(p.grad is None for p in parameters)
    assert not watch.guard.errors
