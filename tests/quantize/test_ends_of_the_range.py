"""The largest numbers, and a compiler that nobody can start."""

from __future__ import annotations

import pytest
import torch
from quantize.backends import backends, each_backend

from fp8watch.kernels import Backend
from fp8watch.kernels.cpu_compiler import Unavailable, find_compiler
from fp8watch.numerics.formats import FORMATS
from fp8watch.numerics.quantize_job import QuantizeJob


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("tile", [(1, 128), (128, 1), (128, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_value_that_rounds_up_past_float32_is_measured_alike_everywhere(fmt, tile, dtype) -> None:
    x = torch.ones(64, 64, dtype=dtype)
    x[-1, -1] = 3.38e38
    alone = [backend.quantize(x, QuantizeJob(tile, fmt, True, 0.0))[2].summary() for backend in backends()]
    x[0, 0] = torch.nan  # another tile's trouble changes nothing here
    beside = [backend.quantize(x, QuantizeJob(tile, fmt, True, 0.0))[2].summary() for backend in backends()]
    for name in ("noise_energy", "tile_noise_ratio_max"):
        values = [float(summary[name]) for summary in alone]
        assert values == pytest.approx([values[-1]] * len(values), rel=1e-6)
        assert values[-1] < float("inf")
    assert float(alone[-1]["noise_energy"]) - 1 <= float(beside[-1]["noise_energy"]) <= float(alone[-1]["noise_energy"])


@each_backend
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_torchs_defaults_are_of_no_concern(backend: Backend, dtype: torch.dtype) -> None:
    x, fmt, before = torch.randn(64, 512), FORMATS["E4M3"], torch.get_default_dtype()
    data, scale_inv, _ = backend.quantize(x, QuantizeJob((1, 128), fmt, False, 0.0))
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            got, got_scale_inv, stats = backend.quantize(x, QuantizeJob((1, 128), fmt, False, 0.0))
            values = backend.dequantize(got, got_scale_inv, (1, 128))
    finally:
        torch.set_default_dtype(before)
    assert stats is not None
    assert torch.equal(got.view(torch.uint8), data.view(torch.uint8))
    assert torch.equal(got_scale_inv, scale_inv)
    assert (values.dtype, values.device.type, stats.amax.dtype) == (torch.float32, "cpu", torch.float32)


def test_a_compiler_variable_that_is_no_command_is_a_reason_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", 'gcc "')
    with pytest.raises(Unavailable, match=r"CC='gcc \"' cannot be read as a command: .*correct or unset CC"):
        find_compiler()
