"""What a Linear computes under each recipe, and which sites it has."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from quantize import oracle
from recipes.linears import run
from recipes.oracles import mxfp8 as mx_oracle
from recipes.oracles import nvfp4_values
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from fp8watch import recipe as recipes
from fp8watch.kernels import reference
from fp8watch.quantize import nvfp4

FORMATS = {"input": "E4M3", "weight": "E4M3", "grad_output": "E5M2"}
THREE = [("input", "rowwise"), ("weight", "rowwise"), ("grad_output", "rowwise")]


def tensorwise(x, fmt, power_2=False):
    return torch.from_numpy(oracle.quantize(x.numpy(), tuple(x.shape), fmt, power_2, 0.0).dequantized)


def mx(x, fmt, axis):
    values = mx_oracle((x if axis == 1 else x.t()).contiguous().numpy(), fmt)[2]
    return torch.from_numpy(values) if axis == 1 else torch.from_numpy(values).t()


def blocks(x, tile):
    return torch.from_numpy(oracle.quantize(x.numpy(), tile, "E4M3", True, 0.0).dequantized)


def test_current(attach, linear):
    model, x, grad = linear
    watch = attach(model, recipe="current")
    y, dx, dw = run(model, x, grad)
    xq, wq = tensorwise(x.detach(), "E4M3"), tensorwise(model[0].weight.detach(), "E4M3")
    gq = tensorwise(grad, "E5M2")
    assert torch.equal(y, xq @ wq.t() + model[0].bias.detach())
    assert torch.equal(dx, gq @ wq)
    assert torch.equal(dw, gq.t() @ xq)
    watch.step()
    _, rows = watch._recorder.step(0)
    assert sorted(rows) == sorted(("0", *place) for place in THREE)
    sites = {s.operand: s for s in watch._recorder.sites}
    assert {o: s.format for o, s in sites.items()} == FORMATS
    assert {o: s.tile for o, s in sites.items()} == {"input": (40, 64), "weight": (48, 64), "grad_output": (40, 48)}
    assert {s.recipe for s in sites.values()} == {"current"}
    assert {s.gemm for s in sites.values()} == {"fprop", "dgrad"}
    assert not any(s.power_2_scale for s in sites.values())
    for row in rows.values():
        assert int(row["num_tiles"]) == 1
        assert float(row["scale_ratio_max"]) == pytest.approx(1, rel=1e-6)
        assert int(row["num_off_scale_tiles"]) == 0


def test_mxfp8(attach, linear):
    model, x, grad = linear
    watch = attach(model, recipe=recipes.mxfp8(fp8_format="HYBRID"))
    y, dx, dw = run(model, x, grad)
    w = model[0].weight.detach()
    assert torch.equal(y, mx(x.detach(), "E4M3", 1) @ mx(w, "E4M3", 1).t() + model[0].bias.detach())
    assert torch.equal(dx, mx(grad, "E5M2", 1) @ mx(w, "E4M3", 0))
    assert torch.equal(dw, mx(grad, "E5M2", 0).t() @ mx(x.detach(), "E4M3", 0))
    watch.step()
    _, rows = watch._recorder.step(0)
    assert len(rows) == 6
    tiles = {(s.operand, s.direction): s.tile for s in watch._recorder.sites}
    assert set(tiles.values()) == {(1, 32), (32, 1)}
    gemms = {(s.operand, s.direction): s.gemm for s in watch._recorder.sites}
    assert gemms["weight", "columnwise"] == "dgrad"
    assert all(
        int(r["num_saturated"]) == 0 and int(r["num_off_scale_tiles"]) == 0
        for (_, o, _), r in rows.items()
        if o != "output"
    )


def fp4(x, rows=1):
    return torch.from_numpy(nvfp4_values(x.contiguous().numpy(), rows))


def test_nvfp4(attach, linear):
    model, x, grad = linear
    watch = attach(model, recipe="nvfp4")
    y, dx, dw = run(model, x, grad)
    x, w = x.detach(), model[0].weight.detach()

    def rounded(g, tile):
        made = nvfp4.cast(g, tile, nvfp4.noise_of(g))
        return reference.untiled(made.kept_t() * reference.spread(made.scale_inv), g)

    of_dgrad, turned = rounded(grad, (1, 16)), rounded(nvfp4.rotated(grad), (16, 1))
    assert torch.equal(y, fp4(x) @ fp4(w, 16).t() + model[0].bias.detach())
    assert torch.equal(dx, of_dgrad @ fp4(w, 16))
    assert torch.equal(dw, turned.t() @ fp4(nvfp4.rotated(x).t()).t())
    watch.step()
    sites = {(s.operand, s.direction): s for s in watch._recorder.sites}
    assert {place: s.tile for place, s in sites.items()} == {
        ("input", "rowwise"): (1, 16), ("input", "columnwise"): (16, 1), ("weight", "rowwise"): (16, 16),
        ("grad_output", "rowwise"): (1, 16), ("grad_output", "columnwise"): (16, 1),
    }  # fmt: skip
    assert {(s.recipe, s.format, s.backend, s.power_2_scale) for s in sites.values()} == {
        ("nvfp4", "E2M1", "reference", False)
    }
    _, rows = watch._recorder.step(0)
    assert float(rows["0", "input", "columnwise"]["amax_max"]) == float(nvfp4.rotated(x).abs().max())
    assert not watch.guard.errors


def test_nvfp4_without_its_techniques_is_plain_rounding(attach, linear):
    model, x, grad = linear
    recipe = recipes.nvfp4(disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True, environ={})
    attach(model, recipe=recipe)
    y, dx, dw = run(model, x, grad)
    x, w = x.detach(), model[0].weight.detach()
    assert torch.equal(y, fp4(x) @ fp4(w).t() + model[0].bias.detach())
    assert torch.equal(dx, fp4(grad) @ fp4(w.t()).t())
    assert torch.equal(dw, fp4(grad.t()) @ fp4(x.t()).t())


def test_blockwise_with_one_dimensional_weights(attach, linear):
    model, x, grad = linear
    watch = attach(model, recipe=recipes.blockwise(environ={}, block_dims=(2, 1, 1)))
    y, dx, dw = run(model, x, grad)
    w = model[0].weight.detach()
    assert torch.equal(y, blocks(x.detach(), (128, 128)) @ blocks(w, (1, 128)).t() + model[0].bias.detach())
    assert torch.equal(dx, blocks(grad, (1, 128)) @ blocks(w, (128, 1)))
    assert torch.equal(dw, blocks(grad, (128, 1)).t() @ blocks(x.detach(), (128, 128)))
    watch.step()
    assert sorted(k[1:] for k in watch._recorder.step(0)[1]) == [
        ("grad_output", "columnwise"),
        ("grad_output", "rowwise"),
        ("input", "rowwise"),
        ("weight", "columnwise"),
        ("weight", "rowwise"),
    ]


@pytest.mark.parametrize("recipe", ["current", "delayed", "mxfp8", "nvfp4"])
def test_frozen_weights_and_inputs_without_grad(attach, recipe):
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    model[0].weight.requires_grad_(False)
    model[2].weight.requires_grad_(False)
    watch = attach(model, recipe=recipe)
    x = torch.randn(32, 64)
    model(x).sum().backward()
    assert model[0].bias.grad is not None
    watch.step()
    _, rows = watch._recorder.step(0)
    assert ("0", "grad_output", "rowwise") not in rows  # neither of its GEMMs runs
    assert ("2", "grad_output", "rowwise") in rows
    assert ("2", "grad_output", "columnwise") not in rows
    model[0].weight.requires_grad_(True)
    model(x).sum().backward()  # a first layer has a wgrad and no dgrad
    watch.step()
    wanted = "columnwise" if recipe in ("mxfp8", "nvfp4") else "rowwise"
    assert ("0", "grad_output", wanted) in watch._recorder.step(1)[1]
    assert model[0].weight.grad.abs().sum() > 0
    assert not watch.guard.errors


@pytest.mark.parametrize("recipe", ["current", "delayed", "mxfp8", "nvfp4"])
def test_an_empty_batch_is_as_empty_as_before(attach, recipe):
    model = nn.Sequential(nn.Linear(64, 48))
    attach(model, recipe=recipe)
    x = torch.zeros(0, 64, requires_grad=True)
    y = model(x)
    y.sum().backward()
    assert y.shape == (0, 48)
    assert torch.equal(model[0].weight.grad, torch.zeros(48, 64))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch traces its own
@pytest.mark.parametrize("recipe", ["current", "delayed", "mxfp8", "nvfp4"])
def test_compiled_training_is_one_graph_and_the_same_numbers(attach, recipe):
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    compiled = copy.deepcopy(eager)
    watches = [attach(eager, recipe=recipe), attach(compiled, recipe=recipe)]
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    runs = torch.compile(compiled, fullgraph=True, backend=counter)
    x = torch.randn(32, 64)
    for model, call in ((eager, eager), (compiled, runs)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            call(x).pow(2).mean().backward()
            optimizer.step()
    assert counter.frame_count == 1
    assert torch.equal(eager[0].weight, compiled[0].weight)
    for step in range(4):
        a, b = (w._recorder.step(step)[1] for w in watches)
        assert a.keys() == b.keys()
        for key in a:
            assert a[key]["amax_max"] == b[key]["amax_max"]
            assert a[key]["scale_inv_max"] == b[key]["scale_inv_max"]


@pytest.mark.parametrize("recipe", ["current", "delayed", "mxfp8", "nvfp4"])
def test_statistics_change_no_number(attach, mlp, train, monkeypatch, recipe):
    twin = copy.deepcopy(mlp)
    attach(mlp, recipe=recipe, tile_maps="all")
    watched = train(mlp, steps=5)
    monkeypatch.setenv("FP8WATCH_DISABLED", "stats")
    attach(twin, recipe=recipe)
    assert train(twin, steps=5) == watched
    assert all(torch.equal(a, b) for a, b in zip(mlp.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("make", [recipes.current, recipes.delayed, recipes.mxfp8, recipes.nvfp4])
def test_observing_with_any_recipe_leaves_every_number_as_it_was(attach, mlp, train, capsys, make):
    twin = copy.deepcopy(mlp)
    plain = train(twin, steps=4)
    watch = attach(mlp, recipe=make(observe_only=True))
    assert train(mlp, steps=4) == plain
    assert all(torch.equal(a, b) for a, b in zip(mlp.parameters(), twin.parameters(), strict=True))
    kind = make().kind
    assert f"2 Linears observed, computing as before ({kind}, " in capsys.readouterr().err
    assert watch._recorder.session.recipe == "observe"
    assert {s.recipe for s in watch._recorder.sites if s.recipe != "probe"} == {
        "delayed" if kind == "delayed" else "observe"
    }
    rows = watch._recorder.step(3)[1]
    assert (
        len(rows) == {"mxfp8": 12 - 1, "nvfp4": 10 - 1}.get(kind, 6) + 2
    )  # the first input has no gradient; the head is probed, and what it is given
    assert all(
        np.isfinite(r["noise_energy"]) and r["noise_energy"] > 0
        for (module, _, _), r in rows.items()
        if module != "lm_head"
    )
    assert not watch.guard.errors
