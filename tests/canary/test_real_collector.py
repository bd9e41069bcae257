"""The six public kernel faults, on our path and on torchao's, attached at the defaults to a real collector: its incidents."""

from __future__ import annotations

import time
from importlib.util import find_spec

import pytest
import torch
from canary import faults
from canary.conftest import Small
from canary.expert_models import Experts
from canary.faults import break_site, by_codes
from proving.collector import incidents, serving
from torch import nn

import fp8watch
from fp8watch import recipe as recipes
from fp8watch.kernels import emulated_gemm

STEPS = 4
QUANTISER, KERNEL = "quantiser-fault", "kernel-output-fault"


def spread(data, scale_inv):
    """Each code stored at row + column, as where the stride of a row is 1 (torchao 4900)."""
    codes = data.view(torch.uint8)
    out = torch.zeros_like(codes).flatten()
    out[(torch.arange(codes.shape[0])[:, None] + torch.arange(codes.shape[1])).flatten()] = codes.flatten()
    return out.view_as(codes).view(data.dtype), scale_inv


def bytes_of_a_miscompiled_store(data, scale_inv):
    """One in five hundred codes is what nobody wrote, none of them a NaN (torchao 4652)."""
    g = torch.Generator().manual_seed(1)
    codes = data.view(torch.uint8)
    other = torch.randint(0, 120, codes.shape, generator=g, dtype=torch.uint8)
    return torch.where(torch.rand(codes.shape, generator=g) < 0.002, other, codes).view(data.dtype), scale_inv


def rounded_up(data, scale_inv):
    """FP32 scales made powers of two, the codes as they were (transformers 47030): gain +31 %."""
    return data, torch.exp2(torch.ceil(torch.log2(scale_inv)))


def bytes_of_the_padding(data, scale_inv):
    """The last scales are those that lie behind the tensor's: E8M0 bytes that nobody wrote (Transformer Engine 3070)."""
    wrong = scale_inv.clone()
    wrong.view(-1)[-3:] = torch.nan
    return data, wrong


OURS = {
    "codes all zero": (recipes.blockwise, {}, "b", "grad_output", False, faults.zeroed),
    "codes at the wrong place": (recipes.blockwise, {}, "b", "input", False, spread),
    "bytes of a transposed copy": (recipes.blockwise, {}, "b", "input", True, bytes_of_a_miscompiled_store),
    "scales rounded up": (recipes.blockwise, {"power_2_scale": False}, "b", "input", False, rounded_up),
    "scales of the padding": (recipes.mxfp8, {}, "b", "input", False, bytes_of_the_padding),
}  # fmt: skip


def run(url, name, model, *, before=lambda watch: None, **how):
    """Train a few steps, watched by the collector."""
    torch.manual_seed(0)
    watch = fp8watch.attach(model, run=name, collector=url, **how)
    before(watch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    try:
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(96, 160)).backward()
            optimizer.step()
        assert watch.flush(20)
        assert dict(watch.guard.errors) == {}
    finally:
        watch.detach()


def first(url, run_id):
    """The first incident: mode, severity, step, place. Waits for the detectors."""
    for _ in range(200):
        if found := [i for i in incidents(url, run_id) if i["origin"]]:
            worst = found[0]
            return worst["mode"], worst["severity"], worst["first_step"], worst["place"]
        time.sleep(0.05)
    return None


@pytest.mark.heavy(20, "fp8watch/layers", "fp8watch/quantize", "server/fp8watch_server/detect")
def test_each_public_fault_is_an_incident_with_its_mode_step_and_place(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FP8WATCH_SPOOL_DIR", str(tmp_path / "spool"))
    told = {}
    with serving(tmp_path) as url:

        def look(name, *args, **kwargs):
            monkeypatch.setenv("FP8WATCH_RUN", name.replace(" ", "-"))
            run(url, name, *args, **kwargs)
            mode, severity, step, place = first(url, name.replace(" ", "-"))
            told[name] = mode, severity, step, place["module"], place["operand"]

        for name, (make, options, fqn, operand, columnwise, fault) in OURS.items():
            given = {"environ": {}, **options} if make is recipes.blockwise else options

            def broken(watch, fqn=fqn, operand=operand, columnwise=columnwise, fault=fault):
                break_site(watch, fqn, operand, columnwise, fault, dequantised=by_codes(fault))

            look(name, Small(), recipe=make(**given), before=broken)

        right = emulated_gemm.wgrad
        monkeypatch.setattr(emulated_gemm, "wgrad", lambda g, *a: right(g, *a) + (0 if g.numel() else 1e-3))
        look("experts without tokens", Experts(nn.Linear, 0))
        monkeypatch.setattr(emulated_gemm, "wgrad", right)
        if find_spec("torchao") is not None:
            _torchao(look, monkeypatch)

    ours = {name: (QUANTISER, "critical", 0, case[2], case[3]) for name, case in OURS.items()}
    assert {name: told[name] for name in OURS} == ours
    mode, severity, step, module, _ = told["experts without tokens"]
    assert (mode, severity, module) == (KERNEL, "critical", "e1")
    assert step == 0
    if find_spec("torchao") is not None:
        # its casts are seen in the module's turn, the second step; a NaN at once, in what came out
        at_once = {"scales of the padding": (KERNEL, "critical", 0)}
        theirs = {
            name: (*at_once.get(name, (QUANTISER, "critical", 1)), "b", case[0]) for name, case in TORCHAO.items()
        }
        assert {name: told["torchao " + name] for name in TORCHAO} == theirs


TORCHAO = {  # operand, which of its casts, recipe, fault
    "codes all zero": ("grad_output", 1, "tensorwise", faults.zeroed),
    "codes at the wrong place": ("input", 1, "tensorwise", spread),
    "bytes of a transposed copy": ("input", 0, "tensorwise", bytes_of_a_miscompiled_store),
    "scales rounded up": ("input", 1, "tensorwise", rounded_up),
    "scales of the padding": ("input", 1, "rowwise", bytes_of_the_padding),
}  # fmt: skip


def _torchao(look, monkeypatch) -> None:
    import sys

    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    from fp8watch.layers.torchao_casts import FUNCTION, MODULE, unwatch_casts

    module = sys.modules[MODULE]
    right = getattr(module, FUNCTION)
    for name, (operand, number, recipe, fault) in TORCHAO.items():
        seen = []

        def cast(x, *args, gemm_input_role, operand=operand, number=number, fault=fault, seen=seen, **kwargs):
            made = right(x, *args, gemm_input_role=gemm_input_role, **kwargs)
            if gemm_input_role.value == operand and tuple(x.shape) == ((96, 272) if operand == "input" else (96, 144)):
                seen.append(1)
                if len(seen) % 2 == number:
                    made._data, scale_inv = fault(made._data, 1 / made._scale)
                    made._scale = 1 / scale_inv
            return made

        monkeypatch.setattr(module, FUNCTION, cast)
        model = Small()
        convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))
        look("torchao " + name, model)
        unwatch_casts()
        monkeypatch.setattr(module, FUNCTION, right)
