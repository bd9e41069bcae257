"""The wire: a batch of steps as columnar msgpack in zstd. One codec for agent and collector.

Upstream:   fp8watch_agent.recorder    Downstream: fp8watch_agent.sender, fp8watch_server.ingest
Shapes:     N records of ROW -> one byte string a column, little-endian, exact lengths
Thread:     sender (encode), collector (decode)

A body is a msgpack map {header, steps, columns}. A column whose every value is the field's default is left out.
Histograms travel as u8 codes round(8·log2(1 + count)); everything else travels bit for bit, NaN and Inf included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from .inflate import MAX_INFLATED_BYTES as MAX_INFLATED_BYTES
from .inflate import TooLarge as TooLarge
from .inflate import WireError as WireError
from .inflate import decompress as decompress
from .record import FIELD_BY_NAME, FIELDS, HISTOGRAMS, ROW, STEP, TileMap

WIRE_VERSION = 1
BATCH_CONTENT_TYPE = "application/vnd.fp8watch.batch+msgpack"
TILE_MAPS_CONTENT_TYPE = "application/vnd.fp8watch.tile-maps+msgpack"

MAX_WIRE_BYTES = 8 << 20
MAX_HEADER_BYTES = 64 << 10
MAX_STEPS = 65_536
MAX_RECORDS = 262_144
MAX_TILE_MAPS = 16_384
MAX_COLUMNS = 256
MAX_NAME_CHARS = 512

Array = npt.NDArray[Any]

_UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class UnsupportedVersion(WireError):
    """A body of a version that this codec does not know."""


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=False):
    """What a batch says of itself. Unknown keys of newer agents are ignored; required ones are these."""

    run: str
    session: str
    rank: int
    seq: int
    step0: int
    num_steps: int
    num_records: int
    clock: float = 0.0
    version: int = WIRE_VERSION
    health: dict[str, float] = {}
    logs: dict[str, list[float | None]] = {}
    batch_ids: list[str | None] = []


class _Body(msgspec.Struct):
    header: msgspec.Raw
    steps: msgspec.Raw  # maps stay closed until their sizes are known: of small entries they unfold to twenty times
    columns: msgspec.Raw


class _TileMapHeader(msgspec.Struct, frozen=True):
    run: str
    session: str
    rank: int
    seq: int
    num_maps: int
    version: int = WIRE_VERSION


class _TileMapBody(msgspec.Struct):
    header: msgspec.Raw
    columns: msgspec.Raw


_KEYS: dict[str, str] = {"step": "<u4", "site": "<u8"}


@dataclass
class Batch:
    """A decoded batch. Columns are numpy arrays over the body; what was left out is filled with defaults on demand."""

    header: Header
    steps: npt.NDArray[np.void]  # [num_steps] of record.STEP
    step: npt.NDArray[np.int64]  # [num_records], absolute
    site: npt.NDArray[np.uint64]  # [num_records]
    sent: dict[str, Array] = field(default_factory=dict)

    def column(self, name: str) -> Array:
        """Values of one field, [num_records] or [num_records, size]. Histograms are counts, decoded from their codes."""
        got = self.sent.get(name)
        f = FIELD_BY_NAME[name]
        n = self.header.num_records
        if got is None:
            shape = n if f.size == 1 else (n, f.size)
            return np.full(shape, f.default, dtype=f.dtype)
        return decode_histogram(got) if name in HISTOGRAMS else got


def encode_histogram(counts: Array) -> npt.NDArray[np.uint8]:
    """Counts -> u8 codes round(8·log2(1 + count)); 255 stands for 2^31.9 and above."""
    codes = np.rint(8.0 * np.log2(1.0 + np.maximum(counts, 0).astype(np.float64)))
    return np.minimum(codes, 255).astype(np.uint8)


def decode_histogram(codes: Array) -> npt.NDArray[np.float64]:
    """u8 codes -> counts, within 4.4 % (half a code step of 2^(1/8)); 0 is exact."""
    return np.exp2(codes.astype(np.float64) / 8.0) - 1.0


def _encode_columns(rows: npt.NDArray[np.void]) -> dict[str, bytes]:
    out: dict[str, bytes] = {}
    for f in FIELDS:
        values = rows[f.name]
        if f.name in HISTOGRAMS:
            values = encode_histogram(values)
            if values.any():
                out[f.name] = values.tobytes()
        elif not np.all(values == f.default):  # NaN differs from every default, so it is always sent
            out[f.name] = np.ascontiguousarray(values).tobytes()
    return out


def encode_batch(
    header: Header,
    steps: npt.NDArray[np.void],
    step: Array,
    site: Array,
    rows: npt.NDArray[np.void],
    *,
    level: int = 1,
) -> bytes:
    """One compressed body.

    Args:
        header: `num_steps` and `num_records` must be those of the arrays.
        steps: [S] of record.STEP, ascending.
        step: [N] int64, absolute step of each record.
        site: [N] uint64, site ids.
        rows: [N] of record.ROW.
        level: zstd level.
    """
    if header.num_steps != len(steps) or header.num_records != len(rows):
        raise WireError("header", "num_steps and num_records must be the lengths of the arrays")
    columns = {
        "step": (np.asarray(step, dtype=np.int64) - header.step0).astype("<u4").tobytes(),
        "site": np.asarray(site, dtype="<u8").tobytes(),
        **_encode_columns(rows),
    }
    body = {
        "header": header,
        "steps": {name: np.ascontiguousarray(steps[name]).tobytes() for name in STEP.names or ()},
        "columns": columns,
    }
    return zstandard.ZstdCompressor(level=level, write_checksum=True).compress(msgspec.msgpack.encode(body))


def _open_map(name: str, raw: msgspec.Raw) -> dict[str, bytes]:
    """A map of byte strings, of at most MAX_COLUMNS entries."""
    data = memoryview(raw)
    kind = data[0]
    wide = {0xDE: 3, 0xDF: 5}.get(kind)  # map 16, map 32: how long the head is
    count = kind & 0x0F if kind & 0xF0 == 0x80 else int.from_bytes(data[1:wide], "big") if wide else None
    if count is None:
        raise WireError(name, "must be a map of column names to byte strings")
    if count > MAX_COLUMNS:
        raise WireError(name, f"{count} columns; at most {MAX_COLUMNS}")
    try:
        return msgspec.msgpack.decode(raw, type=dict[str, bytes])
    except _UNDECODABLE as e:
        raise WireError("body", f"{name}: {e}") from e


def _exact(name: str, raw: bytes, dtype: str, count: int, size: int = 1) -> Array:
    want = np.dtype(dtype).itemsize * count * size
    if len(raw) != want:
        raise WireError(name, f"{len(raw)} bytes; {count} records of {dtype}×{size} take {want}")
    a = np.frombuffer(raw, dtype=dtype)
    return a if size == 1 else a.reshape(count, size)


def _decode_header(raw: msgspec.Raw, kind: type[Any]) -> Any:
    if len(bytes(raw)) > MAX_HEADER_BYTES:
        raise WireError("header", f"larger than {MAX_HEADER_BYTES} bytes")
    try:
        version = msgspec.msgpack.decode(raw, type=dict[str, Any]).get("version", WIRE_VERSION)
        if version != WIRE_VERSION:
            raise UnsupportedVersion("header", f"version {version!r}; this collector reads {WIRE_VERSION}: upgrade it")
        header = msgspec.msgpack.decode(raw, type=kind)
    except _UNDECODABLE as e:
        raise WireError("header", str(e)) from e
    for name in ("run", "session"):
        value = getattr(header, name)
        if not value or len(value) > MAX_NAME_CHARS:
            raise WireError("header", f"{name} of {len(value)} characters; 1 to {MAX_NAME_CHARS} are allowed")
    if header.rank < 0 or header.seq < 0 or header.seq >= 1 << 63:
        raise WireError("header", f"rank {header.rank} and seq {header.seq} must be 0 or more")
    return header


def decode_batch(body: bytes, *, compressed: bool = True) -> Batch:
    """Decode and check one body. Everything or nothing: a single wrong column refuses the batch.

    Raises:
        WireError: naming the column.
    """
    raw = decompress(body) if compressed else body
    try:
        got = msgspec.msgpack.decode(raw, type=_Body)
    except _UNDECODABLE as e:
        raise WireError("body", str(e)) from e
    header: Header = _decode_header(got.header, Header)
    s, n = header.num_steps, header.num_records
    if not 0 <= s <= MAX_STEPS or n < 0 or not 0 <= header.step0 < 1 << 62:
        raise WireError("header", f"num_steps {s}, num_records {n}, step0 {header.step0}: out of range")
    if n > MAX_RECORDS:
        raise TooLarge("body", f"num_records {n}; at most {MAX_RECORDS}: send smaller batches")
    sent_steps, sent_columns = _open_map("steps", got.steps), _open_map("columns", got.columns)
    checked: dict[str, Array] = {}
    for name in STEP.names or ():
        column = sent_steps.get(name)
        if column is None:
            raise WireError(f"steps.{name}", "missing; every column of a step is required")
        checked[name] = _exact(f"steps.{name}", column, STEP[name].str, s)
    steps = np.zeros(s, dtype=STEP)
    for name, values in checked.items():
        steps[name] = values
    if s and (np.any(np.diff(steps["step"]) <= 0) or steps["step"][0] < header.step0):
        raise WireError("steps.step", "steps must ascend, from step0 on")
    if s and steps["step"][-1] - header.step0 > 0xFFFFFFFF:
        raise WireError("steps.step", "a batch spans at most 2^32 steps")
    if np.any(steps["status"] > 2):
        raise WireError("steps.status", f"{int(steps['status'].max())}; 0 ok, 1 skipped, 2 aborted")
    keys: dict[str, Array] = {}
    for name, dtype in _KEYS.items():
        column = sent_columns.get(name)
        if column is None:
            raise WireError(name, "missing; it is a key of every record")
        keys[name] = _exact(name, column, dtype, n)
    step = keys["step"].astype(np.int64) + header.step0
    if n and not np.all(np.isin(step, steps["step"])):
        raise WireError("step", "a record names a step that the batch does not hold")
    for name, log in header.logs.items():
        if len(log) != s:
            raise WireError(f"logs.{name}", f"{len(log)} values for {s} steps")
    if header.batch_ids and len(header.batch_ids) != s:
        raise WireError("batch_ids", f"{len(header.batch_ids)} values for {s} steps")
    batch = Batch(header=header, steps=steps, step=step, site=keys["site"])
    for name, column in sent_columns.items():
        if name in _KEYS:
            continue
        f = FIELD_BY_NAME.get(name)
        if f is None:
            raise WireError(name, f"unknown column; known are {', '.join(FIELD_BY_NAME)}")
        batch.sent[name] = _exact(name, column, "<u1" if name in HISTOGRAMS else f.dtype, n, f.size)
    return batch


_TILE_KEYS = {"site": "<u8", "step": "<i8", "num_tile_rows": "<u4", "num_tile_columns": "<u4"}
_TILE_DATA = {"amax": "<u2", "scale_inv": "<f4", "flags": "<u1", "num_nonfinite": "<u2", "num_underflow": "<u2"}


_E8M0 = np.append(np.ldexp(np.float32(1.0), np.arange(255) - 127), np.nan).astype(np.float32)
"""Of each code its value; 255 is NaN."""


def _is_e8m0(values: Array) -> bool:
    mantissa, exponent = np.frexp(values)
    return bool(np.all((mantissa == 0.5) & (exponent >= -126) & (exponent <= 128)))


def encode_tile_maps(run: str, session: str, rank: int, seq: int, maps: Sequence[TileMap], *, level: int = 1) -> bytes:
    """Tile maps of any sites and steps as one compressed body; the tiles of all maps lie end to end.

    A scale_inv that is a power of two everywhere travels as E8M0: one byte a tile before compression.
    """
    columns: dict[str, bytes] = {
        "site": np.array([m.site for m in maps], dtype="<u8").tobytes(),
        "step": np.array([m.step for m in maps], dtype="<i8").tobytes(),
        "num_tile_rows": np.array([m.shape[0] for m in maps], dtype="<u4").tobytes(),
        "num_tile_columns": np.array([m.shape[1] for m in maps], dtype="<u4").tobytes(),
    }
    for name, dtype in _TILE_DATA.items():
        values = [np.asarray(getattr(m, name), dtype=dtype) for m in maps]
        if name == "scale_inv" and all(_is_e8m0(v) for v in values):
            columns["scale_inv_e8m0"] = b"".join((np.frexp(v)[1] + 126).astype("<u1").tobytes() for v in values)
        elif any(v.any() for v in values):
            columns[name] = b"".join(v.tobytes() for v in values)
    header = _TileMapHeader(run=run, session=session, rank=rank, seq=seq, num_maps=len(maps))
    body = msgspec.msgpack.encode({"header": header, "columns": columns})
    return zstandard.ZstdCompressor(level=level, write_checksum=True).compress(body)


@dataclass(frozen=True)
class TileMaps:
    """A decoded body of tile maps."""

    run: str
    session: str
    rank: int
    seq: int
    maps: list[TileMap]


def decode_tile_maps(body: bytes, *, compressed: bool = True) -> TileMaps:
    """Decode and check tile maps.

    Raises:
        WireError: naming the column.
    """
    raw = decompress(body) if compressed else body
    try:
        got = msgspec.msgpack.decode(raw, type=_TileMapBody)
    except _UNDECODABLE as e:
        raise WireError("body", str(e)) from e
    header: _TileMapHeader = _decode_header(got.header, _TileMapHeader)
    n = header.num_maps
    if n < 0:
        raise WireError("header", f"num_maps {n}: out of range")
    if n > MAX_TILE_MAPS:
        raise TooLarge("body", f"num_maps {n}; at most {MAX_TILE_MAPS}: send fewer at once")
    columns = _open_map("columns", got.columns)
    known = {*_TILE_KEYS, *_TILE_DATA, "scale_inv_e8m0"}
    for name in columns:
        if name not in known:
            raise WireError(name, f"unknown column; known are {', '.join(sorted(known))}")
    keys: dict[str, Array] = {}
    for name, dtype in _TILE_KEYS.items():
        if name not in columns:
            raise WireError(name, "missing; it is a key of every tile map")
        keys[name] = _exact(name, columns[name], dtype, n)
    counts = keys["num_tile_rows"].astype(np.uint64) * keys["num_tile_columns"].astype(np.uint64)
    if n and (int(counts.max()) > MAX_INFLATED_BYTES or int(keys["step"].min()) < 0):
        raise WireError("num_tile_rows", f"{int(counts.max())} tiles in a map: out of range")
    total = int(counts.sum())
    if total > MAX_INFLATED_BYTES:
        raise WireError("num_tile_rows", f"{total} tiles in one body; send fewer maps at once")
    data: dict[str, Array] = {}
    for name, dtype in _TILE_DATA.items():
        column = columns.get(name)
        if name == "scale_inv" and column is None and "scale_inv_e8m0" in columns:
            codes = _exact("scale_inv_e8m0", columns["scale_inv_e8m0"], "<u1", total)
            data[name] = _E8M0[codes]
        else:
            data[name] = np.zeros(total, dtype) if column is None else _exact(name, column, dtype, total)
    ends = np.cumsum(counts.astype(np.int64))
    maps = []
    for i in range(n):
        part = slice(int(ends[i] - counts[i]), int(ends[i]))
        maps.append(
            TileMap(
                site=int(keys["site"][i]),
                step=int(keys["step"][i]),
                shape=(int(keys["num_tile_rows"][i]), int(keys["num_tile_columns"][i])),
                **{name: values[part] for name, values in data.items()},
            )
        )
    return TileMaps(run=header.run, session=header.session, rank=header.rank, seq=header.seq, maps=maps)


def rows_of(batch: Batch) -> npt.NDArray[np.void]:
    """The records of a batch as ROW again; histograms are the counts that their codes stand for, rounded."""
    rows = np.zeros(batch.header.num_records, dtype=ROW)
    for f in FIELDS:
        values = batch.column(f.name)
        rows[f.name] = np.rint(values) if f.name in HISTOGRAMS else values
    return rows
