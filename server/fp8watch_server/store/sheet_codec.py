"""Columns of many sites as few bytes, exact to the last bit: what a sheet holds.

Shapes:     columns [N] or [N, size] of records sorted by site -> a byte string for each part of the sites; and back
Thread:     compactor (pack), query pool (unpack)

All sites of a source are packed together, so that a numpy call handles tens of thousands of values. A lane (one number a
record) is one of: left out (all at the default), one value, one value a site, or planes: each site's smallest value is
taken off, and what is left is cut into byte 0 of all records, byte 1, and so on. A plane is zeros, a zstd frame of its own,
or raw where zstd gains nothing. Frames of thousands of records have the statistics of their plane to themselves. The whole
is covered by a CRC-32.
"""

from __future__ import annotations

import struct
import threading
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from fp8watch_agent.column_words import FROM_AMAX, expected_scale_inv
from fp8watch_server.store.block_codec import Column, DamagedBlock

Array = npt.NDArray[Any]

FORMAT = 2
LEVEL = 1
_HEAD = struct.Struct("<IBI")  # crc32, format, bytes of the directory
_ONE, _SITES, _PLANES = 0, 1, 2
_PLAIN, _UPPER, _FROM_AMAX = 0, 1, 2
"""Words of a column: as they are; of doubles whose lower half is 0 the upper one; less what amax lets expect."""
_RAW, _ZEROS = -1, 0
_MAX_BYTES = 1 << 24

_local = threading.local()


def compress(raw: bytes) -> bytes:
    """One small zstd frame."""
    made = getattr(_local, "compressor", None)
    if made is None:
        made = _local.compressor = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True)
    out: bytes = made.compress(raw)
    return out


def decompress(frame: bytes) -> bytes:
    """Inverse of `compress`."""
    made = getattr(_local, "decompressor", None)
    if made is None:
        made = _local.decompressor = zstandard.ZstdDecompressor()
    out: bytes = made.decompress(frame, max_output_size=_MAX_BYTES)
    return out


@dataclass(frozen=True)
class Places:
    """Where the records of each site lie: next to each other, `lengths` [S] of them."""

    lengths: npt.NDArray[np.int64]

    @cached_property
    def ends(self) -> npt.NDArray[np.int64]:
        """Place after each site's last record. [S]"""
        return np.cumsum(self.lengths)

    @cached_property
    def starts(self) -> npt.NDArray[np.int64]:
        """Place of each site's first record. [S]"""
        return self.ends - self.lengths

    @property
    def n(self) -> int:
        """Number of records."""
        return int(self.ends[-1])

    @cached_property
    def each(self) -> int:
        """Records of every site, where all have as many; else 0."""
        first = int(self.lengths[0])
        return first if bool((self.lengths == first).all()) else 0

    def of_sites(self, ufunc: np.ufunc, values: Array) -> Array:
        """Reduce [N] to [S]."""
        if self.each:
            return np.asarray(ufunc.reduce(values.reshape(-1, self.each), axis=1))
        return np.asarray(ufunc.reduceat(values, self.starts))

    def along(self, of_sites: Array) -> Array:
        """[S] -> [N]"""
        return np.repeat(of_sites, self.each or self.lengths)


def seal(directory: Any, payload: Sequence[bytes]) -> bytes:
    """Directory and payload as one body, with its CRC-32."""
    head = msgspec.msgpack.encode(directory)
    rest = b"".join((_HEAD.pack(0, FORMAT, len(head))[4:], head, *payload))
    return zlib.crc32(rest).to_bytes(4, "little") + rest


def unseal(body: bytes, check: bool) -> tuple[Any, int]:
    """The directory of a body, and where its payload begins.

    Raises:
        DamagedBlock: not a body, or not the bytes that were written.
    """
    try:
        crc, version, size = _HEAD.unpack_from(body)
        if version != FORMAT:
            raise DamagedBlock(f"format {version} of a sheet; this collector reads {FORMAT}: upgrade it")
        if check and zlib.crc32(memoryview(body)[4:]) != crc:
            raise DamagedBlock("the CRC-32 of a sheet is not that of its bytes")
        return msgspec.msgpack.decode(body[_HEAD.size : _HEAD.size + size]), _HEAD.size + size
    except (struct.error, msgspec.DecodeError, UnicodeDecodeError) as e:
        raise DamagedBlock(f"a sheet cannot be read ({type(e).__name__}: {e})") from e


def narrow(values: Array) -> tuple[int, int, bytes]:
    """Unsigned numbers as their smallest, and the bytes of what each has above it."""
    low = int(values.min())
    above = values - values.dtype.type(low)
    width = _width(int(above.max()))
    return low, width, above.astype(f"<u{width}").tobytes()


def wide(packed: Sequence[Any], dtype: Any) -> Array:
    """Inverse of `narrow`."""
    low, width, raw = packed
    values = np.frombuffer(raw, f"<u{width}").astype(dtype)
    values += np.dtype(dtype).type(low)
    return values


def _width(top: int) -> int:
    return 1 if top < 1 << 8 else 2 if top < 1 << 16 else 4 if top < 1 << 32 else 8


_BIAS = {"<i4": np.uint32(1 << 31), "<i8": np.uint64(1 << 63)}
"""Flips the sign of integers, so that their words ascend as they do."""


def _words(spec: Column, values: Array) -> tuple[Array, int]:
    """[N, size] -> words [N, size] of 4 or 8 bytes (1 of a byte), and how they were made."""
    words = values.view(f"<u{values.dtype.itemsize}")
    if spec.dtype in _BIAS:
        return words ^ _BIAS[spec.dtype], _PLAIN
    if spec.dtype == "<f8":
        halves = words.view("<u4").reshape(*words.shape, 2)
        if not halves[..., 0].any():
            return np.ascontiguousarray(halves[..., 1]), _UPPER
    return words, _PLAIN


class _Parts:
    """Entries and payload of each part while columns are packed."""

    def __init__(self, places: Places, edges: Sequence[tuple[int, int]]) -> None:
        self.places, self.edges = places, edges
        self.records = [(int(places.starts[a]), int(places.ends[b - 1])) for a, b in edges]
        self.entries: list[list[Any]] = [[] for _ in edges]
        self.payload: list[list[bytes]] = [[] for _ in edges]

    def lane(self, words: Array) -> list[Any]:
        """One lane [N]: its entry for each part."""
        if bool((words == words[0]).all()):
            return [[_ONE, int(words[0])]] * len(self.edges)
        low, high = (self.places.of_sites(f, words) for f in (np.minimum, np.maximum))
        if bool((low == high).all()):
            return [[_SITES, *narrow(low[a:b])] for a, b in self.edges]
        spread = words - self.places.along(low)
        size = spread.dtype.itemsize
        used = (int((high - low).max()).bit_length() + 7) // 8
        raw = spread.view(np.uint8).reshape(-1, size)
        out: list[list[Any]] = [[_PLANES, *narrow(low[a:b]), []] for a, b in self.edges]
        for k in range(used):
            plane = np.ascontiguousarray(raw[:, k])
            for entry, payload, (a, b) in zip(out, self.payload, self.records, strict=True):
                entry[4].append(_put(plane[a:b], payload))
        return out


def _put(plane: Array, payload: list[bytes]) -> int:
    if not plane.any():
        return _ZEROS
    raw = plane.tobytes()
    frame = compress(raw)
    if len(frame) >= len(raw):
        payload.append(raw)
        return _RAW
    payload.append(frame)
    return len(frame)


def pack(
    columns: Mapping[str, Array], table: Mapping[str, Column], places: Places, edges: Sequence[tuple[int, int]]
) -> list[tuple[list[Any], list[bytes]]]:
    """Entries for the directory, and payload, of each part; `edges` are the first site of a part and that after its last.

    A column that is not given is at its default.
    """
    parts = _Parts(places, edges)
    amax: dict[str, Array] = {}
    for name, given in sorted(columns.items(), key=lambda item: table[item[0]].code):
        spec = table[name]
        values = np.ascontiguousarray(given, dtype=spec.dtype).reshape(places.n, -1)
        words, how = _words(spec, values)
        default = np.full((1, 1), spec.default, dtype=spec.dtype)
        if bool((values.view(f"<u{values.dtype.itemsize}") == default.view(f"<u{default.dtype.itemsize}")).all()):
            continue
        if name in FROM_AMAX.values():
            amax[name] = words[:, 0]
        of_amax = amax.get(FROM_AMAX.get(name, ""))
        if of_amax is not None:
            odd = words - expected_scale_inv(of_amax)[:, None]
            if np.count_nonzero(odd != odd[0]) < np.count_nonzero(words != words[0]):
                words, how = odd, _FROM_AMAX
        lanes = [parts.lane(np.ascontiguousarray(words[:, lane])) for lane in range(words.shape[1])]
        for i, entries in enumerate(parts.entries):
            entries.append([spec.code, how, [lane[i] for lane in lanes]])
    return list(zip(parts.entries, parts.payload, strict=True))


class Unpacked:
    """Columns of a body: `column(name)` gives one, [n] or [n, size], of all its records or of a slice of them."""

    def __init__(
        self, body: bytes, entries: Sequence[Any], payload: int, places: Places, table: Mapping[str, Column]
    ) -> None:
        self._body, self._places, self._table = body, places, table
        self._entries: dict[int, tuple[Any, int]] = {}
        for entry in entries:
            self._entries[entry[0]] = entry, payload
            payload += sum(payload_bytes(lane, places.n) for lane in entry[2])

    def __contains__(self, name: str) -> bool:
        return self._table[name].code in self._entries

    def column(self, name: str, part: slice = slice(None)) -> Array:
        """Values of a column; at its default where it was left out.

        Raises:
            DamagedBlock: it cannot be read.
        """
        spec = self._table[name]
        first, last, _ = part.indices(self._places.n)
        found = self._entries.get(spec.code)
        shape = (last - first,) if spec.size == 1 else (last - first, spec.size)
        if found is None:
            return np.full(shape, spec.default, dtype=spec.dtype)
        (_, how, lanes), at = found
        width = 4 if how == _UPPER else np.dtype(spec.dtype).itemsize
        words = np.empty((len(lanes), last - first), dtype=f"<u{width}")
        try:
            for out, lane in zip(words, lanes, strict=True):
                self._lane(lane, at, out, first, last)
                at += payload_bytes(lane, self._places.n)
        except (ValueError, TypeError, IndexError, zstandard.ZstdError) as e:
            raise DamagedBlock(f"column {name} of a sheet cannot be read ({type(e).__name__}: {e})") from e
        if how == _FROM_AMAX:
            words[0] += expected_scale_inv(self.column(FROM_AMAX[name], part).view("<u4"))
        if how == _UPPER:
            words = words.astype("<u8") << np.uint64(32)
        if spec.dtype in _BIAS:
            words ^= _BIAS[spec.dtype]
        if spec.size == 1:
            return np.asarray(words[0].view(spec.dtype))
        return np.ascontiguousarray(words.T).view(spec.dtype)

    def _lane(self, lane: Sequence[Any], at: int, out: Array, first: int, last: int) -> None:
        if lane[0] == _ONE:
            out[:] = lane[1]
            return
        base = wide(lane[1:4], out.dtype)
        whole = last - first == self._places.n
        along = self._places.along(base) if whole else self._places.along(base)[first:last]
        if lane[0] == _SITES:
            out[:] = along
            return
        raw = np.zeros((last - first, out.dtype.itemsize), dtype=np.uint8)
        for k, how in enumerate(lane[4]):
            if how == _RAW:
                raw[:, k] = np.frombuffer(self._body, np.uint8, count=last - first, offset=at + first)
                at += self._places.n
            elif how != _ZEROS:
                raw[:, k] = np.frombuffer(decompress(self._body[at : at + how]), np.uint8)[first:last]
                at += how
        np.add(raw.view(out.dtype)[:, 0], along, out=out)


def payload_bytes(lane: Sequence[Any], n: int) -> int:
    """Bytes of a lane's planes, of n records."""
    return sum(n if how == _RAW else how for how in lane[4]) if lane[0] == _PLANES else 0
