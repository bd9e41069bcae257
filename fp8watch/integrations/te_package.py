"""Transformer Engine's PyTorch package, or the reason why there is none.

Thread:     training, once
"""

from __future__ import annotations

import importlib
from types import ModuleType


def load() -> tuple[ModuleType | None, str]:
    """Transformer Engine's PyTorch package, or None, and its version or the reason why it cannot be had.

    Its import fails in many ways: a shared object that is missing (OSError, FileNotFoundError), another CUDA
    (RuntimeError), a framework extension that was not built (ImportError).
    """
    try:
        package = importlib.import_module("transformer_engine.pytorch")
        version = getattr(importlib.import_module("transformer_engine"), "__version__", "unknown")
    except Exception as error:  # noqa: BLE001 - any failure to import is a reason, none is ours
        return None, f"transformer_engine cannot be imported ({type(error).__name__}: {error})"
    return package, str(version)
