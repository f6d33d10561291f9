"""Keeps marks of every row and of every file that has it; before, only of improbable rows."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.drop_index("row_marks_at", table_name="row_marks")
    op.rename_table("row_marks", "row_marks_before")
    op.create_table(
        "row_marks",
        sa.Column("mark", sa.Text(), nullable=False),
        sa.Column("improbable", sa.Boolean(), nullable=False),
        sa.Column("submission_digest", sa.Text(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("mark", "improbable", "submission_digest"),
    )
    op.execute(
        "INSERT INTO row_marks (mark, improbable, submission_digest, at) "
        "SELECT mark, true, submission_digest, at FROM row_marks_before"
    )
    op.drop_table("row_marks_before")
    op.create_index("row_marks_submission", "row_marks", ["submission_digest"], unique=False)
    op.create_index("row_marks_at", "row_marks", ["at"], unique=False)
