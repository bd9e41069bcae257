"""Logged values of one rank's steps are found without reading the others of the run."""

from __future__ import annotations

from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

INDEX = "ix_logged_source"


def upgrade() -> None:
    """Forward."""
    op.create_index(INDEX, "logged", ["run_id", "tenant", "attempt", "rank", "step"])


def downgrade() -> None:
    """Back."""
    op.drop_index(INDEX, "logged")
