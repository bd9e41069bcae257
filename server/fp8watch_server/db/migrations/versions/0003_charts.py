"""What Grafana's dashboards ask, and where the collector says under which address it is reached."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from fp8watch_server.db.sql_chart_views import create_chart_views, drop_chart_views

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Forward."""
    op.create_table(
        "fact",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_fact")),
    )
    create_chart_views(op.get_bind())


def downgrade() -> None:
    """Back."""
    drop_chart_views(op.get_bind())
    op.drop_table("fact")
