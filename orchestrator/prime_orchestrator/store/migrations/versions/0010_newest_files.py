"""The newest files are found by an index: `orchestrator rollouts list` and GET /v1/submissions."""

from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.create_index("submissions_newest", "submissions", ["received_at", "digest"])
