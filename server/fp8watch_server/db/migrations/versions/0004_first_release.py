"""The tables of the first release, with the views and functions that Grafana's SQL reads.

A revision never changes once it was released: what the tables become is for later ones. This one stands for the four
before the first release and keeps the name of the last, so that a database that came through them is where it should be.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

from fp8watch_server.db.sql_chart_views import create_chart_views, drop_chart_views
from fp8watch_server.db.sql_views import create_views, drop_views

revision = "0004"
down_revision = None
branch_labels = None
depends_on = None

JSON = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")
REALS = ("amax_max", "scale_inv_min", "scale_inv_max", "clip_depth", "tile_sqnr_db", "underflow_ratio")
COUNTS = ("num_nonfinite", "num_saturated", "num_sentinel_tiles")
SPAN = [
    *("run_id", "tenant", "step_min", "step_max"),
    *("session", "rank", "seq", "attempt", "arrival", "received_at"),
]
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


def _of_session(table: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(
        ["run_id", "tenant", "session"],
        ["session.run_id", "session.tenant", "session.session"],
        name=op.f(f"fk_{table}_session"),
        ondelete="CASCADE",
    )


def _primary(table: str, *names: str) -> sa.PrimaryKeyConstraint:
    return sa.PrimaryKeyConstraint("run_id", "tenant", *names, name=op.f(f"pk_{table}"))


def _all(kind: sa.types.TypeEngine[Any], *names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind, nullable=False) for name in names]


def _numbers(kind: sa.types.TypeEngine[Any], *names: str) -> list[sa.Column[Any]]:
    return [_number(name, kind) for name in names]


def _number(name: str, kind: sa.types.TypeEngine[Any]) -> sa.Column[Any]:
    return sa.Column(name, kind, autoincrement=False, nullable=False)


def upgrade() -> None:
    """Forward."""
    _runs()
    _incidents()
    _batches()
    _blocks()
    op.create_table(
        "fact",
        *_all(sa.Text(), "name", "value"),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_fact")),
    )
    if op.get_bind().dialect.name == "postgresql":
        op.execute("ALTER TABLE block ALTER COLUMN body SET STORAGE EXTERNAL")  # packed already; read in part
    create_views(op.get_bind())
    create_chart_views(op.get_bind())


def _runs() -> None:
    op.create_table(
        "run",
        *_key(),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("recipe", sa.Text(), server_default="", nullable=False),
        sa.Column("backend", sa.Text(), server_default="", nullable=False),
        sa.Column("world_size", sa.Integer(), server_default="1", nullable=False),
        sa.Column("attempt", sa.Integer(), server_default="0", nullable=False),
        *_all(sa.Double(), "created_at", "last_seen_at"),
        sa.Column("last_step", sa.BigInteger(), nullable=True),
        sa.Column("last_step_attempt", sa.Integer(), server_default="0", nullable=False),
        sa.Column("num_batches", sa.BigInteger(), server_default="0", nullable=False),
        _primary("run"),
    )
    op.create_table(
        "token",
        sa.Column("token_sha256", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), server_default="default", nullable=False),
        *_all(sa.Text(), "name", "scopes"),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("revoked_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("token_sha256", name=op.f("pk_token")),
    )
    op.create_table(
        "session",
        *_key(),
        sa.Column("session", sa.Text(), nullable=False),
        *_all(sa.Integer(), "rank", "attempt", "world_size"),
        sa.Column("mesh", JSON, nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("pid", sa.BigInteger(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("versions", JSON, nullable=False),
        *_all(sa.Text(), "recipe", "fingerprint", "backend"),
        sa.Column("facts", JSON, nullable=False),
        *_all(sa.Double(), "registered_at", "last_seen_at"),
        sa.Column("health", JSON, nullable=True),
        sa.Column("health_seq", sa.BigInteger(), server_default="-1", nullable=False),
        sa.Column("ended", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("ledger_seq_max", sa.BigInteger(), server_default="-1", nullable=False),
        _of_run("session"),
        _primary("session", "session"),
    )
    op.create_index(
        op.f("ix_session_run_id_tenant_rank_attempt"), "session", ["run_id", "tenant", "rank", "attempt"], unique=True
    )
    op.create_table(
        "site",
        *_key(),
        _number("site", sa.BigInteger()),
        *_all(sa.Text(), "module", "operand", "direction", "gemm"),
        sa.Column("flow_order", sa.Integer(), nullable=False),
        *_all(sa.BigInteger(), "num_rows", "num_columns"),
        *_all(sa.Integer(), "tile_rows", "tile_columns"),
        sa.Column("format", sa.Text(), nullable=False),
        sa.Column("power_2_scale", sa.Boolean(), nullable=False),
        sa.Column("eps", sa.Double(), nullable=False),
        *_all(sa.Text(), "recipe", "backend"),
        sa.Column("evidence", JSON, nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        _of_run("site"),
        _primary("site", "site"),
    )
    op.create_table(
        "site_total",
        *_key(),
        _number("site", sa.BigInteger()),
        *_all(sa.BigInteger(), "num_nonfinite", "num_saturated", "num_sentinel_tiles"),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("last_step", sa.BigInteger(), nullable=False),
        sa.Column("newest", JSON, nullable=False),
        _of_run("site_total"),
        _primary("site_total", "site"),
    )


def _incidents() -> None:
    op.create_table(
        "incident",
        *_key(),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        *_all(sa.Text(), "mode", "title", "severity", "status", "verdict"),
        *_all(sa.BigInteger(), "first_step", "last_step", "num_events"),
        sa.Column("origin", sa.Boolean(), nullable=False),
        *_all(JSON, "place", "sites"),
        sa.Column("num_sites", sa.Integer(), nullable=False),
        sa.Column("evidence", JSON, nullable=False),
        sa.Column("cause", sa.Text(), nullable=False),
        *_all(JSON, "fix", "alternatives"),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("opened_at", sa.Double(), nullable=False),
        sa.Column("resolved_at", sa.Double(), nullable=True),
        sa.Column("updated_at", sa.Double(), nullable=False),
        _of_run("incident"),
        _primary("incident", "id"),
    )
    op.create_index(op.f("ix_incident_id"), "incident", ["id"], unique=True)
    op.create_index(
        op.f("ix_incident_run_id_tenant_fingerprint"), "incident", ["run_id", "tenant", "fingerprint"], unique=False
    )
    op.create_index(op.f("ix_incident_run_id_tenant_status"), "incident", ["run_id", "tenant", "status"], unique=False)
    op.create_table(
        "incident_event",
        *_key(),
        sa.Column("incident_id", sa.Text(), nullable=False),
        _number("seq", sa.Integer()),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=True),
        sa.Column("detail", JSON, nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id", "tenant", "incident_id"],
            ["incident.run_id", "incident.tenant", "incident.id"],
            name=op.f("fk_incident_event_incident"),
            ondelete="CASCADE",
        ),
        _primary("incident_event", "incident_id", "seq"),
    )
    op.create_table(
        "silence",
        *_key(),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("mode", sa.Text(), server_default="", nullable=False),
        sa.Column("module", sa.Text(), server_default="", nullable=False),
        sa.Column("comment", sa.Text(), server_default="", nullable=False),
        *_all(sa.Double(), "created_at", "expires_at"),
        _primary("silence", "id"),
    )
    op.create_table(
        "outbox",
        *_key(),
        *_all(sa.Text(), "id", "incident_id"),
        sa.Column("channel", sa.Text(), server_default="", nullable=False),
        *_all(sa.Text(), "kind", "idempotency_key"),
        sa.Column("payload", JSON, nullable=False),
        sa.Column("state", sa.Text(), server_default="pending", nullable=False),
        sa.Column("num_attempts", sa.Integer(), server_default="0", nullable=False),
        sa.Column("next_attempt_at", sa.Double(), server_default="0", nullable=False),
        sa.Column("leased_by", sa.Text(), nullable=True),
        sa.Column("leased_until", sa.Double(), nullable=True),
        sa.Column("last_error", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("sent_at", sa.Double(), nullable=True),
        _primary("outbox", "id"),
    )
    op.create_index(
        op.f("ix_outbox_run_id_tenant_idempotency_key_channel"),
        "outbox",
        ["run_id", "tenant", "idempotency_key", "channel"],
        unique=True,
    )
    op.create_index(op.f("ix_outbox_state_next_attempt_at"), "outbox", ["state", "next_attempt_at"], unique=False)


def _batches() -> None:
    op.create_table(
        "scalar",
        *_key(),
        *_numbers(sa.Integer(), "attempt", "rank"),
        _number("step", sa.BigInteger()),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.SmallInteger(), nullable=False),
        sa.Column("time", sa.Double(), nullable=True),
        sa.Column("batch_id", sa.Text(), nullable=True),
        sa.Column("loss", sa.Double(), nullable=True),
        sa.Column("loss_class", sa.SmallInteger(), nullable=True),
        sa.Column("grad_norm", sa.Double(), nullable=True),
        sa.Column("grad_norm_class", sa.SmallInteger(), nullable=True),
        sa.Column("lr", sa.Double(), nullable=True),
        sa.Column("lr_class", sa.SmallInteger(), nullable=True),
        sa.Column("loss_scale", sa.Double(), nullable=True),
        sa.Column("loss_scale_class", sa.SmallInteger(), nullable=True),
        _of_run("scalar"),
        _primary("scalar", "attempt", "rank", "step"),
    )
    op.create_index(op.f("ix_scalar_run_id_tenant_step"), "scalar", ["run_id", "tenant", "step"], unique=False)
    op.create_table(
        "hot_batch",
        *_key(),
        sa.Column("session", sa.Text(), nullable=False),
        _number("rank", sa.Integer()),
        _number("seq", sa.BigInteger()),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("body_sha256", sa.LargeBinary(length=32), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("arrival", sa.BigInteger(), nullable=False),
        sa.Column("step_min", sa.BigInteger(), nullable=True),
        sa.Column("step_max", sa.BigInteger(), nullable=True),
        sa.Column("num_records", sa.BigInteger(), nullable=False),
        sa.Column("received_at", sa.Double(), nullable=False),
        sa.Column("detected", sa.SmallInteger(), server_default="0", nullable=False),
        sa.Column("detect_error", sa.Text(), nullable=True),
        _of_session("hot_batch"),
        _primary("hot_batch", "session", "rank", "seq"),
    )
    op.create_index(
        "ix_hot_batch_pending",
        "hot_batch",
        ["received_at"],
        unique=False,
        sqlite_where=sa.text("detected = 0"),
        postgresql_where=sa.text("detected = 0"),
    )
    op.create_index(
        op.f("ix_hot_batch_run_id_tenant_arrival"), "hot_batch", ["run_id", "tenant", "arrival"], unique=True
    )
    op.create_index("ix_hot_batch_span", "hot_batch", SPAN)
    op.create_table(
        "tile_map",
        *_key(),
        *_numbers(sa.BigInteger(), "site", "step"),
        *_numbers(sa.Integer(), "rank", "attempt"),
        sa.Column("session", sa.Text(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("received_at", sa.Double(), nullable=False),
        _of_session("tile_map"),
        _primary("tile_map", "site", "step", "rank", "attempt"),
    )
    op.create_index(op.f("ix_tile_map_run_id_tenant_step"), "tile_map", ["run_id", "tenant", "step"], unique=False)
    op.create_table(
        "tile_map_batch",
        *_key(),
        sa.Column("session", sa.Text(), nullable=False),
        _number("rank", sa.Integer()),
        _number("seq", sa.BigInteger()),
        sa.Column("body_sha256", sa.LargeBinary(length=32), nullable=False),
        sa.Column("step_max", sa.BigInteger(), nullable=False),
        sa.Column("received_at", sa.Double(), nullable=False),
        _of_session("tile_map_batch"),
        _primary("tile_map_batch", "session", "rank", "seq"),
    )

    op.create_table(
        "logged",
        *_key(),
        sa.Column("name", sa.Text(), nullable=False),
        *_numbers(sa.Integer(), "attempt", "rank"),
        _number("step", sa.BigInteger()),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("value", sa.Double(), nullable=True),
        sa.Column("value_class", sa.SmallInteger(), nullable=True),
        _of_run("logged"),
        _primary("logged", "name", "attempt", "rank", "step"),
    )
    op.create_table(
        "batch_ledger",
        *_key(),
        sa.Column("session", sa.Text(), nullable=False),
        _number("rank", sa.Integer()),
        _number("seq0", sa.BigInteger()),
        sa.Column("digests", sa.LargeBinary(), nullable=False),
        _of_session("batch_ledger"),
        _primary("batch_ledger", "session", "rank", "seq0"),
    )


def _blocks() -> None:
    op.create_table(
        "cell",
        *_key(),
        _number("step0", sa.BigInteger()),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("sources", JSON, nullable=False),
        sa.Column("shown_attempt", sa.Integer(), nullable=True),
        sa.Column("shown_rank", sa.Integer(), nullable=True),
        sa.Column("kept", sa.SmallInteger(), server_default="2", nullable=False),
        *_all(sa.BigInteger(), "step_min", "step_max", "num_records"),
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
        *_numbers(sa.Integer(), "attempt", "rank"),
        *_numbers(sa.BigInteger(), "site", "step0"),
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


def downgrade() -> None:
    """Back to an empty database."""
    drop_chart_views(op.get_bind())
    drop_views(op.get_bind())
    for table in (
        "fact",
        "detect_state",
        "retention",
        "scalar_block",
        "block_meta",
        "block",
        "cell",
        "batch_ledger",
        "logged",
        "tile_map_batch",
        "tile_map",
        "hot_batch",
        "scalar",
        "outbox",
        "silence",
        "incident_event",
        "site_total",
        "site",
        "token",
        "incident",
        "session",
        "run",
    ):
        op.drop_table(table)
