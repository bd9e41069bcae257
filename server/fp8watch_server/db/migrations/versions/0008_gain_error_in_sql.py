"""The gain error of quantisers as an array that SQL reads, with its view. Blocks of before have none."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from fp8watch_server.db.dialect import SqlArray
from fp8watch_server.db.sql_gain_view import create_gain_view, drop_gain_view

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Forward."""
    op.add_column("block", sa.Column("gain_error", SqlArray("REAL"), nullable=True))
    create_gain_view(op.get_bind())


def downgrade() -> None:
    """Back."""
    drop_gain_view(op.get_bind())
    op.drop_column("block", "gain_error")
