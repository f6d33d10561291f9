"""Hardware passports say how much memory of a card was proved."""

import json

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0026"


def upgrade() -> None:
    for name in ("claimed_memory_mb", "proved_memory_mb"):
        op.add_column(
            "passports",
            sa.Column(name, sa.BigInteger(), nullable=False, server_default=sa.text("0")),
        )
    op.add_column("passports", sa.Column("memory", sa.Text()))
    passports = sa.table("passports", *map(sa.column, ("node", "body", "claimed_memory_mb")))
    connection = op.get_bind()
    for node, body in connection.execute(sa.select(passports.c.node, passports.c.body)).all():
        claimed = json.loads(body)["passport"]["claimed_memory_mb"]
        connection.execute(
            sa.update(passports).where(passports.c.node == node).values(claimed_memory_mb=claimed)
        )
