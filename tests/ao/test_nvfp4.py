"""torchao's real NVFP4 tensors decode to the same values: a second oracle of how 4-bit codes and their scales are read."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fp8watch.integrations.te_tensors import read


def test_codes_and_scales_stand_for_what_torchao_says() -> None:
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    torch.manual_seed(0)
    x = torch.randn(64, 128, dtype=torch.bfloat16) * torch.logspace(-2, 2, 64, dtype=torch.bfloat16)[:, None]
    scale = nvfp4.per_tensor_amax_to_scale(x.abs().max().float())
    made = nvfp4.NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale)
    view = read(
        SimpleNamespace(
            _fp4_dtype=10, _quantizer=None, _rowwise_data=made.qdata, _rowwise_scale_inv=made.scale.view(64, 8),
            _amax_rowwise=(scale * 448 * 6).reshape(1),
        ),
        False,
    )  # fmt: skip
    assert not isinstance(view, str), view
    ours = view.values() * view.scale_inv.repeat_interleave(16, 1)
    assert torch.allclose(ours, made.dequantize(torch.float32), rtol=1e-6, atol=0)
    assert 0.001 < ((ours - x.float()).square().sum() / x.float().square().sum()).item() < 0.02
