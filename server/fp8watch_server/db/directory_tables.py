"""Tables of the directory of shards: where each run lies, and where those have gone that have left.

Shapes:     SQLAlchemy Core tables, the same on SQLite and PostgreSQL
Thread:     any; only data
"""

from __future__ import annotations

import sqlalchemy as sa

from fp8watch_server.db.metadata import metadata, run_key

shard_of_run = sa.Table(  # in the home database: the database that a run lies in
    "shard_of_run",
    metadata,
    *run_key(),
    sa.Column("shard", sa.Text, nullable=False),  # its name in FP8WATCH_SHARDS; '' = the home database itself
    sa.Column("placed_at", sa.Double, nullable=False),
    sa.Column("moving_to", sa.Text),  # a move that has not arrived; NULL: none
    sa.Column("moved_from", sa.Text),  # a database that still has its copy; NULL: none
    sa.Column("refuses", sa.Boolean, nullable=False, server_default=sa.false()),  # collectors answer 503 for it
    sa.Column("num_moves", sa.Integer, nullable=False, server_default="0"),
)

moved_run = sa.Table(  # in the database that a run has left: where to
    "moved_run",
    metadata,
    *run_key(),
    sa.Column("moved_to", sa.Text, nullable=False),
    sa.Column("moved_at", sa.Double, nullable=False),
)
