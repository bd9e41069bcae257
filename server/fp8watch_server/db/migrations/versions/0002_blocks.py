"""Blocks, and what goes with them.

Of the first tables, block and block_meta never held a row; they are made anew. What watch.log was given moves out of
the bodies of batches into a table, so that it outlives them.
"""

from __future__ import annotations

import math
from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

from fp8watch_server.db.sql_views import create_views, drop_views

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

JSON = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")
REALS = ("amax_max", "scale_inv_min", "scale_inv_max", "clip_depth", "tile_sqnr_db", "underflow_ratio")
COUNTS = ("num_nonfinite", "num_saturated", "num_sentinel_tiles")
BEHIND = sa.text("shown_rank IS NULL")


def _array(kind: sa.types.TypeEngine[Any]) -> sa.types.TypeEngine[Any]:
    return sa.LargeBinary().with_variant(postgresql.ARRAY(kind), "postgresql")


def _key() -> list[sa.Column[Any]]:
    return [
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), server_default="default", nullable=False),
    ]


def _of_run(table: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(
        ["run_id", "tenant"], ["run.run_id", "run.tenant"], name=op.f(f"fk_{table}_run"), ondelete="CASCADE"
    )


def _primary(table: str, *names: str) -> sa.PrimaryKeyConstraint:
    return sa.PrimaryKeyConstraint("run_id", "tenant", *names, name=op.f(f"pk_{table}"))


def _number(name: str, kind: sa.types.TypeEngine[Any]) -> sa.Column[Any]:
    return sa.Column(name, kind, autoincrement=False, nullable=False)


def upgrade() -> None:
    """Forward."""
    op.drop_table("block_meta")
    op.drop_table("block")
    op.create_table(
        "cell",
        *_key(),
        _number("step0", sa.BigInteger()),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("sources", JSON, nullable=False),
        sa.Column("shown_attempt", sa.Integer(), nullable=True),
        sa.Column("shown_rank", sa.Integer(), nullable=True),
        sa.Column("kept", sa.SmallInteger(), server_default="2", nullable=False),
        sa.Column("step_min", sa.BigInteger(), nullable=False),
        sa.Column("step_max", sa.BigInteger(), nullable=False),
        sa.Column("num_records", sa.BigInteger(), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("compacted_at", sa.Double(), nullable=False),
        _of_run("cell"),
        _primary("cell", "step0"),
    )
    op.create_index(
        "ix_cell_behind",
        "cell",
        ["run_id", "tenant", "step0"],
        unique=False,
        sqlite_where=BEHIND,
        postgresql_where=BEHIND,
    )
    op.create_table(
        "block",
        *_key(),
        _number("attempt", sa.Integer()),
        _number("rank", sa.Integer()),
        _number("site", sa.BigInteger()),
        _number("step0", sa.BigInteger()),
        sa.Column("num_records", sa.Integer(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("front_bytes", sa.Integer(), nullable=False),
        sa.Column("first_step", sa.BigInteger(), nullable=True),
        sa.Column("step_gap", sa.Integer(), nullable=True),
        sa.Column("steps", _array(sa.BigInteger()), nullable=True),
        *[sa.Column(name, _array(sa.REAL()), nullable=True) for name in REALS],
        *[sa.Column(name, _array(sa.BigInteger()), nullable=True) for name in COUNTS],
        _of_run("block"),
        _primary("block", "attempt", "rank", "site", "step0"),
    )
    op.create_table(
        "block_meta",
        *_key(),
        _number("step0", sa.BigInteger()),
        sa.Column("num_sites", sa.Integer(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        _of_run("block_meta"),
        _primary("block_meta", "step0"),
    )
    op.create_table(
        "scalar_block",
        *_key(),
        _number("step0", sa.BigInteger()),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        _of_run("scalar_block"),
        _primary("scalar_block", "step0"),
    )
    op.create_table(
        "batch_ledger",
        *_key(),
        sa.Column("session", sa.Text(), nullable=False),
        _number("rank", sa.Integer()),
        _number("seq0", sa.BigInteger()),
        sa.Column("digests", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id", "tenant", "session"],
            ["session.run_id", "session.tenant", "session.session"],
            name=op.f("fk_batch_ledger_session"),
            ondelete="CASCADE",
        ),
        _primary("batch_ledger", "session", "rank", "seq0"),
    )
    op.create_table(
        "logged",
        *_key(),
        sa.Column("name", sa.Text(), nullable=False),
        _number("attempt", sa.Integer()),
        _number("rank", sa.Integer()),
        _number("step", sa.BigInteger()),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("value", sa.Double(), nullable=True),
        sa.Column("value_class", sa.SmallInteger(), nullable=True),
        _of_run("logged"),
        _primary("logged", "name", "attempt", "rank", "step"),
    )
    op.create_table(
        "retention",
        *_key(),
        sa.Column("keep_days", sa.Double(), nullable=True),
        sa.Column("keep_steps", sa.BigInteger(), nullable=True),
        sa.Column("keep_bytes", sa.BigInteger(), nullable=True),
        _of_run("retention"),
        _primary("retention"),
    )
    op.create_table(
        "detect_state",
        *_key(),
        sa.Column("arrival", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("state", sa.LargeBinary(), nullable=False),
        sa.Column("written_at", sa.Double(), nullable=False),
        _of_run("detect_state"),
        _primary("detect_state"),
    )
    op.add_column("session", sa.Column("ledger_seq_max", sa.BigInteger(), server_default="-1", nullable=False))
    if op.get_bind().dialect.name == "postgresql":
        op.execute("ALTER TABLE block ALTER COLUMN body SET STORAGE EXTERNAL")  # packed already; read in part
    create_views(op.get_bind())
    _move_logs()


def _move_logs() -> None:
    from fp8watch_agent.wire import WireError, decode_batch

    bind = op.get_bind()
    b = sa.table("hot_batch", *(sa.column(n) for n in ("run_id", "tenant", "arrival", "attempt", "body")))
    logged = sa.table(
        "logged",
        *(sa.column(n) for n in ("run_id", "tenant", "name", "attempt", "rank", "step", "seq", "value", "value_class")),
    )
    keys = bind.execute(sa.select(b.c.run_id, b.c.tenant, b.c.arrival, b.c.attempt).order_by(b.c.arrival)).all()
    newest: dict[tuple[object, ...], dict[str, object]] = {}
    for key in keys:
        body = bind.execute(
            sa.select(b.c.body).where(b.c.run_id == key.run_id, b.c.tenant == key.tenant, b.c.arrival == key.arrival)
        ).scalar()
        try:
            batch = decode_batch(bytes(body or b""))
        except WireError:  # what could not be read before cannot be read now
            continue
        for name, values in batch.header.logs.items():
            for step, value in zip(batch.steps["step"].tolist(), values, strict=True):
                of = (key.run_id, key.tenant, name.replace("\0", ""), key.attempt, batch.header.rank, step)
                old = newest.get(of)
                if old is None or int(str(old["seq"])) <= batch.header.seq:
                    newest[of] = {"seq": batch.header.seq, **_classified(value)}
    names = ("run_id", "tenant", "name", "attempt", "rank", "step")
    rows = [{**dict(zip(names, of, strict=True)), **row} for of, row in newest.items()]
    if rows:
        bind.execute(sa.insert(logged), rows)


def _classified(value: float | None) -> dict[str, object]:
    if value is None:
        return {"value": None, "value_class": None}
    if math.isfinite(value):
        return {"value": value, "value_class": 0}
    return {"value": None, "value_class": 1 if math.isnan(value) else 2 if value > 0 else 3}


def downgrade() -> None:
    """Back: what was compacted goes, because the first tables have no place for it."""
    drop_views(op.get_bind())
    op.drop_column("session", "ledger_seq_max")
    for table in ("detect_state", "retention", "logged", "batch_ledger", "scalar_block", "block_meta", "block"):
        op.drop_table(table)
    op.drop_index("ix_cell_behind", table_name="cell")
    op.drop_table("cell")
    for table, *more in (
        ("block", sa.Column("body", sa.LargeBinary(), nullable=False)),
        (
            "block_meta",
            sa.Column("summary", JSON, nullable=False),
            sa.Column("amax_hist", sa.LargeBinary(), nullable=True),
        ),
    ):
        op.create_table(
            table,
            *_key(),
            _number("attempt", sa.Integer()),
            _number("site", sa.BigInteger()),
            _number("rank", sa.Integer()),
            _number("step0", sa.BigInteger()),
            sa.Column("num_steps", sa.Integer(), nullable=False),
            *more,
            _of_run(table),
            _primary(table, "attempt", "site", "rank", "step0"),
        )
