"""Full tile maps: written once, read by the page, pruned when outside the newest 256 steps and not near an incident.

Shapes:     TileMap of [Mt·Kt] tiles -> one row a map
Thread:     ingest pool (write), query pool (read)

Kept are the maps of a run's newest 256 steps, and those within 16 steps of the first and of the last step of an incident. Steps of
a newer attempt are newer, however low.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fp8watch_agent.record import TileFlag, TileMap
from fp8watch_agent.wire import TileMaps, decode_tile_maps, encode_tile_maps
from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import upsert
from fp8watch_server.store.attempts import lowest_current
from fp8watch_server.store.fields import as_data
from fp8watch_server.store.registrations import KeyReused, require_session, require_sites

KEEP_NEWEST_STEPS = 256
KEEP_AROUND_INCIDENT_STEPS = 16
MAX_SHOWN_TILES = 1 << 19
"""Of one map, in an answer or on a page."""
FLAG_ORDER = (TileFlag.NAN, TileFlag.INF, TileFlag.SENTINEL, TileFlag.OFF_SCALE, TileFlag.SATURATED)
"""What makes a tile stand out, worst first. Zero, eps and underflow tiles are everyday."""
LOUD = sum(int(flag) for flag in FLAG_ORDER)
_WORST_FLAG = np.array(
    [next((i for i, flag in enumerate(FLAG_ORDER) if bits & flag), len(FLAG_ORDER)) for bits in range(256)]
)
"""Flags of a tile -> the place of its worst one in FLAG_ORDER."""
BROKEN = int(TileFlag.NAN | TileFlag.INF | TileFlag.SENTINEL | TileFlag.OFF_SCALE)


def commit_tile_maps(
    conn: Connection,
    maps: TileMaps,
    sha256: bytes,
    *,
    now: float,
    key_sha256: str = "",
    tenant: str = t.DEFAULT_TENANT,
) -> bool:
    """Write one checked body of tile maps.

    Returns:
        False when this very body had come before.

    Raises:
        KeyReused, Unknown, RankMismatch, WrongKey: as commit_group does, and nothing was written.
    """
    k = t.tile_map_batch.c
    key = {"run_id": maps.run, "tenant": tenant, "session": maps.session, "rank": maps.rank, "seq": maps.seq}
    attempt = require_session(conn, maps.run, maps.session, maps.rank, tenant, key_sha256)
    there = conn.execute(sa.select(k.body_sha256).where(*(k[name] == value for name, value in key.items()))).scalar()
    if there is not None:
        if bytes(there) != sha256:
            raise KeyReused
        return False
    require_sites(conn, maps.run, np.array([m.site for m in maps.maps], dtype=np.uint64), tenant)
    rows = [
        {
            "run_id": maps.run,
            "tenant": tenant,
            "site": m.site,
            "step": m.step,
            "rank": maps.rank,
            "attempt": attempt,
            "session": maps.session,
            "body": encode_tile_maps(maps.run, maps.session, maps.rank, maps.seq, [m]),
            "received_at": now,
        }
        for m in maps.maps
    ]
    upsert(conn, t.tile_map, rows)
    step_max = max((m.step for m in maps.maps), default=-1)
    conn.execute(
        sa.insert(t.tile_map_batch), [{**key, "body_sha256": sha256, "step_max": step_max, "received_at": now}]
    )
    # notifies open pages, which watch the run's row. Batches lock it before their session: whoever has it writes it, too
    r = t.run.c
    heard = sa.select(r.run_id).where(r.run_id == maps.run, r.tenant == tenant, r.last_seen_at < now)
    free = conn.execute(heard.with_for_update(key_share=True, skip_locked=True)).first()
    if free is not None:
        conn.execute(sa.update(t.run).where(r.run_id == maps.run, r.tenant == tenant).values(last_seen_at=now))
    return True


def prune(conn: Connection, run_id: str, *, tenant: str = t.DEFAULT_TENANT) -> int:
    """Delete tile maps outside both ranges. Returns how many."""
    m = t.tile_map.c
    of_run = (m.run_id == run_id, m.tenant == tenant)
    current = lowest_current(conn, run_id, tenant)
    start = _start(m.attempt, current)
    oldest_kept = conn.execute(
        sa.select(start, m.step)
        .where(*of_run)
        .distinct()
        .order_by(start.desc(), m.step.desc())
        .offset(KEEP_NEWEST_STEPS - 1)
        .limit(1)
    ).first()
    if oldest_kept is None:
        return 0

    def older(attempt: Any, step: Any) -> sa.ColumnElement[bool]:
        of = _start(attempt, current)
        return sa.or_(of < oldest_kept.start, sa.and_(of == oldest_kept.start, step < oldest_kept.step))

    i = t.incident.c
    near_incident = (
        sa.select(sa.literal(1))
        .where(
            i.run_id == m.run_id,
            i.tenant == m.tenant,
            sa.or_(
                *(
                    m.step.between(end - KEEP_AROUND_INCIDENT_STEPS, end + KEEP_AROUND_INCIDENT_STEPS)
                    for end in (i.first_step, i.last_step)
                )
            ),
        )
        .exists()
    )
    gone = conn.execute(sa.delete(t.tile_map).where(*of_run, older(m.attempt, m.step), ~near_incident))
    k, s = t.tile_map_batch.c, t.session.c
    attempt = sa.select(s.attempt).where(s.run_id == k.run_id, s.tenant == k.tenant, s.session == k.session)
    of_session = older(attempt.scalar_subquery(), k.step_max)
    conn.execute(sa.delete(t.tile_map_batch).where(k.run_id == run_id, k.tenant == tenant, of_session))
    return int(gone.rowcount)


def _start(attempt: Any, current: int) -> sa.Label[int]:
    """An attempt, in an order in which all that go on are the newest."""
    return sa.case((attempt < current, attempt), else_=current).label("start")


def steps_available(conn: Connection, run_id: str, site: int, rank: int | None = None) -> list[int]:
    """Steps of a site with a map, ascending."""
    m = t.tile_map.c
    where = [m.run_id == run_id, m.tenant == t.DEFAULT_TENANT, m.site == site]
    if rank is not None:
        where.append(m.rank == rank)
    return list(conn.execute(sa.select(m.step).where(*where).distinct().order_by(m.step)).scalars())


def kept_between(conn: Connection, run_id: str, first: int, last: int) -> dict[str, list[int]]:
    """Site -> steps with a map between two steps, ascending."""
    m = t.tile_map.c
    where = (m.run_id == run_id, m.tenant == t.DEFAULT_TENANT, m.step >= first, m.step <= last)
    out: dict[str, list[int]] = {}
    for site, step in conn.execute(sa.select(m.site, m.step).where(*where).distinct().order_by(m.site, m.step)):
        out.setdefault(str(site), []).append(int(step))
    return out


@dataclass(frozen=True)
class KeptMap:
    """A tile map as it was kept, whole."""

    tiles: TileMap
    rank: int
    ranks: list[int]
    """All that have one of this step."""
    steps: list[int]
    """All steps of the site with a map, ascending."""
    underflow_is_known: bool
    """False where only codes were seen, which do not tell it."""


def kept_map(
    conn: Connection,
    run_id: str,
    site: int,
    step: int | None = None,
    rank: int | None = None,
    attempt: int | None = None,
) -> KeptMap | None:
    """The map of a site in a step; None where there is none.

    `step=None` is the newest that is kept, `rank=None` the lowest that has it. Where several attempts have the step it is the
    map of `attempt`, or of the newest.
    """
    steps = steps_available(conn, run_id, site, rank)
    if not steps:
        return None
    wanted = _newest_step(conn, run_id, site, rank) if step is None else step
    m = t.tile_map.c
    rows = conn.execute(
        sa.select(m.rank, m.body)
        .where(m.run_id == run_id, m.tenant == t.DEFAULT_TENANT, m.site == site, m.step == wanted)
        .order_by(m.rank, sa.case((m.attempt == attempt, 0), else_=1), m.attempt.desc())
    ).all()
    chosen = next((row for row in rows if rank is None or row.rank == rank), None)
    if chosen is None:
        return None
    s = t.site.c
    of_site = (s.run_id == run_id, s.tenant == t.DEFAULT_TENANT, s.site == site)
    evidence = conn.execute(sa.select(s.evidence).where(*of_site)).scalar() or {}
    tiles: TileMap = decode_tile_maps(bytes(chosen.body)).maps[0]
    ranks = sorted({row.rank for row in rows})
    return KeptMap(tiles, chosen.rank, ranks, steps, evidence.get("cast") != "absent")


def _newest_step(conn: Connection, run_id: str, site: int, rank: int | None) -> int | None:
    m = t.tile_map.c
    where = [m.run_id == run_id, m.tenant == t.DEFAULT_TENANT, m.site == site]
    if rank is not None:
        where.append(m.rank == rank)
    start = _start(m.attempt, lowest_current(conn, run_id, t.DEFAULT_TENANT))
    return conn.execute(sa.select(m.step).where(*where).order_by(start.desc(), m.step.desc()).limit(1)).scalar()


def tile_map(
    conn: Connection,
    run_id: str,
    site: int,
    step: int | None = None,
    rank: int | None = None,
    row: int | None = None,
    attempt: int | None = None,
) -> dict[str, Any] | None:
    """`shown_map` of `kept_map`; None where there is no such map."""
    kept = kept_map(conn, run_id, site, step, rank, attempt)
    return None if kept is None else shown_map(kept, row)


def shown_map(kept: KeptMap, row: int | None = None) -> dict[str, Any]:
    """Every tile of a map, row-major, for JSON.

    {site, step, rank, ranks, shape, row0, cut, amax, scale_inv, flags, num_nonfinite,
    num_underflow, nonfinite, nonfinite_scale_inv, steps_available}. `flags` are record.TileFlag.
    `nonfinite` marks amax, `nonfinite_scale_inv` scale_inv: [[index, "nan" | "inf" | "-inf"], …]. `num_underflow` is null
    throughout where it is not known. Of a map of more than MAX_SHOWN_TILES these are the rows around `row`, by default around
    its worst tile: `shape` is theirs, `row0` the first of them, and `cut` is
    {shape: of the whole map, num_broken: tiles with NaN, Inf, sentinel or off-scale in the rest}, else null.
    """
    tiles = kept.tiles
    row0, shape = _window(tiles, row)

    def shown(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return values.reshape(tiles.shape)[row0 : row0 + shape[0], : shape[1]].ravel()

    flags = shown(tiles.flags)
    amax = amax_of(shown(tiles.amax))
    everywhere = np.ones(len(amax), dtype=bool)
    amax_data, amax_marks = as_data(amax, everywhere)
    scale_data, scale_marks = as_data(shown(tiles.scale_inv), everywhere)
    cut = None
    if shape != tiles.shape:
        cut = {"shape": list(tiles.shape), "num_broken": _num_broken(tiles.flags) - _num_broken(flags)}
    return {
        "site": tiles.site,
        "step": tiles.step,
        "rank": kept.rank,
        "ranks": kept.ranks,
        "shape": list(shape),
        "row0": row0,
        "cut": cut,
        "amax": amax_data,
        "scale_inv": scale_data,
        "flags": flags.tolist(),
        "num_nonfinite": shown(tiles.num_nonfinite).tolist(),
        "num_underflow": shown(tiles.num_underflow).tolist() if kept.underflow_is_known else [None] * len(amax),
        "nonfinite": amax_marks,
        "nonfinite_scale_inv": scale_marks,
        "steps_available": kept.steps,
    }


def worst_first(tiles: TileMap, at_most: int) -> list[int]:
    """Indices of tiles that stand out: by flag, then by how many elements are non-finite, then as they lie."""
    loud = np.flatnonzero(tiles.flags & LOUD)
    mildness = 0xFFFF - tiles.num_nonfinite[loud].astype(np.int64)
    key = (_WORST_FLAG[tiles.flags[loud]] << 48) | (mildness << 32) | loud
    if len(key) > at_most:
        key = np.partition(key, at_most - 1)[:at_most]
    return [int(k) & 0xFFFFFFFF for k in np.sort(key)]


def amax_of(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Values of bfloat16 bits, which are the upper half of a float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _window(tiles: TileMap, row: int | None) -> tuple[int, tuple[int, int]]:
    """First row of what is given of a map, and how many rows and columns."""
    rows, columns = tiles.shape
    shown = min(columns, MAX_SHOWN_TILES)
    num_rows = min(rows, MAX_SHOWN_TILES // max(shown, 1))
    if num_rows == rows:
        return 0, (rows, shown)
    if row is None:
        worst = worst_first(tiles, 1)
        row = worst[0] // columns if worst else 0
    return min(max(0, row - num_rows // 2), rows - num_rows), (num_rows, shown)


def _num_broken(flags: npt.NDArray[np.uint8]) -> int:
    return int(np.count_nonzero(flags & BROKEN))
