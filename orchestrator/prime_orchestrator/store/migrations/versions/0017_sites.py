"""Challenges name the wider network that asked for shadow work, so that one IPv6 site cannot add
shadow nodes from each of its many /64 networks."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    op.add_column("challenges", sa.Column("site", sa.Text()))
    op.create_index("challenges_site", "challenges", ["site", "issued_at"])
