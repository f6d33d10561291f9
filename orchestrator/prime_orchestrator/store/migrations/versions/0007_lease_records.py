"""Adds nodes' records of kept and missed leases, and reissuing of expired groups."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    none = sa.text("0")
    for name, kind in (
        ("kept", sa.Float()),
        ("missed", sa.Float()),
        ("misses", sa.Integer()),
        ("rests_until", sa.Float()),
    ):
        op.add_column("nodes", sa.Column(name, kind, nullable=False, server_default=none))
    op.create_index("nodes_provider", "nodes", ["provider"], unique=False)
    for name in ("tries", "issued_again"):
        op.add_column("leases", sa.Column(name, sa.Integer(), nullable=False, server_default=none))
