"""An index on the deadline of challenges: each tick deletes old ones."""

from alembic import op

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    op.create_index("challenges_deadline", "challenges", ["deadline"])
