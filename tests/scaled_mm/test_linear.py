"""A Linear that multiplies codes gives what the emulated one gives, through the same sites."""

from __future__ import annotations

import copy

import pytest
import torch
from scaled_mm.strict import scaled_mm as strict
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8watch
from fp8watch import recipe as recipes
from fp8watch.kernels import scaled_mm
from fp8watch_agent.record import Measured


@pytest.fixture
def attach(monkeypatch, tmp_path):
    monkeypatch.setenv("FP8WATCH_SPOOL_DIR", str(tmp_path))
    monkeypatch.setattr(torch, "_scaled_mm", strict)
    monkeypatch.setattr(scaled_mm, "probe", lambda device: None)
    made = []

    def run(model, **how):
        made.append(fp8watch.attach(model, overhead_budget=None, **how))
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


def test_what_cannot_be_is_refused_or_left_out(attach, monkeypatch, capsys):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 48))
    with pytest.raises(ValueError, match="gemm='fast': must be 'emulated' or 'scaled_mm'"):
        attach(model, gemm="fast")
    for recipe in ("current", "observe", "mxfp8"):
        with pytest.raises(ValueError, match=f"'{recipe}' has no 1×128 and 128×128 scales"):
            attach(model, gemm="scaled_mm", recipe=recipe)
    attach(model, gemm="scaled_mm", recipe=recipes.blockwise(fp8_format="E5M2", environ={}))
    assert "left out: 0 (fprop would multiply E5M2 by E5M2" in capsys.readouterr().err
    monkeypatch.undo()
    with pytest.raises(ValueError, match="serves cuda tensors, not cpu; gemm='emulated' runs everywhere"):
        fp8watch.attach(model, gemm="scaled_mm")
