"""Tokens name runs and an end, sessions have a key."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Forward."""
    op.add_column("token", sa.Column("runs", sa.Text(), server_default="*", nullable=False))
    op.add_column("token", sa.Column("expires_at", sa.Double()))
    op.add_column("session", sa.Column("key_sha256", sa.Text()))


def downgrade() -> None:
    """Back: a token that named some runs would open all, so it is revoked."""
    op.execute("UPDATE token SET revoked_at = created_at WHERE runs <> '*' OR expires_at IS NOT NULL")
    op.drop_column("session", "key_sha256")
    op.drop_column("token", "expires_at")
    op.drop_column("token", "runs")
