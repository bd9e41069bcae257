"""torch._scaled_mm on Hopper: the products of the codes, whatever the shapes need of padding."""

from __future__ import annotations

import pytest
import torch
from scaled_mm.layouts import column_major

from fp8watch.kernels import reference, scaled_mm, triton
from fp8watch.kernels.scaled_mm import Codes
from fp8watch.numerics.formats import FORMATS
from fp8watch.numerics.quantize_job import QuantizeJob

SHAPES = [(256, 512, 1024), (512, 11008, 4096), (256, 640, 384), (40, 128, 16), (7, 1536, 144), (1, 256, 256)]


def wide(codes: Codes, tile: tuple[int, int]) -> torch.Tensor:
    return reference.dequantize(codes.data, codes.scale_inv, tile).double()


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Within the rounding of the result, and of sums of which the tensor cores keep 14 bits inside a slice of 128."""
    limit = 2.0**-7 if got.dtype == torch.bfloat16 else 2.0**-11
    rms = expected.square().mean().sqrt()
    furthest = float((got.double() - expected).abs().max() / rms)
    assert furthest <= limit * 6


@pytest.mark.parametrize(("tokens", "in_features", "out_features"), SHAPES)
@pytest.mark.parametrize("grad_format", ["E4M3", "E5M2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("power_2", [True, False])
def test_equal_float64_on_dequantised_operands(
    hopper: None, tokens: int, in_features: int, out_features: int, grad_format: str, dtype: torch.dtype, power_2: bool
) -> None:
    torch.manual_seed(0)
    x = torch.randn(tokens, in_features, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(out_features, in_features, device="cuda", dtype=torch.bfloat16) * 0.02
    g = torch.randn(tokens, out_features, device="cuda", dtype=torch.bfloat16) * 1e-4
    e4m3, grad = FORMATS["E4M3"], FORMATS[grad_format]
    (xr, xs, _), (xc, xcs, _) = triton.quantize_both(
        x, QuantizeJob((1, 128), e4m3, power_2, 0.0, stats=False), transposed=True
    )
    (gr, gs, _), (gc, gcs, _) = triton.quantize_both(
        g, QuantizeJob((1, 128), grad, power_2, 0.0, stats=False), transposed=True
    )
    weight = Codes(*triton.quantize(w, QuantizeJob((128, 128), e4m3, power_2, 0.0, stats=False))[:2])
    bias = torch.randn(out_features, device="cuda")
    xw, gw, ww = wide(Codes(xr, xs), (1, 128)), wide(Codes(gr, gs), (1, 128)), wide(weight, (128, 128))
    close(scaled_mm.fprop(Codes(xr, xs), weight, None, dtype), xw @ ww.t())
    close(scaled_mm.fprop(Codes(xr, xs), weight, bias, dtype), xw @ ww.t() + bias.double())
    close(scaled_mm.dgrad(Codes(gr, gs), weight, dtype), gw @ ww)
    close(scaled_mm.dgrad(Codes(gr, gs), column_major(weight), dtype), gw @ ww)
    dw = scaled_mm.wgrad(Codes(gc, gcs), Codes(xc, xcs), dtype)
    close(dw, wide(Codes(gc, gcs), (128, 1)).t() @ wide(Codes(xc, xcs), (128, 1)))


def test_an_attached_linear_multiplies_codes(hopper: None, tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same loss, and gradients, as the emulated path, within the rounding of bfloat16."""
    import copy

    import fp8watch

    monkeypatch.setenv("FP8WATCH_SPOOL_DIR", str(tmp_path))
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 512)).cuda().bfloat16()
    other = copy.deepcopy(net)
    x = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
    for model, gemm in ((net, "emulated"), (other, "scaled_mm")):
        with fp8watch.attach(model, run="gpu", gemm=gemm, overhead_budget=None):
            model(x).float().square().mean().backward()
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        assert (
            torch.nn.functional.cosine_similarity(a.grad.flatten().double(), b.grad.flatten().double(), dim=0) > 0.999
        )
