"""Revocations are rows with an index on their time, not entries of `meta`, and sessions have an
index on their end: strangers can leave many of both for a day, and each tick deletes old ones."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    op.create_table(
        "revocations",
        sa.Column("account", sa.Text(), nullable=False),
        sa.Column("revoked_before", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("account"),
    )
    op.execute(
        "INSERT INTO revocations (account, revoked_before) "
        "SELECT substr(key, 16), CAST(value AS BIGINT) FROM meta WHERE key LIKE 'revoked_before/%'"
    )
    op.execute("DELETE FROM meta WHERE key LIKE 'revoked_before/%'")
    op.create_index("revocations_time", "revocations", ["revoked_before"])
    op.create_index("sessions_expiry", "sessions", ["expiry"])
