"""Draw secrets say whether the acceptances of their epoch were compared with them."""

import sqlalchemy as sa
from alembic import op

revision = "0032"
down_revision = "0031"

OPEN = sa.text("compared IS NULL OR compared <> ''")


def upgrade() -> None:
    op.add_column("draw_commitments", sa.Column("compared", sa.Text()))
    op.execute("UPDATE draw_commitments SET compared = '' WHERE revealed")
    op.create_index(
        "draw_commitments_compared",
        "draw_commitments",
        ["epoch"],
        sqlite_where=OPEN,
        postgresql_where=OPEN,
    )
