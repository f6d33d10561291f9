"""Sessions, their nonces and revocations."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy import Connection

from prime_core.ids import Address, Digest
from prime_orchestrator.store import meta, schema
from prime_orchestrator.store.rows import insert_new, record, returning_new

MAX_SESSION_SECONDS = 24 * 3600
"""A grant's longest life."""
_sessions = schema.sessions.c
_nonces = schema.nonces.c


@dataclass(frozen=True)
class SessionRow:
    """A session key that `account` let sign for it; Unix seconds."""

    key_id: Digest
    account: Address
    scope: str
    issued_at: int
    expiry: int
    revoked: bool


def get(connection: Connection, key_id: Digest) -> SessionRow | None:
    """The session of a key, or None."""
    query = sa.select(schema.sessions).where(_sessions.key_id == key_id)
    return record(SessionRow, connection.execute(query).mappings().first())


def of_keys(connection: Connection, key_ids: Collection[Digest]) -> dict[Digest, SessionRow]:
    """The sessions of those keys that have one."""
    query = sa.select(schema.sessions).where(_sessions.key_id.in_(list(key_ids)))
    return {
        Digest(row["key_id"]): SessionRow(**row) for row in connection.execute(query).mappings()
    }


def add(connection: Connection, session: SessionRow) -> bool:
    """Writes a session. False if its key already has one (which is left as it is)."""
    return insert_new(connection, schema.sessions, vars(session))


def count(connection: Connection, account: Address, now: float) -> int:
    """Live sessions of an account."""
    query = sa.select(sa.func.count()).where(
        _sessions.account == account, _sessions.expiry >= now, _sessions.revoked.is_(False)
    )
    return connection.execute(query).scalar_one()


REVOKED = "revoked_before/"


def revoke(connection: Connection, account: Address, revoked_before: int) -> None:
    """Ends every session of `account` issued before `revoked_before`, and forbids old grants. An
    account without a session here has none to end, and nothing is written."""
    if (
        connection.execute(sa.select(_sessions.key_id).where(_sessions.account == account)).first()
        is None
    ):
        return
    before = max(revoked_before, revocation(connection, account))
    meta.put(connection, f"{REVOKED}{account}", str(before))
    connection.execute(
        sa.update(schema.sessions)
        .where(_sessions.account == account, _sessions.issued_at < before)
        .values(revoked=True)
    )


def revocation(connection: Connection, account: Address) -> int:
    """Grants of `account` issued before this time are void; 0 if it never revoked."""
    return int(meta.get(connection, f"{REVOKED}{account}") or 0)


def use_nonces(connection: Connection, used: Sequence[tuple[Digest, str, int]]) -> list[bool]:
    """Remembers nonces, each given as key, nonce and the time until which it is remembered.

    Returns for each whether it is new: False if its key used it before, or further up in `used`.
    """
    # In the order of the primary key, so that two processes never wait for one another.
    ordered = sorted(used)
    rows = [{"key_id": key, "nonce": nonce, "expires": until} for key, nonce, until in ordered]
    new = {(row.key_id, row.nonce) for row in returning_new(connection, schema.nonces, rows)}
    fresh = []
    for key, nonce, _ in used:
        fresh.append((key, nonce) in new)
        new.discard((key, nonce))
    return fresh


def forget(connection: Connection, now: float) -> None:
    """Drops nonces whose time is over, sessions that ended a day ago, and revocations of grants
    that have all ended by now."""
    connection.execute(sa.delete(schema.nonces).where(_nonces.expires < now))
    connection.execute(sa.delete(schema.sessions).where(_sessions.expiry < now - 86_400))
    for key, value in meta.under(connection, REVOKED):
        if int(value) < now - MAX_SESSION_SECONDS:
            meta.drop(connection, key)
