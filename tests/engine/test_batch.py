"""Rows of several callers in one batch: each is what it would have been alone."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from prime_core.errors import FatalError, UnavailableError
from prime_core.ids import Digest
from prime_engine.base import Generation, GenerationRequest
from prime_engine.batch import finish
from prime_engine.plain import PlainEngine, _Running
from prime_engine.shared import EngineThread
from prime_verify.engines import load_engine

MODEL = Path(__file__).parents[2] / "devnet" / "model"
POLICY = Digest("0x" + "11" * 32)


def requests(count: int, first: int = 0, most: int = 24) -> list[GenerationRequest]:
    """Rows of different prompts, lengths and noise."""
    return [
        GenerationRequest(tuple(range(5, 9 + n % 7)), 3 + (5 * n) % most, 7 * n - 50)
        for n in range(first, first + count)
    ]


def engine(batch_rows: int = 64) -> PlainEngine:
    torch.set_num_threads(1)
    made: Any = load_engine(MODEL, batch_rows=batch_rows)
    return made


def same(found: list[Generation], expected: list[Generation]) -> None:
    assert [one.output_tokens for one in found] == [one.output_tokens for one in expected]
    assert [one.finish_reason for one in found] == [one.finish_reason for one in expected]
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-5)
        assert a.states.shape == b.states.shape


class Sink:
    """Records the places of each row, and which rows ended."""

    def __init__(self) -> None:
        self.places: dict[int, list[int]] = {}
        self.ended: list[int] = []

    def step(self, rows: Any, places: Any, tokens: Any, states: Any) -> None:
        assert len(rows) == len(places) == len(tokens) == len(states)
        for row, place in zip(rows, places, strict=True):
            self.places.setdefault(row, []).append(place)

    def end(self, rows: Any) -> None:
        self.ended += rows


@pytest.mark.parametrize("batch_rows", [1, 3, 5])
def test_rows_that_join_later_are_what_they_are_alone(batch_rows: int) -> None:
    asked = requests(13)
    same(engine(batch_rows).generate(asked, 0.9), engine().generate(asked, 0.9))


def test_a_second_callers_rows_join_while_the_firsts_go_on() -> None:
    """The first caller's row 0 is long (52 tokens), its others are short."""
    plain, sink = engine(8), Sink()
    asked = [GenerationRequest((5, 6), 60, seed) for seed in (8, 0, 4, 14, 18, 24, 28, 38)]
    first = plain.add(asked, 3.0)
    for _ in range(4):
        plain.step()
    later = requests(3, first=20)
    second = plain.add(later, 0.5, sink)
    done = finish(plain, second)
    assert not first.done, "a long row holds up no other caller"
    alone = engine().generate(later, 0.5)
    assert [one.output_tokens for one in done] == [one.output_tokens for one in alone]
    assert {n: len(one.output_tokens) for n, one in enumerate(done)} == {
        n: len(places) for n, places in sink.places.items()
    }
    assert all(places == list(range(len(places))) for places in sink.places.values())
    assert sorted(sink.ended) == [0, 1, 2]
    same(finish(plain, first), engine().generate(asked, 3.0))


def test_cancelled_rows_leave_the_others_alone() -> None:
    plain = engine(4)
    kept, dropped = plain.add(requests(3), 0.9), plain.add(requests(6, first=30), 0.9)
    plain.step()
    plain.cancel(dropped)
    same(finish(plain, kept), engine().generate(requests(3), 0.9))
    plain.step()  # nothing is left to do
    same(plain.generate(requests(2), 0.9), engine().generate(requests(2), 0.9))


@pytest.fixture
def thread() -> Iterator[EngineThread]:
    running = EngineThread(lambda version, digest: engine(8))
    yield running
    running.stop()


def test_threads_share_the_batch_and_get_their_own_rows(thread: EngineThread) -> None:
    def work(number: int) -> list[Generation]:
        with thread.using(0, POLICY) as shared:
            return shared.generate(requests(6, first=6 * number), 0.9)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(work, range(4)))
    for number, rows in enumerate(found):
        same(rows, engine().generate(requests(6, first=6 * number), 0.9))


def test_a_policy_is_replaced_when_its_last_user_has_left() -> None:
    loaded: list[int] = []
    order: list[str] = []

    def load(version: int, digest: Digest) -> PlainEngine:
        if version not in loaded:
            loaded.append(version)
        return engine()

    thread, inside, leave = EngineThread(load), threading.Event(), threading.Event()

    def first() -> None:
        with thread.using(0, POLICY):
            inside.set()
            assert leave.wait(60)
            order.append("left")

    def second() -> None:
        with thread.using(1, POLICY):
            order.append("next policy")

    def third() -> None:
        with thread.using(1, POLICY) as shared:
            order.append("again")
            assert shared.generate([], 1.0) == []

    threads = [threading.Thread(target=first)]
    threads[0].start()
    assert inside.wait(60)
    assert not thread.has_room(), "a user has not added its rows"
    threads += [threading.Thread(target=second), threading.Thread(target=third)]
    for one in threads[1:]:
        one.start()
    assert thread.wait_for(lambda: len(thread._waiting) == 2, 60)
    assert loaded == [0]
    leave.set()
    for one in threads:
        one.join()
    assert loaded == [0, 1]
    assert order[0] == "left"
    assert sorted(order[1:]) == ["again", "next policy"]
    thread.stop()


def test_a_step_that_fails_ends_its_callers_and_no_later_one(
    thread: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    with thread.using(0, POLICY) as shared:
        with monkeypatch.context() as patch:

            def fails() -> None:
                raise UnavailableError("the card is gone")

            patch.setattr(shared.engine, "step", fails)
            with pytest.raises(UnavailableError, match="the card is gone"):
                shared.generate(requests(2), 0.9)
        assert thread.has_room()
        same(shared.generate(requests(2), 0.9), engine().generate(requests(2), 0.9))


def test_a_step_and_a_cancel_without_memory_leave_an_empty_batch(
    thread: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = []

    def work(number: int) -> Any:
        with thread.using(0, POLICY) as shared:
            with pytest.raises(MemoryError) as raised:
                shared.generate([GenerationRequest((5, 6), 60, 8 + number)], 0.9)
            return shared, str(raised.value)

    def select(running: object, kept: list[int]) -> None:
        refused.append(len(kept))
        raise torch.OutOfMemoryError("CUDA out of memory")

    step = PlainEngine.step

    def fails(plain: PlainEngine) -> None:
        if len(plain._queue) == 2:  # both callers are there
            step(plain)
            raise MemoryError("the card is full")

    with monkeypatch.context() as patch:
        patch.setattr(PlainEngine, "step", fails)
        patch.setattr(_Running, "select", select)
        with ThreadPoolExecutor(2) as pool:
            (shared, one), (_, other) = pool.map(work, range(2))
    assert (one, other, refused) == ("the card is full", "the card is full", [1])
    assert thread._thread is not None
    assert thread._thread.is_alive()
    assert shared.engine._running is None
    with thread.using(0, POLICY) as again:
        same(again.generate(requests(2), 0.9), engine().generate(requests(2), 0.9))


def test_callers_of_an_operation_that_never_returns_are_ended(
    thread: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when another card's process is gone: a collective with it waits forever."""
    stuck, let_go, raised = threading.Event(), threading.Event(), []

    def hangs() -> None:
        stuck.set()
        assert let_go.wait(60)

    def work(version: int) -> None:
        try:
            with thread.using(version, POLICY) as shared:
                monkeypatch.setattr(shared.engine, "step", hangs)
                shared.generate(requests(2), 0.9)
        except FatalError as error:
            raised.append(str(error))

    threads = [threading.Thread(target=work, args=(version,)) for version in (0, 1)]
    for one in threads:
        one.start()
    assert stuck.wait(60)
    assert thread.wait_for(lambda: bool(thread._waiting), 60)
    thread.fail(FatalError("rank 1 of the engine ended"))
    for one in threads:
        one.join()
    assert raised == ["rank 1 of the engine ended"] * 2
    with pytest.raises(FatalError, match="rank 1"):
        thread.run(lambda: None)
    let_go.set()
    thread.start()
    assert thread.run(lambda: "again") == "again"


def test_the_time_of_a_swap_and_the_time_without_work_are_counted_apart() -> None:
    now, asked = [0.0], queue.SimpleQueue[float]()

    def clock() -> float:
        if threading.current_thread().name == "engine":
            asked.put(now[0])
        return now[0]

    def load(version: int, digest: Digest) -> Any:
        now[0] += 3.0 + version
        return SimpleNamespace()

    thread = EngineThread(load, clock=clock)
    try:
        assert thread.idle_seconds() == 0.0
        with thread.using(0, POLICY):
            assert thread.swap_seconds == 3.0
        for _ in range(5):  # idle from, until; load from, until; idle from
            asked.get(timeout=60)
        now[0] += 5.0
        assert thread.idle_seconds() == 5.0
        with thread.using(0, POLICY):
            assert thread.swap_seconds == 3.0, "the policy was loaded before"
        with thread.using(1, POLICY):
            assert thread.swap_seconds == 4.0
        assert thread.idle_seconds() == 5.0, "the engine loaded meanwhile"
    finally:
        thread.stop()


def test_stopping_ends_generation_and_waiting_and_it_may_start_again(thread: EngineThread) -> None:
    endless = [GenerationRequest((5,), 100, None)] * 2
    raised: list[BaseException] = []

    def work(version: int) -> None:
        try:
            with thread.using(version, POLICY) as shared:
                while True:
                    shared.generate(endless, 1.0)
        except UnavailableError as error:
            raised.append(error)

    threads = [threading.Thread(target=work, args=(version,)) for version in (0, 1)]
    for one in threads:
        one.start()
    assert thread.wait_for(lambda: bool(thread._waiting and thread._rows), 60)
    thread.stop()
    for one in threads:
        one.join()
    assert [str(error) for error in raised] == ["the engine was stopped"] * 2
    thread.start()
    with thread.using(0, POLICY) as shared:
        same(shared.generate(requests(1), 0.9), engine().generate(requests(1), 0.9))
