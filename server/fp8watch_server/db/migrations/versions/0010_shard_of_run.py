"""The directory of shards: which database a run lies in."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Forward."""
    op.create_table(
        "shard_of_run",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), server_default="default", nullable=False),
        sa.Column("shard", sa.Text(), nullable=False),
        sa.Column("placed_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "tenant", name=op.f("pk_shard_of_run")),
    )


def downgrade() -> None:
    """Back. Runs on shards are found no more."""
    op.drop_table("shard_of_run")
