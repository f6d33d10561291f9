"""What becomes of a submitted file is the status of its submission alone: a lease only says that a
file was submitted."""

from alembic import op

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    op.execute(
        "UPDATE leases SET status = 'submitted' WHERE status IN ('accepted', 'rejected', 'void')"
    )
