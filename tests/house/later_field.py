"""A field that nobody knows, put into the table before anything is imported: `pytest -p house.later_field …`.

One count and one maximum, in the middle of `FIELDS`, with a group of their own that no backend fills.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

MODULE = "fp8watch_agent.record"
GROUP = "    MADE_UP = 1 << 29\n"
COUNT = '    Field("num_made_up", "<i8", "sum", Measured.MADE_UP, 0, "elements", "made up", 250, label="made up"),\n'
LARGEST = '    Field("made_up_max", "<f4", "max", Measured.MADE_UP, 0, "x", "made up", 251),\n'


def after(text: str, line: str, more: str) -> str:
    """The text with more lines behind the one that begins so."""
    (found,) = [whole for whole in text.splitlines(keepends=True) if whole.startswith(line)]
    return text.replace(found, found + more)


def plant() -> ModuleType:
    """Import the table of fields with two more of them."""
    spec = importlib.util.find_spec(MODULE)
    assert spec is not None
    assert spec.origin is not None
    text = after(Path(spec.origin).read_text(), "    CAST = 1024", GROUP)
    text = after(after(text, '    Field("num_elements"', COUNT), '    Field("amax_max"', LARGEST)
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module
    exec(compile(text, spec.origin, "exec"), module.__dict__)
    return module


if MODULE in sys.modules:
    raise ImportError(f"{MODULE} was imported before {__name__}")
plant()
