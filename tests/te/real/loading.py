"""The real `transformer_engine.pytorch` of one version, imported on a machine without CUDA over the stand-in beside this.

What is replaced: the extension, the checks of the hardware, and torch's functions that name a CUDA device.
"""

import contextlib
import functools
import importlib
import os
import sys
import types
import warnings
from pathlib import Path

import torch
import torch._dynamo  # it lists torch's functions once: before some of them are replaced

STAND_IN = Path(__file__).parent / "stand_in"
CAPABILITY = (9, 0)
FACTORIES = (
    "empty", "zeros", "ones", "full", "tensor", "arange", "rand", "randn", "as_tensor", "empty_strided",
    "empty_like", "zeros_like", "ones_like",
)  # fmt: skip
CHECKS = ("check_fp8_support", "check_mxfp8_support", "check_fp8_block_scaling_support", "check_nvfp4_support")


def load():
    """transformer_engine.pytorch, ready to train on the CPU. Once a process: torch is patched for good."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # its own switch: do not load the shared objects
    os.environ["NVTE_TORCH_COMPILE"] = "0"
    sys.path.insert(0, str(STAND_IN))
    _without_cuda()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package = importlib.import_module("transformer_engine")
        sys.modules["transformer_engine.common"].load_framework_extension = lambda framework: None
        te = importlib.import_module("transformer_engine.pytorch")
        importlib.import_module("transformer_engine.debug.pytorch.debug_state")
    for name, module in list(sys.modules.items()):
        if not name.startswith("transformer_engine.pytorch") or module is None:
            continue
        for check in CHECKS:
            if check in vars(module):
                setattr(module, check, lambda *_: (True, ""))
        if "get_device_compute_capability" in vars(module):
            module.get_device_compute_capability = lambda *_: CAPABILITY
    distributed = importlib.import_module("transformer_engine.pytorch.distributed")
    distributed._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    distributed._set_cuda_rng_state = lambda *_, **__: None
    te.version = package.__version__
    return te


def _on_cpu(device):
    if isinstance(device, torch.device):
        return torch.device("cpu") if device.type == "cuda" else device
    if isinstance(device, str):
        return "cpu" if device.startswith("cuda") else device
    return torch.device("cpu") if type(device) is int else device


def _with_cpu(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        return function(*args, **kwargs)

    return call


def _without_cuda():
    for name in FACTORIES:
        setattr(torch, name, _with_cpu(getattr(torch, name)))
    torch.Tensor._make_wrapper_subclass = staticmethod(_with_cpu(torch.Tensor._make_wrapper_subclass))
    to = torch.Tensor.to

    def moved(self, *args, **kwargs):
        args = [_on_cpu(a) if isinstance(a, str | torch.device) else a for a in args]
        return to(self, *args, **{k: _on_cpu(v) if k == "device" else v for k, v in kwargs.items()})

    torch.Tensor.to = moved
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self
    torch.Tensor.is_cuda = property(lambda self: True)
    facts = {"major": 9, "minor": 0, "multi_processor_count": 132, "name": "none", "total_memory": 1 << 34}
    properties = types.SimpleNamespace(**facts)
    stream = types.SimpleNamespace(wait_stream=lambda _: None, cuda_stream=0)
    cuda = torch.cuda
    cuda.is_available = lambda: True
    cuda.current_device = lambda: 0
    cuda.is_current_stream_capturing = lambda: False
    cuda.get_device_properties = lambda *_: properties
    cuda.get_device_capability = lambda *_: CAPABILITY
    cuda.synchronize = cuda._lazy_init = cuda.set_rng_state = lambda *_: None
    cuda.get_rng_state = lambda *_: torch.get_rng_state()
    cuda.current_stream = cuda.Stream = lambda *_, **__: stream
    cuda.device = lambda *_: contextlib.nullcontext()
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *_: None
