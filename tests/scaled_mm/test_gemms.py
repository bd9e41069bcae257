"""The GEMMs by torch._scaled_mm ask for the layouts that it takes, and compute what the emulated ones do."""

from __future__ import annotations

import pytest
import torch
from scaled_mm.layouts import column_major
from scaled_mm.strict import scaled_mm as strict

from fp8watch.kernels import emulated_gemm, reference, scaled_mm
from fp8watch.kernels.scaled_mm import Codes
from fp8watch.numerics.formats import FORMATS
from fp8watch.numerics.quantize_job import QuantizeJob

SHAPES = [
    (256, 512, 1024),
    (256, 256, 128),
    (16, 128, 16),
    (40, 384, 640),
    (1, 16, 48),
    (7, 1536, 144),
    (300, 528, 96),
    (37, 97, 423),
    (40, 300, 130),
]


@pytest.fixture(autouse=True)
def strict_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_scaled_mm", strict)
    torch.manual_seed(0)


def codes(
    x: torch.Tensor, tile: tuple[int, int], fmt: str = "E4M3", power_2: bool = True
) -> tuple[Codes, torch.Tensor]:
    """An operand, and what it stands for."""
    data, scale_inv, _ = reference.quantize(x, QuantizeJob(tile, FORMATS[fmt], power_2, 0.0, stats=False))
    return Codes(data, scale_inv), reference.dequantize(data, scale_inv, tile)


def same(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Both are sums in another order; the results differ by float32 rounding, three orders under bfloat16's."""
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    rms = expected.double().square().mean().sqrt()
    limit = 1e-6 if got.dtype == torch.float32 else 2.0**-8
    assert (got.double() - expected.double()).abs().max() <= limit * 16 * rms


@pytest.mark.parametrize(("tokens", "in_features", "out_features"), SHAPES)
@pytest.mark.parametrize(("grad_format", "power_2"), [("E4M3", True), ("E5M2", False)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equal_the_emulated_gemms(
    tokens: int, in_features: int, out_features: int, grad_format: str, power_2: bool, dtype: torch.dtype
) -> None:
    x, w = torch.randn(tokens, in_features), torch.randn(out_features, in_features)
    g, bias = torch.randn(tokens, out_features) * 1e-3, torch.randn(out_features)
    (xr, xr_wide), (xc, xc_wide) = codes(x, (1, 128), power_2=power_2), codes(x, (128, 1), power_2=power_2)
    wq, w_wide = codes(w, (128, 128), power_2=power_2)
    (gr, gr_wide), (gc, gc_wide) = codes(g, (1, 128), grad_format, power_2), codes(g, (128, 1), grad_format, power_2)
    same(scaled_mm.fprop(xr, wq, None, dtype), emulated_gemm.fprop(xr_wide, w_wide, None, dtype))
    same(scaled_mm.fprop(xr, wq, bias, dtype), emulated_gemm.fprop(xr_wide, w_wide, bias, dtype))
    same(scaled_mm.dgrad(gr, wq, dtype), emulated_gemm.dgrad(gr_wide, w_wide, dtype))
    same(scaled_mm.dgrad(gr, column_major(wq), dtype), emulated_gemm.dgrad(gr_wide, w_wide, dtype))
    same(scaled_mm.wgrad(gc, xc, dtype), emulated_gemm.wgrad(gc_wide, xc_wide, dtype))


def test_operands_that_lie_right_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[torch.Tensor] = []
    monkeypatch.setattr(torch, "_scaled_mm", lambda a, b, **how: (given.extend((a, b)), strict(a, b, **how))[1])
    x, w, g = torch.randn(512, 512), torch.randn(1024, 512), torch.randn(512, 1024)
    xr, wq, gr = codes(x, (1, 128))[0], codes(w, (128, 128))[0], codes(g, (1, 128))[0]
    transposed = [column_major(codes(t, (128, 1))[0]) for t in (g, x)]
    w_columns = column_major(wq)
    scaled_mm.fprop(xr, wq, None, torch.bfloat16)
    scaled_mm.dgrad(gr, w_columns, torch.bfloat16)
    scaled_mm.wgrad(*transposed, torch.bfloat16)
    operands = (xr, wq, gr, w_columns, *transposed)
    assert [t.data_ptr() for t in given] == [o.data.data_ptr() for o in operands]


@pytest.mark.parametrize(("tokens", "in_features", "out_features"), [s for s in SHAPES if s[0] > 1])
def test_torch_itself_takes_these_shapes(
    tokens: int, in_features: int, out_features: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own checks of shapes and strides, as for CUDA, run on tensors without values."""
    monkeypatch.undo()

    def fake(rows: int, columns: int, tile: tuple[int, int]) -> Codes:
        data = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device="meta")
        tiles = (-(-rows // tile[0]), -(-columns // tile[1]))
        return Codes(data, torch.empty(tiles, dtype=torch.float32, device="meta"))

    w = fake(out_features, in_features, (128, 128))
    y = scaled_mm.fprop(fake(tokens, in_features, (1, 128)), w, None, torch.bfloat16)
    dx = scaled_mm.dgrad(fake(tokens, out_features, (1, 128)), w, torch.bfloat16)
    dw = scaled_mm.wgrad(fake(tokens, out_features, (128, 1)), fake(tokens, in_features, (128, 1)), torch.float32)
    assert (y.shape, dx.shape) == ((tokens, out_features), (tokens, in_features))
    assert dw.shape == (out_features, in_features)
    assert y.dtype == torch.bfloat16


def test_no_tokens_give_an_empty_product() -> None:
    empty = Codes(torch.empty(0, 128, dtype=torch.float8_e4m3fn), torch.empty(0, 1))
    w = codes(torch.randn(32, 128), (128, 128))[0]
    assert scaled_mm.fprop(empty, w, None, torch.bfloat16).shape == (0, 32)


def test_what_cannot_be_is_refused_in_words() -> None:
    x, w = codes(torch.randn(16, 128), (1, 128))[0], codes(torch.randn(32, 128), (128, 128))[0]
    with pytest.raises(TypeError, match="float64: must be float32, bfloat16 or float16"):
        scaled_mm.fprop(x, w, None, torch.float64)
    with pytest.raises(ValueError, match=r"scale_inv has shape \(1, 1\): must be \(16, 1\)"):
        scaled_mm.fprop(Codes(x.data, torch.ones(1, 1)), w, None, torch.bfloat16)
    with pytest.raises(TypeError, match="float64: must be float32"):
        scaled_mm.fprop(Codes(x.data, x.scale_inv.double()), w, None, torch.bfloat16)
    with pytest.raises(ValueError, match="contraction of 128 by 64 elements"):
        scaled_mm.fprop(x, codes(torch.randn(32, 64), (128, 128))[0], None, torch.bfloat16)


def test_a_linear_that_cannot_be_computed_is_told_apart_at_once() -> None:
    bf16 = torch.bfloat16
    assert scaled_mm.refuses("E4M3", "E4M3", "E5M2", bf16) is None
    assert "dgrad would multiply E5M2 by E5M2" in scaled_mm.refuses("E4M3", "E5M2", "E5M2", bf16)
    assert "fprop would multiply E5M2 by E5M2" in scaled_mm.refuses("E5M2", "E5M2", "E4M3", bf16)
    assert "float64" in scaled_mm.refuses("E4M3", "E4M3", "E4M3", torch.float64)


def test_the_probe_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    assert scaled_mm.probe(torch.device("cpu")) == "serves cuda tensors, not cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert scaled_mm.probe(cuda) == "no CUDA device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert "sm_100: cuBLASLt has 1×128 and 128×128 scales on sm_90 (Hopper) only" in str(scaled_mm.probe(cuda))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(scaled_mm, "_cublaslt_version", lambda: 120804)
    assert scaled_mm.probe(cuda) == "cuBLASLt 12.8: 12.9 or later is needed, of a torch built for CUDA 12.9"
    monkeypatch.setattr(scaled_mm, "_cublaslt_version", lambda: 130100)
    assert scaled_mm.probe(cuda) is None
    monkeypatch.setattr(torch, "__version__", "2.7.1+cu128")
    assert "torch 2.7.1+cu128 does not know 1×128 and 128×128 scales" in str(scaled_mm.probe(cuda))
    monkeypatch.delattr(torch, "_scaled_mm")
    assert "has no torch._scaled_mm" in str(scaled_mm.probe(cuda))
