"""Tables of compacted data: cells of 256 steps, their blocks, summaries, scalars and retention.

Shapes:     SQLAlchemy Core tables; arrays for SQL on PostgreSQL only
Thread:     any; only data

A cell is 256 steps of a run, of one rank (detail) or merged over all ranks (roll-up). Programs read its sheets, packed
bytes of 32 sites each, the same on both databases. SQL reads its blocks: on PostgreSQL what charts show has a row a site
with native arrays to unnest. Collectors before revision 0009 kept packed bytes in the blocks as well.
"""

from __future__ import annotations

import sqlalchemy as sa

from fp8watch_server.db.dialect import Json, SqlArray
from fp8watch_server.db.metadata import metadata, of_run, of_session, run_key

BLOCK_STEPS = 256
ROLLED_ATTEMPT, ROLLED_RANK = 0, -1
"""Key of a roll-up over ranks: attempts count from 1, ranks from 0."""

KEPT_SUMMARY, KEPT_ROLLUP, KEPT_DETAIL = 0, 1, 2
"""cell.kept: only its summary, its roll-up and no more than a few of its ranks, all of its ranks."""

cell = sa.Table(  # 256 compacted steps of a run, and the state of their compaction
    "cell",
    metadata,
    *run_key(),
    sa.Column("step0", sa.BigInteger, primary_key=True, autoincrement=False),  # a multiple of BLOCK_STEPS
    sa.Column("revision", sa.BigInteger, nullable=False),  # +1 with every change: for ETags and optimistic locking
    sa.Column("sources", Json, nullable=False),  # [[attempt, rank], …] that have detail; and store.rolled_past
    sa.Column("shown_attempt", sa.Integer),  # the block key that holds all of the cell: of its roll-up, or of its only
    sa.Column("shown_rank", sa.Integer),  # source; NULL until the roll-up is made
    sa.Column("kept", sa.SmallInteger, nullable=False, server_default="2"),  # KEPT_…: what retention kept
    sa.Column("step_min", sa.BigInteger, nullable=False),
    sa.Column("step_max", sa.BigInteger, nullable=False),
    sa.Column("num_records", sa.BigInteger, nullable=False),  # of all ranks, as received
    sa.Column(
        "num_bytes", sa.BigInteger, nullable=False, server_default="0"
    ),  # of its sheets; too many until its roll-up
    sa.Column("compacted_at", sa.Double, nullable=False),
    of_run(),
)
sa.Index(
    "ix_cell_behind",
    cell.c.run_id,
    cell.c.tenant,
    cell.c.step0,
    sqlite_where=cell.c.shown_rank.is_(None),
    postgresql_where=cell.c.shown_rank.is_(None),
)


BLOCK_ARRAYS = ("amax_max", "scale_inv_min", "scale_inv_max", "clip_depth", "tile_sqnr_db", "underflow_ratio")
BLOCK_COUNTS = ("num_nonfinite", "num_saturated", "num_sentinel_tiles")
BLOCK_SAMPLED = ("gain_error",)
"""Of full statistics alone: NULL where no record of a block has one."""

sheet = sa.Table(  # 256 steps of up to 32 sites on one rank, or merged over all ranks
    "sheet",
    metadata,
    *run_key(),
    sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("rank", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("step0", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("site_min", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("site_max", sa.BigInteger, primary_key=True, autoincrement=False),  # in the key: found without the row
    sa.Column("num_records", sa.Integer, nullable=False),
    sa.Column("max_records", sa.Integer, nullable=False),  # of the site with the most
    sa.Column("body", sa.LargeBinary, nullable=False),  # store.sheets: keys, and all fields but the histograms
    sa.Column("histograms", sa.LargeBinary, nullable=False),
    of_run(),
)

block = sa.Table(  # 256 steps of one site on one rank, or merged over all ranks
    "block",
    metadata,
    *run_key(),
    sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("rank", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("site", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("step0", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("num_records", sa.Integer, nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=False),  # store.block_codec; empty where a sheet has the records
    sa.Column("front_bytes", sa.Integer, nullable=False),  # of the body, without the histograms; 0: empty
    # for SQL, on PostgreSQL only, in the blocks that charts show; NULL elsewhere
    sa.Column("first_step", sa.BigInteger),
    sa.Column("step_gap", sa.Integer),  # when steps are evenly spaced; else:
    sa.Column("steps", SqlArray("BIGINT")),
    *[sa.Column(name, SqlArray("REAL")) for name in BLOCK_ARRAYS],
    *[sa.Column(name, SqlArray("BIGINT")) for name in BLOCK_COUNTS],  # NULL: all 0
    *[sa.Column(name, SqlArray("REAL")) for name in BLOCK_SAMPLED],
    of_run(),
)

block_meta = sa.Table(  # extremes, sums and summed histograms of all shown blocks of a cell: for top-N and heat maps
    "block_meta",
    metadata,
    *run_key(),
    sa.Column("step0", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("num_sites", sa.Integer, nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=False),  # store.summary
    of_run(),
)

scalar_block = sa.Table(  # scalars of a cell, merged over ranks
    "scalar_block",
    metadata,
    *run_key(),
    sa.Column("step0", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("body", sa.LargeBinary, nullable=False),
    of_run(),
)

batch_ledger = sa.Table(  # keys of compacted batches, so that a resend is still recognised
    "batch_ledger",
    metadata,
    *run_key(),
    sa.Column("session", sa.Text, primary_key=True),
    sa.Column("rank", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("seq0", sa.BigInteger, primary_key=True, autoincrement=False),  # a multiple of LEDGER_SEQS
    sa.Column("digests", sa.LargeBinary, nullable=False),  # 16 bytes of each body's SHA-256; zeros: absent
    of_session(),
)

logged = sa.Table(  # values of watch.log besides the four scalars
    "logged",
    metadata,
    *run_key(),
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("rank", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("step", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("seq", sa.BigInteger, nullable=False),
    sa.Column("value", sa.Double),
    sa.Column("value_class", sa.SmallInteger),
    of_run(),
)
sa.Index(  # steps of one source whatever the name: a run has millions of rows, and these are a few hundred
    "ix_logged_source", *(logged.c[name] for name in ("run_id", "tenant", "attempt", "rank", "step"))
)

retention = sa.Table(  # retention of one run; NULL: the collector's settings, 0: no limit
    "retention",
    metadata,
    *run_key(),
    sa.Column("keep_days", sa.Double),
    sa.Column("keep_steps", sa.BigInteger),
    sa.Column("keep_bytes", sa.BigInteger),
    of_run(),
)

detect_state = sa.Table(  # saved detector state of a run, so that a restart need not replay everything
    "detect_state",
    metadata,
    *run_key(),
    sa.Column("arrival", sa.BigInteger, nullable=False),  # of the last batch included in it
    sa.Column("version", sa.Text, nullable=False),
    sa.Column("state", sa.LargeBinary, nullable=False),
    sa.Column("written_at", sa.Double, nullable=False),
    of_run(),
)
