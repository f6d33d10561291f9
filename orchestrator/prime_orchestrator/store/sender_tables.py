"""Tables of the manager's sender journal, which prime_chain/journal.py writes."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Float, Index, Integer, LargeBinary, MetaData, Table, Text


def sender_tables(metadata: MetaData) -> tuple[Table, Table, Table]:
    """Returns the tables for meta, intents and attempts."""
    meta = Table(
        "sender_meta",
        metadata,
        Column("key", Text, primary_key=True),
        Column("value", Text, nullable=False),
    )
    intents = Table(
        "sender_intents",
        metadata,
        Column("seq", Integer, primary_key=True, autoincrement=True),
        Column("id", Text, nullable=False, unique=True),
        Column("call_to", Text),
        Column("data", LargeBinary, nullable=False),
        Column("value", Text, nullable=False),
        Column("description", Text, nullable=False),
        Column("status", Text, nullable=False),
        Column("nonce", BigInteger),
        Column("gas", BigInteger),
        Column("note", Text, nullable=False),
        Column("error", Text),
        Column("tx_hash", Text),
        Column("block", BigInteger),
        Column("contract", Text),
        Column("block_hash", Text),
        Column("created_at", Float, nullable=False),
        Column("updated_at", Float, nullable=False),
        Index("sender_intents_open", "status", "seq"),
        Index("sender_intents_nonce", "nonce"),
        Index("sender_intents_block", "block"),
    )
    attempts = Table(
        "sender_attempts",
        metadata,
        Column("hash", Text, primary_key=True),
        Column("intent_id", Text, nullable=False),
        Column("nonce", BigInteger, nullable=False),
        Column("max_fee", Text, nullable=False),
        Column("priority_fee", Text, nullable=False),
        Column("raw", LargeBinary, nullable=False),
        Column("signed_at", Float, nullable=False),
        Column("sent_at", Float),
        Column("closed", Integer, nullable=False),
        Index("sender_attempts_intent", "intent_id", "signed_at"),
    )
    return meta, intents, attempts
