"""Shared parts of all tables: constraint names, the leading key columns, and foreign keys.

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
    """The key columns that lead every table: run and tenant."""
    return (
        sa.Column("run_id", sa.Text, primary_key=True),
        sa.Column("tenant", sa.Text, primary_key=True, server_default=DEFAULT_TENANT),
    )


def of_run() -> sa.ForeignKeyConstraint:
    """Foreign key to the run; rows are deleted with it."""
    return sa.ForeignKeyConstraint(["run_id", "tenant"], ["run.run_id", "run.tenant"], ondelete="CASCADE")


def of_session() -> sa.ForeignKeyConstraint:
    """Foreign key to the session; rows are deleted with it."""
    return sa.ForeignKeyConstraint(
        ["run_id", "tenant", "session"],
        ["session.run_id", "session.tenant", "session.session"],
        ondelete="CASCADE",
    )
