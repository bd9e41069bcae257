"""What cannot be quantised is refused with the value, the rule and the remedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quantize.backends import USABLE, each_backend

from fp8watch.kernels import Backend, available, reference, resolve
from fp8watch.kernels.backend import quantize_dequantize_both
from fp8watch.kernels.cpu_compiler import Unavailable, find_compiler
from fp8watch.numerics.formats import FORMATS
from fp8watch.numerics.quantize_job import QuantizeJob, quantize_jobs
from fp8watch.quantize import quantize_blockwise

E4M3 = FORMATS["E4M3"]


@pytest.mark.parametrize(
    ("x", "error", "words"),
    [
        (torch.ones(2, 2, dtype=torch.float64), TypeError, "torch.float64: must be float32, bfloat16 or float16"),
        (torch.ones(2, 2, dtype=torch.int32), TypeError, "torch.int32"),
        (torch.ones(2, 2, dtype=torch.bool), TypeError, "torch.bool"),
        (torch.ones(2, 2, dtype=torch.complex64), TypeError, "torch.complex64"),
        (torch.ones(2, 2).to(torch.float8_e4m3fn), TypeError, "torch.float8_e4m3fn"),
        ([[1.0]], TypeError, "list: must be a torch.Tensor"),
        (torch.ones(2), ValueError, r"shape \(2,\): must be 2-D"),
        (torch.ones(2, 2, 2), ValueError, r"x.reshape\(-1, K\)"),
        (torch.ones(0, 2), ValueError, r"shape \(0, 2\): must have at least one row"),
        (torch.ones(2, 0), ValueError, r"shape \(2, 0\)"),
        (torch.ones(2, 2, device="meta"), ValueError, "device meta"),
        (torch.ones(2, 2).to_sparse(), ValueError, "to_dense"),
    ],
)
@each_backend
def test_operands(backend: Backend, x: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        quantize_blockwise(x)
    with pytest.raises(error, match=words):
        backend.quantize(x, QuantizeJob((1, 128), E4M3, True, 0.0))
    with pytest.raises(error, match=words):
        backend.quantize_dequantize(x, QuantizeJob((1, 128), E4M3, True, 0.0))
    with pytest.raises(error, match=words):
        quantize_dequantize_both(backend, x, QuantizeJob((1, 128), E4M3, True, 0.0))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"block_shape": (128, 1)}, r"block_shape=\(128, 1\): must be \(1, 128\)"),
        ({"block_shape": (64, 64)}, "block_shape"),
        ({"block_shape": 128}, "block_shape=128"),
        ({"fp8_format": "E3M4"}, "must be one of 'E4M3', 'E5M2'"),
        ({"fp8_format": "float8_e4m3fnuz"}, "AMD's fnuz"),
        ({"amax_epsilon": -1e-12}, "amax_epsilon=-1e-12: must be a finite number, 0 or more"),
        ({"amax_epsilon": float("nan")}, "amax_epsilon=nan"),
        ({"amax_epsilon": float("inf")}, "amax_epsilon=inf"),
        ({"amax_epsilon": 1e39}, "amax_epsilon"),
        ({"backend": "gpu"}, "backend='gpu' cannot be used: no backend has that name"),
        ({"backend": "triton"}, "backend='triton' cannot be used: serves cuda tensors, not cpu"),
    ],
)
def test_arguments(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        quantize_blockwise(torch.ones(2, 2), **options)


def test_a_refused_backend_names_those_that_can() -> None:
    with pytest.raises(ValueError, match=r"Available for cpu tensors: .*'reference'.*not available: 'triton'"):
        resolve("triton", "cpu")
    assert available("cpu")["reference"] is None
    assert resolve("reference", "cpu") is reference
    assert resolve(None, "cpu") is resolve(USABLE[0], "cpu")
    assert resolve(None, "cpu").probe(torch.device("cpu")) is None
    with pytest.raises(ValueError, match="no backend can serve meta tensors"):
        resolve(None, "meta")


@pytest.mark.parametrize(
    ("scale", "error", "words"),
    [
        (torch.ones(2, 2), ValueError, r"scale has shape \(2, 2\): must be \(2, 1\)"),
        (torch.ones(2, 1, dtype=torch.float64), TypeError, "torch.float64: must be a float32 tensor"),
        (1.0, TypeError, "scale is float"),
        (torch.ones(2, 1, device="meta"), ValueError, "scale is on meta, the operand on cpu"),
    ],
)
@each_backend
def test_given_scales(backend: Backend, scale: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        backend.quantize(torch.ones(2, 128), QuantizeJob((1, 128), E4M3, True, 0.0), scale)


@pytest.mark.parametrize("tile", [(0, 128), (1, -1), (1,), "ab", None])
@each_backend
def test_tile_shapes(backend: Backend, tile: Any) -> None:
    with pytest.raises(ValueError, match="tile_shape="):
        backend.quantize(torch.ones(2, 128), QuantizeJob(tile, E4M3, True, 0.0))


@each_backend
def test_flushing_subnormals_is_refused_and_not_computed_through(backend: Backend) -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    try:
        with pytest.raises(RuntimeError, match=r"torch.set_flush_denormal\(False\)"):
            quantize_blockwise(torch.ones(2, 128))
        with pytest.raises(RuntimeError, match="subnormal"):
            backend.quantize(torch.ones(2, 128), QuantizeJob((1, 128), E4M3, True, 0.0))
        with pytest.raises(RuntimeError, match="subnormal"):
            backend.dequantize(torch.zeros(1, 1).to(torch.float8_e4m3fn), torch.ones(1, 1), (1, 128))
    finally:
        torch.set_flush_denormal(False)
    quantize_blockwise(torch.ones(2, 128))


def test_a_missing_faster_backend_is_told_once(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    from fp8watch.kernels import registry

    monkeypatch.setattr(registry, "_said", set())
    monkeypatch.setattr(registry, "_reason", lambda n, d: None if n == "reference" else "no compiler was found")
    with caplog.at_level("WARNING"):
        assert resolve(None, "cpu") is reference
        assert resolve(None, "cpu") is reference
    assert [r.getMessage() for r in caplog.records] == [
        f"backend {name!r} passed over for cpu tensors: no compiler was found"
        for name, devices in registry.BACKENDS.items()
        if "cpu" in devices
    ]


def test_the_cpu_backend_serves_wherever_a_compiler_does() -> None:
    try:
        find_compiler()
    except Unavailable as reason:
        pytest.skip(str(reason))
    assert available("cpu")["cpu"] is None


def test_both_directions_of_tiles_that_are_not_one_row_high_are_refused_before_memory_is_written() -> None:
    cpu = pytest.importorskip("fp8watch.kernels.cpu")
    if cpu.probe(torch.device("cpu")) is not None:
        pytest.skip("no compiler")
    for job in quantize_jobs((128, 128), "E4M3"):
        with pytest.raises(ValueError, match=r"both directions of 128×128 tiles .*rowwise tile must be 1 high"):
            cpu.quantize_dequantize_both(torch.ones(512, 512), job)
