"""The first tables.

A revision never changes once it was released: what the tables become is for later ones.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

JSON = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")


def upgrade() -> None:
    """Forward."""
    op.create_table(
        "outbox",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), server_default="default", nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("incident_id", sa.Text(), nullable=False),
        sa.Column("channel", sa.Text(), server_default="", nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("idempotency_key", sa.Text(), nullable=False),
        sa.Column("payload", JSON, nullable=False),
        sa.Column("state", sa.Text(), server_default="pending", nullable=False),
        sa.Column("num_attempts", sa.Integer(), server_default="0", nullable=False),
        sa.Column("next_attempt_at", sa.Double(), server_default="0", nullable=False),
        sa.Column("leased_by", sa.Text(), nullable=True),
        sa.Column("leased_until", sa.Double(), nullable=True),
        sa.Column("last_error", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("sent_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("run_id", "tenant", "id", name=op.f("pk_outbox")),
    )
    op.create_index(
        op.f("ix_outbox_run_id_tenant_idempotency_key_channel"),
        "outbox",
        ["run_id", "tenant", "idempotency_key", "channel"],
        unique=True,
    )
    op.create_index(op.f("ix_outbox_state_next_attempt_at"), "outbox", ["state", "next_attempt_at"], unique=False)
    op.create_table(
        "run",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), server_default="default", nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("recipe", sa.Text(), server_default="", nullable=False),
        sa.Column("backend", sa.Text(), server_default="", nullable=False),
        sa.Column("world_size", sa.Integer(), server_default="1", nullable=False),
        sa.Column("attempt", sa.Integer(), server_default="0", nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("last_seen_at", sa.Double(), nullable=False),
        sa.Column("last_step", sa.BigInteger(), nullable=True),
        sa.Column("last_step_attempt", sa.Integer(), server_default="0", nullable=False),
        sa.Column("num_batches", sa.BigInteger(), server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("run_id", "tenant", name=op.f("pk_run")),
    )
    op.create_table(
        "silence",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), server_default="default", nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("mode", sa.Text(), server_default="", nullable=False),
        sa.Column("module", sa.Text(), server_default="", nullable=False),
        sa.Column("comment", sa.Text(), server_default="", nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "tenant", "id", name=op.f("pk_silence")),
    )
    op.create_table(
        "token",
        sa.Column("token_sha256", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), server_default="default", nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("scopes", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("revoked_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("token_sha256", name=op.f("pk_token")),
    )
    op.create_table(
        "block",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), server_default="default", nullable=False),
        sa.Column("attempt", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("site", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("rank", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("step0", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("num_steps", sa.Integer(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id", "tenant"], ["run.run_id", "run.tenant"], name=op.f("fk_block_run"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run_id", "tenant", "attempt", "site", "rank", "step0", name=op.f("pk_block")),
    )
    op.create_table(
        "block_meta",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), server_default="default", nullable=False),
        sa.Column("attempt", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("site", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("rank", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("step0", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("num_steps", sa.Integer(), nullable=False),
        sa.Column("summary", JSON, nullable=False),
        sa.Column("amax_hist", sa.LargeBinary(), nullable=True),
        sa.ForeignKeyConstraint(
            ["run_id", "tenant"], ["run.run_id", "run.tenant"], name=op.f("fk_block_meta_run"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run_id", "tenant", "attempt", "site", "rank", "step0", name=op.f("pk_block_meta")),
    )
    op.create_table(
        "incident",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), server_default="default", nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("mode", sa.Text(), nullable=False),
        sa.Column("title", sa.Text(), nullable=False),
        sa.Column("severity", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("verdict", sa.Text(), nullable=False),
        sa.Column("first_step", sa.BigInteger(), nullable=False),
        sa.Column("last_step", sa.BigInteger(), nullable=False),
        sa.Column("num_events", sa.BigInteger(), nullable=False),
        sa.Column("origin", sa.Boolean(), nullable=False),
        sa.Column("place", JSON, nullable=False),
        sa.Column("sites", JSON, nullable=False),
        sa.Column("num_sites", sa.Integer(), nullable=False),
        sa.Column("evidence", JSON, nullable=False),
        sa.Column("cause", sa.Text(), nullable=False),
        sa.Column("fix", JSON, nullable=False),
        sa.Column("alternatives", JSON, nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("opened_at", sa.Double(), nullable=False),
        sa.Column("resolved_at", sa.Double(), nullable=True),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id", "tenant"], ["run.run_id", "run.tenant"], name=op.f("fk_incident_run"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run_id", "tenant", "id", name=op.f("pk_incident")),
    )
    op.create_index(op.f("ix_incident_id"), "incident", ["id"], unique=True)
    op.create_index(
        op.f("ix_incident_run_id_tenant_fingerprint"), "incident", ["run_id", "tenant", "fingerprint"], unique=False
    )
    op.create_index(op.f("ix_incident_run_id_tenant_status"), "incident", ["run_id", "tenant", "status"], unique=False)
    op.create_table(
        "scalar",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), server_default="default", nullable=False),
        sa.Column("attempt", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("rank", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
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
        sa.ForeignKeyConstraint(
            ["run_id", "tenant"], ["run.run_id", "run.tenant"], name=op.f("fk_scalar_run"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run_id", "tenant", "attempt", "rank", "step", name=op.f("pk_scalar")),
    )
    op.create_index(op.f("ix_scalar_run_id_tenant_step"), "scalar", ["run_id", "tenant", "step"], unique=False)
    op.create_table(
        "session",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), server_default="default", nullable=False),
        sa.Column("session", sa.Text(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("world_size", sa.Integer(), nullable=False),
        sa.Column("mesh", JSON, nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("pid", sa.BigInteger(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("versions", JSON, nullable=False),
        sa.Column("recipe", sa.Text(), nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("backend", sa.Text(), nullable=False),
        sa.Column("facts", JSON, nullable=False),
        sa.Column("registered_at", sa.Double(), nullable=False),
        sa.Column("last_seen_at", sa.Double(), nullable=False),
        sa.Column("health", JSON, nullable=True),
        sa.Column("health_seq", sa.BigInteger(), server_default="-1", nullable=False),
        sa.Column("ended", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id", "tenant"], ["run.run_id", "run.tenant"], name=op.f("fk_session_run"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run_id", "tenant", "session", name=op.f("pk_session")),
    )
    op.create_index(
        op.f("ix_session_run_id_tenant_rank_attempt"), "session", ["run_id", "tenant", "rank", "attempt"], unique=True
    )
    op.create_table(
        "site",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), server_default="default", nullable=False),
        sa.Column("site", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("module", sa.Text(), nullable=False),
        sa.Column("operand", sa.Text(), nullable=False),
        sa.Column("direction", sa.Text(), nullable=False),
        sa.Column("gemm", sa.Text(), nullable=False),
        sa.Column("flow_order", sa.Integer(), nullable=False),
        sa.Column("num_rows", sa.BigInteger(), nullable=False),
        sa.Column("num_columns", sa.BigInteger(), nullable=False),
        sa.Column("tile_rows", sa.Integer(), nullable=False),
        sa.Column("tile_columns", sa.Integer(), nullable=False),
        sa.Column("format", sa.Text(), nullable=False),
        sa.Column("power_2_scale", sa.Boolean(), nullable=False),
        sa.Column("eps", sa.Double(), nullable=False),
        sa.Column("recipe", sa.Text(), nullable=False),
        sa.Column("backend", sa.Text(), nullable=False),
        sa.Column("evidence", JSON, nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id", "tenant"], ["run.run_id", "run.tenant"], name=op.f("fk_site_run"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run_id", "tenant", "site", name=op.f("pk_site")),
    )
    op.create_table(
        "site_total",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), server_default="default", nullable=False),
        sa.Column("site", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("num_nonfinite", sa.BigInteger(), nullable=False),
        sa.Column("num_saturated", sa.BigInteger(), nullable=False),
        sa.Column("num_sentinel_tiles", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("last_step", sa.BigInteger(), nullable=False),
        sa.Column("newest", JSON, nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id", "tenant"], ["run.run_id", "run.tenant"], name=op.f("fk_site_total_run"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run_id", "tenant", "site", name=op.f("pk_site_total")),
    )
    op.create_table(
        "hot_batch",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), server_default="default", nullable=False),
        sa.Column("session", sa.Text(), nullable=False),
        sa.Column("rank", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("seq", sa.BigInteger(), autoincrement=False, nullable=False),
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
        sa.ForeignKeyConstraint(
            ["run_id", "tenant", "session"],
            ["session.run_id", "session.tenant", "session.session"],
            name=op.f("fk_hot_batch_session"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("run_id", "tenant", "session", "rank", "seq", name=op.f("pk_hot_batch")),
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
    op.create_index(
        op.f("ix_hot_batch_run_id_tenant_step_min_step_max"),
        "hot_batch",
        ["run_id", "tenant", "step_min", "step_max"],
        unique=False,
    )
    op.create_table(
        "incident_event",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), server_default="default", nullable=False),
        sa.Column("incident_id", sa.Text(), nullable=False),
        sa.Column("seq", sa.Integer(), autoincrement=False, nullable=False),
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
        sa.PrimaryKeyConstraint("run_id", "tenant", "incident_id", "seq", name=op.f("pk_incident_event")),
    )
    op.create_table(
        "tile_map",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), server_default="default", nullable=False),
        sa.Column("site", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("rank", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("attempt", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("session", sa.Text(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("received_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id", "tenant", "session"],
            ["session.run_id", "session.tenant", "session.session"],
            name=op.f("fk_tile_map_session"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("run_id", "tenant", "site", "step", "rank", "attempt", name=op.f("pk_tile_map")),
    )
    op.create_index(op.f("ix_tile_map_run_id_tenant_step"), "tile_map", ["run_id", "tenant", "step"], unique=False)
    op.create_table(
        "tile_map_batch",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), server_default="default", nullable=False),
        sa.Column("session", sa.Text(), nullable=False),
        sa.Column("rank", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("seq", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("body_sha256", sa.LargeBinary(length=32), nullable=False),
        sa.Column("step_max", sa.BigInteger(), nullable=False),
        sa.Column("received_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id", "tenant", "session"],
            ["session.run_id", "session.tenant", "session.session"],
            name=op.f("fk_tile_map_batch_session"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("run_id", "tenant", "session", "rank", "seq", name=op.f("pk_tile_map_batch")),
    )


def downgrade() -> None:
    """Back."""
    op.drop_table("tile_map_batch")
    op.drop_index(op.f("ix_tile_map_run_id_tenant_step"), table_name="tile_map")
    op.drop_table("tile_map")
    op.drop_table("incident_event")
    op.drop_index(op.f("ix_hot_batch_run_id_tenant_step_min_step_max"), table_name="hot_batch")
    op.drop_index(op.f("ix_hot_batch_run_id_tenant_arrival"), table_name="hot_batch")
    op.drop_index(
        "ix_hot_batch_pending",
        table_name="hot_batch",
        sqlite_where=sa.text("detected = 0"),
        postgresql_where=sa.text("detected = 0"),
    )
    op.drop_table("hot_batch")
    op.drop_table("site_total")
    op.drop_table("site")
    op.drop_index(op.f("ix_session_run_id_tenant_rank_attempt"), table_name="session")
    op.drop_table("session")
    op.drop_index(op.f("ix_scalar_run_id_tenant_step"), table_name="scalar")
    op.drop_table("scalar")
    op.drop_index(op.f("ix_incident_run_id_tenant_status"), table_name="incident")
    op.drop_index(op.f("ix_incident_run_id_tenant_fingerprint"), table_name="incident")
    op.drop_index(op.f("ix_incident_id"), table_name="incident")
    op.drop_table("incident")
    op.drop_table("block_meta")
    op.drop_table("block")
    op.drop_table("token")
    op.drop_table("silence")
    op.drop_table("run")
    op.drop_index(op.f("ix_outbox_state_next_attempt_at"), table_name="outbox")
    op.drop_index(op.f("ix_outbox_run_id_tenant_idempotency_key_channel"), table_name="outbox")
    op.drop_table("outbox")
