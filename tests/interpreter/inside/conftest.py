"""The interpreter as it is, but that calls between kernels' functions do not patch Triton anew each time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction, _patch_lang


@pytest.fixture(autouse=True, scope="session")
def quick_interpreter() -> Iterator[None]:
    """The launch of a kernel has patched the language already; doing it again takes ten times as long as the call.
    Triton's own functions see it under another name, and what is patched for them stays."""
    patched: set[str] = set()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = self.fn.__module__
        if module not in patched and not module.startswith("fp8watch"):
            _patch_lang(self.fn)
            patched.add(module)
        return self.rewrite()(*args, **kwargs)

    before, InterpretedFunction.__call__ = InterpretedFunction.__call__, call
    torch.set_num_threads(1)
    yield
    InterpretedFunction.__call__ = before


@pytest.fixture(autouse=True)
def numpy_does_not_warn() -> Iterator[None]:
    """448 / 0 is Inf to a kernel; to numpy, which interprets it, it is also a warning."""
    with np.errstate(all="ignore"):
        yield


@pytest.fixture
def small_geometry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions as on a GPU, read in more than one strip and folded in more than one chunk."""
    from fp8watch.kernels import triton_fold, triton_launch

    monkeypatch.setattr(triton_launch, "interpreted_region", triton_launch.REGION)
    monkeypatch.setattr(triton_launch, "interpreted_strip", 64)
    monkeypatch.setattr(triton_fold, "CHUNK", 2)
