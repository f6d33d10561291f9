"""What waits for a root is found at once: shadow files, which have none, gather for ever."""

from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.create_index(
        "submissions_unrooted", "submissions", ["root_id", "shadow", "received_at"], unique=False
    )
