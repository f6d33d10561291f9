"""The worker's loop with an agent that allows several leases at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from node_world import NODE, run_definition

from prime_core.errors import FatalError, UnavailableError
from prime_core.ids import Digest
from prime_core.run import RunDefinition
from prime_core.signing import Domain
from prime_node.bridge_messages import Abandon, HandIn, HandInAnswer, LeaseOffer, LeaseWish
from prime_node.worker.loop import StopFlag, work
from prime_node.worker.rollout_builder import Built, Job
from prime_verify.calibrate import synthetic_lease

DOMAIN = Domain(chain_id=31337, contract=NODE.address)


class Agent:
    """Offers synthetic leases, `slots` at once, and notes what the worker sends."""

    def __init__(self, run: RunDefinition, slots: int, leases: int) -> None:
        self._run, self._slots, self._left = run, slots, leases
        self.holds: list[tuple[Digest, ...]] = []
        self.submitted: list[Digest] = []
        self.abandoned: list[tuple[Digest, str]] = []

    def lease(self, wish: LeaseWish) -> LeaseOffer:
        self.holds.append(wish.holds)
        if not self._left:
            return LeaseOffer(lease=None, slots=self._slots)
        self._left -= 1
        made = synthetic_lease(self._run, self._left, policy_version=0)
        return LeaseOffer(lease=made.signed, domain=DOMAIN, slots=self._slots)

    def for_lease(self, digest: Digest) -> None:
        """It has no gateway."""

    def send_file(self, path: Path) -> None:
        assert path.exists()

    def submit(self, body: HandIn) -> HandInAnswer:
        self.submitted.append(body.lease_digest)
        return HandInAnswer(submission_digest=body.lease_digest, receipt=None)

    def abandon(self, body: Abandon) -> None:
        self.abandoned.append((body.lease_digest, body.reason))


class Builder:
    """Makes empty files. `during` runs in each job's thread with how many jobs go on."""

    def __init__(self, folder: Path, during: Callable[[Builder, int], None]) -> None:
        self._folder, self._during = folder, during
        self.changed = threading.Condition()
        self.going, self.most, self.room = 0, 0, True
        self.stopped = False
        self.looked = 0
        """How often the loop has looked whether it may ask for a lease."""

    def announce(self, bridge: Any) -> None:
        """It has no class."""

    def start(self) -> None:
        self.stopped = False

    def stop(self) -> None:
        with self.changed:
            self.stopped = True
            self.changed.notify_all()

    def has_room(self) -> bool:
        return self.room

    def wait_for(self, condition: Callable[[], bool], seconds: float) -> bool:
        def look() -> bool:
            self.looked += 1
            self.changed.notify_all()
            return condition()

        with self.changed:
            return self.changed.wait_for(look, seconds)

    def nudge(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def build(self, job: Job) -> Built:
        with self.changed:
            self.going += 1
            self.most = max(self.most, self.going)
            self.changed.notify_all()
        try:
            self._during(self, self.going)
        finally:
            with self.changed:
                self.going -= 1
        path = self._folder / job.lease_digest[2:]
        path.write_bytes(b"")
        return Built(path, 1, 1.0)


def until_going(count: int) -> Callable[[Builder, int], None]:
    def during(builder: Builder, going: int) -> None:
        with builder.changed:
            assert builder.changed.wait_for(lambda: builder.most >= count or builder.stopped, 60)
        if builder.stopped:
            raise UnavailableError("the engine was stopped")

    return during


def stop_after(agent: Agent, builder: Builder, stop: StopFlag, done: Callable[[], bool]) -> Any:
    def watch() -> None:
        with builder.changed:
            assert builder.changed.wait_for(done, 60)
        stop.set()
        builder.nudge()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


@pytest.fixture
def run() -> RunDefinition:
    return run_definition()


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_it_holds_as_many_leases_as_the_agent_allows(
    run: RunDefinition, tmp_path: Path, slots: int
) -> None:
    agent, stop = Agent(run, slots, leases=5), StopFlag()
    builder = Builder(tmp_path, until_going(slots))
    watcher = stop_after(agent, builder, stop, lambda: len(agent.submitted) == 5)
    work(agent, builder, stop)  # type: ignore[arg-type]
    watcher.join()
    assert builder.most == slots
    assert len(set(agent.submitted)) == 5
    assert max(map(len, agent.holds)) < max(2, slots), "it asks only below its slots"
    assert (agent.holds == [()] * len(agent.holds)) == (slots == 1), "an old agent hears no holds"
    assert not agent.abandoned


def test_without_room_in_the_batch_it_asks_for_no_second_lease(
    run: RunDefinition, tmp_path: Path
) -> None:
    def until_looked(builder: Builder, going: int) -> None:
        """Until the loop has looked twice: after a first look that finds room it would start
        another job before the second."""
        for _ in range(2):
            before = builder.looked
            builder.nudge()
            with builder.changed:
                assert builder.changed.wait_for(lambda: builder.looked > before, 60)  # noqa: B023

    agent, stop = Agent(run, 4, leases=3), StopFlag()
    builder = Builder(tmp_path, until_looked)
    builder.room = False
    watcher = stop_after(agent, builder, stop, lambda: len(agent.submitted) == 3)
    work(agent, builder, stop)  # type: ignore[arg-type]
    watcher.join()
    assert builder.most == 1


def test_a_stopped_worker_gives_all_its_leases_back(run: RunDefinition, tmp_path: Path) -> None:
    agent, stop = Agent(run, 2, leases=2), StopFlag()
    builder = Builder(tmp_path, until_going(3))
    watcher = stop_after(agent, builder, stop, lambda: builder.going == 2)
    work(agent, builder, stop)  # type: ignore[arg-type]
    watcher.join()
    assert not agent.submitted
    assert [reason for _, reason in agent.abandoned] == ["the worker was asked to stop"] * 2
    assert len({digest for digest, _ in agent.abandoned}) == 2


def test_a_job_that_the_worker_cannot_handle_ends_it_and_its_other_leases(
    run: RunDefinition, tmp_path: Path
) -> None:
    def during(builder: Builder, going: int) -> None:
        if going == 1:
            until_going(3)(builder, going)
        raise FatalError("states and logits are not of the same rows")

    agent, stop = Agent(run, 2, leases=2), StopFlag()
    with pytest.raises(FatalError, match="not of the same rows"):
        work(agent, Builder(tmp_path, during), stop)  # type: ignore[arg-type]
    assert [reason for _, reason in agent.abandoned] == ["the engine was stopped"]
