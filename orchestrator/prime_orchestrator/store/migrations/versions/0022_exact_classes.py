"""Exact classes that validators and nodes announced, and what their files showed."""

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"


def upgrade() -> None:
    op.create_table(
        "classes",
        sa.Column("digest", sa.Text(), primary_key=True),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("facts", sa.Text(), nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("policy_version", sa.BigInteger(), nullable=False),
    )
    op.create_index("classes_policy", "classes", ["policy_version", "key"])
    op.create_table(
        "class_members",
        sa.Column("account", sa.Text(), nullable=False),
        sa.Column("policy_version", sa.BigInteger(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("account", "policy_version", "digest"),
    )
    op.create_index("class_members_digest", "class_members", ["digest"])
    op.create_table(
        "class_records",
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("files", sa.BigInteger(), nullable=False),
        sa.Column("mismatched", sa.BigInteger(), nullable=False),
        sa.Column("rows", sa.BigInteger(), nullable=False),
        sa.Column("longest", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("key", "node"),
    )
    op.create_index("class_records_node", "class_records", ["node"])
