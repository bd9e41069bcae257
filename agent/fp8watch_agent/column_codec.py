"""Column codec of the wire: a site's records side by side, their differences, byte planes; defaults omitted.

Shapes:     rows [N] of ROW <-> constants and columns, a byte string a field
Thread:     sender (pack), collector (Columns); pure

docs/wire.md defines the bytes. What only sampled records hold takes bytes for those alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from fp8watch_agent.bounded_decompress import WireError
from fp8watch_agent.column_words import (
    FROM_AMAX,
    GROUPS,
    SAMPLED,
    Array,
    bytes_of,
    check_constants,
    constant_of,
    defaults_of,
    expected_scale_inv,
    field_of,
    widen_sums,
    words_of,
)
from fp8watch_agent.histogram_code import (
    best_stride,
    encode_histogram,
    live_buckets,
    pack_dense,
    pack_live,
    unpack_dense,
    unpack_live,
)
from fp8watch_agent.record import FIELD_BY_NAME, FIELDS, HISTOGRAMS, Field
from fp8watch_agent.site_major import SiteMajor

PIECE_RECORDS, PIECE_VALUES = 1024, 4
"""What is worked on without letting go of the interpreter's lock: about a millisecond."""

_DEFAULTS = {id(fields): defaults_of(fields) for fields, _, _ in GROUPS}
_GROUP_OF = {f.name: group for group in GROUPS for f in group[0]}


class Packed:
    """Columns and constants of a batch while it is packed.

    Args:
        rows: [N] of ROW.
        order: places of the records in a column.
        compressor: zstandard.ZstdCompressor, to try things out with.
        yield_gil: called between pieces of work, so that the training thread gets the GIL.
    """

    def __init__(
        self, rows: Array, order: SiteMajor, compressor: Any, yield_gil: Callable[[], None] = lambda: None
    ) -> None:
        self.columns: dict[str, bytes] = {}
        self.constants: dict[str, bytes] = {}
        self.sparse = 0  # bits of `measured` whose fields take no bytes for records without them
        self.depth_stride = 0
        if not len(rows):
            return
        self._rows, self._order, self._yield_gil = np.ascontiguousarray(rows), order, yield_gil
        self._orders = self._orders_of_groups()
        for fields, _, bits in GROUPS:
            self._pack_numbers(fields, bits)
            yield_gil()
        for name in HISTOGRAMS:
            self._pack_histogram(name, compressor)
            yield_gil()

    def _orders_of_groups(self) -> dict[int, SiteMajor]:
        """By bit of `measured`: the records that hold its fields, where the others have them at their default."""
        measured, orders = self._rows["measured"], {}
        for bit in sorted(set(SAMPLED.values())):
            has = (measured & bit) != 0
            if has.all() or not has.any():
                continue
            self._yield_gil()
            without = np.flatnonzero(~has)
            if all((self._rows[f.name][without] == f.default).all() for f in FIELDS if SAMPLED.get(f.name) == bit):
                orders[bit] = self._order.some(has)
                self.sparse |= bit
        return orders

    def _pack_numbers(self, fields: tuple[Field, ...], bits: int) -> None:
        words, defaults = words_of(self._rows, fields, self._yield_gil), _DEFAULTS[id(fields)]
        self._yield_gil()
        alike = (words == words[:, :1]).all(axis=1)
        at = 0
        wanted: dict[int, tuple[SiteMajor, list[tuple[Field, slice]]]] = {}  # fields that travel, and their words
        for f in fields:
            values = slice(at, at + f.size)
            at += f.size
            order = self._orders.get(SAMPLED.get(f.name, 0), self._order)
            one = words[values, order.index[0]]
            if order is self._order:
                constant = alike[values].all()
            else:
                constant = (words[values][:, order.index] == one[:, None]).all()
            if not constant:
                wanted.setdefault(id(order), (order, []))[1].append((f, values))
            elif (one != defaults[values]).any():
                self.constants[f.name] = one.tobytes()
        amax = {f.name: words[place] for f, place in _places(fields).items() if f.name in FROM_AMAX.values()}
        pieces = [(order, some) for order, members in wanted.values() for some in _pieces(members)]
        for order, members in pieces:
            self._yield_gil()
            taken = np.concatenate([words[values] for _, values in members])
            for f, place in _places(tuple(f for f, _ in members)).items():
                if f.name in FROM_AMAX:
                    taken[place] -= expected_scale_inv(amax[FROM_AMAX[f.name]])
            folded = order.fold(taken, bits)
            self._yield_gil()
            planes, used = _planes(folded)
            at = 0
            for f, _ in members:
                here = slice(at, at + f.size)
                at += f.size
                self.columns[f.name] = planes[here, : used[here].max()].tobytes()

    def _pack_histogram(self, name: str, compressor: Any) -> None:
        codes = np.empty((len(self._rows), FIELD_BY_NAME[name].size), np.uint8)
        for start in range(0, len(codes), PIECE_RECORDS):
            piece = slice(start, start + PIECE_RECORDS)
            codes[piece] = encode_histogram(self._rows[name][piece])
            self._yield_gil()
        if not codes.any():
            return
        order = self._orders.get(SAMPLED.get(name, 0), self._order)
        if name == "depth_hist":
            self.depth_stride = best_stride(codes, order, compressor)
            self.columns[name] = pack_dense(codes, order, self.depth_stride)
        else:
            self.columns[name] = pack_live(codes, order)


def _pieces(members: list[tuple[Field, slice]]) -> list[list[tuple[Field, slice]]]:
    """Fields in groups of about PIECE_VALUES values."""
    out: list[list[tuple[Field, slice]]] = []
    size = PIECE_VALUES
    for member in members:
        if size >= PIECE_VALUES:
            out.append([])
            size = 0
        out[-1].append(member)
        size += member[0].size
    return out


def _places(fields: tuple[Field, ...]) -> dict[Field, int]:
    at, out = 0, {}
    for f in fields:
        out[f] = at
        at += f.size
    return out


def _planes(words: Array) -> tuple[Array, Array]:
    """Byte planes [values, width, N], lowest first, and for each value the number of planes to keep, at least one."""
    num_values, n = words.shape
    width = words.dtype.itemsize
    largest = words.max(axis=1)
    used = np.ones(num_values, np.intp)
    for k in range(1, width):
        used += largest >= words.dtype.type(1 << (8 * k))
    planes = np.ascontiguousarray(words.view("u1").reshape(num_values, n, width).transpose(0, 2, 1))
    return planes, used


class Columns(Mapping[str, Array]):
    """Columns of a body, opened when they are asked for. Lengths are checked at once.

    Raises:
        WireError: naming the column.
    """

    def __init__(
        self,
        order: SiteMajor,
        columns: Mapping[str, bytes],
        constants: Mapping[str, bytes],
        sparse: int,
        depth_stride: int,
    ) -> None:
        self._n, self._columns, self._constants = order.num_records, dict(columns), dict(constants)
        self._order, self._sparse, self._depth_stride = order, sparse, depth_stride
        self._open: dict[str, Array] = {}
        self._orders: dict[int, SiteMajor] = {}
        check_constants(constants, columns)
        for name in sorted(columns, key=lambda name: name != "measured"):  # lengths of others depend on it
            self._check(name)

    def _check(self, name: str) -> None:
        f, raw = field_of(name), self._columns[name]
        n = len(self._order_of(name))
        if n and name == "amax_hist":  # its length follows from its own bits
            live_buckets(name, raw, f.size, self._order)
            return
        plane, most = n * f.size, bytes_of(f)
        if not plane or not len(raw) or len(raw) % plane or len(raw) > most * plane:
            rule = f"{n} records take 1 to {most} planes of {n}×{f.size}"
            raise WireError(name, f"{len(raw)} bytes; {rule}")

    def _order_of(self, name: str) -> SiteMajor:
        """Places of the records that a column has values of."""
        bit = SAMPLED.get(name, 0) & self._sparse
        if not bit:
            return self._order
        if bit not in self._orders:
            self._orders[bit] = self._order.some((self._value_of("measured") & bit) != 0)
        return self._orders[bit]

    def _value_of(self, name: str) -> Array:
        got = self.get(name)
        f = FIELD_BY_NAME[name]
        return np.full(self._n, f.default, f.dtype) if got is None else got

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

    def __contains__(self, name: object) -> bool:
        return name in self._columns or name in self._constants

    def __getitem__(self, name: str) -> Array:
        got = self._open.get(name)
        if got is None:
            if name not in self:
                raise KeyError(name)
            if name in self._constants:
                got = self._open_constant(name)
            elif name in HISTOGRAMS:
                got = self._open_histogram(name)
            else:
                self._open_together(name)
                got = self._open[name]
            self._open[name] = got
        return got

    def _open_constant(self, name: str) -> Array:
        f, value = FIELD_BY_NAME[name], constant_of(name, self._constants[name])
        order = self._order_of(name)
        shape = (self._n, f.size) if f.size > 1 else (self._n,)
        out = np.full(shape, f.default if order is not self._order else value, f.dtype)
        if order is not self._order:
            out[order.index] = value
        return out

    def _open_histogram(self, name: str) -> Array:
        order, size = self._order_of(name), FIELD_BY_NAME[name].size
        if name == "depth_hist":
            return unpack_dense(self._columns[name], size, order, self._depth_stride)
        return unpack_live(name, self._columns[name], size, order)

    def _open_together(self, name: str) -> None:
        """All number columns of one width and order: together they take hardly longer than one."""
        fields, width, bits = _GROUP_OF[name]
        order = self._order_of(name)
        if name == "measured":  # which records the others have depends on it
            members = [FIELD_BY_NAME[name]]
        else:
            sent = (f for f in fields if f.name in self._columns and f.name != "measured")
            members = [f for f in sent if self._order_of(f.name) is order]
        num_values = sum(f.size for f in members)
        planes = np.zeros((num_values, width, len(order)), "u1")
        at = 0
        for f in members:
            raw = np.frombuffer(self._columns[f.name], "u1").reshape(f.size, -1, len(order))
            planes[at : at + f.size, : raw.shape[1]] = raw
            at += f.size
        packed = np.ascontiguousarray(planes.transpose(0, 2, 1)).reshape(num_values, -1).view(f"<u{width}")
        words = order.unfold(packed, bits)
        at = 0
        for f in members:
            self._open[f.name] = self._by_record(f, words[at : at + f.size], order, bits)
            at += f.size
        for f in members:
            if f.name in FROM_AMAX:
                amax = self._value_of(FROM_AMAX[f.name]).view("<u4")
                self._open[f.name] = (self._open[f.name].view("<u4") + expected_scale_inv(amax)).view(f.dtype)

    def _by_record(self, f: Field, words: Array, order: SiteMajor, bits: int) -> Array:
        values = (widen_sums(words) if f.dtype == "<f8" else words).view(f.dtype)
        out = (
            np.empty((f.size, self._n), f.dtype)
            if order is self._order
            else np.full((f.size, self._n), f.default, f.dtype)
        )
        order.put(values, out)
        return out[0] if f.size == 1 else np.ascontiguousarray(out.T)
