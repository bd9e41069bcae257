"""A Linear in FP8 keeps less for its backward than the bfloat16 one, and its losses have the bits that they had."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from fp8watch import recipe as recipes
from fp8watch.layers import fp8_linear, saved_operands

RECIPES = [recipes.blockwise, recipes.current, recipes.delayed, recipes.mxfp8, recipes.rowwise, recipes.nvfp4]


def kept_bytes(model, x):
    """Bytes of the tensors that autograd holds between forward and backward, each once."""
    held = {}

    def pack(t):
        held[t.data_ptr(), t.numel()] = t.numel() * t.element_size()
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        y = model(x)
    y.sum().backward()
    return sum(held.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("make", RECIPES)
def test_a_linear_keeps_no_more_bytes_than_in_bfloat16(attach, make, dtype):
    plain = nn.Sequential(nn.Linear(512, 384, bias=False)).to(dtype)
    model, x = copy.deepcopy(plain), torch.randn(256, 512, dtype=dtype, requires_grad=True)
    attach(model, recipe=make())
    in_bfloat16 = 2 * (256 * 512 + 384 * 512)
    assert kept_bytes(plain, x) >= in_bfloat16
    assert kept_bytes(model, x) <= 0.6 * in_bfloat16


@pytest.mark.parametrize("high", [[], ["grad_output"], ["input"], ["weight"]])
def test_gemms_in_high_precision_keep_what_they_would(attach, high):
    plain = nn.Sequential(nn.Linear(512, 384, bias=False)).bfloat16()
    model, x = copy.deepcopy(plain), torch.randn(256, 512, dtype=torch.bfloat16, requires_grad=True)
    attach(model, recipe=recipes.blockwise(high_precision=high))
    assert kept_bytes(model, x) <= kept_bytes(plain, x) + 8  # the number of its site


@pytest.mark.parametrize("make", RECIPES)
def test_losses_are_those_of_values_that_were_kept(attach, mlp, train, monkeypatch, make):
    twin = copy.deepcopy(mlp)
    attach(mlp, recipe=make())
    losses = train(mlp, steps=4)

    def values(x, site, operand, *, count, now, later, tile, warms):
        row, column = fp8_linear.quantize_dequantize(x, site, operand, count=count, rowwise=now, columnwise=later)
        return row, column, row.new_empty((0,))

    monkeypatch.setattr(fp8_linear, "quantize_for_backward", values)
    attach(twin, recipe=make())
    assert train(twin, steps=4) == losses
    assert all(torch.equal(a, b) for a, b in zip(mlp.parameters(), twin.parameters(), strict=True))


def test_in_a_warm_up_values_are_kept_and_codes_after_it(attach):
    model, x = nn.Sequential(nn.Linear(256, 256, bias=False)), torch.randn(128, 256, requires_grad=True)
    watch = attach(model, recipe=recipes.blockwise(warmup_steps=1))
    warm = kept_bytes(model, x)
    watch.step()
    assert kept_bytes(model, x) < 0.3 * warm
    assert not watch.guard.errors


@pytest.mark.parametrize("fmt", ["E4M3", "E5M2"])
def test_dequantised_again_every_code_has_its_bits(fmt):
    from fp8watch.kernels import available, cpu, reference
    from fp8watch.numerics.formats import FORMATS

    if available("cpu")["cpu"] is not None:
        pytest.skip("no C compiler here: set CC")
    codes = torch.arange(256, dtype=torch.uint8).repeat(9, 3).view(FORMATS[fmt].dtype)
    for tile in ((1, 128), (4, 1), (128, 128), (9, 768), (1, 32), (3, 7)):
        shape = (-(-9 // tile[0]), -(-768 // tile[1]))
        scale_inv = torch.exp2(torch.randint(-130, 20, shape)) * torch.rand(shape)
        got, want = cpu.dequantize(codes, scale_inv, tile), reference.dequantize(codes, scale_inv, tile)
        nan = want.isnan()
        assert torch.equal(got.isnan(), nan)
        assert torch.equal(got.view(torch.int32)[~nan], want.view(torch.int32)[~nan])


def test_a_code_of_a_graph_that_outlived_its_watch_is_refused(attach):
    watch = attach(model := nn.Sequential(nn.Linear(64, 64)))
    y = model(torch.randn(32, 64, requires_grad=True))
    watch.detach()
    with pytest.raises(RuntimeError, match="belongs to a detached watch"):
        y.sum().backward()
    assert saved_operands.dequantize_kept(torch.ones(2, 2), torch.ones(0), torch.tensor(0), 0).dtype == torch.float32
