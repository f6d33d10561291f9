"""Indexes for what each status reads: void files of the pool's fault, and the newest intents."""

from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    op.create_index("submissions_unjudged", "submissions", ["status", "reason", "shadow", "node"])
    op.create_index("intents_newest", "intents", ["updated_at"])
