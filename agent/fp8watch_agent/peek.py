"""The run of a body without decoding it: whoever shares bodies out needs no more.

Shapes:     a compressed body -> run id, or None where it cannot be seen so
Thread:     any; pure

Bodies of this agent begin with their header, and a header with its run. Other encoders may put them elsewhere; their
bodies are decoded as a whole.
"""

from __future__ import annotations

import zstandard

from fp8watch_agent.bounded_decompress import MAX_WINDOW_BYTES
from fp8watch_agent.envelope import MAX_NAME_CHARS

_HEAD_BYTES = 64 + 4 * MAX_NAME_CHARS
_MAPS = {0xDE: 3, 0xDF: 5}
_TEXTS = {0xD9: 2, 0xDA: 3}


def run_of(body: bytes) -> str | None:
    """The run that a batch or a body of tile maps names first."""
    try:
        reader = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).stream_reader(body)
        head = bytes(reader.read(_HEAD_BYTES))
        at = _expect(head, _into_map(head, 0), "header")
        at = _expect(head, _into_map(head, at), "run")
        return _text(head, at)[0]
    except (zstandard.ZstdError, IndexError, UnicodeDecodeError, ValueError):
        return None


def _into_map(head: bytes, at: int) -> int:
    """Position after the head of a map that is not empty."""
    kind = head[at]
    if 0x81 <= kind <= 0x8F:
        return at + 1
    if kind in _MAPS:
        return at + _MAPS[kind]
    raise ValueError(kind)


def _expect(head: bytes, at: int, name: str) -> int:
    """Position after a key."""
    found, after = _text(head, at)
    if found != name:
        raise ValueError(found)
    return after


def _text(head: bytes, at: int) -> tuple[str, int]:
    """A string, and the position after it."""
    kind = head[at]
    if 0xA0 <= kind <= 0xBF:
        begin, length = at + 1, kind & 0x1F
    elif kind in _TEXTS:
        begin = at + _TEXTS[kind]
        length = int.from_bytes(head[at + 1 : begin], "big")
    else:
        raise ValueError(kind)
    if begin + length > len(head):
        raise ValueError(length)
    return head[begin : begin + length].decode(), begin + length
