"""Nodes' cards are measured again, and passports show when they were measured."""

import json

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"


def upgrade() -> None:
    op.add_column(
        "passports",
        sa.Column("measured_at", sa.BigInteger(), nullable=False, server_default=sa.text("0")),
    )
    passports = sa.table("passports", *map(sa.column, ("node", "body", "measured_at")))
    connection = op.get_bind()
    for node, body in connection.execute(sa.select(passports.c.node, passports.c.body)).all():
        measured_at = json.loads(body)["passport"]["measured_at"]
        connection.execute(
            sa.update(passports).where(passports.c.node == node).values(measured_at=measured_at)
        )
    op.create_table(
        "measurements",
        sa.Column("node", sa.Text(), primary_key=True),
        sa.Column("asked_at", sa.Float()),
        sa.Column("again_at", sa.Float()),
        sa.Column("knows", sa.Integer(), nullable=False),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("trouble", sa.Text(), nullable=False),
        sa.Column("passed", sa.Integer(), nullable=False),
        sa.Column("refused", sa.Integer(), nullable=False),
        sa.Column("unanswered", sa.Integer(), nullable=False),
        sa.Column("ignored", sa.Integer(), nullable=False),
    )
