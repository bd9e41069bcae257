"""Envelope shared by all wire bodies: header, and bounded msgpack maps of byte strings.

Thread:     any; pure
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from fp8watch_agent.bounded_decompress import WireError

MAX_WIRE_BYTES = 8 << 20
MAX_HEADER_BYTES = 64 << 10
MAX_STEPS = 65_536
MAX_RECORDS = 262_144
MAX_TILE_MAPS = 16_384
MAX_COLUMNS = 256
MAX_NAME_CHARS = 512

Array = npt.NDArray[Any]

UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class UnsupportedVersion(WireError):
    """A body of a wire version that this codec does not know."""


def open_map(name: str, raw: msgspec.Raw) -> dict[str, bytes]:
    """Decode a map of byte strings, of at most MAX_COLUMNS entries."""
    data = memoryview(raw)
    kind = data[0]
    wide = {0xDE: 3, 0xDF: 5}.get(kind)  # map 16, map 32: length of the map header
    count = kind & 0x0F if kind & 0xF0 == 0x80 else int.from_bytes(data[1:wide], "big") if wide else None
    if count is None:
        raise WireError(name, "must be a map of column names to byte strings")
    if count > MAX_COLUMNS:
        raise WireError(name, f"{count} columns; at most {MAX_COLUMNS}")
    try:
        return msgspec.msgpack.decode(raw, type=dict[str, bytes])
    except UNDECODABLE as e:
        raise WireError("body", f"{name}: {e}") from e


def exact(name: str, raw: bytes, dtype: str, count: int, size: int = 1) -> Array:
    want = np.dtype(dtype).itemsize * count * size
    if len(raw) != want:
        raise WireError(name, f"{len(raw)} bytes; {count} records of {dtype}×{size} take {want}")
    a = np.frombuffer(raw, dtype=dtype)
    return a if size == 1 else a.reshape(count, size)


def decode_header(raw: msgspec.Raw, kind: type[Any], reads: tuple[int, ...]) -> Any:
    if len(bytes(raw)) > MAX_HEADER_BYTES:
        raise WireError("header", f"larger than {MAX_HEADER_BYTES} bytes")
    try:
        version = msgspec.msgpack.decode(raw, type=dict[str, Any]).get("version", 1)
        if version not in reads:
            raise UnsupportedVersion("header", f"version {version!r}; this collector reads {reads}: upgrade it")
        header = msgspec.msgpack.decode(raw, type=kind)
    except UNDECODABLE as e:
        raise WireError("header", str(e)) from e
    for name in ("run", "session"):
        value = getattr(header, name)
        if not value or len(value) > MAX_NAME_CHARS:
            raise WireError("header", f"{name} of {len(value)} characters; 1 to {MAX_NAME_CHARS} are allowed")
    if header.rank < 0 or header.seq < 0 or header.seq >= 1 << 63:
        raise WireError("header", f"rank {header.rank} and seq {header.seq} must be 0 or more")
    return header
