"""An orchestrator that awaits nothing reads the chain's events seldom, and at once otherwise."""

from __future__ import annotations

from dataclasses import replace

from anvil_kit import needs_anvil
from chain_kit import World
from money_kit import RUN
from walk_kit import HONEST

from prime_orchestrator.manager.loops import BUSY_SECONDS, Pace
from prime_orchestrator.store import chain

pytestmark = needs_anvil


def test_events_are_read_every_idle_seconds_unless_a_transaction_or_event_is_expected(
    members: World,
) -> None:
    world, clock = members, members.mgr.now
    loops = replace(world.loops, pace=Pace(idle_seconds=12.0))

    def read() -> bool:
        """Runs a tick on a chain with a new block; whether the block was read."""
        world.anvil.mine()
        before = position()
        loops.chain_tick()
        return position() > before

    def position() -> int:
        with world.mgr.store.read() as connection:
            found = chain.cursor(connection, "chain")
        return 0 if found is None else found[0]

    assert read(), "nothing has been read yet"
    clock.time += BUSY_SECONDS  # events of the start no longer count as recent
    assert read()
    assert not read()
    clock.time += 11
    assert not read()
    clock.time += 1
    assert read()
    assert not read()

    world.mgr.judge(world.mgr.submit(HONEST))
    clock.time += min(RUN.root_seconds, 11)
    assert not read(), "nothing is awaited yet"
    clock.time += RUN.root_seconds
    loops.pace.read_at = clock.time
    loops.money_tick()  # decides to post a root
    assert read(), "the root's transaction is awaited"
    clock.time += 1
    assert read(), "its event is recent, or it is still awaited"
