"""Runs that move between shards: where to, and what a shard knows of those that have left it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Forward."""
    op.add_column("shard_of_run", sa.Column("moving_to", sa.Text()))
    op.add_column("shard_of_run", sa.Column("moved_from", sa.Text()))
    op.add_column("shard_of_run", sa.Column("refuses", sa.Boolean(), server_default=sa.false(), nullable=False))
    op.add_column("shard_of_run", sa.Column("num_moves", sa.Integer(), server_default="0", nullable=False))
    op.create_table(
        "moved_run",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), server_default="default", nullable=False),
        sa.Column("moved_to", sa.Text(), nullable=False),
        sa.Column("moved_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "tenant", name=op.f("pk_moved_run")),
    )


def downgrade() -> None:
    """Back. Finish all moves before."""
    op.drop_table("moved_run")
    for name in ("num_moves", "refuses", "moved_from", "moving_to"):
        op.drop_column("shard_of_run", name)
