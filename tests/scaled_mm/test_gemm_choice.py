"""Which GEMMs attach takes where nobody says: decided by the device's capability and the recipe, here by pretended ones."""

from __future__ import annotations

import copy

import pytest
import torch
from scaled_mm.strict import scaled_mm as strict
from torch import nn

import fp8watch
from fp8watch import recipe as recipes
from fp8watch.kernels import scaled_mm
from fp8watch.recipe.build import observe
from fp8watch.session import attach as attach_module
from fp8watch.session.gemm_choice import choose_gemm

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BLOCKWISE = recipes.blockwise(environ={})


@pytest.fixture
def device(monkeypatch):
    """Pretend to have a CUDA device of some capability."""

    def pretend(major, minor, cublaslt=130100):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, minor))
        monkeypatch.setattr(scaled_mm, "_cublaslt_version", lambda: cublaslt)

    return pretend


@pytest.mark.parametrize("recipe", [BLOCKWISE, recipes.delayed(), recipes.rowwise(), recipes.observe(environ={})])
def test_on_a_cpu_it_is_emulated(recipe):
    found = choose_gemm("auto", recipe, CPU)
    assert (found.how, found.recipe, found.reason) == ("emulated", recipe, None)


def test_on_hopper_codes_are_multiplied(device):
    device(9, 0)
    found = choose_gemm("auto", BLOCKWISE, CUDA)
    assert (found.how, found.recipe, found.reason) == ("scaled_mm", BLOCKWISE, None)


@pytest.mark.parametrize(
    ("capability", "cublaslt", "recipe", "why"),
    [
        ((8, 0), 130100, BLOCKWISE, "sm_80: cuBLASLt has"),
        ((8, 9), 130100, BLOCKWISE, "sm_89: cuBLASLt has"),
        ((10, 0), 130100, BLOCKWISE, "sm_100: cuBLASLt has"),
        ((9, 0), 120804, BLOCKWISE, "cuBLASLt 12.8: 12.9 or later"),
        ((9, 0), 130100, recipes.delayed(), "recipe 'delayed' has no 1×128"),
        ((9, 0), 130100, recipes.rowwise(), "recipe 'rowwise' has no 1×128"),
        ((9, 0), 130100, recipes.blockwise(environ={}, warmup_steps=5), "a warm-up in high precision"),
        (
            (9, 0),
            130100,
            recipes.blockwise(environ={}, high_precision=["grad_output"]),
            "grad_output in high precision",
        ),
        *(
            (
                (9, 0),
                130100,
                recipes.blockwise(environ={}, block_dims=dims),
                "its tiles are not 1×128 · 128×128 · 1×128",
            )
            for dims in ((1, 1, 1), (2, 1, 1), (1, 1, 2))
        ),
    ],
    ids=str,
)
def test_elsewhere_on_a_gpu_it_is_observed_with_the_reason(device, capability, cublaslt, recipe, why):
    device(*capability, cublaslt)
    found = choose_gemm("auto", recipe, CUDA)
    assert found.how == "observe"
    assert found.recipe.observe_only
    assert found.recipe.kind == recipe.kind
    assert why in str(found.reason)
    assert choose_gemm("emulated", recipe, CUDA).recipe is recipe
    with pytest.raises(ValueError, match=r"gemm='scaled_mm' cannot be used: .*; gemm='emulated' runs everywhere"):
        choose_gemm("scaled_mm", recipe, CUDA)


def test_what_is_observed_anyway_is_not_told_why(device):
    device(8, 0)
    assert choose_gemm("auto", recipes.observe(environ={}), CUDA).reason is None
    assert choose_gemm("auto", BLOCKWISE, CUDA, num_linears=0).reason is None


def losses(model, steps=3):
    torch.manual_seed(1)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(32, 64)).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.fixture
def on_a_gpu(monkeypatch, tmp_path):
    """A model on the CPU, for which attach decides as if it were on a GPU whose probe says `reason`."""
    monkeypatch.setenv("FP8WATCH_SPOOL_DIR", str(tmp_path))
    monkeypatch.setattr(attach_module, "choose_gemm", lambda asked, recipe, _, n: choose_gemm(asked, recipe, CUDA, n))
    monkeypatch.setattr(torch, "_scaled_mm", strict)

    def make(reason):
        monkeypatch.setattr(scaled_mm, "probe", lambda device: reason)
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))

    return make


def test_attach_leaves_a_model_alone_where_codes_cannot_be_multiplied(on_a_gpu, capsys):
    model = on_a_gpu("sm_80: cuBLASLt has none")
    twin = copy.deepcopy(model)
    with fp8watch.attach(model, recipe=BLOCKWISE) as watch:
        assert losses(model) == losses(twin)
        assert watch._plan.recipe.observe_only
    said = capsys.readouterr().err
    assert "2 Linears observed, computing as before (backend " in said
    assert "; not in FP8, because sm_80: cuBLASLt has none; " in said
    assert "gemm='emulated' computes it in float32 products, slower" in said


def test_attach_multiplies_codes_on_hopper_and_says_so(on_a_gpu, capsys):
    model = on_a_gpu(None)
    twin = copy.deepcopy(model)
    with fp8watch.attach(model, recipe=BLOCKWISE):
        in_codes = losses(model)
    said = capsys.readouterr().err
    assert "2 Linears now compute in FP8 (blockwise, backend " in said
    assert ", codes multiplied by torch._scaled_mm)" in said
    with fp8watch.attach(twin, recipe=BLOCKWISE, gemm="emulated"):
        assert losses(twin) == pytest.approx(in_codes, rel=1e-5)
    assert "_scaled_mm" not in capsys.readouterr().err


@pytest.mark.parametrize("dims", [(1, 1, 1), (2, 1, 1), (1, 1, 2)])
def test_tiles_that_the_product_does_not_have_leave_the_model_alone(on_a_gpu, capsys, dims):
    model, recipe = on_a_gpu(None), recipes.blockwise(environ={}, block_dims=dims)
    twin = copy.deepcopy(model)
    with fp8watch.attach(model, recipe=recipe):
        assert losses(model) == losses(twin)
    assert "; not in FP8, because its tiles are not 1×128 · 128×128 · 1×128" in capsys.readouterr().err
    with pytest.raises(ValueError, match="gemm='scaled_mm' cannot be used: its tiles are not 1×128"):
        fp8watch.attach(twin, recipe=recipe, gemm="scaled_mm")


@pytest.mark.parametrize(
    ("recipe", "gemm", "how"),
    [(BLOCKWISE, None, "scaled_mm"), (BLOCKWISE, "emulated", "emulated"), (observe(BLOCKWISE), None, "observe")],
)
def test_a_session_says_how_products_are_made_and_on_what(on_a_gpu, monkeypatch, recipe, gemm, how):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    on_a_gpu(None)
    assert choose_gemm(gemm or "auto", recipe, torch.device("cuda")).facts(torch.device("cuda")) == {
        "gemm": how,
        "device": "NVIDIA H200",
    }
    assert choose_gemm("auto", recipe, torch.device("cpu")).facts(torch.device("cpu"))["device"] == "cpu"
