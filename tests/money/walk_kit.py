"""What tests of money on a real chain ask of it: parties, rows, settlements and their rebuild."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial

import sqlalchemy as sa
from chain_kit import World
from money_kit import key

from prime_chain.history import read_events
from prime_chain.rewards import Rebuilt, history_of, rebuild
from prime_core.errors import UnavailableError
from prime_core.ids import Digest
from prime_core.settlement import Settlement, load_settlement
from prime_core.storage.base import digest_key
from prime_orchestrator.context import read_object
from prime_orchestrator.manager import revisions
from prime_orchestrator.store import leases, rewards, schema
from prime_orchestrator.store.submissions import SubmissionRow

HONEST, LIAR = key(10), key(11)
OWNER, OTHER = key(12), key(13)


def one(world: World, table: sa.Table) -> sa.RowMapping:
    with world.mgr.store.read() as connection:
        return connection.execute(sa.select(table)).mappings().one()


def amounts(world: World) -> dict[str, str]:
    with world.mgr.store.read() as connection:
        rows = connection.execute(
            sa.select(schema.credits.c.submission_digest, schema.credits.c.status)
        ).all()
    return {digest: status for digest, status in rows}  # noqa: C416


def post_own_leaf(world: World, row: SubmissionRow) -> None:
    """The node roots its own submission, as the contract lets it an epoch after the receipt."""
    with world.mgr.store.read() as connection:
        lease = leases.get(connection, row.lease_digest)
    assert lease is not None
    promise, claim, receipt = lease.signed(), row.signed(), row.receipt_answer()
    call = world.contracts.work.post_leaf(
        promise.lease,
        promise.signature,
        claim.submission,
        claim.signature,
        receipt.receipt,
        receipt.signature,
    )
    world.send(OWNER, call)


def until(world: World, holds: Callable[[], bool]) -> None:
    """Ticks until `holds`; an endpoint that is not back yet is asked again."""
    deadline = time.monotonic() + 90
    while not holds():
        assert time.monotonic() < deadline
        with contextlib.suppress(UnavailableError):
            world.ticks(1)
        world.mgr.now.time += 1  # as the block that each tick mines moves the chain's clock
        time.sleep(0.05)


class Published:
    """The object store as anyone reads it."""

    def __init__(self, world: World) -> None:
        self._objects = world.mgr.objects

    def get_object(self, digest: Digest, limit: int) -> bytes:
        return self._objects.get(digest_key(digest), limit)


def rebuild_root(world: World, epoch: int) -> Rebuilt:
    events = read_events(world.client, world.deployment)
    runs = history_of(events, 1, partial(run_bytes, world))
    return rebuild(events, world.deployment, 1, runs, Published(world), epoch)


def run_bytes(world: World, digest: Digest) -> bytes:
    """A definition as the orchestrator serves it."""
    with world.mgr.store.read() as connection:
        return revisions.history(connection, world.mgr.context).of(digest).raw()


def settled(world: World) -> Settlement:
    with world.mgr.store.read() as connection:
        root = rewards.newest_root(connection, confirmed=True)
    assert root is not None
    return load_settlement(root.object, partial(read_object, world.mgr.objects))
