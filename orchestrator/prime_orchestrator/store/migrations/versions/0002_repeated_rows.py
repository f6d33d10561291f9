"""Adds marks of accepted files' rows, and each submission's number of repeated rows."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "row_marks",
        sa.Column("mark", sa.Text(), nullable=False),
        sa.Column("submission_digest", sa.Text(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("mark"),
    )
    op.create_index("row_marks_at", "row_marks", ["at"], unique=False)
    op.add_column("submissions", sa.Column("repeated_rows", sa.Integer(), nullable=True))
