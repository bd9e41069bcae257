"""The emulated GEMMs of a Linear are those of the recipe, close to float64, in every precision context."""

from __future__ import annotations

import pytest
import torch

from fp8watch.kernels import emulated_gemm, reference
from fp8watch.numerics.formats import FORMATS
from fp8watch.numerics.quantize_job import QuantizeJob

M, K, N = 192, 512, 320
E4M3 = FORMATS["E4M3"]


def operands(seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    x, w, dy = torch.randn(M, K, generator=g), torch.randn(N, K, generator=g) / 20, torch.randn(M, N, generator=g) / 1e6

    def q(t: torch.Tensor, tile: tuple[int, int]) -> torch.Tensor:
        return reference.quantize_dequantize(t, QuantizeJob(tile, E4M3, True, 0.0, stats=False))[0]

    return {
        "x": q(x, (1, 128)), "x_columnwise": q(x, (128, 1)), "w": q(w, (128, 128)),
        "dy": q(dy, (1, 128)), "dy_columnwise": q(dy, (128, 1)), "bias": torch.randn(N, generator=g),
    }  # fmt: skip


def assert_close_to_float64(got: torch.Tensor, a: torch.Tensor, b: torch.Tensor, plus: torch.Tensor | None) -> None:
    exact = a.double() @ b.double()
    if plus is not None:
        exact += plus.double()
    error = (got.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert error < 3e-7


@pytest.mark.parametrize("seed", range(3))
def test_within_3e_7_of_float64(seed: int) -> None:
    o = operands(seed)
    assert_close_to_float64(
        emulated_gemm.fprop(o["x"], o["w"], o["bias"], torch.float32), o["x"], o["w"].t(), o["bias"]
    )
    assert_close_to_float64(emulated_gemm.fprop(o["x"], o["w"], None, torch.float32), o["x"], o["w"].t(), None)
    assert_close_to_float64(emulated_gemm.dgrad(o["dy"], o["w"], torch.float32), o["dy"], o["w"], None)
    wgrad = emulated_gemm.wgrad(o["dy_columnwise"], o["x_columnwise"], torch.float32)
    assert_close_to_float64(wgrad, o["dy_columnwise"].t(), o["x_columnwise"], None)


def test_the_bias_is_added_before_the_cast() -> None:
    x, w, bias = torch.tensor([[1 + 2.0**-9]]), torch.ones(1, 1), torch.tensor([2.0**-8])
    # bfloat16 keeps 2^-7 beside 1: each part alone is rounded away, the sum is not
    assert float(emulated_gemm.fprop(x, w, bias, torch.bfloat16)) == 1 + 2.0**-7
    assert float((x @ w.t()).bfloat16() + bias.bfloat16()) == 1.0


def test_shapes_and_dtypes() -> None:
    o = operands()
    assert emulated_gemm.fprop(o["x"], o["w"], None, torch.bfloat16).shape == (M, N)
    assert emulated_gemm.dgrad(o["dy"], o["w"], torch.float16).shape == (M, K)
    assert emulated_gemm.wgrad(o["dy_columnwise"], o["x_columnwise"], torch.bfloat16).dtype == torch.bfloat16


def test_autocast_does_not_lower_the_precision() -> None:
    o = operands()
    plain = emulated_gemm.fprop(o["x"], o["w"], o["bias"], torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(emulated_gemm.fprop(o["x"], o["w"], o["bias"], torch.float32), plain)


def test_operands_that_are_not_dequantised_are_refused() -> None:
    with pytest.raises(TypeError, match="must be float32, as quantize_dequantize returns them"):
        emulated_gemm.dgrad(torch.ones(2, 2, dtype=torch.bfloat16), torch.ones(2, 2), torch.float32)
