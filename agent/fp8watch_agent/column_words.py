"""Fields of the sketch as unsigned words: what both directions of the wire's column codec know of them.

Shapes:     rows [N] of ROW -> words [values, N] of one width
Thread:     any; only tables and pure functions

Fields of one width are handled together, one matrix at a time: few large numpy operations instead of many small ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import zstandard

from fp8watch_agent.bounded_decompress import WireError
from fp8watch_agent.record import FIELD_BY_NAME, FIELDS, HISTOGRAMS, ROW, Field, Measured

Array = npt.NDArray[Any]

SUM_BITS = 24
"""Of a float64, what travels: sign, exponent, and 12 bits of the fraction, rounded: within 2^-13 of the value."""

_DROPPED = np.uint64(64 - SUM_BITS)
_FRACTION_BITS = SUM_BITS - 12

SUMS = tuple(f for f in FIELDS if f.dtype == "<f8")
WIDE = tuple(f for f in FIELDS if f.dtype == "<i8" and f.name not in HISTOGRAMS)
NARROW = tuple(f for f in FIELDS if f.dtype in ("<i4", "<f4") and f.name not in HISTOGRAMS)
GROUPS = ((SUMS, 4, SUM_BITS), (WIDE, 8, 64), (NARROW, 4, 32))
"""Fields that are packed together, bytes of their words, and bits that are used of them."""

_ALWAYS = Measured.COUNTS | Measured.AMAX | Measured.SCALE | Measured.RATIO | Measured.CAST
SAMPLED: dict[str, int] = {f.name: int(f.group) for f in FIELDS if not f.group & _ALWAYS}
"""Fields that only some records hold, and the bit in `measured` of those."""


def words_of(rows: Array, fields: tuple[Field, ...], yield_gil: Callable[[], None] = lambda: None) -> Array:
    """[N] of ROW -> [values, N], the values of one field next to each other; float64 rounded to SUM_BITS."""
    size = np.dtype(fields[0].dtype).itemsize
    offsets: Mapping[str, Any] = ROW.fields or {}
    at = [offsets[f.name][1] // size + i for f in fields for i in range(f.size)]
    flat = rows.view(f"<u{size}").reshape(len(rows), -1)
    words = np.empty((len(at), len(rows)), flat.dtype)
    for start in range(0, len(rows), 1024):
        words[:, start : start + 1024] = flat[start : start + 1024, at].T
        yield_gil()
    return round_sums(words.view("<f8")) if fields is SUMS else words


def defaults_of(fields: tuple[Field, ...]) -> Array:
    """Words of the default of each value."""
    kind = "<u4" if fields is SUMS else f"<u{np.dtype(fields[0].dtype).itemsize}"
    each = [np.array(f.default, f.dtype) for f in fields for _ in range(f.size)]
    return np.array([round_sums(v[None])[0] if fields is SUMS else v.view(kind) for v in each], kind)


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


def expected_scale_inv(amax: Array) -> Array:
    """Words of the power-of-two scale_inv that E4M3 takes for an amax, from the words of the amax: 2^⌈log2(amax / 448)⌉.

    448 is 1.75·2^8, so the exponent is that of amax less 8, and one more where its fraction is above 1.75. Of other
    formats and scales it is off, but by the same from step to step.
    """
    exponent = (amax >> np.uint32(23)) - np.uint32(8) + ((amax & np.uint32(0x7FFFFF)) > np.uint32(0x600000))
    return np.asarray(exponent.astype("<u4") << np.uint32(23))


FROM_AMAX = {"scale_inv_max": "amax_max", "scale_inv_min": "amax_min_nonzero"}
"""Fields of which the difference from `expected_scale_inv` travels."""


def bytes_of(f: Field) -> int:
    """Bytes of one value on the wire, at most."""
    return 1 if f.name in HISTOGRAMS else 3 if f.dtype == "<f8" else np.dtype(f.dtype).itemsize


def field_of(name: str) -> Field:
    """A field by the name of its column.

    Raises:
        WireError: for one that nobody knows.
    """
    return FIELD_BY_NAME.get(name) or unknown(name)


def unknown(name: str) -> NoReturn:
    """Refuse a column."""
    raise WireError(name, f"unknown column; known are {', '.join(FIELD_BY_NAME)}")


def constant_of(name: str, raw: bytes) -> Array:
    """The one value of a field, [size] of its dtype; its length has been checked."""
    f = FIELD_BY_NAME[name]
    return widen_sums(np.frombuffer(raw, "<u4")) if f.dtype == "<f8" else np.frombuffer(raw, f.dtype)


def check_constants(constants: Mapping[str, bytes], columns: Mapping[str, bytes]) -> None:
    """Whether constants have the length of a value, and are no columns as well.

    Raises:
        WireError: naming the field.
    """
    for name, raw in constants.items():
        f = field_of(name)
        want = (4 if f.dtype == "<f8" else np.dtype(f.dtype).itemsize) * f.size
        if len(raw) != want or name in HISTOGRAMS or name in columns:
            raise WireError(name, f"{len(raw)} bytes as a constant; {f.dtype}×{f.size} takes {want}, and no column")


def new_compressor(level: int) -> Any:
    """One frame with a checksum."""
    return zstandard.ZstdCompressor(level=level, write_checksum=True)
