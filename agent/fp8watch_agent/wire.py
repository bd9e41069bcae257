"""Wire codec of agent and collector: a batch of steps as columnar msgpack in zstd.

Upstream:   fp8watch_agent.batch
Shapes:     N records of ROW -> one byte string a column, little-endian, exact lengths
Thread:     sender (encode), collector (decode)

A body is a msgpack map {header, steps, columns, constants}. A column whose every value is the field's default is left
out; one value for all records travels once. Side vectors over experts (expert_vectors) are a map `experts` beside these. Histograms travel as u8 codes round(8·log2(1 + count)), float64 sums within
2^-13; everything else travels bit for bit, NaN and Inf included. Bodies of versions 1 and 2 are read as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from fp8watch_agent.bounded_decompress import MAX_INFLATED_BYTES as MAX_INFLATED_BYTES
from fp8watch_agent.bounded_decompress import TooLarge as TooLarge
from fp8watch_agent.bounded_decompress import WireError as WireError
from fp8watch_agent.bounded_decompress import decompress as decompress
from fp8watch_agent.column_codec import Columns, Packed
from fp8watch_agent.column_words import new_compressor
from fp8watch_agent.columns_v2 import ColumnsV2
from fp8watch_agent.envelope import MAX_COLUMNS as MAX_COLUMNS
from fp8watch_agent.envelope import MAX_HEADER_BYTES as MAX_HEADER_BYTES
from fp8watch_agent.envelope import MAX_NAME_CHARS, UNDECODABLE, Array, decode_header, exact, open_map
from fp8watch_agent.envelope import MAX_RECORDS as MAX_RECORDS
from fp8watch_agent.envelope import MAX_STEPS as MAX_STEPS
from fp8watch_agent.envelope import MAX_TILE_MAPS as MAX_TILE_MAPS
from fp8watch_agent.envelope import MAX_WIRE_BYTES as MAX_WIRE_BYTES
from fp8watch_agent.envelope import UnsupportedVersion as UnsupportedVersion
from fp8watch_agent.expert_vectors import ExpertVector, decode_vectors, encode_vectors
from fp8watch_agent.histogram_code import decode_histogram as decode_histogram
from fp8watch_agent.histogram_code import encode_histogram as encode_histogram
from fp8watch_agent.record import FIELD_BY_NAME, FIELDS, HISTOGRAMS, ROW, STEP
from fp8watch_agent.site_major import SiteMajor
from fp8watch_agent.wire_maps import TileMaps as TileMaps
from fp8watch_agent.wire_maps import decode_tile_maps as decode_tile_maps
from fp8watch_agent.wire_maps import encode_tile_maps as encode_tile_maps

WIRE_VERSION = 3
READS = (1, 2, 3)
BATCH_CONTENT_TYPE = "application/vnd.fp8watch.batch+msgpack"
TILE_MAPS_CONTENT_TYPE = "application/vnd.fp8watch.tile-maps+msgpack"
SPLIT_SHIFT = 48
"""Bits of `seq`; above them each half of a batch that was too large has its path in the tree of halves."""


def parent_seq(seq: int) -> int:
    """`seq` of the whole batch that one with this `seq` is a half of, or is under another key; its own where it is
    neither. What was sent later has the greater one."""
    return seq & ((1 << SPLIT_SHIFT) - 1) if seq > 0 else seq


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=False):
    """Header of a batch. Unknown keys of newer agents are ignored; these are required."""

    run: str
    session: str
    rank: int
    seq: int
    step0: int
    num_steps: int
    num_records: int
    clock: float = 0.0
    version: int = 1
    health: dict[str, float] = {}
    logs: dict[str, list[float | None]] = {}
    batch_ids: list[str | None] = []
    # set by encode_batch
    per_step: int = 0  # number of sites, where the records of all steps lie in one order of sites; else 0
    depth_stride: int = 0  # delta stride of depth_hist, in records
    sparse: int = 0  # bits of `measured` whose fields take bytes for the records that have them alone

    @property
    def parent_seq(self) -> int:
        return parent_seq(self.seq)


class _Body(msgspec.Struct):
    header: msgspec.Raw
    steps: msgspec.Raw  # decoded once their sizes are known: small entries expand to twenty times their size
    columns: msgspec.Raw
    constants: msgspec.Raw = msgspec.Raw(b"\x80")  # {}
    experts: msgspec.Raw = msgspec.Raw(b"\x80")  # vectors over experts; versions that do not know them pass them over


@dataclass
class Batch:
    """A decoded batch. Columns are numpy arrays over the body; omitted ones are filled with defaults on demand."""

    header: Header
    steps: npt.NDArray[np.void]  # [num_steps] of record.STEP
    step: npt.NDArray[np.int64]  # [num_records], absolute
    site: npt.NDArray[np.uint64]  # [num_records]
    sent: Mapping[str, Array] = field(default_factory=dict)
    experts: list[ExpertVector] = field(default_factory=list)

    def column(self, name: str) -> Array:
        """Values of one field, [num_records] or [num_records, size]. Histograms are decoded to counts."""
        got = self.sent.get(name)
        f = FIELD_BY_NAME[name]
        n = self.header.num_records
        if got is None:
            shape = n if f.size == 1 else (n, f.size)
            return np.full(shape, f.default, dtype=f.dtype)
        return decode_histogram(got) if name in HISTOGRAMS else got

    @property
    def nbytes(self) -> int:
        """Memory with all columns decoded."""
        sent = self.sent
        if isinstance(sent, Columns | ColumnsV2):
            opened = sent.nbytes
        else:
            opened = sum(column.nbytes for column in sent.values())
        return self.steps.nbytes + self.step.nbytes + self.site.nbytes + opened


def _one_order(steps: Array, step: Array, site: Array) -> tuple[Array, npt.NDArray[np.bool_]] | None:
    """Sites in the order in which all steps have them, and which of them each step has [steps, sites].

    None where there is no such order, or a step has a site twice.
    """
    n, num_steps = len(step), len(steps)
    if not n or not (step[1:] >= step[:-1]).all():
        return None
    ends = np.searchsorted(step, steps["step"], side="right")
    each = np.split(site, ends[:-1])
    sites = max(each, key=len)
    if all(np.array_equal(of_step, sites) for of_step in each):
        there = np.ones((num_steps, len(sites)), dtype=bool)
    else:
        sites = _merged(sites, each)
        by_id = np.argsort(sites)
        number = by_id[np.searchsorted(sites, site, sorter=by_id)]
        there = np.zeros((num_steps, len(sites)), dtype=bool)
        there[np.searchsorted(steps["step"], step), number] = True
        follows = step[1:] == step[:-1]
        if not (number[1:] > number[:-1])[follows].all():
            return None
    in_order = np.sort(sites)  # np.unique would import numpy.ma here, in the middle of a batch
    return (sites, there) if (in_order[1:] != in_order[:-1]).all() and int(there.sum()) == n else None


def _merged(sites: Array, each: list[Array]) -> Array:
    """The longest list of sites with those of the others put behind what they follow."""
    order: list[int] = sites.tolist()
    known = set(order)
    for of_step in each:
        if not known.issuperset(ids := of_step.tolist()):
            for before, one in zip([None, *ids], ids, strict=False):
                if one not in known:
                    order.insert(0 if before is None else order.index(before) + 1, one)
                    known.add(one)
    return np.array(order, dtype="<u8")


def in_step_order(step: Array, site: Array, each: list[Array]) -> npt.NDArray[np.intp]:
    """Places of records by step, and within a step in one order of sites, so that a body has them as it does best.

    Args:
        step: [N] of each record.
        site: [N], site ids.
        each: site ids in the order that the steps have, those of the first that hold a site say where it stands.
    """
    sites = _merged(max(each, key=len), each)
    by_id = np.argsort(sites)
    return np.lexsort((by_id[np.searchsorted(sites, site, sorter=by_id)], step))


def encode_batch(
    header: Header,
    steps: npt.NDArray[np.void],
    step: Array,
    site: Array,
    rows: npt.NDArray[np.void],
    *,
    experts: Sequence[ExpertVector] = (),
    level: int = 1,
    yield_gil: Callable[[], None] = lambda: None,
) -> bytes:
    """Encode one compressed body.

    Args:
        header: `num_steps` and `num_records` must be those of the arrays.
        steps: [S] of record.STEP, ascending.
        step: [N] int64, absolute step of each record.
        site: [N] uint64, site ids.
        rows: [N] of record.ROW.
        experts: what sites say of each of their experts, in steps of the batch.
        level: zstd level.
        yield_gil: called between pieces of work, so that a training thread gets the GIL.
    """
    if header.num_steps != len(steps) or header.num_records != len(rows):
        raise WireError("header", "num_steps and num_records must be the lengths of the arrays")
    step, site = np.asarray(step, dtype="<i8"), np.asarray(site, dtype="<u8")
    found = _one_order(steps, step, site)
    sites, there = (site, np.ones((1, len(site)), dtype=bool)) if found is None else found
    compressor = new_compressor(level)
    yield_gil()
    order = SiteMajor.of_batch(there)
    yield_gil()
    packed = Packed(rows, order, compressor, yield_gil)
    columns = {"site": sites.tobytes(), **packed.columns}
    if found is None:
        columns["step"] = (step - header.step0).astype("<u4").tobytes()
    elif not there.all():
        columns["there"] = np.packbits(there).tobytes()
    header = msgspec.structs.replace(
        header, version=WIRE_VERSION, per_step=0 if found is None else len(sites), depth_stride=packed.depth_stride,
        sparse=packed.sparse,
    )  # fmt: skip
    body: dict[str, Any] = {
        "header": header,
        "steps": {name: np.ascontiguousarray(steps[name]).tobytes() for name in STEP.names or ()},
        "columns": columns,
        "constants": packed.constants,
    }
    if experts:
        body["experts"] = encode_vectors(experts, header.step0)
    yield_gil()
    compressed: bytes = compressor.compress(msgspec.msgpack.encode(body))
    return compressed


def decode_batch(body: bytes, *, compressed: bool = True) -> Batch:
    """Decode and validate one body. All or nothing: one wrong column refuses the batch.

    Raises:
        WireError: naming the column.
    """
    raw = decompress(body) if compressed else body
    try:
        got = msgspec.msgpack.decode(raw, type=_Body)
    except UNDECODABLE as e:
        raise WireError("body", str(e)) from e
    header: Header = _storable(decode_header(got.header, Header, READS))
    s, n = header.num_steps, header.num_records
    if not 0 <= s <= MAX_STEPS or n < 0 or not 0 <= header.step0 < 1 << 62:
        raise WireError("header", f"num_steps {s}, num_records {n}, step0 {header.step0}: out of range")
    if n > MAX_RECORDS:
        raise TooLarge("body", f"num_records {n}; at most {MAX_RECORDS}: send smaller batches")
    sent_steps, sent_columns = open_map("steps", got.steps), open_map("columns", got.columns)
    checked: dict[str, Array] = {}
    for name in STEP.names or ():
        column = sent_steps.get(name)
        if column is None:
            raise WireError(f"steps.{name}", "missing; every column of a step is required")
        checked[name] = exact(f"steps.{name}", column, STEP[name].str, s)
    steps = np.zeros(s, dtype=STEP)
    for name, values in checked.items():
        steps[name] = values
    if s and (not (steps["step"][1:] > steps["step"][:-1]).all() or steps["step"][0] < header.step0):
        raise WireError("steps.step", "steps must ascend, from step0 on")
    if s and steps["step"][-1] - header.step0 > 0xFFFFFFFF:
        raise WireError("steps.step", "a batch spans at most 2^32 steps")
    if (steps["status"] > 2).any():
        raise WireError("steps.status", f"{int(steps['status'].max())}; 0 ok, 1 skipped, 2 aborted")
    step, site, order = _read_keys(header, steps, sent_columns)
    for name, log in header.logs.items():
        if len(log) != s:
            raise WireError(f"logs.{name}", f"{len(log)} values for {s} steps")
    if header.batch_ids and len(header.batch_ids) != s:
        raise WireError("batch_ids", f"{len(header.batch_ids)} values for {s} steps")
    if header.version == 1:
        sent: Mapping[str, Array] = _read_plain(sent_columns, n)
    else:
        constants = open_map("constants", got.constants)
        if not 0 <= header.depth_stride <= n:
            raise WireError("header", f"depth_stride {header.depth_stride}; 0 to {n} are allowed")
        if header.version == 2:
            sent = ColumnsV2(n, sent_columns, constants, header.per_step, header.depth_stride)
        else:
            sent = Columns(order, sent_columns, constants, header.sparse, header.depth_stride)
    experts = decode_vectors(open_map("experts", got.experts), header.step0, steps["step"])
    return Batch(header=header, steps=steps, step=step, site=site, sent=sent, experts=experts)


def _storable(header: Header) -> Header:
    """The header with names and batch ids as every database holds them: U+FFFD for NUL, and names of MAX_NAME_CHARS at most.

    What is alike then is one name, and the first of them is kept.
    """
    changed: dict[str, Any] = {}
    for field_name in ("health", "logs"):
        names = getattr(header, field_name)
        if any("\0" in name or len(name) > MAX_NAME_CHARS for name in names):
            kept: dict[str, Any] = {}
            for name, value in names.items():
                kept.setdefault(name.replace("\0", "\ufffd")[:MAX_NAME_CHARS], value)
            changed[field_name] = kept
    if any(batch_id is not None and "\0" in batch_id for batch_id in header.batch_ids):
        changed["batch_ids"] = [None if i is None else i.replace("\0", "\ufffd") for i in header.batch_ids]
    return msgspec.structs.replace(header, **changed) if changed else header


def _read_keys(header: Header, steps: Array, sent: dict[str, bytes]) -> tuple[Array, Array, SiteMajor]:
    """Step and site of each record, and their places in a column; removes these columns from `sent`."""
    n, s, each = header.num_records, header.num_steps, header.per_step if header.version > 1 else 0
    if "site" not in sent:
        raise WireError("site", "missing; it is a key of every record")
    if each:
        there = _read_there(n, s, each, sent.pop("there", b"") if header.version > 2 else b"")
        site = exact("site", sent.pop("site"), "<u8", each)
        number = np.broadcast_to(np.arange(each), there.shape)[there]
        return np.repeat(steps["step"], there.sum(axis=1)), site[number], SiteMajor.of_batch(there)
    site = exact("site", sent.pop("site"), "<u8", n)
    if "step" not in sent:
        raise WireError("step", "missing; it is a key of every record")
    step = exact("step", sent.pop("step"), "<u4", n).astype(np.int64) + header.step0
    if n and not np.all(np.isin(step, steps["step"])):
        raise WireError("step", "a record names a step that the batch does not hold")
    return step, site, SiteMajor.of_batch(np.ones((1, n), dtype=bool))


def _read_there(num_records: int, num_steps: int, num_sites: int, raw: bytes) -> npt.NDArray[np.bool_]:
    """Which sites each step has, [num_steps, num_sites]."""
    num_bits = num_steps * num_sites
    if not 0 < num_sites <= num_records or num_bits < num_records or num_bits > MAX_RECORDS * 8:
        raise WireError("header", f"{num_steps} steps of {num_sites} records are not {num_records}")
    if not raw:
        there = np.ones((num_steps, num_sites), dtype=bool)
    else:
        bits = exact("there", raw, "<u1", -(-num_bits // 8))
        there = np.unpackbits(bits, count=num_bits).view(bool).reshape(num_steps, num_sites)
    if int(there.sum()) != num_records:
        raise WireError("header", f"{num_steps} steps of {num_sites} records are not {num_records}")
    return there


def _read_plain(columns: dict[str, bytes], num_records: int) -> dict[str, Array]:
    """Columns of version 1: uncoded values."""
    out = {}
    for name, column in columns.items():
        f = FIELD_BY_NAME.get(name)
        if f is None:
            raise WireError(name, f"unknown column; known are {', '.join(FIELD_BY_NAME)}")
        out[name] = exact(name, column, "<u1" if name in HISTOGRAMS else f.dtype, num_records, f.size)
    return out


def rows_of(batch: Batch) -> npt.NDArray[np.void]:
    """The records of a batch as ROW; histograms are the rounded counts of their codes."""
    rows = np.zeros(batch.header.num_records, dtype=ROW)
    for f in FIELDS:
        values = batch.column(f.name)
        rows[f.name] = np.rint(values) if f.name in HISTOGRAMS else values
    return rows
