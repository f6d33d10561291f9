"""Groups count the rows that could not be graded."""

import sqlalchemy as sa
from alembic import op

revision = "0029"
down_revision = "0028"


def upgrade() -> None:
    op.add_column(
        "groups",
        sa.Column("ungraded", sa.Integer(), nullable=False, server_default=sa.text("0")),
    )
