"""Cases worked out by hand. They are never regenerated."""

from __future__ import annotations

import pytest
import torch
from quantize.backends import USABLE, backends, each_backend

import fp8watch.quantize
from fp8watch.kernels import Backend
from fp8watch.numerics.formats import FORMATS
from fp8watch.numerics.quantize_job import QuantizeJob

INF, NAN = float("inf"), float("nan")


def codes_of(values: list[float], fmt: str = "E4M3", power_2: bool = True, eps: float = 0.0) -> tuple[list[int], float]:
    """Codes and scale_inv of one tile; all backends agree, rowwise and as a column."""
    found = []
    for backend in backends():
        x = torch.tensor([values])
        data, scale_inv, _ = backend.quantize(x, QuantizeJob((1, 128), FORMATS[fmt], power_2, eps))
        found.append((data.view(torch.uint8)[0].tolist(), float(scale_inv[0, 0])))
        data, scale_inv, _ = backend.quantize(x.t(), QuantizeJob((128, 1), FORMATS[fmt], power_2, eps))
        found.append((data.view(torch.uint8)[:, 0].tolist(), float(scale_inv[0, 0])))
    assert all(one == found[0] for one in found)
    return found[0]


@pytest.mark.parametrize(
    ("values", "expected", "scale_inv"),
    [
        # amax 448: scale 1. 448 = 1.75·2^8 is 0x7E; 1 = 2^0 is 0x38; 2^-9 is the smallest subnormal, 0x01
        ([448.0, 1.0, -1.0, 2.0**-9], [0x7E, 0x38, 0xB8, 0x01], 1.0),
        # half of the smallest subnormal is a tie to the even 0; a hair above is not; −0 and −tiny keep their sign
        ([448.0, 2.0**-10, 2.0**-10 * 1.0001, -0.0, -(2.0**-12)], [0x7E, 0x00, 0x01, 0x80, 0x80], 1.0),
        # 1.0625 lies between 1 (0x38) and 1.125 (0x39): even 0x38; 1.1875 between 0x39 and 0x3A: even 0x3A
        ([448.0, 1.0625, 1.1875], [0x7E, 0x38, 0x3A], 1.0),
        # amax 224.00002 needs 448/amax = 1.9999999, rounded down to 1; amax 224 has 2 exactly
        ([224.00002, 1.0], [0x76, 0x38], 1.0),
        ([224.0, 1.0], [0x7E, 0x40], 0.5),
        # amax 449: 448/449 < 1, rounded down to 1/2; 449/2 = 224.5 goes to 224 = 0x76
        ([449.0, 2.0], [0x76, 0x38], 2.0),
        # all zero; NaN only: scale 1
        ([0.0, -0.0], [0x00, 0x80], 1.0),
        ([NAN, -NAN], [0x7F, 0x7F], 1.0),
        # NaN is not in amax; Inf forces the scale to 1 and is stored as 448
        ([NAN, 224.0], [0x7F, 0x7E], 0.5),
        ([INF, -INF, 1.0, 1e-3], [0x7E, 0xFE, 0x38, 0x01], 1.0),
        # 448/1.4e-45 overflows: the largest float32, rounded down to 2^127; 2^-149·2^127 = 2^-22 vanishes
        ([2.0**-149], [0x00], 2.0**-127),
        # 448/2^-119 = 1.75·2^127 does not: 2^127
        ([2.0**-119], [0x78], 2.0**-127),
    ],
)
def test_e4m3_power_of_two(values: list[float], expected: list[int], scale_inv: float) -> None:
    assert codes_of(values) == (expected, scale_inv)


def test_float32_scales() -> None:
    # 448/3 = 149.33333 in float32; 3·149.33333 = 448 → 0x7E; 1·149.33 lies between 144 (0x71) and 160 (0x72): 144
    codes, scale_inv = codes_of([3.0, 1.0], power_2=False)
    assert codes == [0x7E, 0x71]
    scale = torch.tensor(448.0) / torch.tensor(3.0)
    assert scale_inv == float(torch.tensor(1.0) / scale)


def test_eps_comes_before_the_zero_test() -> None:
    # eps 1 raises both: scale 448 → 256
    assert codes_of([0.0], eps=1.0) == ([0x00], 2.0**-8)
    assert codes_of([0.5], eps=1.0) == ([0x70], 2.0**-8)  # 0.5·256 = 128 = 2^7: exponent 14
    assert codes_of([1.0], eps=1.0) == ([0x78], 2.0**-8)  # strict: amax equal to eps stays what it is


def test_e5m2() -> None:
    # 57344 = 1.75·2^15 is 0x7B; 1 is 0x3C; 2^-16 is 0x01; Inf is stored as the largest finite value
    assert codes_of([57344.0, 1.0, -(2.0**-16)], "E5M2") == ([0x7B, 0x3C, 0x81], 1.0)
    assert codes_of([INF, -INF, NAN], "E5M2") == ([0x7B, 0xFB, 0x7F], 1.0)


@pytest.mark.parametrize(
    ("dtype", "largest"),
    [(torch.float16, 65504.0), (torch.bfloat16, 3.3895313892515355e38), (torch.float32, 3.4028234663852886e38)],
)
@each_backend
def test_an_overflowing_scale_is_the_largest_number_of_the_input_type(
    backend: Backend, dtype: torch.dtype, largest: float
) -> None:
    x = torch.zeros(1, 128, dtype=dtype)
    scale_inv = backend.quantize(x, QuantizeJob((1, 128), FORMATS["E4M3"], False, 1e-40))[1]  # 448/1e-40 overflows
    assert float(scale_inv) == float(torch.tensor(1.0) / torch.tensor(largest))
    rounded = backend.quantize(x, QuantizeJob((1, 128), FORMATS["E4M3"], True, 1e-40))[1]
    assert float(rounded) == (2.0**-15 if dtype == torch.float16 else 2.0**-127)


def test_the_public_face() -> None:
    x = torch.tensor([[448.0] * 128 + [1.0] * 72] * 3, dtype=torch.bfloat16)
    q = fp8watch.quantize.quantize_blockwise(x)
    assert q.data.dtype == torch.float8_e4m3fn
    assert (tuple(q.data.shape), tuple(q.scale_inv.shape)) == ((3, 200), (3, 2))
    assert q.scale_inv.tolist() == [[1.0, 2.0**-8]] * 3
    assert torch.equal(q.dequantize(), x.float())
    assert q.backend == USABLE[0]
    assert q.stats.summary()["num_elements"] == 600
    block = fp8watch.quantize.quantize_blockwise(x, (128, 128), "E5M2", False, 1e-12, "reference")
    assert block.data.dtype == torch.float8_e5m2
    assert tuple(block.scale_inv.shape) == (1, 2)
    assert block.backend == "reference"
