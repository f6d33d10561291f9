"""Draw secrets say whether their validators accepted files of their epoch, from now on."""

import sqlalchemy as sa
from alembic import op

revision = "0033"
down_revision = "0032"


def upgrade() -> None:
    column: sa.Column[bool] = sa.Column(
        "accepted", sa.Boolean(), nullable=False, server_default=sa.false()
    )
    op.add_column("draw_commitments", column)
