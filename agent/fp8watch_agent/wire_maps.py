"""Wire codec of tile maps: every tile of a site in a step, concatenated in one zstd frame.

Shapes:     maps of [Mt·Kt] tiles -> one byte string a column
Thread:     sender (encode), collector (decode)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from fp8watch_agent.bounded_decompress import MAX_INFLATED_BYTES, TooLarge, WireError, decompress
from fp8watch_agent.column_words import new_compressor
from fp8watch_agent.envelope import MAX_TILE_MAPS, UNDECODABLE, Array, decode_header, exact, open_map
from fp8watch_agent.record import TileMap

MAPS_VERSION = 1


class _TileMapHeader(msgspec.Struct, frozen=True):
    run: str
    session: str
    rank: int
    seq: int
    num_maps: int
    version: int = MAPS_VERSION


class _TileMapBody(msgspec.Struct):
    header: msgspec.Raw
    columns: msgspec.Raw


_TILE_KEYS = {"site": "<u8", "step": "<i8", "num_tile_rows": "<u4", "num_tile_columns": "<u4"}
_TILE_DATA = {"amax": "<u2", "scale_inv": "<f4", "flags": "<u1", "num_nonfinite": "<u2", "num_underflow": "<u2"}


_E8M0 = np.append(np.ldexp(np.float32(1.0), np.arange(255) - 127), np.nan).astype(np.float32)
"""Of each code its value; 255 is NaN."""


MAX_TILES = 1 << 24
"""In one body. Columns that are left out take no bytes, so the size of a body says nothing of how many there are."""
_PIECE = 1 << 16


def _e8m0(values: Array) -> bytes | None:
    """The codes of values that are powers of two; None where one is not. Looked at in pieces: most often the first decides."""
    codes = []
    for start in range(0, len(values), _PIECE):
        mantissa, exponent = np.frexp(values[start : start + _PIECE])
        if not ((mantissa == 0.5) & (exponent >= -126) & (exponent <= 128)).all():
            return None
        codes.append((exponent + 126).astype("<u1").tobytes())
    return b"".join(codes)


def encode_tile_maps(run: str, session: str, rank: int, seq: int, maps: Sequence[TileMap], *, level: int = 1) -> bytes:
    """Encode tile maps of any sites and steps as one compressed body, the tiles of all maps concatenated.

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
        codes: list[bytes] = []
        if name == "scale_inv":
            for v in values:
                if (of_map := _e8m0(v)) is None:
                    break
                codes.append(of_map)
        if name == "scale_inv" and len(codes) == len(values):
            columns["scale_inv_e8m0"] = b"".join(codes)
        elif any(v.any() for v in values):
            columns[name] = b"".join(v.tobytes() for v in values)
    header = _TileMapHeader(run=run, session=session, rank=rank, seq=seq, num_maps=len(maps))
    body = msgspec.msgpack.encode({"header": header, "columns": columns})
    packed: bytes = new_compressor(level).compress(body)
    return packed


@dataclass(frozen=True)
class TileMaps:
    """A decoded body of tile maps."""

    run: str
    session: str
    rank: int
    seq: int
    maps: list[TileMap]


def decode_tile_maps(body: bytes, *, compressed: bool = True) -> TileMaps:
    """Decode and validate tile maps.

    Raises:
        WireError: naming the column.
    """
    raw = decompress(body) if compressed else body
    try:
        got = msgspec.msgpack.decode(raw, type=_TileMapBody)
    except UNDECODABLE as e:
        raise WireError("body", str(e)) from e
    header: _TileMapHeader = decode_header(got.header, _TileMapHeader, (MAPS_VERSION,))
    n = header.num_maps
    if n < 0:
        raise WireError("header", f"num_maps {n}: out of range")
    if n > MAX_TILE_MAPS:
        raise TooLarge("body", f"num_maps {n}; at most {MAX_TILE_MAPS}: send fewer at once")
    columns = open_map("columns", got.columns)
    known = {*_TILE_KEYS, *_TILE_DATA, "scale_inv_e8m0"}
    for name in columns:
        if name not in known:
            raise WireError(name, f"unknown column; known are {', '.join(sorted(known))}")
    keys: dict[str, Array] = {}
    for name, dtype in _TILE_KEYS.items():
        if name not in columns:
            raise WireError(name, "missing; it is a key of every tile map")
        keys[name] = exact(name, columns[name], dtype, n)
    counts = keys["num_tile_rows"].astype(np.uint64) * keys["num_tile_columns"].astype(np.uint64)
    if n and (int(counts.max()) > MAX_INFLATED_BYTES or int(keys["step"].min()) < 0):
        raise WireError("num_tile_rows", f"{int(counts.max())} tiles in a map: out of range")
    total = int(counts.sum())
    if total > MAX_TILES:
        raise TooLarge("body", f"{total} tiles; at most {MAX_TILES}: send fewer maps at once")
    data: dict[str, Array] = {}
    for name, dtype in _TILE_DATA.items():
        column = columns.get(name)
        if name == "scale_inv" and column is None and "scale_inv_e8m0" in columns:
            codes = exact("scale_inv_e8m0", columns["scale_inv_e8m0"], "<u1", total)
            data[name] = _E8M0[codes]
        else:
            none = np.broadcast_to(np.zeros(1, dtype), total)  # takes no memory
            data[name] = none if column is None else exact(name, column, dtype, total)
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
