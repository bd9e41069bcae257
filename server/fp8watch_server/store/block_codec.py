"""Numbers as few bytes: the columns of a block, exact to the last bit that is kept.

Shapes:     columns {name: [n] or [n, size]} of B blocks at once -> B byte strings, and back, a column at a time
Thread:     compactor (pack), query pool (unpack)

A column is one of: left out (every value is its default), one value (all alike), or planes. Planes are what makes
floats small: byte 3 of all values, then byte 2, and so on. A plane is one byte (all alike), noise (kept as it is), or
goes into one of two zstd frames by its entropy, because zstd has one Huffman table a frame. Integers have their
minimum taken off first. The whole is covered by a CRC-32.
"""

from __future__ import annotations

import struct
import threading
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

Array = npt.NDArray[Any]

FORMAT = 1
LEVEL = 3
_HEAD = struct.Struct("<IBBHHII")  # crc32, format, number of columns, n, bytes of directory; bytes of the two frames
_ONE, _PLANES = 0, 1
_ALIKE, _LOW, _MIDDLE, _NOISE = 0, 1, 2, 3
_LOW_BITS, _NOISE_BITS = 2.5, 7.0
"""Entropy of a byte of a plane up to which it counts as low, and from which zstd gains nothing."""
_MAX_BYTES = 1 << 24

_local = threading.local()


class DamagedBlock(ValueError):
    """Bytes that are not what was written."""


@dataclass(frozen=True)
class Column:
    """What both sides know of a column."""

    code: int  # its number in the directory, 0…255, for good
    dtype: str
    size: int = 1
    default: float = 0


def _compressor() -> zstandard.ZstdCompressor:
    made = getattr(_local, "compressor", None)
    if made is None:
        made = _local.compressor = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True)
    return made


def _decompressor() -> zstandard.ZstdDecompressor:
    made = getattr(_local, "decompressor", None)
    if made is None:
        made = _local.decompressor = zstandard.ZstdDecompressor()
    return made


def short_mantissa(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Doubles rounded to 20 bits of fraction, their upper four bytes: within 5e-7, over all of their range. Idempotent.

    NaN, Inf and the sign stay; what is finite stays finite.
    """
    bits = np.ascontiguousarray(values, dtype=np.float64).view(np.int64)
    rounded = ((bits + (1 << 31)) & -(1 << 32)).view(np.float64)
    finite = np.isfinite(values)
    if finite.all() and np.isfinite(rounded).all():
        return np.asarray(rounded)
    cut = (bits & -(1 << 32)).view(np.float64)
    return np.where(finite, np.where(np.isfinite(rounded), rounded, cut), values)


def _entropy(planes: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
    """Bits a byte of each plane [P, n]."""
    p, n = planes.shape
    index = planes.astype(np.int64) + (np.arange(p, dtype=np.int64) << 8)[:, None]
    counts = np.bincount(index.reshape(-1), minlength=p << 8).reshape(p, 256)
    with np.errstate(divide="ignore", invalid="ignore"):
        parts = np.where(counts > 0, counts * np.log2(counts), 0.0)
    return np.asarray(np.log2(n) - parts.sum(axis=1) / n)


def _planes_of(values: Array) -> tuple[npt.NDArray[np.uint8], Array | None]:
    """[B, n] of any dtype -> planes [B, k, n], and what was taken off [B] (integers)."""
    base = None
    if values.dtype.kind in "iu":
        wide = values.astype(np.int64)
        base = wide.min(axis=1)
        spread = (wide.view(np.uint64) - base.view(np.uint64)[:, None]).astype("<u8")
        top = int(spread.max())
        width = 1 if top < 1 << 8 else 2 if top < 1 << 16 else 4 if top < 1 << 32 else 8
        values = spread.astype(f"<u{width}")
    b, n = values.shape
    raw = np.ascontiguousarray(values).view(np.uint8).reshape(b, n, values.dtype.itemsize)
    return np.ascontiguousarray(raw.transpose(0, 2, 1)), base


def pack(columns: Mapping[str, Array], table: Mapping[str, Column], shape: tuple[int, int]) -> list[bytes]:
    """Pack B blocks of n values, `shape` (B, n): columns [B, n] or [B, n, size] in, one byte string a block out.

    A column that is not given is at its default.
    """
    num_blocks, n = shape
    if not 0 < n < 1 << 16:
        raise ValueError(f"{n} values in a block; 1 to 65535 are allowed")
    entries: list[list[bytes]] = [[] for _ in range(num_blocks)]
    counts = np.zeros(num_blocks, dtype=np.int64)
    streams: list[dict[int, list[bytes]]] = [{_LOW: [], _MIDDLE: [], _NOISE: []} for _ in range(num_blocks)]
    for name, given in sorted(columns.items(), key=lambda item: table[item[0]].code):
        spec = table[name]
        values = np.ascontiguousarray(given, dtype=spec.dtype)
        lanes = values[:, :, None] if values.ndim == 2 else values
        same = _all_default(lanes, spec)
        wanted = np.flatnonzero(~same)
        if not len(wanted):
            continue
        size = lanes.shape[2]
        flat = lanes[wanted].transpose(0, 2, 1).reshape(len(wanted) * size, n)
        raw = np.ascontiguousarray(flat).view(np.uint8).reshape(len(flat), n, flat.dtype.itemsize)
        alike = (raw == raw[:, :1]).all(axis=(1, 2))
        planes, base = _planes_of(flat)
        k = planes.shape[1]
        kinds = np.full((len(flat), k), _ALIKE, dtype=np.uint8)
        mixed = (planes != planes[:, :, :1]).any(axis=2)
        if mixed.any():
            bits = _entropy(planes[mixed])
            kinds[mixed] = np.where(bits < _LOW_BITS, _LOW, np.where(bits < _NOISE_BITS, _MIDDLE, _NOISE))
        one_value = alike.reshape(len(wanted), size).all(axis=1).tolist()
        heads, busy = _lane_heads(base, planes, kinds), kinds.any(axis=1).reshape(len(wanted), size)
        for w, block in enumerate(wanted.tolist()):
            counts[block] += 1
            out, into = entries[block], streams[block]
            if one_value[w]:
                out.append(bytes((spec.code, _ONE)) + np.ascontiguousarray(lanes[block, 0]).tobytes())
                continue
            out.append(bytes((spec.code, _PLANES, k)))
            out += heads[w * size : (w + 1) * size]
            for at in (np.flatnonzero(busy[w]) + w * size).tolist():
                for plane, kind in enumerate(kinds[at].tolist()):
                    if kind != _ALIKE:
                        into[kind].append(planes[at, plane].tobytes())
    return [_assemble(n, int(counts[i]), b"".join(entries[i]), streams[i]) for i in range(num_blocks)]


def _lane_heads(base: Array | None, planes: npt.NDArray[np.uint8], kinds: npt.NDArray[np.uint8]) -> list[bytes]:
    """What the directory says of each lane [F, k, n]: what was taken off, then the kind of each plane, and the byte of
    one that is alike.
    """
    num_lanes, k = kinds.shape
    wide = 0 if base is None else 8
    heads = np.zeros((num_lanes, wide + 2 * k), np.uint8)
    there = np.ones(heads.shape, dtype=bool)
    if base is not None:
        heads[:, :8] = base.astype("<i8").view(np.uint8).reshape(num_lanes, 8)
    heads[:, wide::2] = kinds
    heads[:, wide + 1 :: 2] = planes[:, :, 0]
    there[:, wide + 1 :: 2] = kinds == _ALIKE
    ends = np.cumsum(there.sum(axis=1)).tolist()
    raw = heads[there].tobytes()
    return [raw[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _all_default(lanes: Array, spec: Column) -> npt.NDArray[np.bool_]:
    return np.asarray((lanes == np.asarray(spec.default, dtype=spec.dtype)).all(axis=(1, 2)))


def _assemble(n: int, num_columns: int, directory: bytes, streams: dict[int, list[bytes]]) -> bytes:
    low = _compressor().compress(directory + b"".join(streams[_LOW]))
    middle = _compressor().compress(b"".join(streams[_MIDDLE])) if streams[_MIDDLE] else b""
    rest = (
        _HEAD.pack(0, FORMAT, num_columns, n, len(directory), len(low), len(middle))[4:]
        + low
        + middle
        + b"".join(streams[_NOISE])
    )
    return zlib.crc32(rest).to_bytes(4, "little") + rest


class Packed:
    """A packed block, opened: `column(name)` gives one column, [n] or [n, size]."""

    def __init__(self, body: bytes, table: Mapping[str, Column], *, check: bool = False) -> None:
        """Open a block; `check` compares its CRC-32.

        Raises:
            DamagedBlock: not a block, or not the bytes that were written.
        """
        try:
            crc, version, num_columns, n, directory, low, middle = _HEAD.unpack_from(body)
            if version != FORMAT:
                raise DamagedBlock(f"format {version} of a block; this collector reads {FORMAT}: upgrade it")
            if check and zlib.crc32(memoryview(body)[4:]) != crc:
                raise DamagedBlock("the CRC-32 of a block is not that of its bytes")
            at = _HEAD.size
            frame = _decompressor().decompress(body[at : at + low], max_output_size=_MAX_BYTES)
            self._streams = {_LOW: frame, _NOISE: body, _MIDDLE: b""}
            if middle:
                part = body[at + low : at + low + middle]
                self._streams[_MIDDLE] = _decompressor().decompress(part, max_output_size=_MAX_BYTES)
            self.n = n
            self._table, self._names = table, _names(table)
            self._directory, self._at, self._left = frame, 0, num_columns
            self._next = {_LOW: directory, _MIDDLE: 0, _NOISE: at + low + middle}
            self._where: dict[str, Any] = {}
            if num_columns and not directory:
                raise DamagedBlock("a block without the directory of its columns")
        except (struct.error, zstandard.ZstdError) as e:
            raise DamagedBlock(f"a block cannot be read ({type(e).__name__}: {e})") from e

    def _find(self, wanted: str) -> Any:
        """Its one value, or the place of every plane; None where it was left out. Reads on only as far as it must."""
        code = self._table[wanted].code
        while wanted not in self._where and self._left:
            if self._directory[self._at] > code:  # columns stand in the order of their numbers
                return None
            try:
                self._read_on()
            except (IndexError, KeyError) as e:
                raise DamagedBlock(f"the directory of a block cannot be read ({type(e).__name__}: {e})") from e
        return self._where.get(wanted)

    def _read_on(self) -> None:
        directory, at, n, next_at = self._directory, self._at, self.n, self._next
        name = self._names[directory[at]]
        spec = self._table[name]
        if directory[at + 1] == _ONE:
            self._at = at + 2 + _item_bytes(spec.dtype) * spec.size
            self._where[name] = directory[at + 2 : self._at]
            self._left -= 1
            return
        k = directory[at + 2]
        at += 3
        whole = _is_integer(spec.dtype)
        lanes = []
        for _ in range(spec.size):
            base = 0
            if whole:
                base = int.from_bytes(directory[at : at + 8], "little", signed=True)
                at += 8
            planes = []
            for _ in range(k):
                how = directory[at]
                if how == _ALIKE:
                    planes.append((how, directory[at + 1]))
                    at += 2
                else:
                    planes.append((how, next_at[how]))
                    next_at[how] += n
                    at += 1
            lanes.append((base, planes))
        self._where[name] = (k, lanes)
        self._at = at
        self._left -= 1

    def __contains__(self, name: str) -> bool:
        return self._find(name) is not None

    def column(self, name: str) -> Array:
        """Values of a column, [n] or [n, size]; at its default where it was left out."""
        spec = self._table[name]
        out = np.empty(self.n if spec.size == 1 else (self.n, spec.size), dtype=spec.dtype)
        self.fill(name, out)
        return out

    def one(self, name: str) -> int | float | None:
        """The value of a column of one number a record, where all are alike; None where they are not."""
        found = self._find(name)
        if found is None:
            return self._table[name].default
        return np.frombuffer(found, dtype=self._table[name].dtype)[0].item() if isinstance(found, bytes) else None

    def fill(self, name: str, out: Array) -> None:
        """Write a column into an array [n] or [n, size] of its dtype."""
        found = self._find(name)
        if found is None:
            out[:] = self._table[name].default
        elif isinstance(found, bytes):
            out[:] = np.frombuffer(found, dtype=out.dtype)
        elif out.ndim == 1:
            k, ((base, planes),) = found
            out[:] = self._lane(k, base, planes, out.dtype)
        else:
            k, lanes = found
            if out.dtype.kind != "f":  # most buckets of a histogram are one number, 0
                out[:] = [base + at[0][1] if k == 1 and at[0][0] == _ALIKE else 0 for base, at in lanes]
            for lane, (base, planes) in enumerate(lanes):
                if k > 1 or planes[0][0] != _ALIKE or out.dtype.kind == "f":
                    out[:, lane] = self._lane(k, base, planes, out.dtype)

    def _lane(self, k: int, base: int, planes: Sequence[tuple[int, int]], dtype: np.dtype[Any]) -> Array:
        n = self.n
        raw = np.empty((n, k), dtype=np.uint8)
        for p, (how, at) in enumerate(planes):
            raw[:, p] = at if how == _ALIKE else np.frombuffer(self._streams[how], dtype=np.uint8, count=n, offset=at)
        if dtype.kind == "f":
            return raw.view(dtype)[:, 0]
        spread = raw.view(f"<u{k}")[:, 0]
        if dtype.itemsize <= k < 8 or k == 8:
            return (spread.astype(np.uint64) + np.uint64(base & ((1 << 64) - 1))).view(np.int64).astype(dtype)
        return np.asarray(spread.astype(dtype) + np.asarray(base, dtype=dtype))


@lru_cache(maxsize=64)
def _item_bytes(dtype: str) -> int:
    return np.dtype(dtype).itemsize


@lru_cache(maxsize=64)
def _is_integer(dtype: str) -> bool:
    return np.dtype(dtype).kind in "iu"


_NAMES: dict[int, dict[int, str]] = {}


def _names(table: Mapping[str, Column]) -> dict[int, str]:
    known = _NAMES.get(id(table))
    if known is None:
        known = _NAMES[id(table)] = {spec.code: name for name, spec in table.items()}
    return known
