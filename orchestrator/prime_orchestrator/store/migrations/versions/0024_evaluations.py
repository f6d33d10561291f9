"""Evaluations on held-out problems by the pool's nodes, and the leases that belong to them."""

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"


def upgrade() -> None:
    op.create_table(
        "evaluations",
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("policy_version", sa.BigInteger(), nullable=False),
        sa.Column("problems", sa.BigInteger(), nullable=False),
        sa.Column("started_at", sa.Float(), nullable=False),
        sa.Column("ended_at", sa.Float()),
    )
    op.add_column("leases", sa.Column("evaluation", sa.Integer()))
    op.add_column("leases", sa.Column("heldout", sa.BigInteger()))
    given = sa.text("evaluation IS NOT NULL")
    op.create_index(
        "leases_evaluation", "leases", ["evaluation"], sqlite_where=given, postgresql_where=given
    )
