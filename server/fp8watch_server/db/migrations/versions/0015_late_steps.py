"""Steps of a session that came too late to be compared are counted."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Forward. What came late before is not known."""
    op.add_column("session", sa.Column("num_late_steps", sa.BigInteger(), server_default="0", nullable=False))
    op.add_column("session", sa.Column("last_late_step", sa.BigInteger()))


def downgrade() -> None:
    """Back."""
    op.drop_column("session", "last_late_step")
    op.drop_column("session", "num_late_steps")
