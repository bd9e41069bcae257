"""Sheets: packed records of 32 sites of a source, where each site had a block of its own. Blocks stay readable."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

KEY = ("attempt", "rank", "step0", "site_min", "site_max")


def upgrade() -> None:
    """Forward."""
    op.create_table(
        "sheet",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), server_default="default", nullable=False),
        *[sa.Column(name, sa.Integer(), autoincrement=False, nullable=False) for name in KEY[:2]],
        *[sa.Column(name, sa.BigInteger(), autoincrement=False, nullable=False) for name in KEY[2:]],
        *[sa.Column(name, sa.Integer(), nullable=False) for name in ("num_records", "max_records")],
        *[sa.Column(name, sa.LargeBinary(), nullable=False) for name in ("body", "histograms")],
        sa.ForeignKeyConstraint(
            ["run_id", "tenant"], ["run.run_id", "run.tenant"], name=op.f("fk_sheet_run"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run_id", "tenant", *KEY, name=op.f("pk_sheet")),
    )
    if op.get_bind().dialect.name == "postgresql":  # packed already
        for name in ("body", "histograms"):
            op.execute(f"ALTER TABLE sheet ALTER COLUMN {name} SET STORAGE EXTERNAL")


def downgrade() -> None:
    """Back. What only sheets hold is lost."""
    op.drop_table("sheet")
