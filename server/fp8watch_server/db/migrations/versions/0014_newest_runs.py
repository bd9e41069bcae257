"""The newest runs are found without reading the others."""

from __future__ import annotations

from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

INDEX = "ix_run_tenant_created_at"


def upgrade() -> None:
    """Forward."""
    op.create_index(INDEX, "run", ["tenant", "created_at"])


def downgrade() -> None:
    """Back."""
    op.drop_index(INDEX, "run")
