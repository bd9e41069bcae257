"""Each statistic equals a count made one element after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from quantize import oracle
from quantize.backends import backends, compared, each_backend, scale_of, shared
from quantize.operands import DTYPES, KINDS, TILES, case, operand
from quantize.tolerances import SUMS, gain_tolerance

from fp8watch.kernels import Backend, reference, reference_stats
from fp8watch.numerics.formats import FORMATS
from fp8watch.numerics.quantize_job import QuantizeJob
from fp8watch.numerics.tile_stats import TileStats
from fp8watch_agent.record import FIELDS, SOME_CALLS, Measured, TileFlag

OF_THE_GEMM = ("output_num_nonfinite", "gemm_error", "gemm_gain_max", "gemm_gain_min")  # no quantiser knows them
LOOKS = tuple(f.name for f in FIELDS if f.group & SOME_CALLS)  # taken in turn, by no quantiser
LIGHT = Measured.COUNTS | Measured.AMAX | Measured.SCALE | Measured.RATIO
NOT_COMPARED = ("weight_hash", "order", "measured", *OF_THE_GEMM, *LOOKS, *SUMS)


def assert_same_sketch(got: dict[str, Any], expected: dict[str, Any], who: str = "reference") -> None:
    """Counts, extremes and coordinates exactly; energies and moments within 1e-6."""
    for f in FIELDS:
        if not compared(f, got["measured"]):
            continue
        if f.name in SUMS:
            assert got[f.name] == pytest.approx(expected[f.name], rel=1e-6, abs=1e-300), (who, f.name)
        elif f.name == "gain_energy":
            tolerance = gain_tolerance(expected)
            assert got[f.name] == pytest.approx(expected[f.name], rel=1e-6, abs=tolerance), (who, f.name)
        elif f.name == "noise_tile" and expected["tile_noise_ratio_max"] > 0:
            # two tiles may be equally bad but for the last bits of a sum
            ratios = expected["noise_ratios"]
            assert ratios[tuple(got[f.name])] == pytest.approx(expected["tile_noise_ratio_max"], rel=1e-6), (
                who,
                f.name,
            )
        elif f.name not in NOT_COMPARED:
            assert np.array_equal(got[f.name], expected[f.name], equal_nan=True), (
                f"{who} {f.name}: {got[f.name]}, not {expected[f.name]}"
            )


def assert_same_tiles(stats: TileStats, result: oracle.Result, fmt: str) -> None:
    """What is said of each tile, against the tile's elements."""
    for (i, j), tile in result.tiles.items():
        x = tile.elements
        with np.errstate(all="ignore"):
            clipped = np.isfinite(x) & (np.abs(x) * tile.scale >= float(oracle.CLIP_FROM[fmt]))
        expected = ((x != 0).sum(), clipped.sum(), ((x != 0) & (tile.codes & 0x7F == 0)).sum(), np.isnan(x).sum())
        assert [int(n) for n in stats.counts[:, i, j]] == [*expected, np.isinf(x).sum()], (i, j)
        flags = TileFlag(int(stats.flags()[i, j]))
        assert (TileFlag.NAN in flags, TileFlag.INF in flags) == (bool(np.isnan(x).any()), bool(np.isinf(x).any()))
        assert (TileFlag.ZERO in flags, TileFlag.SENTINEL in flags) == (tile.amax == 0, bool(np.isinf(tile.amax)))
        assert (TileFlag.SATURATED in flags, TileFlag.UNDERFLOW in flags) == (bool(clipped.any()), expected[2] > 0)


def compare(
    x: torch.Tensor, tile: tuple[int, int], fmt: str, power_2: bool, eps: float, dtype: str = "float32", **options: Any
) -> dict[str, Any]:
    given = options.pop("scale", None)
    result = oracle.quantize(
        x.float().numpy(),
        tile,
        fmt,
        power_2,
        eps,
        dtype,
        given.numpy() if given is not None else None,
        options.get("force_scale_1", True),
    )
    expected = oracle.sketch(result, fmt, power_2, eps, dtype, options.get("invariant", True))
    for backend in backends():
        stats = backend.quantize(x, QuantizeJob(tile, FORMATS[fmt], power_2, eps, **options), given)[2]
        summary = stats.summary()
        assert_same_sketch(summary, expected, backend.NAME)
        assert_same_tiles(stats, result, fmt)
        stats = backend.quantize_dequantize(
            x, QuantizeJob(tile, FORMATS[fmt], power_2, eps, heavy=False, **options), given
        )[2]
        light = stats.summary()
        for f in FIELDS:
            if f.group & LIGHT and f.name != "measured":
                assert np.array_equal(light[f.name], summary[f.name], equal_nan=True), (backend.NAME, f.name)
    return summary


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("fmt", "power_2", "eps"), [("E4M3", True, 0.0), ("E4M3", False, 0.3), ("E5M2", False, 0.0)])
def test_every_field_of_the_sketch(tile: tuple[int, int], fmt: str, power_2: bool, eps: float) -> None:
    for kind in KINDS:
        dtype = list(DTYPES)[(len(kind) + tile[0]) % 3]
        with case(kind, dtype):
            compare(operand(kind, dtype, (10, 150)), tile, fmt, power_2, eps, dtype)


@pytest.mark.parametrize("factor", [1.0, 0.5, 0.3, 2.0, 1.0000001, 4096.0, 1e-30, 0.0, np.inf, np.nan])
@pytest.mark.parametrize("power_2", [True, False])
def test_a_given_scale_is_judged_by_the_tensor(factor: float, power_2: bool) -> None:
    for kind in ("normal", "zeros", "nan-and-inf", "subnormal", "huge"):
        x = operand(kind, "float32", (6, 150))
        scale = scale_of(x, (1, 128), FORMATS["E4M3"], power_2).clone()
        scale[2:4] *= factor
        with case(kind):
            compare(x, (1, 128), "E4M3", power_2, 0.0, scale=scale)


@pytest.mark.parametrize("power_2", [True, False])
def test_a_delayed_scale_is_not_bound_by_the_invariant(power_2: bool) -> None:
    x = operand("normal", "float32", (6, 150))
    scale = scale_of(x, (1, 128), FORMATS["E4M3"], power_2) * 30
    bound = compare(x, (1, 128), "E4M3", power_2, 0.0, scale=scale)
    free = compare(x, (1, 128), "E4M3", power_2, 0.0, scale=scale, invariant=False)
    assert bound["num_off_scale_tiles"] > 0
    assert free["num_off_scale_tiles"] == 0
    assert free["scale_ratio_max"] == bound["scale_ratio_max"] > 1
    scale[1, 0] = 0.0
    assert compare(x, (1, 128), "E4M3", power_2, 0.0, scale=scale, invariant=False)["num_off_scale_tiles"] == 1


@pytest.mark.parametrize("kind", ["zeros", "all-zero", "inf", "normal", "subnormal"])
def test_an_unguarded_zero_tile_is_off_scale(kind: str) -> None:
    summary = compare(operand(kind, "float32", (6, 150)), (1, 128), "E4M3", True, 0.0, force_scale_1=False)
    guarded = compare(operand(kind, "float32", (6, 150)), (1, 128), "E4M3", True, 0.0)
    assert guarded["num_off_scale_tiles"] == 0
    if summary["num_zero_tiles"]:
        assert summary["num_off_scale_tiles"] >= summary["num_zero_tiles"]


@pytest.mark.parametrize("kind", ["normal", "wide", "gradient", "outliers", "zeros", "subnormal", "huge", "ties"])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("power_2", [True, False])
def test_the_careful_way_counts_what_the_plain_way_counts(
    kind: str, tile: tuple[int, int], power_2: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = operand(kind, "float32", (130, 300))
    plain = reference.quantize(x, QuantizeJob(tile, FORMATS["E4M3"], power_2, 0.0))[2]
    called: list[int] = []
    careful_counts = reference_stats._careful_counts
    monkeypatch.setattr(reference_stats, "_careful_counts", lambda *args: (called.append(1), careful_counts(*args))[1])
    careful = reference.quantize(x, QuantizeJob(tile, FORMATS["E4M3"], power_2, 0.0), plain.tiles.scale)[2]
    assert called
    expected = plain.summary()
    expected["noise_ratios"] = dict(np.ndenumerate(plain.tiles.heavy.noise_ratio.numpy()))
    assert_same_sketch(careful.summary(), expected)


@each_backend
def test_what_is_not_measured_is_at_its_default_and_says_so(backend: Backend) -> None:
    stats = backend.quantize(
        operand("wide", "float32", (4, 256)), QuantizeJob((1, 128), FORMATS["E4M3"], True, 0.0, heavy=False)
    )
    summary = stats[2].summary()
    heavy = Measured.ENERGIES | Measured.MOMENTS | Measured.DEPTH
    assert shared(summary["measured"]) == Measured.COUNTS | Measured.AMAX | Measured.SCALE | Measured.RATIO
    for f in FIELDS:
        if f.group & heavy:
            assert np.all(summary[f.name] == f.default), f.name
    assert backend.quantize(torch.ones(2, 2), QuantizeJob((1, 128), FORMATS["E4M3"], True, 0.0, stats=False))[2] is None


@each_backend
def test_flags_name_each_tile(backend: Backend) -> None:
    x = torch.zeros(7, 128)
    x[0, 0], x[1, 5], x[2, 7], x[3, :], x[4, 0] = 1.0, float("inf"), float("nan"), 1e-9, 2.0
    x[5, :2] = torch.tensor([1.0, 1e-6])
    x[6, :] = 1.0
    scale = torch.full((7, 1), 448.0)
    scale[0], scale[4], scale[6] = 448.0, 448.0, 600.0
    scale[1:4] = 1.0
    flags = backend.quantize(x, QuantizeJob((1, 128), FORMATS["E4M3"], False, 1e-6), scale)[2].flags()
    f = TileFlag
    assert [TileFlag(int(v)) for v in flags[:, 0]] == [
        f(0),
        f.INF | f.SENTINEL,
        f.NAN | f.ZERO,
        f.EPS | f.UNDERFLOW,
        f.OFF_SCALE | f.SATURATED,
        f.UNDERFLOW,
        f.OFF_SCALE | f.SATURATED,
    ]


@each_backend
def test_inf_is_laundered_and_counted(backend: Backend) -> None:
    x = torch.full((2, 256), 1e-3)
    x[1, 130] = float("-inf")
    data, scale_inv, stats = backend.quantize(x, QuantizeJob((1, 128), FORMATS["E4M3"], True, 0.0))
    summary = stats.summary()
    assert data[1, 130].float() == -448.0
    assert scale_inv[1, 1] == 1.0
    assert summary["first_nonfinite"].tolist() == [1, 130, 0]
    assert (summary["num_inf"], summary["num_sentinel_tiles"], summary["num_zero_tiles"]) == (1, 1, 0)
    assert summary["amax_max"] == float("inf")
    assert summary["worst_tile"].tolist() == [1, 1]
    assert summary["num_underflow"] == 0  # 1e-3 is just above half of 2^-9
    assert summary["tile_noise_ratio_max"] > 0.5
    assert summary["noise_tile"].tolist() == [1, 1]


@each_backend
def test_statistics_per_tile_are_those_of_the_tile_alone(backend: Backend) -> None:
    x = operand("nan-and-inf", "float32", (4, 300))
    stats = backend.quantize(x, QuantizeJob((1, 128), FORMATS["E4M3"], True, 0.0))[2]
    for i in range(4):
        for j in range(3):
            alone = backend.quantize(
                x[i : i + 1, j * 128 : (j + 1) * 128], QuantizeJob((1, 128), FORMATS["E4M3"], True, 0.0)
            )[2].summary()
            for name in ("num_nonzero", "num_underflow", "num_saturated", "num_nan", "num_inf"):
                assert getattr(stats, name)[i, j] == alone[name]
            assert stats.num_nonfinite[i, j] == alone["num_nan"] + alone["num_inf"]


@each_backend
def test_tile_sqnr_of_healthy_data_is_that_of_the_format(backend: Backend) -> None:
    x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(1))
    s = backend.quantize(x, QuantizeJob((1, 128), FORMATS["E4M3"], True, 0.0))[2].summary()
    tile_sqnr_db = -10 * np.log10(s["tile_noise_ratio_sum"] / (s["num_tiles"] - s["num_zero_tiles"]))
    assert 31.3 < tile_sqnr_db < 32.0
    kurtosis = s["moment4"] / s["num_elements"] / (s["moment2"] / s["num_elements"]) ** 2
    assert 2.5 < kurtosis < 3.5


@each_backend
def test_the_invariant_ends_where_it_says(backend: Backend) -> None:
    x = torch.full((5, 128), 448.0)  # the ratio is the scale
    ulp = 2.0**-23
    scale = torch.tensor([[1 + 4 * ulp], [1 + 5 * ulp], [1 - 4 * ulp], [1 - 5 * ulp], [1.0]])
    stats = backend.quantize(x, QuantizeJob((1, 128), FORMATS["E4M3"], False, 0.0), scale)[2]
    assert stats.off_scale[:, 0].tolist() == [False, True, False, True, False]
    scale = torch.tensor([[1.0], [1 + ulp], [0.5], [0.5 + ulp / 2], [0.75]])
    stats = backend.quantize(x, QuantizeJob((1, 128), FORMATS["E4M3"], True, 0.0), scale)[2]
    assert stats.off_scale[:, 0].tolist() == [False, True, True, False, False]


@each_backend
def test_an_amax_equal_to_eps_is_not_clamped(backend: Backend) -> None:
    x = torch.tensor([[2.0**-10], [2.0**-11], [0.0], [1.0]])
    summary = backend.quantize(x, QuantizeJob((1, 128), FORMATS["E4M3"], True, 2.0**-10))[2].summary()
    assert (summary["num_eps_tiles"], summary["num_zero_tiles"]) == (1, 1)
