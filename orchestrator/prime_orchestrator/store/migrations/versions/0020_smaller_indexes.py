"""Indexes of tables that are kept forever hold no digest that only breaks ties, and no rows that
nothing looks up by them."""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"


def upgrade() -> None:
    op.drop_index("submissions_newest", "submissions")
    op.create_index("submissions_newest", "submissions", ["received_at"])
    op.drop_index("submissions_unrooted", "submissions")
    op.create_index(
        "submissions_unrooted", "submissions", ["shadow", "received_at"],
        sqlite_where=sa.text("root_id IS NULL"), postgresql_where=sa.text("root_id IS NULL"),
    )  # fmt: skip
    op.drop_index("groups_newest", "groups")
    op.create_index("groups_newest", "groups", ["accepted_at"])
