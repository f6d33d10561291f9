"""Adds an index for submissions without a root, because shadow files never get one and
accumulate."""

from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.create_index(
        "submissions_unrooted", "submissions", ["root_id", "shadow", "received_at"], unique=False
    )
