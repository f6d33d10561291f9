"""Challenges may be proofs of cards, and nodes have hardware passports."""

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"


def upgrade() -> None:
    op.add_column("challenges", sa.Column("cards", sa.Text()))
    op.create_table(
        "passports",
        sa.Column("node", sa.Text(), primary_key=True),
        sa.Column("cards", sa.Text(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
    )
