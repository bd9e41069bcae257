"""A small language model on real text learns in FP8 what it learns in float32.

Four layers, 300 steps, a learning rate at which a change of 1e-6 in the first weights moves the mean loss of the last
50 steps by 1e-6 of itself: what differs by more comes from the arithmetic. At three times that rate the runs separate
chaotically by a per cent, whatever causes it, and the comparison would say nothing.
"""

from __future__ import annotations

import math

import pytest
import torch
from support.counts import in_turn
from torch import nn

from fp8watch.demo.model import ByteModel
from fp8watch.demo.text import batches, load_text
from fp8watch.kernels import emulated_gemm
from fp8watch.recipe import blockwise, current, delayed, mxfp8

STEPS, LAST, TOLERANCE = 300, 50, 0.0025


def mean_loss(attach=None, steps=STEPS, **how):
    """Mean loss of the last steps, in nats."""
    torch.manual_seed(0)
    model = ByteModel(dim=128, num_layers=4, hidden=384)
    if attach is not None:
        attach(model, **how)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    losses = []
    for step, (tokens, targets) in zip(range(steps), batches(load_text(), 16, 64, seed=7), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = 3e-4 * min(1, (step + 1) / 40) * (0.5 + 0.5 * math.cos(math.pi * step / STEPS))
        loss = model(tokens, targets)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return sum(losses[-LAST:]) / LAST


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def in_float32():
    return mean_loss()


RECIPES = {
    "blockwise": lambda: blockwise(environ={}),
    "blockwise, HYBRID": lambda: blockwise(fp8_format="HYBRID", environ={}),
    "blockwise, FP32 scales": lambda: blockwise(environ={"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}),
    "current": lambda: current(environ={}),
    "delayed": delayed,
    "delayed, warmed up": lambda: delayed(warmup_steps=3),
    "mxfp8": mxfp8,
}


@pytest.mark.heavy(
    60, "fp8watch/layers", "fp8watch/kernels", "fp8watch/quantize", "fp8watch/numerics", "fp8watch/recipe"
)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", in_turn(RECIPES))
def test_300_steps_end_within_a_quarter_of_a_per_cent(attach, monkeypatch, in_float32, name):
    monkeypatch.setenv("FP8WATCH_DISABLED", "stats")
    got = mean_loss(attach, recipe=RECIPES[name]())
    assert abs(got / in_float32 - 1) < TOLERANCE, f"{got:.4f} nats, float32 {in_float32:.4f}"


@pytest.mark.heavy(100, "fp8watch/layers", "fp8watch/kernels", "fp8watch/quantize", "fp8watch/numerics")
@pytest.mark.timeout(900)
def test_a_quantiser_that_loses_two_bits_does_not(attach, monkeypatch, in_float32):
    """The tolerance is not so wide that anything passes: operands with one bit of mantissa are told apart."""
    monkeypatch.setenv("FP8WATCH_DISABLED", "stats")
    right = emulated_gemm._mm

    def coarse(x):
        mantissa, exponent = torch.frexp(x)
        return torch.ldexp(torch.round(mantissa * 4) / 4, exponent)

    monkeypatch.setattr(emulated_gemm, "_mm", lambda a, b: right(coarse(a), coarse(b)))
    assert abs(mean_loss(attach) / in_float32 - 1) > TOLERANCE
