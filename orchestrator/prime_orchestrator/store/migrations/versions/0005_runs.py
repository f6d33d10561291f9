"""Adds revisions of the pool's run."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.create_table(
        "runs",
        sa.Column("from_step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("final", sa.Boolean(), nullable=False),
        sa.Column("announced_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("from_step"),
    )
