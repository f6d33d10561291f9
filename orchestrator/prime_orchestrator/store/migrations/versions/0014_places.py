"""Challenges name the address that asked for shadow work, so that all processes of a pool and a
restarted one count the same shadow nodes of an address."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    op.add_column("challenges", sa.Column("place", sa.Text()))
    op.create_index("challenges_place", "challenges", ["place", "issued_at"])
