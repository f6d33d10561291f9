"""Add the kind of file to the sums of statistics. Existing sums get a kind of their own."""

import sqlalchemy as sa
from alembic import op

revision = "0034"
down_revision = "0033"


def upgrade() -> None:
    op.rename_table("drift", "drift_before")
    op.create_table(
        "drift",
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("setup", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("statistic", sa.Text(), nullable=False),
        sa.Column("files", sa.BigInteger(), nullable=False),
        sa.Column("total", sa.Float(), nullable=False),
        sa.Column("squares", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("node", "setup", "kind", "statistic"),
    )
    op.execute(
        "INSERT INTO drift (node, setup, kind, statistic, files, total, squares) "
        "SELECT node, setup, '', statistic, files, total, squares FROM drift_before"
    )
    op.drop_table("drift_before")
