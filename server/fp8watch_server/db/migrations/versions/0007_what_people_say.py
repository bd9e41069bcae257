"""What people say of runs and incidents: tags, notes, archive; seen, owner, fixed or false alarm; causes over runs.

Incidents that were resolved before count as seen: nobody is asked to go through the past.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

JSON = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")
ALIVE: dict[str, Any] = {"sqlite_where": sa.text("ended = 0"), "postgresql_where": sa.text("ended IS FALSE")}
FAILED: dict[str, Any] = {"sqlite_where": sa.text("detected = 2"), "postgresql_where": sa.text("detected = 2")}
OF_RUN = ("note", "archived_at", "edited_at")
OF_INCIDENT = ("cause_id", "seen_at", "owner", "closed_as", "regression_of")


def upgrade() -> None:
    """Forward."""
    op.add_column("run", sa.Column("note", sa.Text(), server_default="", nullable=False))
    op.add_column("run", sa.Column("archived_at", sa.Double(), nullable=True))
    op.add_column("run", sa.Column("edited_at", sa.Double(), server_default="0", nullable=False))
    op.create_table(
        "run_tag",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), server_default="default", nullable=False),
        sa.Column("tag", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id", "tenant"], ["run.run_id", "run.tenant"], name=op.f("fk_run_tag_run"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run_id", "tenant", "tag", name=op.f("pk_run_tag")),
    )
    op.create_index("ix_session_alive", "session", ["run_id", "tenant"], unique=False, **ALIVE)
    op.create_index("ix_hot_batch_failed", "hot_batch", ["received_at"], unique=False, **FAILED)
    op.add_column("incident", sa.Column("cause_id", sa.Text(), server_default="", nullable=False))
    op.add_column("incident", sa.Column("seen_at", sa.Double(), nullable=True))
    op.add_column("incident", sa.Column("owner", sa.Text(), server_default="", nullable=False))
    op.add_column("incident", sa.Column("closed_as", sa.Text(), nullable=True))
    op.add_column("incident", sa.Column("regression_of", sa.Text(), nullable=True))
    op.create_index(op.f("ix_incident_tenant_cause_id"), "incident", ["tenant", "cause_id"], unique=False)
    _fill(op.get_bind())


def _fill(conn: sa.Connection) -> None:
    names = ("run_id", "tenant", "id", "mode", "status", "cause_id")
    t = sa.table("incident", *map(sa.column, names), sa.column("place", JSON), sa.column("seen_at"),
                 sa.column("resolved_at"))  # fmt: skip
    for row in conn.execute(sa.select(t.c.run_id, t.c.tenant, t.c.id, t.c.mode, t.c.place)).all():
        key = (t.c.run_id == row.run_id, t.c.tenant == row.tenant, t.c.id == row.id)
        conn.execute(sa.update(t).where(*key).values(cause_id=_cause_id(row.mode, row.place or {})))
    conn.execute(sa.update(t).where(t.c.status != "open").values(seen_at=sa.func.coalesce(t.c.resolved_at, 0)))


def _cause_id(mode: str, place: Mapping[str, Any]) -> str:
    """As fp8watch_server.incidents.causes had it when this was written."""
    module = re.sub(r"(?<![^.])\d+(?![^.])", "*", place.get("module") or "")
    name = "\0".join([mode, module, place.get("operand") or ""])
    return hashlib.blake2b(name.encode(), digest_size=8).hexdigest()


def downgrade() -> None:
    """Back."""
    op.drop_index(op.f("ix_incident_tenant_cause_id"), table_name="incident")
    op.drop_index("ix_session_alive", table_name="session")
    op.drop_index("ix_hot_batch_failed", table_name="hot_batch")
    op.drop_table("run_tag")
    for table, names in (("incident", OF_INCIDENT), ("run", OF_RUN)):
        for name in names:
            op.drop_column(table, name)
