"""Charts of large runs: dashboards' functions that unnest what they show, and an index that has all that a page asks first."""

from __future__ import annotations

from alembic import op

from fp8watch_server.db.sql_chart_views import create_chart_views, drop_chart_views

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

BEFORE = ("run_id", "tenant", "step_min", "step_max")
AFTER = (*BEFORE, "session", "rank", "seq", "attempt", "arrival", "received_at")


def upgrade() -> None:
    """Forward."""
    op.create_index("ix_hot_batch_span", "hot_batch", AFTER)
    op.drop_index("ix_hot_batch_run_id_tenant_step_min_step_max", "hot_batch")
    drop_chart_views(op.get_bind())
    create_chart_views(op.get_bind())


def downgrade() -> None:
    """Back. The functions stay as they are: they answer as those before did, and the revision before makes its own."""
    op.create_index("ix_hot_batch_run_id_tenant_step_min_step_max", "hot_batch", BEFORE)
    op.drop_index("ix_hot_batch_span", "hot_batch")
