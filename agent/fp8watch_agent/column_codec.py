"""Column codec of the wire: delta over steps, byte-plane shuffle, and columns at their default omitted.

Shapes:     rows [N] of ROW <-> constants and columns, a byte string a field
Thread:     sender (pack), collector (unpack); pure

Fields of one width are packed together, one matrix [fields, N] at a time: few large numpy operations instead of many
small ones. docs/wire.md defines the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import zstandard

from fp8watch_agent.bounded_decompress import WireError
from fp8watch_agent.record import FIELD_BY_NAME, FIELDS, HISTOGRAMS, ROW, Field

Array = npt.NDArray[Any]

SUM_BITS = 24
"""Of a float64, what travels: sign, exponent, and 12 bits of the fraction, rounded: within 2^-13 of the value."""

_DROPPED = np.uint64(64 - SUM_BITS)
_SUM_MASK = np.uint32((1 << SUM_BITS) - 1)
_FRACTION_BITS = SUM_BITS - 12
_STRIDES = (1, 5)
"""Candidate delta strides within a step: the other direction, the same operand one Linear earlier."""
_SAMPLE_RECORDS = 64

_SUMS = tuple(f for f in FIELDS if f.dtype == "<f8")
_WIDE = tuple(f for f in FIELDS if f.dtype == "<i8" and f.name not in HISTOGRAMS)
_NARROW = tuple(f for f in FIELDS if f.dtype in ("<i4", "<f4") and f.name not in HISTOGRAMS)

_GROUPS = ((_SUMS, 4, SUM_BITS), (_WIDE, 8, 64), (_NARROW, 4, 32))
_GROUP_OF = {f.name: group for group in _GROUPS for f in group[0]}


@lru_cache(maxsize=256)
def _places(sizes: tuple[int, ...], num_planes: tuple[int, ...], width: int) -> tuple[int, npt.NDArray[np.intp]]:
    """For adjacent fields with these numbers of byte planes: words per record, and where each plane goes."""
    place: list[int] = []
    row = 0
    for size, planes in zip(sizes, num_planes, strict=True):
        for _ in range(size):
            place += range(row * width, row * width + planes // size)
            row += 1
    return row, np.array(place, dtype=np.intp)


def _words(fields: tuple[Field, ...], width: int) -> npt.NDArray[np.intp]:
    """Values of these fields as words of `width` bytes, each at its place in the record."""
    offsets: Mapping[str, Any] = ROW.fields or {}
    return np.array([offsets[f.name][1] // width + i for f in fields for i in range(f.size)], dtype=np.intp)


_SUM_WORDS, _WIDE_WORDS, _NARROW_WORDS = _words(_SUMS, 8), _words(_WIDE, 8), _words(_NARROW, 4)


def _defaults(fields: tuple[Field, ...], dtype: str) -> Array:
    return np.array([np.array(f.default, f.dtype).view(dtype) for f in fields for _ in range(f.size)], dtype)


_WIDE_DEFAULTS, _NARROW_DEFAULTS = _defaults(_WIDE, "<u8"), _defaults(_NARROW, "<u4")


def round_sums(values: Array) -> Array:
    """Float64 -> its upper SUM_BITS bits as u32, rounded to nearest. NaN and Inf are preserved."""
    bits = np.ascontiguousarray(values).view("<u8")
    rounded = (bits + (np.uint64(1) << (_DROPPED - np.uint64(1)))) >> _DROPPED
    finite = np.isfinite(values)
    overflown = finite & ((rounded >> np.uint64(_FRACTION_BITS)) & np.uint64(0x7FF) == np.uint64(0x7FF))
    if overflown.any() or not finite.all():
        cut = bits >> _DROPPED
        cut |= np.isnan(values).astype("<u8") << np.uint64(
            _FRACTION_BITS - 1
        )  # a NaN stays NaN after its payload is cut
        rounded = np.where(finite & ~overflown, rounded, cut)
    return rounded.astype("<u4")


def widen_sums(words: Array) -> Array:
    """Inverse of `round_sums`."""
    return (words.astype("<u8") << _DROPPED).view("<f8")


def _fold(words: Array, stride: int, bits: int) -> Array:
    """Delta to the value `stride` records earlier, zigzag-encoded so that small differences are small numbers. [fields,
    N]
    """
    one = words.dtype.type(1)
    out = words
    if 0 < stride < words.shape[1]:
        out = words.copy()
        out[:, stride:] -= words[:, :-stride]
    mask = words.dtype.type((1 << bits) - 1)
    out = out & mask
    return np.asarray(((out << one) ^ (words.dtype.type(0) - (out >> words.dtype.type(bits - 1)))) & mask)


def _unfold(words: Array, stride: int, bits: int) -> Array:
    """Inverse of `_fold`."""
    one = words.dtype.type(1)
    out = (words >> one) ^ (words.dtype.type(0) - (words & one))
    fields, n = words.shape
    if 0 < stride < n:
        steps = out.reshape(fields, n // stride, stride)
        np.cumsum(steps, axis=1, dtype=words.dtype, out=steps)
    return np.asarray(out & words.dtype.type((1 << bits) - 1))


def _planes(words: Array) -> tuple[Array, Array]:
    """Byte planes [fields, width, N], lowest first, and for each field the number of planes to keep, at least one."""
    fields, n = words.shape
    width = words.dtype.itemsize
    used = np.ones(fields, np.intp)
    if n:
        largest = words.max(axis=1)
        for k in range(1, width):
            used += largest >= words.dtype.type(1 << (8 * k))
    planes = np.ascontiguousarray(words.view("u1").reshape(fields, n, width).transpose(0, 2, 1))
    return planes, used


def _pack_numbers(
    fields: tuple[Field, ...], words: Array, defaults: Array, stride: int, bits: int, out: dict[str, bytes],
    constants: dict[str, bytes],
) -> None:  # fmt: skip
    """Pack `words` [values, N], the values of one field next to each other."""
    constant = (words == words[:, :1]).all(axis=1)
    default = constant & (words[:, 0] == defaults)
    live = np.flatnonzero(~constant)
    planes, used = _planes(_fold(words[live], stride, bits))
    place = {int(row): i for i, row in enumerate(live)}
    at = 0
    for f in fields:
        rows = range(at, at + f.size)
        at += f.size
        if default[rows[0]] and (f.size == 1 or default[rows].all()):
            continue
        if constant[rows[0]] and (f.size == 1 or constant[rows].all()):
            constants[f.name] = words[rows, 0].tobytes()
            continue
        if all(row in place for row in rows):
            here = slice(place[rows[0]], place[rows[-1]] + 1)
            out[f.name] = planes[here, : used[here].max()].tobytes()
        else:  # of a pair one is constant
            p, u = _planes(_fold(words[rows], stride, bits))
            out[f.name] = p[:, : u.max()].tobytes()


_CODES = np.rint(8.0 * np.log2(1.0 + np.arange(1 << 15))).astype(np.uint8)
"""Codes of small counts: a lookup is faster than a logarithm."""
_COUNTS = np.exp2(np.arange(256) / 8.0) - 1.0


def encode_histogram(counts: Array) -> npt.NDArray[np.uint8]:
    """Counts -> u8 codes round(8·log2(1 + count)); 255 stands for 2^31.9 and above."""
    counts = np.ascontiguousarray(counts)
    if counts.dtype.kind == "f":  # decoded ones
        return np.minimum(np.rint(8.0 * np.log2(1.0 + np.maximum(counts, 0))), 255).astype(np.uint8)
    codes = np.take(_CODES, counts, mode="clip")
    large = np.flatnonzero(counts >= len(_CODES))
    if len(large):
        exact = np.minimum(np.rint(8.0 * np.log2(1.0 + counts.reshape(-1)[large])), 255)
        codes.reshape(-1)[large] = exact.astype(np.uint8)
    return codes


def decode_histogram(codes: Array) -> npt.NDArray[np.float64]:
    """u8 codes -> counts, within 4.4 % (half a code step of 2^(1/8)); 0 is exact."""
    return _COUNTS[codes]


def _differences(codes: Array, stride: int) -> Array:
    if not 0 < stride < len(codes):
        return codes
    out = codes.copy()
    out[stride:] -= codes[:-stride]
    return out


def _best_stride(codes: Array, compressor: Any) -> int:
    """Delta stride for a batch of a single step, chosen by compressing the first records."""
    sample = codes[:_SAMPLE_RECORDS]
    if len(sample) < _SAMPLE_RECORDS:
        return 0
    sizes = {s: len(compressor.compress(_differences(sample, s).tobytes())) for s in (0, *_STRIDES)}
    return min(sizes, key=lambda s: (sizes[s], s))


def _keep_gil() -> None:
    pass


def pack(
    rows: Array, per_step: int, compressor: Any, yield_gil: Callable[[], None] = _keep_gil
) -> tuple[dict[str, bytes], dict[str, bytes], int]:
    """Encode records as columns.

    Args:
        rows: [N] of ROW.
        per_step: records of each step, where all steps have the same sites in the same order; else 0.
        compressor: zstandard.ZstdCompressor, to try things out with.
        yield_gil: called between pieces of work, so that the training thread gets the GIL.

    Returns:
        columns, constants, stride of depth_hist.
    """
    columns: dict[str, bytes] = {}
    constants: dict[str, bytes] = {}
    n = len(rows)
    if not n:
        return columns, constants, 0
    rows = np.ascontiguousarray(rows)
    wide, narrow = rows.view("<u8").reshape(n, -1), rows.view("<u4").reshape(n, -1)
    sums = round_sums(np.ascontiguousarray(wide[:, _SUM_WORDS].T).view("<f8"))
    _pack_numbers(_SUMS, sums, np.zeros(len(sums), "<u4"), per_step, SUM_BITS, columns, constants)
    yield_gil()
    _pack_numbers(_WIDE, np.ascontiguousarray(wide[:, _WIDE_WORDS].T), _WIDE_DEFAULTS, per_step, 64, columns, constants)
    _pack_numbers(
        _NARROW, np.ascontiguousarray(narrow[:, _NARROW_WORDS].T), _NARROW_DEFAULTS, per_step, 32, columns, constants
    )
    stride = 0
    for name in HISTOGRAMS:
        yield_gil()
        codes = encode_histogram(rows[name])
        if not codes.any():
            continue
        if name == "depth_hist":
            stride = per_step if 0 < per_step < n else _best_stride(codes, compressor)
            codes = _differences(codes, stride)
        columns[name] = codes.tobytes()
    return columns, constants, stride


class Columns(Mapping[str, Array]):
    """Columns of a body, opened when they are asked for. Lengths are checked at once.

    Raises:
        WireError: naming the column.
    """

    def __init__(
        self, num_records: int, columns: Mapping[str, bytes], constants: Mapping[str, bytes], per_step: int, depth: int
    ) -> None:
        self._n, self._columns, self._constants = num_records, dict(columns), dict(constants)
        self._per_step, self._depth = per_step, depth
        self._open: dict[str, Array] = {}
        for name, raw in self._columns.items():
            size, most = _SHAPES.get(name) or _unknown(name)
            plane = num_records * size
            if not plane or not len(raw) or len(raw) % plane or len(raw) > most * plane:
                if name in HISTOGRAMS and len(raw) == plane:  # of nothing
                    continue
                rule = f"{num_records} records take 1 to {most} planes of {num_records}×{size}"
                raise WireError(name, f"{len(raw)} bytes; {rule}")
        for name, raw in self._constants.items():
            f = FIELD_BY_NAME.get(name) or _unknown(name)
            want = (4 if f.dtype == "<f8" else int(f.dtype[2:])) * f.size
            if len(raw) != want or name in HISTOGRAMS or name in self._columns:
                raise WireError(name, f"{len(raw)} bytes as a constant; {f.dtype}×{f.size} takes {want}, and no column")

    @property
    def nbytes(self) -> int:
        """Of all columns, opened."""
        each = sum(FIELD_BY_NAME[n].size * (1 if n in HISTOGRAMS else int(FIELD_BY_NAME[n].dtype[2:])) for n in self)
        return self._n * each

    def __iter__(self) -> Iterator[str]:
        yield from self._columns
        yield from self._constants

    def __len__(self) -> int:
        return len(self._columns) + len(self._constants)

    def __getitem__(self, name: str) -> Array:
        got = self._open.get(name)
        if got is None:
            if name not in self:
                raise KeyError(name)
            got = self._open[name] = self._open_one(name)
        return got

    def __contains__(self, name: object) -> bool:
        return name in self._columns or name in self._constants

    def _open_one(self, name: str) -> Array:
        n, f = self._n, FIELD_BY_NAME[name]
        if name in self._constants:
            raw = np.frombuffer(self._constants[name], "<u4" if f.dtype == "<f8" else f.dtype)
            value = widen_sums(raw) if f.dtype == "<f8" else raw
            return np.full((n, f.size) if f.size > 1 else n, value if f.size > 1 else value[0], f.dtype)
        if name in HISTOGRAMS:
            codes = np.frombuffer(self._columns[name], "u1").reshape(n, f.size)
            return self._open_histogram(codes, self._depth if name == "depth_hist" else 0)
        self._open_group(f)
        return self._open[name]

    def _open_group(self, member: Field) -> None:
        """All number columns of one width: together they take hardly longer than one."""
        fields, width, bits = _GROUP_OF[member.name]
        n, sent = self._n, self._columns
        present = tuple(f for f in fields if f.name in sent)
        raws = [sent[f.name] for f in present]
        rows, place = _places(tuple(f.size for f in present), tuple(len(raw) // n for raw in raws), width)
        planes = np.zeros((rows * width, n), "u1")
        planes[place] = np.frombuffer(b"".join(raws), "u1").reshape(-1, n)
        bytes_ = np.ascontiguousarray(planes.reshape(rows, width, n).transpose(0, 2, 1))
        words = _unfold(bytes_.reshape(rows, n * width).view(f"<u{width}"), self._per_step, bits)
        values = widen_sums(words) if bits == SUM_BITS else words
        at = 0
        for f in present:
            numbers = values[at] if f.size == 1 else np.ascontiguousarray(values[at : at + f.size].T)
            at += f.size
            self._open[f.name] = numbers.view(f.dtype)

    def _open_histogram(self, codes: Array, stride: int) -> Array:
        if not 0 < stride < len(codes):
            return codes.copy()
        out = codes.copy()
        whole = len(out) // stride * stride
        steps = out[:whole].reshape(-1, stride, out.shape[1])
        np.cumsum(steps, axis=0, dtype=np.uint8, out=steps)
        if whole < len(out):
            out[whole:] += steps[-1, : len(out) - whole]
        return out


_SHAPES = {f.name: (f.size, 1 if f.name in HISTOGRAMS else 3 if f.dtype == "<f8" else int(f.dtype[2:])) for f in FIELDS}
"""Per field: values per record, and the maximum number of byte planes of a column."""


def _unknown(name: str) -> NoReturn:
    raise WireError(name, f"unknown column; known are {', '.join(FIELD_BY_NAME)}")


def new_compressor(level: int) -> Any:
    """One frame with a checksum."""
    return zstandard.ZstdCompressor(level=level, write_checksum=True)
