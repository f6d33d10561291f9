"""Copies the chain's events into the store and derives chain facts from them.

Every derived column is a function of the stored events. When an event about a root, a slash, a
reward root or a node is added or retracted, that subject's columns are recomputed from the
remaining events. A rollback therefore needs no undo, and duplicate events are harmless.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from prime_chain.events import Event, RootPosted
from prime_chain.watcher import BlockRef, Confirmed, Watcher
from prime_core.errors import UnavailableError
from prime_core.ids import ZERO_DIGEST, Address, Digest
from prime_core.logs import fields
from prime_core.verdict import Reason, reason_of
from prime_orchestrator.context import PoolContext
from prime_orchestrator.manager.members import MEMBERSHIP_EVENTS, derive_node
from prime_orchestrator.manager.settlement import (
    CHAIN_BLOCK,
    CHAIN_LOCK,
    CHAIN_TIME,
    refresh_credits,
)
from prime_orchestrator.manager.transactions import forget_unsent
from prime_orchestrator.store import (
    Connection,
    chain,
    checks,
    leases,
    meta,
    nodes,
    rewards,
    roots,
    slashes,
    submissions,
)
from prime_orchestrator.store import intents as store_intents
from prime_orchestrator.store.chain import EventRow
from prime_orchestrator.store.engine import Store, lock, on_commit
from prime_orchestrator.store.rewards import RewardRootRow
from prime_orchestrator.store.slashes import SlashRow

log = logging.getLogger(__name__)

SLASH_EVENTS = ("SlashProposed", "SlashExecuted", "SlashCancelled")
CURSOR = "chain"
RECEIPTS_CHECKED = "receipts_checked"
LATE_BLOCKS = 64
SEEN_SECONDS = 2.0
"""Interval at which polls are recorded while the chain does not advance."""


def run_indexer_tick(
    store: Store,
    context: PoolContext,
    watcher: Watcher,
    now: Callable[[], float],
    window_time: Callable[[], int] | None = None,
) -> list[Event]:
    """Processes what the chain has confirmed or retracted since the last tick; returns the new
    events of this pool. Each step is one transaction that includes its cursor. `window_time`
    returns the time that closes windows, if it may be earlier than the chain's time.

    Raises UnavailableError if no endpoint answers, or if answers are incomplete; the next tick
    resumes where this one stopped.
    """
    with store.read() as connection:
        trail = remembered(connection)
    taken: list[Event] = []
    steps = 0
    for step in watcher.poll(trail):
        steps += 1
        if isinstance(step, Confirmed):
            time = step.block_time if window_time is None else min(step.block_time, window_time())
            mine = _of_pool(step.events, context.pool)
            mine += _missing_roots(store, context, watcher, mine, step.block.number)
        with store.begin() as connection:
            lock(connection, CHAIN_LOCK)
            if isinstance(step, Confirmed):
                rows = _take(connection, mine)
                others = [
                    (e.block, e.name, e.args()) for e in step.events if e.name in chain.STATE_EVENTS
                ]
                chain.fold(connection, others, step.block.number)
                chain.add_step(connection, step.block.number, step.block.hash)
                if step.block.number >= watcher.top:
                    meta.put_once(connection, meta.CHAIN_READ, "1")
                meta.put(connection, CHAIN_BLOCK, str(step.block.number))
                meta.put(connection, CHAIN_TIME, str(time))
                taken += mine
                cursor = step.block
            else:
                cursor, rows = _go_back(connection, watcher, step.block)
            chain.set_cursor(connection, CURSOR, cursor.number, cursor.hash)
            derive(connection, context, rows, now())
            meta.put(connection, meta.CHAIN_SEEN_AT, str(int(now())))
        if cursor != step.block:
            break  # rolled back further: read again from there
    taken += _check_receipts(store, context, watcher, now)
    if not steps:
        _note_seen(store, now())
    return taken


def _of_pool(events: Iterable[Event], pool: int) -> list[Event]:
    return [event for event in events if getattr(event, "pool", None) == pool]


def _take(connection: Connection, events: Sequence[Event]) -> list[EventRow]:
    rows = [
        chain.event_row(
            block_hash=event.block_hash,
            log_index=event.log_index,
            block=event.block,
            block_time=event.block_time,
            tx_hash=event.tx_hash,
            name=event.name,
            args=event.args(),
        )
        for event in events
    ]
    chain.add_events(connection, rows)
    return rows


def _go_back(
    connection: Connection, watcher: Watcher, block: BlockRef
) -> tuple[BlockRef, list[EventRow]]:
    """Forgets everything above `block`, or all events if the rollback is too deep to undo."""
    known = chain.cursor(connection, CURSOR)
    too_far = block == watcher.start or (
        known is not None and known[0] - block.number > chain.UNDO_BLOCKS
    )
    target = watcher.start if too_far else block
    rows = chain.forget_all(connection) if too_far else chain.retract(connection, block.number + 1)
    if too_far:
        meta.drop(connection, meta.CHAIN_READ)
    forget_unsent(connection, target.number)
    checks.go_back(connection, target.number)
    on_commit(
        connection, log.warning, "the chain went back to block %d; %d events are gone",
        target.number, len(rows),
    )  # fmt: skip
    return target, rows


def _missing_roots(
    store: Store, context: PoolContext, watcher: Watcher, found: Sequence[Event], until: int
) -> list[Event]:
    """Finds gaps in the pool's work roots, which are numbered consecutively. If one is missing, the
    blocks since the last known root are read again from another endpoint.

    Raises UnavailableError if the gap remains; nothing is processed until it is closed.
    """
    numbers = [event.seq for event in found if isinstance(event, RootPosted)]
    if not numbers:
        return []
    with store.read() as connection:
        last, block = chain.newest_root(connection)
    wanted = set(range(last + 1, max(numbers) + 1)) - set(numbers)
    if not wanted:
        return []
    why = f"work roots {sorted(wanted)[:5]} of pool {context.pool} are missing from its logs"
    log.error("%s; blocks %d to %d are read again", why, block, until)
    count_gap(store)
    watcher.distrust(why)
    here = {(event.block_hash, event.log_index) for event in found}
    again = _of_pool(watcher.read_again(max(block, watcher.start.number + 1), until), context.pool)
    if wanted - {event.seq for event in again if isinstance(event, RootPosted)}:
        raise UnavailableError(f"{why}, and no endpoint shows them")
    return [event for event in again if (event.block_hash, event.log_index) not in here]


def _check_receipts(
    store: Store, context: PoolContext, watcher: Watcher, now: Callable[[], float]
) -> list[Event]:
    """Checks that each confirmed transaction of ours has an event in the pool. Missing events are
    read again from another endpoint."""
    with store.read() as connection:
        cursor = chain.cursor(connection, CURSOR)
        checked = int(meta.get(connection, RECEIPTS_CHECKED) or 0)
        mined = store_intents.mined_between(connection, checked, cursor[0] if cursor else 0)
        missing = [row for row in mined if not chain.has_transaction(connection, row.tx_hash or "")]
    taken: list[Event] = []
    for row in missing:
        block = watcher.block_of(Digest(row.tx_hash or ""))
        if block is None or cursor is None or block > cursor[0]:
            continue  # a reorganization removed or moved it
        why = f"the events of our own transaction {row.tx_hash} are missing"
        log.error("%s; block %s is read again", why, block)
        count_gap(store)
        taken += (again := read_again(store, context, watcher, (block, block), why, now))
        if all(event.tx_hash != row.tx_hash for event in again):
            raise UnavailableError(f"{why}, and no endpoint shows them")
    # A transaction may be recorded after one from a later block.
    until = max((row.block or 0 for row in mined), default=0) - LATE_BLOCKS
    if until > checked:
        with store.begin() as connection:
            meta.put(connection, RECEIPTS_CHECKED, str(until))
    return taken


def read_again(
    store: Store,
    context: PoolContext,
    watcher: Watcher,
    blocks: tuple[int, int],
    why: str,
    now: Callable[[], float],
) -> list[Event]:
    """Reads the pool's events of `blocks` (first, last) again from another endpoint, because of
    `why`, and stores them. Returns those that were not known. Raises UnavailableError."""
    watcher.distrust(why)
    found = _of_pool(watcher.read_again(*blocks), context.pool)
    with store.begin() as connection:
        lock(connection, CHAIN_LOCK)
        new = [
            event
            for event in found
            if not chain.has_event(connection, event.block_hash, event.log_index)
        ]
        derive(connection, context, _take(connection, found), now())
    return new


def count_gap(store: Store) -> None:
    """Counts a gap found in the endpoints' answers (a metric with an alarm)."""
    with store.begin() as connection:
        known = int(meta.get(connection, meta.CHAIN_GAPS) or 0)
        meta.put(connection, meta.CHAIN_GAPS, str(known + 1))


def remembered(connection: Connection) -> list[BlockRef]:
    """Returns the last blocks that were read, ascending; the cursor is last."""
    cursor = chain.cursor(connection, CURSOR)
    if cursor is None:
        return []
    steps = [BlockRef(*step) for step in chain.steps(connection) if step[0] < cursor[0]]
    return [*steps, BlockRef(*cursor)]


def _note_seen(store: Store, now: float) -> None:
    with store.read() as connection:
        seen = meta.get(connection, meta.CHAIN_SEEN_AT)
    if seen is None or now - int(seen) >= SEEN_SECONDS:
        with store.begin() as connection:
            meta.put(connection, meta.CHAIN_SEEN_AT, str(int(now)))
            meta.put_once(connection, meta.CHAIN_READ, "1")


def derive(
    connection: Connection, context: PoolContext, events: Sequence[EventRow], now: float
) -> None:
    """Recomputes the columns of every subject that `events` (added or retracted) refer to.

    Submissions are written before rows of nodes are locked, as verdicts do, and several nodes' rows
    are locked in order, so that no writer of the same rows waits for another in a circle.
    """
    of_nodes: list[tuple[str, dict[str, Any]]] = []
    for event in events:
        args = event.arguments()
        if event.name == "RootPosted":
            derive_root(connection, Digest(args["root"]))
        elif event.name in ("RewardRootPosted", "RewardRootDisabled"):
            for epoch in range(int(args["epoch"]), int(args.get("last", args["epoch"])) + 1):
                derive_reward_root(connection, epoch)
        elif event.name in (*MEMBERSHIP_EVENTS, *SLASH_EVENTS):
            of_nodes.append((event.name, args))
    if not of_nodes:
        return
    lock(connection, "leases")  # issuing leases writes rows of several nodes
    touched = nodes.lock_rows(connection, {Address(args["node"]) for _, args in of_nodes})
    held = leases.open_among(connection, touched).values()
    leases.lock_rows(connection, [lease.digest for some in held for lease in some])
    for name, args in of_nodes:
        if name in SLASH_EVENTS:
            derive_slash(connection, context, Digest(args["leaf"]), now)
        derive_node(connection, context, Address(args["node"]), now)


def derive_root(connection: Connection, root: Digest) -> None:
    """Derives `roots.chain_seq`, `epoch`, `posted_at` and `block` from the first RootPosted of this
    root.

    A root that a node posted itself (Work.postLeaf: one leaf, no leaves object, the leaf is the
    root) gets a row if its submission is ours and has no root yet. Otherwise it is ignored, so that
    no submission is paid twice.
    """
    first = _first(connection, "RootPosted", root)
    args = {} if first is None else first.arguments()
    if first is None:
        roots.drop_leaf(connection, root)
    elif args["leaves_object"] == ZERO_DIGEST and args["count"] == 1:
        submission = submissions.get(connection, root)
        if submission is not None and not submission.shadow:
            roots.add(connection, root, ZERO_DIGEST, [root], now=float(first.block_time))
    roots.set_posted(connection, root, first)


def derive_reward_root(connection: Connection, epoch: int) -> None:
    """Derives the `reward_roots` row of an epoch from its newest RewardRootPosted.

    A root that the arbiter disabled loses its row, so that the next settlement builds on the
    previous one. A root whose posting was retracted waits for its transaction again.
    """
    known = rewards.root_of(connection, epoch)
    posted = chain.events(connection, "RewardRootPosted", subject=epoch)
    if not posted:
        if known is not None:
            rewards.put_root(connection, replace(known, claimable_at=None))
        return
    newest = posted[-1]
    args = newest.arguments()
    disabled = any(
        _epoch(event) <= epoch <= int(event.arguments().get("last", _epoch(event)))
        and (event.block, event.log_index) > (newest.block, newest.log_index)
        for event in chain.events(connection, "RewardRootDisabled")
    )
    if disabled:
        if known is not None and known.root == args["root"]:
            rewards.drop_root(connection, epoch)
        return
    row = RewardRootRow(
        epoch=epoch,
        root=Digest(args["root"]),
        cumulative_total=str(args["cumulative_total"]),
        object=Digest(args["object"]),
        created_at=newest.block_time if known is None else known.created_at,
        claimable_at=args["claimable_at"],
    )
    rewards.put_root(connection, row)


def _epoch(event: EventRow) -> int:
    return int(event.arguments()["epoch"])


def derive_slash(connection: Connection, context: PoolContext, leaf: Digest, now: float) -> None:
    """Derives the `slashes` row of submission `leaf` from its proposal's events, then updates the
    credits.

    A proposal by another validator gets a row if the submission is ours.
    """
    proposed = _first(connection, "SlashProposed", leaf)
    row = slashes.get(connection, leaf)
    if proposed is None:
        if row is not None and row.propose_tx is not None:  # the proposal was retracted
            about = fields(
                kind="slash", status="queued", submission=leaf, node=row.node,
                reason=Reason(row.reason).name,
            )  # fmt: skip
            on_commit(
                connection, log.warning, "the proposal of the slash for %s was retracted", leaf,
                extra=about,
            )  # fmt: skip
            gone = dict.fromkeys(("executable_at", "propose_tx", "execute_tx"))
            slashes.change(connection, leaf, status="queued", **gone)
            refresh_credits(connection, row.node)
        return
    args = proposed.arguments()
    node, reason = Address(args["node"]), int(reason_of(args["reason"]) or Reason.NONE)
    if row is None:
        submission = submissions.get(connection, leaf)
        if submission is None:
            on_commit(
                connection, log.warning,
                "a slash was proposed for %s, which this store does not know", leaf,
            )  # fmt: skip
            return
        author = submission.validator or ""
        slashes.add(
            connection,
            SlashRow(leaf, node, author, args["evidence"], reason, "0", "proposed", created_at=now),
        )
    executed = _first(connection, "SlashExecuted", leaf)
    cancelled = _first(connection, "SlashCancelled", leaf)
    status = "executed" if executed else "cancelled" if cancelled else "proposed"
    if row is None or row.status != status:
        about = fields(
            kind="slash", status=status, submission=leaf, node=node, reason=Reason(reason).name
        )
        on_commit(
            connection, log.warning, "the slash of %s for submission %s is %s",
            node, leaf, status, extra=about,
        )  # fmt: skip
    slashes.change(
        connection,
        leaf,
        status=status,
        evidence=args["evidence"],
        reason=reason,
        amount=str(executed.arguments()["amount"] if executed else args["amount"]),
        executable_at=args["executable_at"],
        propose_tx=proposed.tx_hash,
        execute_tx=executed.tx_hash if executed else None,
    )
    refresh_credits(connection, node)


def _first(connection: Connection, name: str, subject: Digest) -> EventRow | None:
    return next(iter(chain.events(connection, name, subject=subject)), None)
