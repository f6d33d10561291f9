"""An intent and its transaction are one row: `intents` takes over the rows of `sender_intents`."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"

_COPY = """
INSERT INTO intents (id, kind, payload, call_to, data, value, description, status, nonce, gas, note,
                     error, tx_hash, block, contract, block_hash, created_at, updated_at)
SELECT sent.id, COALESCE(old.kind, ''), COALESCE(old.payload, ''), sent.call_to, sent.data,
       sent.value, sent.description, sent.status, sent.nonce, sent.gas, sent.note, sent.error,
       sent.tx_hash, sent.block, sent.contract, sent.block_hash, sent.created_at, sent.updated_at
FROM sender_intents AS sent LEFT JOIN old_intents AS old ON old.id = sent.id
ORDER BY sent.seq
"""
_ADD_UNSENT = """
INSERT INTO intents (id, kind, payload, value, description, status, note, tx_hash, block,
                     created_at, updated_at)
SELECT id, kind, payload, '0', '',
       CASE WHEN status IN ('queued', 'sent') THEN 'waiting' ELSE status END,
       COALESCE(error, ''), tx_hash, block, created_at, updated_at
FROM old_intents WHERE id NOT IN (SELECT id FROM sender_intents) ORDER BY created_at, id
"""
_WAIT_AGAIN = """
UPDATE intents SET status = 'waiting', data = NULL, note = '', error = NULL, nonce = NULL,
                   tx_hash = NULL, block = NULL, block_hash = NULL
"""
_REQUEUED = "SELECT id FROM old_intents WHERE status = 'queued'"


def upgrade() -> None:
    op.drop_index("intents_block", "intents")
    op.drop_index("intents_lane_status", "intents")
    op.rename_table("intents", "old_intents")
    if op.get_bind().dialect.name == "postgresql":  # the new table's key gets this name
        op.execute("ALTER INDEX intents_pkey RENAME TO old_intents_pkey")
    op.create_table(
        "intents",
        sa.Column("seq", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("payload", sa.Text(), nullable=False),
        sa.Column("call_to", sa.Text(), nullable=True),
        sa.Column("data", sa.LargeBinary(), nullable=True),
        sa.Column("value", sa.Text(), nullable=False),
        sa.Column("description", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("nonce", sa.BigInteger(), nullable=True),
        sa.Column("gas", sa.BigInteger(), nullable=True),
        sa.Column("note", sa.Text(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("tx_hash", sa.Text(), nullable=True),
        sa.Column("block", sa.BigInteger(), nullable=True),
        sa.Column("contract", sa.Text(), nullable=True),
        sa.Column("block_hash", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("updated_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("seq"),
        sa.UniqueConstraint("id"),
    )
    op.execute(_COPY)
    op.execute(_ADD_UNSENT)
    # A failed intent that was queued again has its call built again.
    again = f"status = 'failed' AND id IN ({_REQUEUED})"
    closed = f"SELECT id FROM intents WHERE {again}"  # noqa: S608
    op.execute(f"UPDATE sender_attempts SET closed = 1 WHERE intent_id IN ({closed})")  # noqa: S608
    op.execute(f"{_WAIT_AGAIN} WHERE {again}")
    op.drop_table("sender_intents")
    op.drop_table("old_intents")
    op.create_index("intents_status", "intents", ["status", "seq"])
    op.create_index("intents_nonce", "intents", ["nonce"])
    op.create_index("intents_block", "intents", ["block"])
