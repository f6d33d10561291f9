"""Pages of the archive say whether the rollout files of their files are removed."""

import sqlalchemy as sa
from alembic import op

revision = "0030"
down_revision = "0029"


def upgrade() -> None:
    op.add_column("archive_pages", sa.Column("kept_days", sa.Integer()))
    op.add_column(
        "archive_pages",
        sa.Column("removed", sa.Boolean(), nullable=False, server_default=sa.false()),
    )
