"""An index finds whether any active node has a record."""

from alembic import op

revision = "0031"
down_revision = "0030"


def upgrade() -> None:
    op.create_index("nodes_status_kept", "nodes", ["status", "kept"])
