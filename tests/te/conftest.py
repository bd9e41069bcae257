"""An imitation of Transformer Engine on the path, for the tests that ask for it, and gone afterwards."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

SURFACE = Path(__file__).parent / "surface"


def forget() -> None:
    """Unload every module of Transformer Engine."""
    for name in [n for n in sys.modules if n.split(".")[0] == "transformer_engine"]:
        del sys.modules[name]


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """transformer_engine.pytorch, imitated."""
    forget()
    monkeypatch.syspath_prepend(str(SURFACE))
    import transformer_engine.pytorch as package

    torch.manual_seed(0)
    yield package
    forget()


from attach.conftest import attach, refused_nothing  # noqa: E402, F401 - a recorder that keeps what it is handed
