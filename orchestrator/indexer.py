"""The chain's events → the store's read copy of chain facts.

Every derived column is a function of the events that are stored: when an event about a root, a
slash, a reward root or a node comes or is retracted, the columns of that subject are derived anew
from what is left. So a rollback needs no undo, and an event may come twice.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence

import sqlalchemy as sa
from sqlalchemy import Connection

from orchestrator.context import PoolContext
from orchestrator.members import MEMBERSHIP_EVENTS, derive_node
from orchestrator.requeue import forget_unsent
from orchestrator.settlement import (
    CHAIN_BLOCK,
    CHAIN_LOCK,
    CHAIN_TIME,
    refresh_credits,
)
from orchestrator.store import chain, meta, schema, submissions
from orchestrator.store.chain import EventRow
from orchestrator.store.engine import Store, lock
from orchestrator.store.rows import insert_new, upsert
from protocol.chain.events import Event
from protocol.chain.watcher import BlockRef, Confirmed, Watcher
from protocol.core.ids import ZERO_DIGEST, Address, Digest

log = logging.getLogger(__name__)

SLASH_EVENTS = ("SlashProposed", "SlashExecuted", "SlashCancelled")
CURSOR = "chain"
REMEMBERED_BLOCKS = 256
"""Blocks with events that are remembered by hash, to find where a reorganisation began."""
SEEN_SECONDS = 2.0
"""How often a look at a chain that stands still is written down."""


def run_indexer_tick(
    store: Store, context: PoolContext, watcher: Watcher, now: Callable[[], float]
) -> list[Event]:
    """Takes in what the chain has confirmed or retracted since the last tick; returns the new
    events of this pool. Each step is one transaction, with its cursor.

    Raises UnavailableError if no endpoint answers: the next tick goes on where this one was.
    """
    with store.read() as connection:
        trail = remembered(connection)
    taken: list[Event] = []
    steps = 0
    for step in watcher.poll(trail):
        steps += 1
        with store.begin() as connection:
            lock(connection, CHAIN_LOCK)
            if isinstance(step, Confirmed):
                mine = [e for e in step.events if getattr(e, "pool", context.pool) == context.pool]
                rows = [_store_event(connection, event) for event in mine]
                meta.put(connection, CHAIN_BLOCK, str(step.block.number))
                meta.put(connection, CHAIN_TIME, str(step.block_time))
                taken += mine
            else:
                rows = chain.retract(connection, step.block.number + 1)
                forget_unsent(connection, step.block.number)
                log.warning(
                    "the chain went back to block %d; %d events are retracted",
                    step.block.number,
                    len(rows),
                )
            chain.set_cursor(connection, CURSOR, step.block.number, step.block.hash)
            derive(connection, context, rows, now())
            meta.put(connection, meta.CHAIN_SEEN_AT, str(int(now())))
    if not steps:
        _note_seen(store, now())
    return taken


def remembered(connection: Connection) -> list[BlockRef]:
    """The cursor, after the newest blocks whose events are stored (ascending)."""
    cursor = chain.cursor(connection, CURSOR)
    if cursor is None:
        return []
    table = schema.chain_events
    rows = connection.execute(
        sa.select(table.c.block, table.c.block_hash)
        .where(table.c.block < cursor[0])
        .distinct()
        .order_by(table.c.block.desc())
        .limit(REMEMBERED_BLOCKS)
    ).all()
    return [
        *(BlockRef(row.block, Digest(row.block_hash)) for row in reversed(rows)),
        BlockRef(*cursor),
    ]


def _store_event(connection: Connection, event: Event) -> EventRow:
    args = event.args()
    chain.add_event(
        connection,
        block_hash=event.block_hash,
        log_index=event.log_index,
        block=event.block,
        block_time=event.block_time,
        tx_hash=event.tx_hash,
        name=event.name,
        args=args,
    )
    return EventRow(
        event.block_hash,
        event.log_index,
        event.block,
        event.block_time,
        event.tx_hash,
        event.name,
        json.dumps(args, sort_keys=True),
    )


def _note_seen(store: Store, now: float) -> None:
    with store.read() as connection:
        seen = meta.get(connection, meta.CHAIN_SEEN_AT)
    if seen is None or now - int(seen) >= SEEN_SECONDS:
        with store.begin() as connection:
            meta.put(connection, meta.CHAIN_SEEN_AT, str(int(now)))


def derive(
    connection: Connection, context: PoolContext, events: Sequence[EventRow], now: float
) -> None:
    """Brings up to date the columns of every subject that `events` speak of (come or gone)."""
    for event in events:
        args = event.arguments()
        if event.name == "RootPosted":
            derive_root(connection, Digest(args["root"]))
        elif event.name in ("RewardRootPosted", "RewardRootDisabled"):
            for epoch in range(int(args["epoch"]), int(args.get("last", args["epoch"])) + 1):
                derive_reward_root(connection, epoch)
        elif event.name in MEMBERSHIP_EVENTS:
            derive_node(connection, context, Address(args["node"]), now)
        elif event.name in SLASH_EVENTS:
            leaf = args.get("leaf") or _leaf_of_proposal(connection, int(args["id"]))
            if leaf is not None:
                derive_slash(connection, context, Digest(leaf), now)
            derive_node(connection, context, Address(args["node"]), now)


def derive_root(connection: Connection, root: Digest) -> None:
    """`roots.chain_seq`, `epoch`, `posted_at`, `block` from the first RootPosted of this root.

    One that a node posted for itself (Work.postLeaf: one leaf, no leaves object, the leaf is the
    root) gets a row if its submission is ours and in no root yet; else it is passed over, so that
    no submission is paid twice.
    """
    posted = chain.events(connection, "RootPosted", contains=root)
    first = next((e for e in posted if e.arguments()["root"] == root), None)
    args = first.arguments() if first else {}
    if first is None:
        _let_go_leaf(connection, root)
    elif args["leaves_object"] == ZERO_DIGEST and args["count"] == 1:
        _adopt_leaf(connection, root, first.block_time)
    connection.execute(
        sa.update(schema.roots)
        .where(schema.roots.c.root == root)
        .values(
            chain_seq=args.get("seq"),
            epoch=args.get("epoch"),
            posted_at=first.block_time if first else None,
            block=first.block if first else None,
        )
    )


def _adopt_leaf(connection: Connection, leaf: Digest, posted_at: int) -> None:
    """The row of a root that is one leaf, posted by its node."""
    submission = submissions.get(connection, leaf)
    if submission is None or submission.root_id is not None or submission.shadow:
        return
    key = connection.execute(
        sa.insert(schema.roots).values(
            root=leaf, leaves_object=ZERO_DIGEST, count=1, created_at=float(posted_at)
        )
    ).inserted_primary_key
    assert key is not None
    connection.execute(
        sa.update(schema.submissions)
        .where(schema.submissions.c.digest == leaf)
        .values(root_id=key[0], leaf_index=0)
    )


def _let_go_leaf(connection: Connection, leaf: Digest) -> None:
    """Undoes `_adopt_leaf`: its posting was retracted, and the manager may root it after all."""
    table = schema.roots.c
    adopted = sa.and_(table.root == leaf, table.leaves_object == ZERO_DIGEST)
    connection.execute(
        sa.update(schema.submissions)
        .where(schema.submissions.c.root_id.in_(sa.select(table.id).where(adopted)))
        .values(root_id=None, leaf_index=None)
    )
    connection.execute(sa.delete(schema.roots).where(adopted))


def derive_reward_root(connection: Connection, epoch: int) -> None:
    """The `reward_roots` row of an epoch from its newest RewardRootPosted.

    A root that the guardian has disabled loses its row, so that the next settlement builds on the
    one before it; one whose posting was retracted waits for its transaction again.
    """
    table = schema.reward_roots
    posted = [e for e in chain.events(connection, "RewardRootPosted") if _epoch(e) == epoch]
    if not posted:
        connection.execute(sa.update(table).where(table.c.epoch == epoch).values(claimable_at=None))
        return
    newest = posted[-1]
    args = newest.arguments()
    disabled = any(
        _epoch(event) <= epoch <= int(event.arguments().get("last", _epoch(event)))
        and (event.block, event.log_index) > (newest.block, newest.log_index)
        for event in chain.events(connection, "RewardRootDisabled")
    )
    if disabled:
        connection.execute(
            sa.delete(table).where(table.c.epoch == epoch, table.c.root == args["root"])
        )
        return
    known = connection.execute(sa.select(table.c.created_at).where(table.c.epoch == epoch)).scalar()
    upsert(
        connection,
        table,
        {
            "epoch": epoch,
            "root": args["root"],
            "cumulative_total": str(args["cumulative_total"]),
            "object": args["object"],
            "created_at": newest.block_time if known is None else known,
            "claimable_at": args["claimable_at"],
        },
    )


def _epoch(event: EventRow) -> int:
    return int(event.arguments()["epoch"])


def derive_slash(connection: Connection, context: PoolContext, leaf: Digest, now: float) -> None:
    """The `slashes` row of submission `leaf` from the events of its proposal; then the credits.

    A proposal by another validator gets a row if the submission is ours.
    """
    proposed = next(
        (
            e
            for e in chain.events(connection, "SlashProposed", contains=leaf)
            if e.arguments()["leaf"] == leaf
        ),
        None,
    )
    table = schema.slashes
    row = connection.execute(sa.select(table).where(table.c.submission_digest == leaf)).first()
    if proposed is None:
        if row is not None and row.proposal_id is not None:  # its proposal was retracted
            connection.execute(
                sa.update(table)
                .where(table.c.submission_digest == leaf)
                .values(
                    status="queued",
                    proposal_id=None,
                    executable_at=None,
                    propose_tx=None,
                    execute_tx=None,
                )
            )
            refresh_credits(connection, Address(row.node))
        return
    args = proposed.arguments()
    submission = submissions.get(connection, leaf)
    if row is None:
        if submission is None:
            log.warning("a slash was proposed for %s, which this store does not know", leaf)
            return
        insert_new(
            connection,
            table,
            {
                "submission_digest": leaf,
                "node": args["node"],
                "validator": submission.validator or "",
                "evidence": args["evidence"],
                "reason": args["reason"],
                "amount": str(args["amount"]),
                "status": "proposed",
                "created_at": now,
            },
        )
    ended = {
        name: _event_of_proposal(connection, name, int(args["id"]))
        for name in ("SlashExecuted", "SlashCancelled")
    }
    status = "proposed"
    if ended["SlashExecuted"] is not None:
        status = "executed"
    elif ended["SlashCancelled"] is not None:
        status = "cancelled"
    executed = ended["SlashExecuted"]
    connection.execute(
        sa.update(table)
        .where(table.c.submission_digest == leaf)
        .values(
            status=status,
            evidence=args["evidence"],
            reason=args["reason"],
            amount=str(executed.arguments()["amount"] if executed else args["amount"]),
            proposal_id=args["id"],
            executable_at=args["executable_at"],
            propose_tx=proposed.tx_hash,
            execute_tx=executed.tx_hash if executed else None,
        )
    )
    refresh_credits(connection, Address(args["node"]))


def _event_of_proposal(connection: Connection, name: str, proposal: int) -> EventRow | None:
    return next(
        (e for e in chain.events(connection, name) if int(e.arguments()["id"]) == proposal), None
    )


def _leaf_of_proposal(connection: Connection, proposal: int) -> Digest | None:
    event = _event_of_proposal(connection, "SlashProposed", proposal)
    if event is not None:
        return Digest(event.arguments()["leaf"])
    table = schema.slashes
    leaf = connection.execute(
        sa.select(table.c.submission_digest).where(table.c.proposal_id == proposal)
    ).scalar()
    return None if leaf is None else Digest(leaf)
