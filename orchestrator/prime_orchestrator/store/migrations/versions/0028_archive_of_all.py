"""The archive takes every file that is over, also unpaid, planted and evaluation files, and leases
without a file: what is counted or paid by forever outlives their rows.
"""

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0027"


def upgrade() -> None:
    op.create_table(
        "archive_totals",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("value", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", "subject"),
    )
    op.add_column("slashes", sa.Column("receipt", sa.Text()))
    op.add_column("evaluations", sa.Column("archived", sa.Text()))
