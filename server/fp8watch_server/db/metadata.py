"""What every table shares: names of constraints, the key that leads, and whom a row belongs to.

Upstream:   fp8watch_server.db.dialect    Downstream: fp8watch_server.db.schema, fp8watch_server.db.block_tables
Thread:     any; only data
"""

from __future__ import annotations

import sqlalchemy as sa

DEFAULT_TENANT = "default"

metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)


def run_key() -> tuple[sa.Column[str], sa.Column[str]]:
    """Run and tenant lead every key."""
    return (
        sa.Column("run_id", sa.Text, primary_key=True),
        sa.Column("tenant", sa.Text, primary_key=True, server_default=DEFAULT_TENANT),
    )


def of_run() -> sa.ForeignKeyConstraint:
    """Goes with its run."""
    return sa.ForeignKeyConstraint(["run_id", "tenant"], ["run.run_id", "run.tenant"], ondelete="CASCADE")


def of_session() -> sa.ForeignKeyConstraint:
    """Goes with its session."""
    return sa.ForeignKeyConstraint(
        ["run_id", "tenant", "session"],
        ["session.run_id", "session.tenant", "session.session"],
        ondelete="CASCADE",
    )
