"""The read copy of chain facts. Only the indexer writes it.

chain_events   events of this pool, found by name and subject
chain_state    current state of all accounts that admission and sessions need: a node's provider,
               a provider's stake, a revocation. One row per account and kind
chain_undo     previous values of chain_state rows, by block, to undo reorganizations
chain_steps    the last blocks that were read
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from prime_core.ids import Address, Digest
from prime_orchestrator.store import schema
from prime_orchestrator.store.rows import (
    built_once,
    insert_all_new,
    insert_new,
    one_of_bound,
    records,
    upsert,
    upsert_all,
)

_events = schema.chain_events.c
_NAMED = (
    sa.select(schema.chain_events)
    .where(_events.name == sa.bindparam("of_name"))
    .order_by(_events.block, _events.log_index)
)
_cursors = schema.cursors.c
_state = schema.chain_state
_undo = schema.chain_undo
_steps = schema.chain_steps

UNDO_BLOCKS = 4096
"""Reorganizations up to this many blocks are undone. After a deeper one, the chain is read again
from the start."""
STEPS_KEPT = 256

_SUBJECTS: dict[str, tuple[str, ...]] = {
    "RootPosted": ("root", "seq"),
    "LeafRejected": ("leaf",),
    "RewardRootPosted": ("epoch",),
    "NodeJoined": ("node",),
    "NodeLeft": ("node",),
    "NodeEjected": ("node",),
    "PolicyPublished": ("version",),
    "ValidatorSet": ("validator",),
    "SlashProposed": ("leaf",),
    "SlashDisputed": ("leaf",),
    "SlashObjected": ("leaf",),
    "SlashExecuted": ("leaf",),
    "SlashCancelled": ("leaf",),
    "FileRestored": ("leaf",),
}
"""The one or two arguments that identify an event's subject, by which it is looked up."""

STATE_EVENTS = frozenset(
    {
        "NodeAdded", "NodeRemoved", "RevokedBefore", "Deposited", "UnbondStarted", "Rebonded",
        "SlashHeld", "SlashReleased", "Slashed",
    }
)  # fmt: skip
"""Events of any account that are stored only as `chain_state`."""

_BIND = 500
"""Most values in one statement."""


@dataclass(frozen=True)
class EventRow:
    """One confirmed event; `args` is JSON, `block_time` the block's Unix time."""

    block_hash: Digest
    log_index: int
    block: int
    block_time: int
    tx_hash: Digest
    name: str
    args: str
    subject: str | None = None
    second: str | None = None

    def arguments(self) -> dict[str, Any]:
        """Returns the event's arguments, parsed."""
        parsed: dict[str, Any] = json.loads(self.args)
        return parsed


def add_event(connection: Connection, *, name: str, args: Mapping[str, Any], **head: Any) -> bool:
    """Writes an event, or applies it to the state; `head`: the other columns of EventRow. Returns
    False if it is known already."""
    if name in STATE_EVENTS:
        fold(connection, [(head["block"], name, args)])
        return True
    row = event_row(name=name, args=args, **head)
    return insert_new(connection, schema.chain_events, vars(row))


def add_events(connection: Connection, rows: Sequence[EventRow]) -> None:
    """Writes the given events that are not known."""
    insert_all_new(connection, schema.chain_events, [vars(row) for row in rows])


def event_row(*, name: str, args: Mapping[str, Any], **head: Any) -> EventRow:
    """Returns the row of an event."""
    places = [str(args[field]) for field in _SUBJECTS.get(name, ())]
    subject, second = (*places, None, None)[:2]
    return EventRow(
        name=name, args=json.dumps(args, sort_keys=True), subject=subject, second=second, **head
    )


def events(
    connection: Connection,
    name: str,
    *,
    subject: object = None,
    second: object = None,
) -> list[EventRow]:
    """Returns the events with this name, oldest first; only those about `subject` or `second` if
    given."""
    query = _NAMED
    if subject is not None:
        query = query.where(_events.subject == str(subject))
    if second is not None:
        query = query.where(_events.second == str(second))
    found = connection.execute(query, {"of_name": name})
    return records(EventRow, found.mappings().all())


def events_of(connection: Connection, tx_hash: Digest) -> list[EventRow]:
    """Returns the transaction's stored events in their order."""
    query = sa.select(schema.chain_events).where(_events.tx_hash == tx_hash)
    query = query.order_by(_events.block, _events.log_index)
    return records(EventRow, connection.execute(query).mappings().all())


def naming(
    connection: Connection, accounts: Collection[Address], since: float, limit: int
) -> list[Digest]:
    """Returns the transactions since a time (Unix seconds) that caused an event which names one of
    `accounts`, at most `limit` of them."""
    named = sa.or_(sa.false(), *(_events.args.contains(account) for account in accounts))
    query = (
        sa.select(_events.tx_hash).where(_events.block_time >= since, named).distinct().limit(limit)
    )
    return [Digest(tx_hash) for tx_hash in connection.execute(query).scalars()]


def has_event(connection: Connection, block_hash: Digest, log_index: int) -> bool:
    """Whether the event at this place is stored."""
    query = sa.select(_events.log_index).where(
        _events.block_hash == block_hash, _events.log_index == log_index
    )
    return connection.execute(query).first() is not None


def has_transaction(connection: Connection, tx_hash: str) -> bool:
    """Whether an event of the transaction is stored."""
    query = sa.select(_events.log_index).where(_events.tx_hash == tx_hash).limit(1)
    return connection.execute(query).first() is not None


def newest_root(connection: Connection) -> tuple[int, int]:
    """Returns (number, block) of the newest work root; (0, 0) if there is none."""
    query = (
        sa.select(_events.second, _events.block)
        .where(_events.name == "RootPosted")
        .order_by(_events.block.desc(), _events.log_index.desc())
        .limit(1)
    )
    row = connection.execute(query).first()
    return (0, 0) if row is None else (int(row.second), int(row.block))


# ── current state of any account ──


def fold(
    connection: Connection, happened: Sequence[tuple[int, str, Mapping[str, Any]]], head: int = 0
) -> None:
    """Applies events (block, name, arguments) to the state, in chain order. The replaced values are
    kept for `retract` if they belong to the last UNDO_BLOCKS before `head`."""
    keys = {key for _, name, args in happened for key in _keys(name, args)}
    before = _state_of(connection, keys)
    now = dict(before)
    undo: dict[tuple[int, str, str], str | None] = {}
    for block, name, args in happened:
        for key in _keys(name, args):
            old = now.get(key)
            if block > head - UNDO_BLOCKS:
                undo.setdefault((block, *key), old)
            now[key] = _after(name, args, old)
    insert_all_new(
        connection,
        _undo,
        [
            {"block": block, "kind": kind, "account": account, "value": value}
            for (block, kind, account), value in undo.items()
        ],
    )
    _write(connection, {key: value for key, value in now.items() if value != before.get(key)})


def correct(
    connection: Connection, kind: str, account: Address, value: str | None, block: int
) -> None:
    """Replaces an account's state by `value` (None: there is none), which the contract has at
    `block`, the last one read. `retract` undoes it."""
    old = state(connection, kind, account)
    row = {"block": block, "kind": kind, "account": account, "value": old}
    insert_all_new(connection, _undo, [row])
    _write(connection, {(kind, account): value})


def _keys(name: str, args: Mapping[str, Any]) -> list[tuple[str, str]]:
    match name:
        case "NodeAdded" | "NodeRemoved":
            return [("provider", args["node"])]
        case "RevokedBefore":
            return [("revoked", args["node"])]
    return [("stake", args["provider"])]


def _after(name: str, args: Mapping[str, Any], old: str | None) -> str | None:
    """Returns an account's state after an event. Slashes are taken from bonded stake first."""
    match name:
        case "NodeAdded":
            return str(args["provider"])
        case "NodeRemoved":
            return None
        case "RevokedBefore":
            return str(max(int(args["at"]), int(old or 0)))
    bonded, held = (int(one) for one in (old or "0 0").split())
    amount = int(args["amount"])
    match name:
        case "Deposited" | "Rebonded":
            bonded += amount
        case "UnbondStarted":
            bonded -= amount
        case "SlashHeld":
            held += amount
        case "SlashReleased":
            held -= amount
        case "Slashed":
            held -= amount
            bonded -= min(amount, bonded)
    return f"{bonded} {held}"


def _state_of(
    connection: Connection, keys: Iterable[tuple[str, str]]
) -> dict[tuple[str, str], str | None]:
    found: dict[tuple[str, str], str | None] = {}
    by_kind: dict[str, list[str]] = {}
    for kind, account in keys:
        by_kind.setdefault(kind, []).append(account)
    for kind, accounts in by_kind.items():
        for at in range(0, len(accounts), _BIND):
            bound = {"kind": kind, "accounts": accounts[at : at + _BIND]}
            for row in connection.execute(_states_of(connection), bound):
                found[kind, row.account] = row.value
    return found


@built_once
def _states_of(postgresql: bool) -> sa.Select[Any]:
    return sa.select(_state.c.account, _state.c.value).where(
        _state.c.kind == sa.bindparam("kind"),
        one_of_bound(postgresql, _state.c.account, "accounts"),
    )


def _write(connection: Connection, values: Mapping[tuple[str, str], str | None]) -> None:
    for (kind, account), value in values.items():
        if value is None:
            connection.execute(
                sa.delete(_state).where(_state.c.kind == kind, _state.c.account == account)
            )
    upsert_all(
        connection,
        _state,
        [
            {"kind": kind, "account": account, "value": value}
            for (kind, account), value in values.items()
            if value is not None
        ],
    )


def state(connection: Connection, kind: str, account: Address) -> str | None:
    """Returns an account's current state: kind "provider" (of a node), "stake" ("bonded held" of a
    provider, in wei) or "revoked" (a node's revocation time). None if there is none."""
    return connection.execute(
        sa.select(_state.c.value).where(_state.c.kind == kind, _state.c.account == account)
    ).scalar()


def states(connection: Connection, kind: str, accounts: Collection[Address]) -> dict[Address, str]:
    """Returns `state` by account, without accounts that have none."""
    found = _state_of(connection, [(kind, account) for account in accounts])
    return {Address(account): value for (_, account), value in found.items() if value is not None}


def revoked_before(connection: Connection, account: Address) -> int:
    """Returns the newest `RevokedBefore` time on chain for `account`; 0 if none."""
    return int(state(connection, "revoked", account) or 0)


def pool_ended(connection: Connection, pool: int) -> int | None:
    """Returns when `pool` ended on chain (Unix seconds), or None if it did not."""
    found = (one for one in events(connection, "PoolEnded") if one.arguments()["pool"] == pool)
    return next((one.block_time for one in found), None)


# ── reorganizations and reading position ──


def retract(connection: Connection, from_block: int) -> list[EventRow]:
    """Removes and returns the events of `from_block` and later, and undoes their effects on the
    state (after a reorganization)."""
    query = (
        sa.select(schema.chain_events)
        .where(_events.block >= from_block)
        .order_by(_events.block, _events.log_index)
    )
    gone = records(EventRow, connection.execute(query).mappings().all())
    connection.execute(sa.delete(schema.chain_events).where(_events.block >= from_block))
    before: dict[tuple[str, str], str | None] = {}
    undone = sa.select(_undo).where(_undo.c.block >= from_block).order_by(_undo.c.block)
    for row in connection.execute(undone):
        before.setdefault((row.kind, row.account), row.value)
    _write(connection, before)
    connection.execute(sa.delete(_undo).where(_undo.c.block >= from_block))
    connection.execute(sa.delete(_steps).where(_steps.c.block >= from_block))
    return gone


def forget_all(connection: Connection) -> list[EventRow]:
    """Removes everything that was read; returns the events."""
    gone = retract(connection, 0)
    connection.execute(sa.delete(_state))
    return gone


def add_step(connection: Connection, block: int, block_hash: Digest) -> None:
    """Records a block that was read, and drops what is too old to be undone."""
    insert_new(connection, _steps, {"block": block, "block_hash": block_hash})
    oldest = connection.execute(
        sa.select(_steps.c.block).order_by(_steps.c.block.desc()).offset(STEPS_KEPT).limit(1)
    ).scalar()
    if oldest is not None:
        connection.execute(sa.delete(_steps).where(_steps.c.block <= oldest))
    connection.execute(sa.delete(_undo).where(_undo.c.block <= block - UNDO_BLOCKS))


def steps(connection: Connection) -> list[tuple[int, Digest]]:
    """Returns the last blocks that were read, ascending."""
    query = sa.select(_steps.c.block, _steps.c.block_hash).order_by(_steps.c.block)
    return [(int(row.block), Digest(row.block_hash)) for row in connection.execute(query)]


def cursor(connection: Connection, name: str) -> tuple[int, Digest] | None:
    """Returns (block, its hash) of a reader's position, or None before its first block."""
    query = sa.select(_cursors.block, _cursors.block_hash).where(_cursors.name == name)
    row = connection.execute(query).first()
    return None if row is None else (int(row.block), Digest(row.block_hash))


def set_cursor(connection: Connection, name: str, block: int, block_hash: Digest) -> None:
    """Moves a reader's cursor."""
    upsert(connection, schema.cursors, {"name": name, "block": block, "block_hash": block_hash})


def appointed(connection: Connection, pool: int) -> frozenset[Address]:
    """Returns the pool's validators according to the stored events."""
    return frozenset(appointed_at(connection, pool))


def ever_appointed(connection: Connection) -> frozenset[Address]:
    """Returns every account that was a validator of the pool at some time."""
    found = events(connection, "ValidatorSet")
    return frozenset(Address(event.arguments()["validator"]) for event in found)


def trainers(connection: Connection) -> frozenset[Address]:
    """Returns the pool's trainer; nothing before the pool's creation is read."""
    found = events(connection, "PoolCreated")
    return frozenset(Address(event.arguments()["trainer"]) for event in found)


def appointed_at(connection: Connection, pool: int) -> dict[Address, tuple[int, int]]:
    """Returns the pool's validators, each with the block and its time (Unix seconds) from which it
    has been appointed without a break."""
    since: dict[Address, tuple[int, int]] = {}
    for event in events(connection, "ValidatorSet"):
        args = event.arguments()
        validator = Address(args["validator"])
        if args["pool"] == pool and args["on"]:
            since.setdefault(validator, (event.block, event.block_time))
        elif args["pool"] == pool:
            since.pop(validator, None)
    return since
