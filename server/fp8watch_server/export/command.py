"""`fp8watch export`: a run as Parquet files.

Thread:     main

Everything comes out of one snapshot: a run that is still written is exported as it was at one moment.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fp8watch_agent.version import __version__
from fp8watch_server.db import schema as t
from fp8watch_server.settings import Settings
from fp8watch_server.store import queries
from fp8watch_server.store.command import Unusable, opened, parser_of, require_run, run_command

NAMES = ("steps", "series", "logged", "incidents", "sites")


def main(argv: list[str] | None = None) -> int:
    """Exit status 0: complete. 2: there is none."""
    parser = parser_of("export", "Write a run as Parquet files, which DuckDB, polars and pandas read.")
    parser.add_argument("run", metavar="RUN", help="its id")
    parser.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="OUT",
        help="a folder, s3://BUCKET/PREFIX, or one table's .parquet file in either; never written over",
    )
    parser.add_argument(
        "--table", choices=NAMES, default=None, help="only this table (default: all; in a file, series)"
    )
    parser.add_argument(
        "--from", dest="from_step", type=_step, default=0, metavar="STEP", help="first step (default: 0)"
    )
    parser.add_argument("--to", dest="to_step", type=_step, default=queries.MAX_STEP, metavar="STEP", help="last step")
    parser.add_argument(
        "--per-rank", action="store_true", help="series of each rank that is kept, not of all ranks merged"
    )
    return run_command("export", parser, argv, _export)


def _step(text: str) -> int:
    if not text.isdecimal() or int(text) > queries.MAX_STEP:
        raise argparse.ArgumentTypeError(f"{text!r} is no step; a step is a whole number from 0 on")
    return int(text)


def _export(args: Any, settings: Settings) -> int:
    try:
        from fp8watch_server.export import object_store
        from fp8watch_server.export.columns import schema_of
        from fp8watch_server.export.parquet import ExportError, is_file, whole_or_nothing, write
        from fp8watch_server.export.tables import MAKERS, Asked
    except ModuleNotFoundError as e:
        raise Unusable(f"Parquet needs a package that is not here ({e}); pip install 'fp8watch[export]'") from e
    if args.from_step > args.to_step:
        raise Unusable(f"--from {args.from_step} is after --to {args.to_step}; the range holds no step")
    asked = Asked(args.run, args.from_step, args.to_step, args.per_rank)
    remote = object_store.is_url(args.output)
    place = object_store.place_of(args.output) if remote else args.output
    target = Path(place)
    wanted = [args.table or "series"] if is_file(target) else [args.table] if args.table else list(NAMES)
    at_target = object_store.whole_or_nothing(args.output) if remote else whole_or_nothing(target)
    with opened(settings) as engine:
        require_run(engine, args.run)
        try:
            with at_target as folder, engine.connect() as conn:
                facts = _facts(conn, args)
                done = []
                for name in wanted:
                    path = folder / (target.name if is_file(target) else f"{name}.parquet")
                    done.append(write(path, schema_of(name, facts), MAKERS[name](conn, asked)))
                notes = _notes(conn, asked.run_id, asked.from_step, asked.to_step, asked.per_rank)
        except ExportError as e:
            raise Unusable(str(e)) from e
    for file in done:
        where = place if is_file(target) else f"{place.rstrip('/')}/{file.name}"
        print(f"{where}: {file.num_rows} rows in {file.num_row_groups} row groups, {file.num_bytes} bytes")
    if facts["run"]["status"] != "ended":
        notes = [f"run {args.run!r} has not ended: this is what was stored at the start of the export", *notes]
    for note in notes:
        print(note)
    return 0


def _facts(conn: Connection, args: Any) -> dict[str, Any]:
    """What every file says of its run, in its metadata."""
    run = queries.run(conn, args.run)
    assert run is not None
    facts = {name: value for name, value in run.items() if name != "sessions"}
    to_step = None if args.to_step == queries.MAX_STEP else args.to_step
    return {
        "version": __version__,
        "run": facts,
        "exported_at": time.time(),
        "steps": [args.from_step, to_step],
        "per_rank": args.per_rank,
    }


def _notes(conn: Connection, run_id: str, from_step: int, to_step: int, per_rank: bool) -> Sequence[str]:
    """What the retention policy has let go of, and so is not in the files."""
    c = t.cell.c
    query = sa.select(c.kept, sa.func.count()).where(
        c.run_id == run_id, c.tenant == t.DEFAULT_TENANT, c.step_max >= from_step, c.step_min <= to_step
    )
    kept = {kept: int(n) for kept, n in conn.execute(query.group_by(c.kept))}
    cells = f"cells of {t.BLOCK_STEPS} steps"
    notes = []
    if gone := kept.get(t.KEPT_SUMMARY, 0):
        notes.append(f"{gone} {cells} are kept as summaries alone: their steps are in no row of the series")
    if per_rank and (gone := kept.get(t.KEPT_ROLLUP, 0)):
        notes.append(
            f"{gone} {cells} are kept merged over ranks, with no more than a few ranks: the others have no rows"
        )
    return notes
