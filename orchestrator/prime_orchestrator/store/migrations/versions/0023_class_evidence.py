"""Equal rows of exact classes by the validator that compared them, times of mismatches, and suspect
classes. Rows counted before have no author; they are counted again."""

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"


def upgrade() -> None:
    op.create_index("class_members_policy", "class_members", ["policy_version"])
    op.create_table(
        "class_rows",
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("validator", sa.Text(), nullable=False),
        sa.Column("rows", sa.BigInteger(), nullable=False),
        sa.Column("longest", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("key", "node", "validator"),
    )
    op.create_table(
        "class_suspects",
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("calibration", sa.Text(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("key", "calibration"),
    )
    with op.batch_alter_table("class_records") as table:
        table.drop_column("rows")
        table.drop_column("longest")
        table.add_column(
            sa.Column("differed", sa.BigInteger(), nullable=False, server_default=sa.text("0"))
        )
        table.add_column(
            sa.Column("judged_at", sa.Float(), nullable=False, server_default=sa.text("0"))
        )
        table.add_column(sa.Column("differed_at", sa.Float()))
