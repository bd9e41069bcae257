"""A stand-in for Transformer Engine's C++ extension: what its Python modules need to train, computed by torch on a CPU.

The Python packages run on it unchanged. It quantises, multiplies and normalises, lays tensors out as the extension does,
and refuses what the extension refuses (a quantiser that is not exactly one of its classes). It says nothing about the
kernels: their bytes, order and speed need a GPU.
"""

from . import compute
from .compute import (
    generic_gemm,
    layernorm_bwd,
    layernorm_fwd,
    rmsnorm_bwd,
    rmsnorm_fwd,
    te_general_grouped_gemm,
)
from .enums import (
    CommOverlapType,
    DType,
    Float8BlockScaleTensorFormat,
    FP8BwdTensors,
    FP8FwdTensors,
    any_enumeration,
)
from .quantize import (
    bgrad_quantize,
    compute_amax,
    create_empty_quantized_tensor,
    dequantize,
    fp8_transpose,
    fused_amax_and_scale_update_after_reduction,
    quantize,
    split_quantize,
)

for _name in compute.ACTIVATIONS:
    globals()[_name], globals()[f"d{_name}"], globals()[f"dbias_d{_name}"] = compute.activation(_name)

_FACTS = {
    "get_num_cublas_streams": 4,
    "get_cublasLt_version": 130200,
    "get_cudnn_version": 91900,
    "device_supports_multicast": False,
    "ubuf_built_with_mpi": False,
    "get_stream_priority_range": (0, -5),
}


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    if name in _FACTS:
        return lambda *_: _FACTS[name]
    if name.startswith("NVTE_") or name[:1].isupper():
        made = globals()[name] = any_enumeration(name)
        return made

    def missing(*_, **__):
        raise NotImplementedError(f"transformer_engine_torch.{name}: not in the stand-in")

    missing.__name__ = name
    return missing


__all__ = [
    "CommOverlapType",
    "DType",
    "FP8BwdTensors",
    "FP8FwdTensors",
    "Float8BlockScaleTensorFormat",
    "bgrad_quantize",
    "compute_amax",
    "create_empty_quantized_tensor",
    "dequantize",
    "fp8_transpose",
    "fused_amax_and_scale_update_after_reduction",
    "generic_gemm",
    "get_cudnn_version",
    "layernorm_bwd",
    "layernorm_fwd",
    "quantize",
    "rmsnorm_bwd",
    "rmsnorm_fwd",
    "split_quantize",
    "te_general_grouped_gemm",
]
