"""What lets Megatron-core run on a CPU: where it asks for a CUDA device, it gets the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _OnTheCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def _type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """ "torch.cuda.FloatTensor" for float32: Megatron tells dtypes by these names."""
    got = _own_type(self, *args, **kwargs)
    return got.replace("torch.", "torch.cuda.") if isinstance(got, str) and ".cuda." not in got else got


_own_type = torch.Tensor.type


@contextlib.contextmanager
def on_the_cpu() -> Iterator[None]:
    """Everything that is made inside lies on the CPU."""
    patched = {(torch.Tensor, "type"): _type, (torch.Tensor, "cuda"): lambda self, *_, **__: self}
    patched[torch.cuda, "current_device"] = lambda: torch.device("cpu")
    before = {place: getattr(*place) for place in patched}
    for (owner, name), function in patched.items():
        setattr(owner, name, function)
    try:
        with _OnTheCpu():
            yield
    finally:
        for (owner, name), function in before.items():
            setattr(owner, name, function)


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """Megatron's groups of one rank, in a process group that the environment describes, everything on the CPU."""
    with on_the_cpu():
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import random as random_states

    torch.distributed.init_process_group("gloo")
    with on_the_cpu():
        parallel_state.initialize_model_parallel()
        random_states.get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()
        yield
    torch.distributed.destroy_process_group()
