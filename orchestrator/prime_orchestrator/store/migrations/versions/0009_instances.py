"""A node's row names the machine that sends its heartbeats."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    column = sa.Column("instance", sa.Text(), nullable=False, server_default=sa.text("''"))
    op.add_column("nodes", column)
