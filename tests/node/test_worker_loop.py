"""The worker's loop with an agent that allows several leases at once."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from node_world import NODE, run_definition

from prime_core.errors import FatalError, UnavailableError, UserError
from prime_core.ids import Digest
from prime_core.run import RunDefinition
from prime_core.signing import Domain
from prime_engine import shared
from prime_engine.base import GenerationRequest
from prime_engine.batch import RowSet
from prime_node.bridge_messages import (
    Abandon,
    HandIn,
    HandInAnswer,
    LeaseOffer,
    LeaseWish,
    Pauses,
)
from prime_node.worker import rollout_builder
from prime_node.worker.loop import StopFlag, work
from prime_node.worker.rollout_builder import Built, Job, Options, RolloutBuilder
from prime_verify.calibrate import synthetic_lease
from prime_verify.engines import FolderEngines

DOMAIN = Domain(chain_id=31337, contract=NODE.address)


class Agent:
    """Offers synthetic leases, `slots` at once, and notes what the worker sends."""

    def __init__(self, run: RunDefinition, slots: int, leases: int) -> None:
        self._run, self._slots, self._left = run, slots, leases
        self.holds: list[tuple[Digest, ...]] = []
        self.submitted: list[Digest] = []
        self.abandoned: list[tuple[Digest, str]] = []
        self.paused: list[Pauses] = []

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

    def pauses(self, body: Pauses) -> None:
        self.paused.append(body)
        raise UnavailableError("the agent does not answer")  # which ends nothing


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
        return Built(path, 1, 1.0, idle_seconds=0.25, swap_seconds=2.5)


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
    assert agent.paused == [Pauses(policy_version=0, swap_ms=2500, idle_ms=250)] * 5


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
    assert [reason for _, reason in agent.abandoned] == [
        "states and logits are not of the same rows", "the engine was stopped",
    ]  # fmt: skip


class OfRows:
    """An engine for `batch_rows` rows that has loaded nothing."""

    on_lost: Any = None

    def __init__(self, batch_rows: int) -> None:
        self.batch_rows = batch_rows
        self.closed = False

    def close(self) -> None:
        self.closed = True


class Short(RolloutBuilder):
    """Makes empty files on a machine with memory for `room` rows."""

    room = 0
    concurrent = False

    def make(self, job: Job, engine: Any) -> bytes:
        if engine.engine.batch_rows > self.room:
            raise MemoryError("DefaultCPUAllocator: can't allocate memory")
        return b""

    def count(self, content: bytes) -> int:
        return 1

    def announce(self, bridge: Any) -> None:
        """It has no class."""


@pytest.fixture
def short(
    run: RunDefinition, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Short, list[OfRows]]]:
    loaded: list[OfRows] = []

    def load(folder: Path, *, batch_rows: int, **_: Any) -> OfRows:
        assert all(one.closed for one in loaded), "two engines would be in memory"
        loaded.append(OfRows(batch_rows))
        return loaded[-1]

    monkeypatch.setattr(rollout_builder, "load_engine", load)
    policy = synthetic_lease(run, 0, policy_version=0).signed.lease.policy_digest
    monkeypatch.setattr(FolderEngines, "digest", lambda self, version: policy)
    builder = Short(run, Options(tmp_path, tmp_path, tmp_path))
    yield builder, loaded
    builder.stop()


def test_a_worker_short_of_memory_gives_the_lease_back_and_takes_fewer_rows(
    run: RunDefinition, short: tuple[Short, list[OfRows]]
) -> None:
    builder, loaded = short
    builder.room = 4
    agent, stop = Agent(run, 1, leases=4), StopFlag()

    def until_submitted(condition: Callable[[], bool], seconds: float) -> bool:
        if len(agent.submitted) == 2:
            stop.set()
        return RolloutBuilder.wait_for(builder, condition, seconds)

    builder.wait_for = until_submitted  # type: ignore[method-assign]
    work(agent, builder, stop, sleep=lambda _: None)  # type: ignore[arg-type]
    assert [one.batch_rows for one in loaded] == [64, 16, 4]
    assert len(agent.submitted) == 2
    assert [reason for _, reason in agent.abandoned] == [
        f"the engine ran out of memory with {rows} rows at once (DefaultCPUAllocator: can't "
        "allocate memory); the next try generates fewer"
        for rows in (64, 16)
    ]


def test_a_worker_without_memory_for_one_row_ends_in_one_sentence(
    run: RunDefinition, short: tuple[Short, list[OfRows]]
) -> None:
    builder, loaded = short
    agent = Agent(run, 1, leases=9)
    with pytest.raises(UserError, match=r"with 1 rows at once .* 4 times without a file\. A lower"):
        work(agent, builder, StopFlag(), sleep=lambda _: None)  # type: ignore[arg-type]
    assert [one.batch_rows for one in loaded] == [64, 16, 4, 1]
    assert len(agent.abandoned) == 4, "each lease is given back"


def test_a_file_says_how_long_the_engine_paused(
    run: RunDefinition, short: tuple[Short, list[OfRows]], monkeypatch: pytest.MonkeyPatch
) -> None:
    builder, _ = short
    builder.room = 64
    idle = iter((1.5, 4.0))
    monkeypatch.setattr(builder._thread, "idle_seconds", lambda: next(idle))
    monkeypatch.setattr(builder._thread, "_clock", itertools.count().__next__)
    for number, expected in enumerate((1.5, 2.5)):
        made = synthetic_lease(run, number, policy_version=0)
        built = builder.build(Job(made.signed, made.lease_digest))
        assert built.idle_seconds == expected
        assert built.swap_seconds > 0.0


class Waiting(Short):
    """Its engine waits for a rank that is gone."""

    def make(self, job: Job, engine: Any) -> bytes:
        engine.generate((), 1.0)
        return b""


def test_a_worker_whose_card_is_gone_gives_its_leases_back_and_ends_in_one_sentence(
    run: RunDefinition, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = FatalError("rank 1 of the engine ended while in use: status -9")
    ended = threading.Event()

    class Stuck(OfRows):
        def add(self, requests: Any, temperature: float, sink: Any) -> RowSet:
            return RowSet((GenerationRequest((5,), 1, 1),), temperature)

        def step(self) -> None:
            threading.Thread(target=self.on_lost, args=(lost,)).start()
            assert ended.wait(60)

    def load(folder: Path, *, batch_rows: int, on_lost: Any, **_: Any) -> OfRows:
        made = Stuck(batch_rows)
        made.on_lost = on_lost
        return made

    monkeypatch.setattr(rollout_builder, "load_engine", load)
    monkeypatch.setattr(shared, "STOP_SECONDS", 0.0)
    policy = synthetic_lease(run, 0, policy_version=0).signed.lease.policy_digest
    monkeypatch.setattr(FolderEngines, "digest", lambda self, version: policy)
    builder = Waiting(run, Options(tmp_path, tmp_path, tmp_path, engine="vllm"))
    agent = Agent(run, 1, leases=2)
    try:
        with pytest.raises(FatalError, match="rank 1 of the engine ended"):
            work(agent, builder, StopFlag())  # type: ignore[arg-type]
    finally:
        ended.set()
    assert [reason for _, reason in agent.abandoned] == [str(lost)]


def test_leases_of_one_batch_that_fail_together_count_once(
    run: RunDefinition, short: tuple[Short, list[OfRows]]
) -> None:
    builder, _ = short
    builder.room = 16
    both = threading.Barrier(2)
    make = builder.make

    def together(job: Job, engine: Any) -> bytes:
        if engine.engine.batch_rows > builder.room:
            both.wait(60)
        return make(job, engine)

    builder.make = together  # type: ignore[method-assign]
    jobs = [
        Job(made.signed, made.lease_digest)
        for made in (synthetic_lease(run, number, policy_version=0) for number in (0, 1))
    ]

    def build(job: Job) -> str:
        try:
            return builder.build(job).path.name
        except UnavailableError as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(build, jobs))
    assert all("with 64 rows" in one for one in found), found
    assert build(jobs[0]) == f"{jobs[0].lease_digest[2:]}.parquet"
