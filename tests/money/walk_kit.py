"""What tests of money on a real chain ask of it: parties, rows, settlements and their rebuild."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import sqlalchemy as sa
from chain_kit import World
from money_kit import key

from orchestrator.settlement import newest_settlement
from orchestrator.store import schema
from protocol.chain.history import read_events
from protocol.core.errors import UnavailableError
from protocol.core.ids import Digest
from protocol.core.settlement import Settlement
from protocol.storage.base import digest_key
from protocol.verification.rewards import Rebuilt, rebuild

HONEST, LIAR = key(10), key(11)
OWNER, OTHER = key(12), key(13)


def one(world: World, table: sa.Table) -> sa.RowMapping:
    with world.shop.store.read() as connection:
        return connection.execute(sa.select(table)).mappings().one()


def amounts(world: World) -> dict[str, str]:
    with world.shop.store.read() as connection:
        rows = connection.execute(
            sa.select(schema.credits.c.submission_digest, schema.credits.c.status)
        ).all()
    return {digest: status for digest, status in rows}  # noqa: C416


def until(world: World, holds: Callable[[], bool]) -> None:
    """Ticks until `holds`; an endpoint that is not back yet is asked again."""
    deadline = time.monotonic() + 90
    while not holds():
        assert time.monotonic() < deadline
        with contextlib.suppress(UnavailableError):
            world.ticks(1)
        world.shop.now.time += 1  # as the block that each tick mines moves the chain's clock
        time.sleep(0.05)


class Published:
    """The object store as anyone reads it."""

    def __init__(self, world: World) -> None:
        self._objects = world.shop.objects

    def get_object(self, digest: Digest, limit: int) -> bytes:
        return self._objects.get(digest_key(digest), limit)


def rebuild_root(world: World, epoch: int) -> Rebuilt:
    events = read_events(world.client, world.deployment)
    return rebuild(events, world.deployment, 1, world.shop.context.run, Published(world), epoch)


def settled(world: World) -> Settlement:
    with world.shop.store.read() as connection:
        found = newest_settlement(connection, world.shop.objects)
    assert found is not None
    return found
