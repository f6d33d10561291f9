"""Sessions, their nonces and revocations."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from prime_core.ids import Address, Digest
from prime_orchestrator.store import schema
from prime_orchestrator.store.rows import (
    built_once,
    insert_new,
    one_of_bound,
    record,
    returning_new,
    upsert,
)

MAX_SESSION_SECONDS = 24 * 3600
"""Maximum duration of a grant."""
_sessions = schema.sessions.c
_nonces = schema.nonces.c
_revocations = schema.revocations.c


@dataclass(frozen=True)
class SessionRow:
    """A session key authorized by `account`; times in Unix seconds."""

    key_id: Digest
    account: Address
    scope: str
    issued_at: int
    expiry: int
    revoked: bool


def get(connection: Connection, key_id: Digest) -> SessionRow | None:
    """Returns the session of a key, or None."""
    query = sa.select(schema.sessions).where(_sessions.key_id == key_id)
    return record(SessionRow, connection.execute(query).mappings().first())


def with_revocations(
    connection: Connection, key_ids: Collection[Digest]
) -> dict[Digest, tuple[SessionRow, int]]:
    """Returns the sessions of those keys that have one, each with the newest `RevokedBefore` time
    of its account on chain, 0 if none."""
    found = connection.execute(_of_keys(connection), {"key_ids": list(key_ids)})
    return {Digest(row.key_id): (SessionRow(*row[:-1]), int(row.before or 0)) for row in found}


@built_once
def _of_keys(postgresql: bool) -> sa.Select[Any]:
    columns = (_sessions[field.name] for field in fields(SessionRow))
    on_chain = schema.chain_state.c
    revoked = sa.and_(on_chain.kind == "revoked", on_chain.account == _sessions.account)
    return (
        sa.select(*columns, on_chain.value.label("before"))
        .select_from(schema.sessions.outerjoin(schema.chain_state, revoked))
        .where(one_of_bound(postgresql, _sessions.key_id, "key_ids"))
    )


def add(connection: Connection, session: SessionRow) -> bool:
    """Writes a session. Returns False if its key already has one, which is left unchanged."""
    return insert_new(connection, schema.sessions, vars(session))


def count(connection: Connection, account: Address, now: float) -> int:
    """Returns the number of live sessions of an account."""
    query = sa.select(sa.func.count()).where(
        _sessions.account == account, _sessions.expiry >= now, _sessions.revoked.is_(False)
    )
    return connection.execute(query).scalar_one()


def revoke(connection: Connection, account: Address, revoked_before: int) -> None:
    """Ends every session of `account` issued before `revoked_before`, and forbids old grants.
    Writes nothing if the account has no session here."""
    if (
        connection.execute(sa.select(_sessions.key_id).where(_sessions.account == account)).first()
        is None
    ):
        return
    before = max(revoked_before, revocation(connection, account))
    upsert(connection, schema.revocations, {"account": account, "revoked_before": before})
    connection.execute(
        sa.update(schema.sessions)
        .where(_sessions.account == account, _sessions.issued_at < before)
        .values(revoked=True)
    )


def revocation(connection: Connection, account: Address) -> int:
    """Returns the time before which grants of `account` are void; 0 if it never revoked any."""
    query = sa.select(_revocations.revoked_before).where(_revocations.account == account)
    return int(connection.execute(query).scalar() or 0)


def use_nonces(connection: Connection, used: Sequence[tuple[Digest, str, int]]) -> list[bool]:
    """Stores nonces, each given as key, nonce and the time until which it is kept.

    Returns for each whether it is new: False if its key used it before, or earlier in `used`.
    """
    # Sort by primary key, so that two processes cannot deadlock.
    ordered = sorted(used)
    rows = [{"key_id": key, "nonce": nonce, "expires": until} for key, nonce, until in ordered]
    new = {(row.key_id, row.nonce) for row in returning_new(connection, schema.nonces, rows)}
    fresh = []
    for key, nonce, _ in used:
        fresh.append((key, nonce) in new)
        new.discard((key, nonce))
    return fresh


def forget(connection: Connection, now: float) -> None:
    """Deletes expired nonces, sessions that ended a day ago, and revocations of grants that have
    all expired."""
    connection.execute(sa.delete(schema.nonces).where(_nonces.expires < now))
    connection.execute(sa.delete(schema.sessions).where(_sessions.expiry < now - 86_400))
    connection.execute(
        sa.delete(schema.revocations).where(_revocations.revoked_before < now - MAX_SESSION_SECONDS)
    )
