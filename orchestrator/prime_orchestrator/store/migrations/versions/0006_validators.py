"""Makes validators separate parties: adds assignments and signed opinions, removes their
secrets."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    for table in ("jobs", "opinions", "draw_secrets"):
        op.drop_table(table)
    op.create_table(
        "jobs",
        sa.Column("submission_digest", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("needed", sa.Integer(), nullable=True),
        sa.Column("assigned", sa.Integer(), nullable=False),
        sa.Column("whole", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("shadow", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("submission_digest"),
    )
    op.create_index("jobs_open", "jobs", ["status", "shadow", "created_at"], unique=False)
    op.create_table(
        "assignments",
        sa.Column("submission_digest", sa.Text(), nullable=False),
        sa.Column("validator", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("worker", sa.Text(), nullable=True),
        sa.Column("until", sa.Float(), nullable=False),
        sa.Column("not_before", sa.Float(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("delays", sa.Integer(), nullable=False),
        sa.Column("seal", sa.Text(), nullable=True),
        sa.Column("at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("submission_digest", "validator"),
    )
    op.create_index("assignments_validator", "assignments", ["validator", "status"], unique=False)
    op.create_index("assignments_status", "assignments", ["status", "until"], unique=False)
    op.create_table(
        "validators",
        sa.Column("address", sa.Text(), nullable=False),
        sa.Column("seen_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("address"),
    )
    op.create_table(
        "opinions",
        sa.Column("submission_digest", sa.Text(), nullable=False),
        sa.Column("validator", sa.Text(), nullable=False),
        sa.Column("reason", sa.Integer(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("submission_digest", "validator"),
    )
    op.create_table(
        "draw_commitments",
        sa.Column("validator", sa.Text(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("revealed", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("validator", "epoch"),
    )
    op.create_index("draw_commitments_epoch", "draw_commitments", ["epoch"], unique=False)
    op.create_table(
        "second_secrets",
        sa.Column("epoch", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("commitment", sa.Text(), nullable=False),
        sa.Column("secret", sa.Text(), nullable=False),
        sa.Column("revealed", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("epoch"),
        sa.UniqueConstraint("commitment"),
    )
