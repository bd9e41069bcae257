"""Columns of wire version 2, which agents of 0.1 send: records in their order, delta over steps, byte planes.

Shapes:     a byte string a field -> columns [N], [N, size]
Thread:     collector; pure
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from fp8watch_agent.bounded_decompress import WireError
from fp8watch_agent.column_words import (
    GROUPS,
    SUM_BITS,
    Array,
    bytes_of,
    check_constants,
    constant_of,
    field_of,
    widen_sums,
)
from fp8watch_agent.record import FIELD_BY_NAME, HISTOGRAMS, Field
from fp8watch_agent.site_major import unzigzag

_GROUP_OF = {f.name: group for group in GROUPS for f in group[0]}


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


def _unfold(words: Array, stride: int, bits: int) -> Array:
    out = unzigzag(words, bits)
    fields, n = words.shape
    if 0 < stride < n:
        steps = out.reshape(fields, n // stride, stride)
        np.cumsum(steps, axis=1, dtype=words.dtype, out=steps)
    return np.asarray(out & words.dtype.type((1 << bits) - 1))


class ColumnsV2(Mapping[str, Array]):
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
            size, most = field_of(name).size, bytes_of(field_of(name))
            plane = num_records * size
            if not plane or not len(raw) or len(raw) % plane or len(raw) > most * plane:
                if name in HISTOGRAMS and len(raw) == plane:  # of nothing
                    continue
                rule = f"{num_records} records take 1 to {most} planes of {num_records}×{size}"
                raise WireError(name, f"{len(raw)} bytes; {rule}")
        check_constants(self._constants, self._columns)

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
            value = constant_of(name, self._constants[name])
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
