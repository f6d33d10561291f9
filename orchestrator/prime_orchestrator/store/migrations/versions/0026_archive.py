"""The archive: where files lie whose rows went into objects (store/archive.py).

An archived file stays counted in `tallies`, so deleting a submission does not change them any more.
"""

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"

_TRIGGER = """CREATE TRIGGER submissions_tally AFTER INSERT OR
    UPDATE OF node, shadow, status, units ON submissions
    FOR EACH ROW EXECUTE FUNCTION tally_submission()"""


def upgrade() -> None:
    op.create_table(
        "archive_pages",
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("files", sa.Integer(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("first_received", sa.Float(), nullable=False),
        sa.Column("last_received", sa.Float(), nullable=False),
    )
    op.create_table(
        "archived",
        sa.Column("digest", sa.LargeBinary(), primary_key=True),
        sa.Column("lease_digest", sa.LargeBinary(), nullable=False, unique=True),
        sa.Column("page", sa.Integer(), nullable=False),
        sa.Column("place", sa.SmallInteger(), nullable=False),
    )
    if op.get_context().dialect.name == "postgresql":
        op.execute("DROP TRIGGER submissions_tally ON submissions")
        op.execute(_TRIGGER)
    else:
        op.execute("DROP TRIGGER submissions_tally_delete")
