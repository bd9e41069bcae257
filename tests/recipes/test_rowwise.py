"""Rowwise scaling is torchao's: the numbers below are what its version 0.18 made of the same operand."""

from __future__ import annotations

import pytest
import torch
from recipes.linears import run

from fp8watch import recipe as recipes
from fp8watch.kernels import available, resolve
from fp8watch.quantize.self_consistency import Reads, check_quantiser
from fp8watch.quantize.site_quantizer import places, site_quantizer

USABLE = [name for name, reason in available("cpu").items() if reason is None]

TORCHAO = {  # (powers of two, columnwise) -> codes, NaN as 7f, and the bits of the scales
    (True, False): (
        "0008b0f7012de3801e4d808200000000000000000000000003d87e0fbffd0332ed80274c80000080807f0080800000807668809f4d008ac30002b7df",
        [1073741824, 1468006400, 1434451968, 0, 1056964608],
    ),
    (True, True): (
        "0008f0f71000fb8a7e758885000000000000000000000000008000008080000080800000f00078e28e7f7486f17601907678a3af7d00b2fb352ff7f7",
        [1056964608, 1073741824, 1140850688, 1073741824, 1107296256, 0, 1098907648, 1115684864, 1174405120, 1115684864,
         1124073472, 1082130432],
    ),
    (False, False): (
        "000fb7fe0234eb812554808500000000000000000000000003d87e0fbffd0333ee80274c80000080807f0080800000807e7080a7550092cb0004bfe7",
        [1081209590, 1472969232, 1434559268, 0, 1065353211],
    ),
    (False, True): (
        "000ef7fe1000fe8d7e7c8e89000000000000000000000000008000008080000080800000f8007eea8f7f7788f17e02977e7eaab67e00b5fe3537fefe",
        [1065353211, 1080050063, 1147432732, 1081209590, 1107608940, 0, 1101006677, 1118090223, 1174559760, 1123753511,
         1131371417, 1089773911],
    ),
}  # fmt: skip


def operand() -> torch.Tensor:
    """A row of zeros, one far below, one with an Inf, and an amax just above what a power of two carries."""
    i = torch.arange(5 * 12, dtype=torch.float64)
    x = (torch.sin(i * 1.7) * torch.exp2((i * 7) % 23 - 14)).reshape(5, 12).float()
    x[1] = 0
    x[2] *= 2.0**-40
    x[3, 5] = float("inf")
    x[4, 0] = 448 * (1 + 2.0**-22)
    return x


@pytest.mark.parametrize("backend", USABLE)
@pytest.mark.parametrize(("power_2", "columnwise"), TORCHAO)
def test_codes_and_scales_are_torchaos(backend, power_2, columnwise):
    recipe = recipes.rowwise(power_2_scale=power_2)
    place = next(p for p in places(recipe) if p.operand == "input" and (p.direction == "columnwise") == columnwise)
    quantizer = site_quantizer(recipe, place, resolve(backend, "cpu"), torch.device("cpu"))
    codes, scales = TORCHAO[power_2, columnwise]
    x = operand()
    (data, scale_inv), stats = quantizer.codes(x, stats=True, heavy=True)
    assert bytes(data.view(torch.uint8).flatten().tolist()).hex() == codes
    assert quantizer.scale(x).flatten().view(torch.int32).tolist() == scales
    assert torch.equal(scale_inv.flatten(), 1 / torch.tensor(scales, dtype=torch.int32).view(torch.float32))
    assert tuple(scale_inv.shape) == ((1, 12) if columnwise else (5, 1))
    values, _ = quantizer(x, stats=False, heavy=False)
    finite = values.isfinite()
    assert torch.equal(values[finite], (data.float() * scale_inv)[finite])
    assert stats.summary()["num_inf"] == 1


@pytest.mark.parametrize("backend", USABLE)
def test_what_it_makes_holds_against_its_operand(backend):
    recipe = recipes.rowwise()
    for columnwise, place in enumerate(places(recipe)[:2]):
        quantizer = site_quantizer(recipe, place, resolve(backend, "cpu"), torch.device("cpu"))
        x = torch.randn(40, 300) * torch.exp2(torch.randint(-8, 8, (40, 1)))
        (data, scale_inv), _ = quantizer.codes(x, stats=False, heavy=False)
        found = check_quantiser(x, Reads(data, scale_inv, quantizer.tile_for((40, 300))), quantizer.spec)
        assert int(found.tiles[0]) > 2 + columnwise
        assert not found.elements.any()
        assert not found.tiles[1:].any()


def test_the_gemms_of_a_linear(attach, linear):
    def rows(x, axis):
        scale = torch.exp2(torch.floor(torch.log2(448 / x.abs().amax(axis, keepdim=True).clamp_min(1e-12))))
        return (x * scale).to(torch.float8_e4m3fn).float() / scale

    model, x, grad = linear
    watch = attach(model, recipe="rowwise")
    y, dx, dw = run(model, x, grad)
    w = model[0].weight.detach()
    assert torch.equal(y, rows(x.detach(), 1) @ rows(w, 1).t() + model[0].bias.detach())
    assert torch.equal(dx, rows(grad, 1) @ rows(w, 0))
    assert torch.equal(dw, rows(grad, 0).t() @ rows(x.detach(), 0))
    watch.step()
    tiles = {(s.operand, s.direction): s.tile for s in watch._recorder.sites}
    assert tiles["input", "rowwise"] == (1, 64)
    assert tiles["input", "columnwise"] == (40, 1)
    assert tiles["weight", "columnwise"] == (48, 1)
    assert {s.recipe for s in watch._recorder.sites} == {"rowwise"}
    _, seen = watch._recorder.step(0)
    assert len(seen) == 6
    assert not any(int(row["num_off_scale_tiles"]) for row in seen.values())
    assert {int(row["num_tiles"]) for row in seen.values()} == {40, 48, 64}
    assert not watch.guard.errors


def test_a_row_needs_an_eps():
    with pytest.raises(ValueError, match="a row of zeros has no scale without one; 1e-12 is torchao's"):
        recipes.rowwise(amax_epsilon=0.0)
