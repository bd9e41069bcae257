"""NVFP4 is read as Transformer Engine's own reference in Python wrote it, and measured against the operand that it cast."""

import importlib
from types import SimpleNamespace

import pytest
import torch
from check_observed import module_of
from torch import nn
from watched import FEATURES, HIDDEN, TOKENS

from fp8watch import recipe as recipes
from fp8watch.integrations import te_nvfp4
from fp8watch.integrations.te_recipe import operand_of
from fp8watch.integrations.te_stats import derived, exact
from fp8watch.integrations.te_tensors import read
from fp8watch.kernels import reference, resolve
from fp8watch.numerics.formats import E2M1
from fp8watch.quantize import nvfp4
from fp8watch.quantize.site_quantizer import SitePlace, site_quantizer
from fp8watch_agent.record import Measured

PLACES = ("reference_nvfp4", "quantization_ref_nvfp4")


@pytest.fixture(scope="module")
def oracle():
    for name in PLACES:
        try:
            return importlib.import_module(f"transformer_engine.pytorch.custom_recipes.{name}")
        except ImportError:
            continue
    pytest.skip("this version has no reference quantiser for NVFP4 where it is looked for")


@pytest.fixture
def on_cpu():
    """Bits are compared behind a rotation whose product each device rounds in its own way."""
    with torch.device("cpu"):
        yield


def quantizer(oracle, tile=(1, 16), rht=True):
    utils = getattr(oracle, "reference_utils", None) or oracle.utils
    return oracle.NVFP4QuantizerRef(
        dtype=utils.Fp4Formats.E2M1,
        quant_tile_shape=tile,
        pow_2_scales=False,
        with_rht=rht,
        rowwise=True,
        columnwise=True,
    )


def dequantised(oracle, codes, scale, amax):
    values = oracle.cast_from_fp4x2(codes.view(torch.uint8), torch.float32)
    return values * scale.float().repeat_interleave(16, 1)[:, : values.shape[1]] * (amax.float() / 2688)


@pytest.mark.parametrize("tile", [(1, 16), (16, 16)])
def test_codes_and_scales_are_those_of_the_reference(te, oracle, tile):
    torch.manual_seed(0)
    x = torch.randn(96, 64, dtype=torch.bfloat16) * torch.logspace(-3, 3, 96, dtype=torch.bfloat16)[:, None]
    x[32:48, 16:32] = 0
    made = quantizer(oracle, tile, rht=tile == (1, 16))
    q = made.quantize(x)
    for columnwise, (codes, scale, amax) in enumerate(
        ((q.data, q.scale, q.global_amax_row), (q.data_t, q.scale_t, q.global_amax_col))
    ):
        view = read(q, bool(columnwise))
        assert not isinstance(view, str), view
        ours = view.values() * view.scale_inv.repeat_interleave(view.tile[0], 0).repeat_interleave(view.tile[1], 1)
        theirs = dequantised(oracle, codes, scale, amax)
        assert view.shape == (96, 64)
        assert torch.allclose(ours, theirs.t() if columnwise else theirs, rtol=1e-6, atol=0)
        seen = te_nvfp4.rotated(x, q, bool(columnwise))
        cast = made._apply_rht(x.t().contiguous()).t() if columnwise else x
        assert torch.equal(seen, cast)
        summary = exact(seen, view, False, 0.0, bound=False, heavy=True).summary()
        assert summary["amax_max"] == cast.abs().max().item()
        noise = (ours - cast.float()).double().square().sum().item()
        assert summary["noise_energy"] == pytest.approx(noise, rel=1e-5)
        wide = view.scale_inv.repeat_interleave(view.tile[0], 0).repeat_interleave(view.tile[1], 1)
        assert summary["num_saturated"] == int((cast.float().abs() / wide >= 7).sum())
        lost = ((theirs.t() if columnwise else theirs) == 0) & (cast != 0)
        assert summary["num_underflow"] == int(lost.sum())


KINDS = {
    "normal": lambda x: x,
    "octaves": lambda x: x * torch.exp2(torch.randint(-16, 4, x.shape)),
    "rows": lambda x: x * torch.logspace(-12, 3, 96)[:, None],
    "zeros": lambda x: x * 0,
    "tiny": lambda x: x * 1e-38,
    "inf": lambda x: x.index_put((torch.tensor(3), torch.tensor(5)), torch.tensor(float("inf"))),
    "nan": lambda x: x.index_put((torch.tensor(3), torch.tensor(5)), torch.tensor(float("nan"))),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile", [(1, 16), (16, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_our_own_recipe_has_the_bits_of_the_reference(te, oracle, on_cpu, kind, tile, dtype):
    torch.manual_seed(0)
    x = KINDS[kind](torch.randn(96, 64)).to(dtype)
    with torch.backends.mkldnn.flags(enabled=False):  # AVX-512 takes subnormals of bfloat16 for 0; a GPU does not
        q = quantizer(oracle, tile, rht=tile == (1, 16)).quantize(x)
    made = recipes.nvfp4(environ={}, disable_stochastic_rounding=True)
    operand = "input" if tile == (1, 16) else "weight"
    for columnwise, (data, scale, amax) in enumerate(
        ((q.data, q.scale, q.global_amax_row), (q.data_t, q.scale_t, q.global_amax_col))
    ):
        place = SitePlace(operand, "columnwise" if columnwise else "rowwise", "")
        ours = site_quantizer(made, place, resolve("reference", "cpu"), torch.device("cpu"))
        seen = ours.as_cast(x)
        mine = nvfp4.cast(seen, ours.tile_for((96, 64)))
        numbers = reference.untiled(mine.numbers_t, seen)
        codes = torch.bucketize(numbers.abs(), torch.tensor(te_nvfp4.VALUES)).to(torch.uint8)
        codes |= torch.signbit(numbers).to(torch.uint8) << 3
        scales = mine.scale.float()
        scales = scales.repeat_interleave(tile[0], 1 if columnwise else 0)
        packed = data.view(torch.uint8)
        theirs = torch.stack((packed & 0xF, packed >> 4), -1).reshape(packed.shape[0], -1)
        assert torch.equal(codes.t() if columnwise else codes, theirs)
        same = (scales.t() if columnwise else scales), scale.float()
        assert torch.equal(*(s.nan_to_num(7.5) for s in same))
        assert torch.equal(mine.amax.nan_to_num(7.5).view(1), amax.float().nan_to_num(7.5).view(1))


def test_our_own_recipe_reads_theirs(te):
    recipe = importlib.import_module("transformer_engine.common.recipe")
    if not hasattr(recipe, "NVFP4BlockScaling"):
        pytest.skip("this version has no recipe of that name")
    assert recipes.resolve_recipe(recipe.NVFP4BlockScaling(), environ={}, argv=[]) == recipes.nvfp4(environ={})
    bare = recipe.NVFP4BlockScaling(disable_rht=True, disable_2d_quantization=True)
    assert recipes.resolve_recipe(bare, environ={}, argv=[]) == recipes.nvfp4(
        environ={}, disable_rht=True, disable_2d_quantization=True
    )


def test_our_own_products_are_those_of_the_reference(te, oracle):
    """wgrad of a Linear whose gradients are rounded to nearest, as its GEMM multiplies."""
    torch.manual_seed(0)
    x, g = torch.randn(96, 64), torch.randn(96, 32)
    gemm = importlib.import_module("transformer_engine.pytorch.custom_recipes.gemm")
    theirs = quantizer(oracle)
    qx, qg = theirs.quantize(x), theirs.quantize(g)
    want = theirs.qgemm(
        qg.data_t, qx.data_t, None, torch.float32, qg.scale_t, qx.scale_t,
        gemm_type=gemm.GEMMType.WGRAD, qresult_x=qg, qresult_w=qx,
    )  # fmt: skip
    recipe = recipes.nvfp4(environ={}, disable_stochastic_rounding=True)
    values = []
    for operand, t in (("grad_output", g), ("input", x)):
        q = site_quantizer(
            recipe, SitePlace(operand, "columnwise", ""), resolve("reference", "cpu"), torch.device("cpu")
        )
        values.append(q(t, stats=False, heavy=False)[0])
    assert torch.allclose(values[0].t() @ values[1], want, rtol=1e-5, atol=1e-5)


def test_a_block_whose_scale_is_zero_is_underflow(te, oracle):
    x = torch.ones(16, 64, dtype=torch.bfloat16)
    x[:, 16:32] = 1e-7
    view = read(quantizer(oracle).quantize(x), False)
    summary = exact(x, view, False, 0.0, bound=False, heavy=True).summary()
    assert (summary["num_underflow"], summary["num_saturated"]) == (256, 0)


@pytest.mark.parametrize("swizzled", [False, True])
def test_the_layout_of_the_stock_quantiser_is_read(te, oracle, swizzled):
    """Padded scales as bytes, in plain order or in that of the tensor cores."""
    q = quantizer(oracle).quantize(torch.randn(96, 80, dtype=torch.bfloat16))

    def laid_out(scale):
        rows, blocks = scale.shape
        padded = torch.randint(0, 255, (-(-rows // 128) * 128, -(-blocks // 4) * 4), dtype=torch.uint8)
        padded[:rows, :blocks] = scale.to(torch.float8_e4m3fn).view(torch.uint8)
        if not swizzled:
            return padded
        long, short = padded.shape
        tiles = padded.reshape(long // 128, 4, 32, short // 4, 4).permute(0, 3, 2, 1, 4)
        return tiles.reshape(long, short).contiguous()

    stock = SimpleNamespace(
        _fp4_dtype=10, _with_gemm_swizzled_scales=swizzled, _quantizer=None,
        _rowwise_data=q.data.view(torch.uint8), _rowwise_scale_inv=laid_out(q.scale), _amax_rowwise=q.global_amax_row,
        _columnwise_data=q.data_t.view(torch.uint8), _columnwise_scale_inv=laid_out(q.scale_t), _amax_columnwise=q.global_amax_col,
    )  # fmt: skip
    for columnwise in (False, True):
        ours, theirs = read(stock, columnwise), read(q, columnwise)
        assert torch.equal(ours.codes, theirs.codes)
        assert torch.equal(ours.scale_inv, theirs.scale_inv)


def test_stochastic_rounding_is_right_in_expectation(te):
    """No code is compared with another; the gain of many draws is 1, and the noise that of the grid."""
    generator, device = torch.Generator("cpu").manual_seed(0), torch.get_default_device()

    def drawn():
        return torch.rand(64, 256, generator=generator, device="cpu").to(device)

    x = drawn() * 5.9 + 0.05
    x[:, ::16] = 6.0
    grid = torch.tensor(te_nvfp4.VALUES)
    high = torch.bucketize(x, grid).clamp(1, 7)
    share = (x - grid[high - 1]) / (grid[high] - grid[high - 1])
    gain = signal = 0.0
    for _ in range(32):
        codes = torch.where(drawn() < share, high, high - 1).to(torch.uint8)
        stock = SimpleNamespace(
            _fp4_dtype=10, _quantizer=SimpleNamespace(stochastic_rounding=True), _rowwise_data=codes[:, ::2] | codes[:, 1::2] << 4,
            _rowwise_scale_inv=torch.full((64, 16), 0x7E, dtype=torch.uint8), _amax_rowwise=torch.tensor([6.0]),
        )  # fmt: skip
        summary = exact(x, read(stock, False), False, 0.0, bound=False, heavy=True).summary()
        gain, signal = gain + summary["gain_energy"], signal + summary["signal_energy"]
        assert 0 < summary["noise_energy"] < 0.03 * summary["signal_energy"]
    assert abs(gain / signal) < 2e-4


def test_codes_alone_tell_no_counts(te, oracle):
    view = read(quantizer(oracle).quantize(torch.randn(32, 64, dtype=torch.bfloat16)), False)
    stats = derived(view, False, 0.0, bound=False)
    assert not stats.measured & Measured.COUNTS
    assert stats.measured & Measured.AMAX


@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear"])
def test_a_module_that_computes_in_it_is_observed(te, oracle, watched, kind):
    theirs = importlib.import_module("transformer_engine.common.recipe")
    watch = watched(nn.Sequential(module_of(te, kind, False)))

    def factory(role):
        weight = operand_of(role) == "weight"
        return quantizer(oracle, (16, 16) if weight else (1, 16), rht=not weight)

    watch.train(theirs.CustomRecipe(qfactory=factory))
    watch.clean()
    assert watch.missing() == []
    facts = watch.observer.numerics.values()
    assert {(f.recipe, f.format) for f in facts} == {("nvfp4", E2M1.name)}
    assert {f.tile for f in facts} == {(1, 16), (16, 1)}
    for found in watch.seen.values():
        for row, stats in found:
            summary = stats.summary()
            if watch.observer.numerics[row].evidence["energies"] == "exact":
                assert 1e-4 * summary["signal_energy"] < summary["noise_energy"] < 0.03 * summary["signal_energy"]
            assert summary["amax_max"] > 0
    assert TOKENS > HIDDEN // 2 >= FEATURES
