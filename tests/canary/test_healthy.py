"""Healthy training of every recipe and backend raises nothing, though a module has its turn in every step."""

from __future__ import annotations

import pytest
import torch
from canary.healthy_runs import LONG, Tiny
from canary.own_forward import ScriptFloat8Linear
from quantize.backends import USABLE
from support.counts import part_of
from torch import nn

from fp8watch import recipe as recipes
from fp8watch_agent.record import QUANTISER_FAULTS, Measured

RESTS_ON = "fp8watch/layers", "fp8watch/kernels", "fp8watch/observer"
STEPS = [pytest.param(40, id="40"), pytest.param(300, id="300", marks=pytest.mark.heavy(8, *RESTS_ON))]
RECIPES = {
    "blockwise": lambda: recipes.blockwise(environ={}),
    "blockwise, FP32 scales, HYBRID": lambda: recipes.blockwise(environ={}, power_2_scale=False, fp8_format="HYBRID"),
    "current": lambda: recipes.current(),
    "delayed": lambda: recipes.delayed(),
    "mxfp8": lambda: recipes.mxfp8(),
    "rowwise": lambda: recipes.rowwise(),
    "nvfp4": lambda: recipes.nvfp4(environ={}),
    "observe": lambda: "observe",
}


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("backend", USABLE)
@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_a_healthy_run_is_silent(train, recipe, backend, steps) -> None:
    line, _ = train(steps, tokens=40, recipe=RECIPES[recipe](), backend=backend, share=1.0)
    assert line.said() == []
    checked = {i for rows in line.rows for i, row in rows.items() if row["measured"] & Measured.QUANTISER}
    multiplied = {i for rows in line.rows for i, row in rows.items() if row["measured"] & Measured.GEMM}
    if recipe == "observe":
        assert not checked | multiplied
        return
    assert checked == set(line.sites) - {i for i, s in line.sites.items() if s.operand == "output"}
    assert len(multiplied) == (
        8 if recipe.startswith(("blockwise", "mxfp8", "rowwise", "nvfp4")) else 6
    )  # the input of `a` has no gradient
    assert not any(row[name] for rows in line.rows for row in rows.values() for name in QUANTISER_FAULTS)
    errors = [row["gemm_error"] for rows in line.rows for row in rows.values() if row["measured"] & Measured.GEMM]
    assert max(errors) < 1e-4


MORE = {
    "current, forward only": lambda: recipes.current(high_precision=["grad_output"]),
    "delayed, after a warm-up": lambda: recipes.delayed(warmup_steps=100),
    "observe of delayed": lambda: recipes.delayed(observe_only=True),
}


@pytest.mark.heavy(8, *RESTS_ON)
@pytest.mark.parametrize("backend", USABLE)
@pytest.mark.parametrize("recipe", sorted(RECIPES | MORE))
def test_a_long_healthy_run_at_the_defaults_is_silent(train, recipe, backend) -> None:
    made = (RECIPES | MORE)[recipe]()
    line, _ = train(part_of(LONG), model=Tiny(nn.Linear), tokens=24, recipe=made, backend=backend)
    assert line.said() == []


@pytest.mark.heavy(8, *RESTS_ON)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [None, 1.0])
def test_a_long_healthy_run_of_own_forwards_is_silent(train, share, dtype) -> None:
    line, _ = train(part_of(LONG), model=Tiny(ScriptFloat8Linear), tokens=32, dtype=dtype, share=share)
    assert line.said() == []


@pytest.mark.heavy(8, *RESTS_ON)
def test_a_long_healthy_run_of_codes_is_silent(train) -> None:
    model = Tiny(lambda i, o: nn.Linear(i, o, bias=False))
    line, _ = train(part_of(LONG), model=model, tokens=32, dtype=torch.bfloat16, gemm="scaled_mm")
    assert line.said() == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gemm", ["emulated", "scaled_mm"])
def test_half_precision_is_silent(train, dtype, gemm) -> None:
    line, _ = train(30, dtype=dtype, gemm=gemm, share=1.0)
    assert line.said() == []
