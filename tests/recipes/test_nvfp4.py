"""NVFP4 equals the oracle bit by bit, rounds gradients right in expectation, and draws from no generator of torch's."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
import torch
from quantize.operands import DTYPES, KINDS, case, operand
from recipes.oracles import e2m1
from recipes.oracles import nvfp4 as oracle

from fp8watch import recipe as recipes
from fp8watch.kernels import reference, resolve
from fp8watch.quantize import nvfp4
from fp8watch.quantize.site_quantizer import SitePlace, site_quantizer

INF, NAN = float("inf"), float("nan")
CPU = torch.device("cpu")


def quantizer(operand, direction="rowwise", backend="reference", **how):
    place = SitePlace(operand, direction, "")
    return site_quantizer(recipes.nvfp4(environ={}, **how), place, resolve(backend, CPU), CPU)


@pytest.mark.parametrize("tile", [(1, 16), (16, 1), (16, 16)])
def test_equals_the_oracle(tile) -> None:
    for kind, dtype in itertools.product(KINDS, DTYPES):
        with case(kind, dtype):
            x = operand(kind, dtype, (35, 53))
            along = x.t() if tile == (16, 1) else x
            numbers, scales, amax = oracle(along.float().numpy(), 16 if tile == (16, 16) else 1)
            got = nvfp4.cast(x, tile)
            mine, scale = reference.untiled(got.numbers_t, x), got.scale.float()
            if tile == (16, 1):
                mine, scale = mine.t(), scale.t()
            assert np.array_equal(mine.numpy(), numbers)
            assert np.array_equal(np.signbit(mine.numpy()), np.signbit(numbers))
            assert np.array_equal(scale.numpy(), scales, equal_nan=True)
            assert np.array_equal(got.amax.numpy(), amax, equal_nan=True)


def test_every_number_and_every_tie() -> None:
    ties = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    y = np.concatenate([ties, np.nextafter(ties, np.float32(9)), np.nextafter(ties, np.float32(0)), np.float32([6, 0])])
    assert e2m1(ties).tolist() == [0, 1, 1, 2, 2, 4, 4]
    x = torch.from_numpy(np.concatenate([np.pad(v, (0, 15)) for v in y[:, None]])).view(-1, 16)
    x[:, 15] = 6.0  # each block has the scale 448, and the tensor 6 / 2688
    got = nvfp4.cast(x, (1, 16))
    assert got.numbers_t.view(-1, 16)[:, 0].tolist() == e2m1(y).tolist()


def test_the_transform_is_orthonormal_and_drops_out_of_a_product() -> None:
    torch.manual_seed(0)
    x, g = torch.randn(64, 40), torch.randn(64, 24)
    turned = nvfp4.rotated(x)
    assert torch.allclose(turned.square().sum(0), x.square().sum(0), rtol=1e-5)
    assert torch.allclose(nvfp4.rotated(g).t() @ turned, g.t() @ x, atol=1e-4)
    one = torch.zeros(16, 1)
    one[3] = 4.0
    assert nvfp4.rotated(one).flatten().tolist() == [-1, 1, 1, -1] * 4  # row 3 of Hadamard's matrix, and its sign −1
    ragged = torch.randn(37, 8)
    assert torch.equal(nvfp4.rotated(ragged)[32:], ragged[32:])
    assert torch.equal(nvfp4.rotated(ragged)[:32], nvfp4.rotated(ragged[:32]))
    assert nvfp4.rotated(ragged[:7]).shape == (7, 8)


def test_gradients_are_right_in_expectation_and_one_step_away_at_most() -> None:
    torch.manual_seed(0)
    x = torch.randn(32, 64) * torch.exp2(torch.randint(-3, 3, (32, 1)))
    nearest, total, num = nvfp4.cast(x, (1, 16)), torch.zeros(32, 64), 600
    per_block = (1 / nearest.scale_inv).repeat_interleave(16, 1)
    y = (x * per_block).clamp(-6, 6)
    grid = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
    step = torch.zeros_like(y)
    for seed in range(num):
        made = reference.untiled(nvfp4.cast(x, (1, 16), nvfp4.noise_of(x, seed)).numbers_t, x)
        assert torch.isin(made.abs(), grid).all()
        assert ((made - y).abs() < (made.abs() - y.abs()).abs() + 1e-6).all(), "the sign stays"
        step = torch.maximum(step, (made - y).abs())
        total += made
    width = torch.where(y.abs() < 2, 0.5, torch.where(y.abs() < 4, 1.0, 2.0))
    assert (step <= width * (1 + 1e-5)).all()
    error = (total / num - y) / (width / (12 * num) ** 0.5)  # in standard errors, if not less
    assert error.abs().max() < 8
    assert abs(error.mean()) < 0.2
    assert (total / num - reference.untiled(nearest.numbers_t, x)).abs().max() > 0.2, "to nearest is another thing"


def test_noise_is_of_the_operand_alone() -> None:
    torch.manual_seed(0)
    x = torch.randn(96, 160)
    state = torch.get_rng_state()
    noise = nvfp4.noise_of(x)
    grads = [quantizer("grad_output", backend=b)(x, stats=s, heavy=s)[0] for b in ("reference", "cpu") for s in (0, 1)]
    assert torch.equal(torch.get_rng_state(), state), "torch's generator is the training's"
    assert all(torch.equal(grads[0], other) for other in grads)
    assert torch.equal(nvfp4.noise_of(x.clone()), noise)
    other = x.clone()
    other[3, 5] += 1e-3
    both = torch.stack((noise.flatten(), nvfp4.noise_of(other).flatten(), nvfp4.noise_of(x, 1).flatten()))
    assert (torch.corrcoef(both) - torch.eye(3)).abs().max() < 0.05
    assert noise.min() >= 0
    assert noise.max() < 1
    assert noise.mean() == pytest.approx(0.5, abs=0.01)
    assert noise.var() * 12 == pytest.approx(1, abs=0.03)


def test_a_nan_takes_the_tensor_along_and_an_inf_leaves_nothing_finite() -> None:
    x = torch.randn(32, 64)
    x[3, 5] = NAN
    values, stats = quantizer("input")(x, stats=True, heavy=True)
    assert values.isnan().all()
    assert int(stats.num_nan.sum()) == 1
    x[3, 5] = INF
    values, stats = quantizer("input")(x, stats=True, heavy=True)
    assert not values.isfinite().any()
    summary = stats.summary()
    assert (summary["num_inf"], summary["num_nan"], summary["first_nonfinite"].tolist()[:2]) == (1, 0, [3, 5])
    assert int(quantizer("input", "columnwise").measure(x, heavy=False).num_inf.sum()) == 16  # rows of its transform


def test_a_block_far_below_the_tensor_is_lost_and_counts_as_underflow() -> None:
    x = torch.ones(16, 64)
    x[:, 16:32] = 2.0**-10 / 448 * 0.9  # its scale would be less than half of the smallest
    values, stats = quantizer("input")(x, stats=True, heavy=True)
    assert not values[:, 16:32].any()
    assert torch.equal(values[:, :16], torch.ones(16, 16))
    assert stats.num_underflow.tolist() == [[0, 16, 0, 0]] * 16
    assert int(stats.num_saturated.sum()) == 0
    summary = stats.summary()
    assert summary["noise_energy"] == pytest.approx(float(x[:, 16:32].double().square().sum()), rel=1e-6)
    (codes, scale_inv), _ = quantizer("input").codes(x, stats=False, heavy=False)
    assert torch.equal(reference.dequantize(codes, scale_inv, (1, 16)), values)
    assert (scale_inv > 0).all()


def test_clips_are_counted_where_the_scale_of_a_block_is_rounded_down_far() -> None:
    x = torch.ones(1, 32)
    x[:, 16:] = 1.45 * 2.0**-9 / 448  # its scale is the smallest, and it 8.7 times that
    stats = quantizer("input").measure(x, heavy=True)
    assert stats.num_saturated.tolist() == [[0, 16]]
    broken = torch.cat((x, torch.full((1, 32), NAN)))
    assert int(quantizer("input").measure(broken, heavy=True).num_saturated.sum()) == 0, "no scale, no clip"
    assert stats.summary()["scale_ratio_max"] == pytest.approx(1.45, rel=1e-5)


@pytest.mark.parametrize("operand", ["input", "weight", "grad_output"])
@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
def test_statistics_are_those_of_the_cast(operand, direction) -> None:
    torch.manual_seed(1)
    x = torch.randn(40, 72) * torch.exp2(torch.randint(-12, 2, (40, 72)))
    q = quantizer(operand, direction)
    values, stats = q(x, stats=True, heavy=True)
    seen, summary = q.as_cast(x), stats.summary()
    assert (operand == "weight" or direction == "rowwise") == torch.equal(seen, x)
    assert summary["amax_max"] == float(seen.abs().max())
    assert summary["num_nonzero"] == int((seen != 0).sum())
    assert summary["num_underflow"] == int(((seen != 0) & (values == 0)).sum()) > 0
    signal, noise = seen.double().square().sum(), (values.double() - seen.double()).square().sum()
    assert summary["signal_energy"] == pytest.approx(float(signal), rel=1e-6)
    assert summary["noise_energy"] == pytest.approx(float(noise), rel=1e-6)
    assert summary["num_off_scale_tiles"] == 0
    (codes, scale_inv), _ = q.codes(x, stats=False, heavy=False)
    assert torch.equal(reference.dequantize(codes, scale_inv, q.tile_for((40, 72))), values)
    assert (summary["scale_inv_max"], summary["scale_inv_min"]) == (float(scale_inv.max()), float(scale_inv.min()))
    assert torch.equal(q(x, stats=False, heavy=False)[0], values)


def test_flags_of_transformer_engine_are_arguments_and_variables() -> None:
    off = {f"NVTE_NVFP4_DISABLE_{n}": "1" for n in ("RHT", "STOCHASTIC_ROUNDING", "2D_QUANTIZATION")}
    plain, bare = recipes.nvfp4(environ={}), recipes.nvfp4(environ=off)
    assert bare == recipes.nvfp4(
        environ={}, disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True
    )
    assert [s.tile for _, s in plain.quantised] == [(1, 16), (16, 16), (1, 16)]
    assert [s.tile for _, s in bare.quantised] == [(1, 16)] * 3
    assert [s.random_hadamard_transform for _, s in plain.quantised] == [True, False, True]
    assert [s.stochastic_rounding for _, s in plain.quantised] == [False, False, True]
    assert not any(s.random_hadamard_transform or s.stochastic_rounding for _, s in bare.quantised)
    wins = recipes.nvfp4(environ=off, disable_rht=False)
    assert wins.input.random_hadamard_transform
    assert "NVTE_NVFP4_DISABLE_RHT=1 has no effect: the argument disable_rht=False wins" in wins.declared_not_effective
    with pytest.raises(ValueError, match="NVTE_NVFP4_DISABLE_RHT='yes': must be '0' or '1'"):
        recipes.nvfp4(environ={"NVTE_NVFP4_DISABLE_RHT": "yes"})
    one_off = [{name: "1"} for name in off]
    assert len({recipes.nvfp4(environ=e).fingerprint() for e in [{}, *one_off]}) == 4


def test_what_cannot_be_meant_is_refused() -> None:
    one = recipes.nvfp4(environ={})
    made = {
        "belong together": lambda: recipes.OperandRecipe((1, 16)),
        "have no eps": lambda: recipes.OperandRecipe((1, 16), "E2M1", False, 1e-12, "nvfp4"),
        "it is of scaling='nvfp4'": lambda: recipes.OperandRecipe((1, 128), stochastic_rounding=True),
        "it is of tiles (1, 16)": lambda: recipes.OperandRecipe(
            (16, 16), "E2M1", False, 0.0, "nvfp4", random_hadamard_transform=True
        ),
        "drops out only where both": lambda: recipes.Recipe("", one.input, one.weight, recipes.blockwise().input),
        "it is for grad_output alone": lambda: recipes.Recipe("", one.grad_output, one.weight, one.grad_output),
        "dgrad reads it beside": lambda: recipes.Recipe("", one.input, one.input, one.grad_output),
    }
    for says, make in made.items():
        with pytest.raises(ValueError, match=re.escape(says)):
            make()
    half = recipes.Recipe("", one.input, one.weight, None)
    assert (half.kind, half.gemms) == ("nvfp4", (True, False, False))
