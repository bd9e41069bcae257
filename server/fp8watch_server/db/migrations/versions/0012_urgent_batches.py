"""Which batches the detectors take first, found among those that wait without their bodies being read."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

INDEX = "ix_hot_batch_urgent"


def upgrade() -> None:
    """Forward. What waits already has its turn in order."""
    op.add_column("hot_batch", sa.Column("urgent", sa.Boolean(), server_default=sa.false(), nullable=False))
    where = sa.text("detected = 0 AND urgent")
    op.create_index(INDEX, "hot_batch", ["received_at", "run_id", "tenant"], sqlite_where=where, postgresql_where=where)


def downgrade() -> None:
    """Back."""
    op.drop_index(INDEX, "hot_batch")
    op.drop_column("hot_batch", "urgent")
