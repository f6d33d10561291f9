"""Accepted files count the tokens that their nodes only read; expired leases may be excused."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    for table, name, kind in (
        ("submissions", "prompt_units", sa.BigInteger()),
        ("leases", "excused", sa.Integer()),
    ):
        column = sa.Column(name, kind, nullable=False, server_default=sa.text("0"))
        op.add_column(table, column)
