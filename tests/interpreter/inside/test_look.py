"""A look at an output in two launches leaves the row that the CPU's look leaves."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fp8watch.kernels import triton_launch, triton_look
from fp8watch.observer.probes import probe_numbers
from fp8watch.sketch.slab import Slab
from fp8watch_agent.record import FIELDS, Measured, empty_rows

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WHOLE = [f.name for f in FIELDS if f.name != "signal_energy"]


@pytest.fixture(autouse=True)
def several_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 elements each, and several reads of lines."""
    monkeypatch.setattr(triton_look, "INTERPRETED_BLOCK", 16)
    monkeypatch.setattr(triton_look, "TIMES", 4)
    monkeypatch.setattr(triton_look, "CHUNK", 4)


def outputs(dtype: torch.dtype) -> list[torch.Tensor]:
    """Finite, small, zero, one of each that is not finite, several in several programs, nothing but NaN; rows apart."""
    torch.manual_seed(3)
    plain = torch.randn(12, 40)
    found = [plain, plain * 1e-6, torch.zeros(3, 5), plain * 3e4, torch.full((2, 3), math.nan)]
    for places in (
        {(7, 13): math.nan},
        {(2, 0): -math.inf},
        {(11, 39): math.inf, (1, 38): math.nan, (9, 3): -math.inf},
    ):
        y = plain.clone()
        for at, value in places.items():
            y[at] = value
        found.append(y)
    return [y.to(dtype) for y in found] + [
        plain.to(dtype).t(),
        found[-1].to(dtype)[::3, 1:17],
        torch.full((1, 1), 1.75, dtype=dtype),
    ]


def assert_same(there: Slab, here: Slab) -> None:
    (a,), (b,) = there.copy_rows()[1:2], here.copy_rows()[1:2]
    for name in WHOLE:
        assert np.array_equal(a[name], b[name]), name
    assert float(a["signal_energy"]) == pytest.approx(float(b["signal_energy"]), rel=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("energy", [False, True])
def test_it_is_the_look_on_the_cpu(dtype: torch.dtype, energy: bool) -> None:
    for y in outputs(dtype):
        there, here = Slab(3), Slab(3)
        assert there.look_there(1, y, 4, energy=energy)
        here.accumulate_probe(1, probe_numbers(y, heavy=energy), 4)
        assert_same(there, here)
        assert there.copy_rows()[[0, 2]].tobytes() == empty_rows(2).tobytes()  # the neighbours were not touched


@pytest.mark.parametrize("dtype", DTYPES)
def test_looks_merge_as_on_the_cpu(dtype: torch.dtype) -> None:
    there, here = Slab(2), Slab(2)
    for order, y in enumerate(outputs(dtype)):
        assert there.look_there(1, y, order, energy=order % 3 > 0)
        here.accumulate_probe(1, probe_numbers(y, heavy=order % 3 > 0), order)
        assert_same(there, here)


def test_its_energy_is_exact_where_float32_overflows() -> None:
    y, slab = torch.full((9, 40), 1e25), Slab(1)
    slab.look_there(0, y, 0, energy=True)
    assert float(slab.copy_rows()[0]["signal_energy"]) == pytest.approx(360 * float(y[0, 0]) ** 2, rel=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_is_counted_in_the_row_of_the_operand(dtype: torch.dtype) -> None:
    slab, expected = Slab(3), 0
    for y in outputs(dtype):
        assert slab.count_outputs_there(1, y, nan_only=dtype == torch.float16)
        expected += int((y.isnan() if dtype == torch.float16 else ~y.isfinite()).sum())
        row = slab.copy_rows()[1]
        assert int(row["num_nonfinite_outputs"]) == expected
        assert bool(row["measured"] & Measured.OUTPUTS) == (expected > 0)
    assert expected > 0
    assert slab.count_outputs_there(1, torch.full((2, 3, 4), math.nan, dtype=dtype), nan_only=True)
    assert int(slab.copy_rows()[1]["num_nonfinite_outputs"]) == expected + 24
    rest = slab.copy_rows()
    rest["num_nonfinite_outputs"], rest["measured"] = 0, 0
    assert rest.tobytes() == empty_rows(3).tobytes()


@pytest.mark.parametrize(
    "y", [torch.zeros(4, 4, dtype=torch.float64), torch.zeros(0, 4), torch.zeros(4)], ids=["float64", "empty", "1-d"]
)
def test_what_has_no_kernel_is_left_to_torch(y: torch.Tensor) -> None:
    slab = Slab(1)
    assert not slab.look_there(0, y, 0, energy=True)
    assert not slab.count_outputs_there(0, y, nan_only=False)
    assert slab.copy_rows().tobytes() == empty_rows(1).tobytes()


def test_an_expanded_output_is_read_by_its_strides() -> None:
    slab = Slab(1)
    assert slab.look_there(0, torch.arange(5.0).view(1, 5).expand(100, 5), 0, energy=True)
    row = slab.copy_rows()[0]
    assert (int(row["num_elements"]), float(row["amax_max"]), float(row["signal_energy"])) == (500, 4.0, 3000.0)


def test_a_kernel_is_tried_before_a_device_is_taken() -> None:
    triton_launch.try_out(torch.device("cpu"))
