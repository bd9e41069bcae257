"""Characters that turn the direction of text around, written as escapes: a name must look like what it is.

Shapes:     text -> text
Thread:     any; pure
"""

from __future__ import annotations

import re
from typing import TypeVar

_TURNING = re.compile(r"[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
T = TypeVar("T")


def visible(value: T) -> T:
    """Text with U+202E and its like as \\u202e; everything else as it is, and markup stays markup."""
    if not isinstance(value, str) or not _TURNING.search(value):
        return value
    return type(value)(_TURNING.sub(lambda m: f"\\u{ord(m[0]):04x}", value))
