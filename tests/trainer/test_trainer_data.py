"""A sealed batch is held to every line; each test breaks one and names who broke it."""

from __future__ import annotations

import gc
import random
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import trainer_kit as kit
from hypothesis import given, settings
from hypothesis import strategies as st
from served import served_folder

from prime_core.batch import SignedBatch
from prime_core.errors import (
    MalformedError,
    PolicyError,
    PrimeError,
    UnavailableError,
    UntrustedError,
)
from prime_core.ids import ZERO_DIGEST, Digest, Step
from prime_core.rollout import COLUMNS, Rollout
from prime_core.transport.client import OrchestratorClient
from prime_core.waiting import StoppedError
from prime_trainer import feed
from prime_trainer.data import TrainingBatch, assemble, decode_message, encode_message
from prime_trainer.feed import Prefetcher, fetcher, insist
from prime_trainer.metrics import Stopwatch

RUN = kit.run_definition(groups=12)
STEP = 4


def rollouts(seed: int, version: int = STEP, groups: int = 2) -> list[Rollout]:
    return kit.rows(groups, RUN.samples_per_group, seed=seed, version=version)


def sealed(objects: kit.Objects, *files: list[Rollout]) -> SignedBatch:
    parts = files or (rollouts(1), rollouts(2, STEP - 2))
    entries = [
        kit.seal_file(objects, part, sorted({r.group for r in part}), STEP) for part in parts
    ]
    return kit.seal(entries, STEP, RUN)


def test_an_honest_batch_comes_whole_with_the_validators_rewards() -> None:
    objects = kit.Objects()
    batch = assemble(sealed(objects), STEP, kit.rules(RUN), objects.fetch)
    assert len(batch.groups) == 4
    assert len(set(batch.keys)) == 4
    expected = {(*r.prompt_tokens, r.sample): r for r in rollouts(1) + rollouts(2, STEP - 2)}
    for row in batch.rollouts:
        expected_row = expected.pop((*row.prompt_tokens, row.sample))
        # The file says 0.123 for every row (kit.file_of): the node's word counts for nothing.
        assert row.reward == pytest.approx(expected_row.reward, abs=1e-6)
        assert row.logprobs == expected_row.logprobs
        assert row.output_tokens == expected_row.output_tokens
    assert not expected


@pytest.mark.slow
def test_a_batch_in_memory_takes_few_bytes_a_token() -> None:
    """4 a prompt token, 8 a generated one: a long batch is tens of millions of them, twice."""
    run = RUN.model_copy(update={"max_output_tokens": 4096})
    part = kit.rows(2, run.samples_per_group, longest=4096, version=STEP)
    objects = kit.Objects()
    signed = kit.seal([kit.seal_file(objects, part, [0, 1], STEP)], STEP, run)
    tokens = sum(len(row.prompt_tokens) + len(row.output_tokens) for row in part)

    def held(make: Callable[[], object]) -> float:
        gc.collect()
        tracemalloc.start()
        try:
            batch = make()
            gc.collect()
            return tracemalloc.get_traced_memory()[0] / tokens if batch else 0.0
        finally:
            tracemalloc.stop()

    found = assemble(signed, STEP, kit.rules(run), objects.fetch)
    sent = encode_message(found)
    assert len(sent) < 9 * tokens
    assert held(lambda: assemble(signed, STEP, kit.rules(run), objects.fetch)) < 10
    assert held(lambda: decode_message(sent)) < 10
    assert decode_message(sent) == found


def test_only_the_groups_that_the_manifest_takes_are_trained() -> None:
    objects = kit.Objects()
    file = kit.seal_file(objects, rollouts(1), [1], STEP)
    batch = assemble(kit.seal([file], STEP, RUN), STEP, kit.rules(RUN), objects.fetch)
    assert {row.group for row in batch.rollouts} == {1}


def test_how_many_groups_of_its_files_teach_nothing_is_counted() -> None:
    objects = kit.Objects()
    part = [replace(r, reward=0.5) if r.group == 0 else r for r in rollouts(1, groups=3)]
    signed = kit.seal([kit.seal_file(objects, part, [1], STEP)], STEP, RUN)
    found = assemble(signed, STEP, kit.rules(RUN), objects.fetch)
    assert (len(found.groups), found.seen, found.alike) == (1, 3, 1)


def test_a_row_that_was_not_graded_makes_no_difference_in_its_group() -> None:
    objects = kit.Objects()
    part = [
        replace(r, reward=0.0, finish_reason="ungraded")
        if r.group == 0 and r.sample == 0
        else replace(r, reward=0.5)
        if r.group == 0
        else r
        for r in rollouts(1)
    ]

    def batch(groups: Sequence[int]) -> TrainingBatch:
        file = kit.seal_file(objects, part, groups, STEP)
        return assemble(kit.seal([file], STEP, RUN), STEP, kit.rules(RUN), objects.fetch)

    found = batch([1])
    assert (len(found.groups), found.seen, found.alike) == (1, 2, 1)
    with pytest.raises(UntrustedError, match="has equal rewards"):
        batch([0])


@pytest.mark.parametrize("reward", [-1e10, 1e300])
def test_a_reward_beyond_all_bounds_is_refused(reward: float) -> None:
    objects = kit.Objects()
    part = [replace(r, reward=reward) if r.sample == 0 else r for r in rollouts(1)]
    with pytest.raises(MalformedError, match="too large"):
        assemble(sealed(objects, part), STEP, kit.rules(RUN), objects.fetch)


def test_the_batch_does_not_depend_on_the_order_of_downloads() -> None:
    # An ancestor's ranks listed a live directory, unsorted.
    objects = kit.Objects()
    signed = sealed(objects)
    once = assemble(signed, STEP, kit.rules(RUN), objects.fetch)
    objects.by_digest = dict(reversed(objects.by_digest.items()))
    assert assemble(signed, STEP, kit.rules(RUN), objects.fetch) == once


Spoil = Callable[[kit.Objects], SignedBatch]


def _strangers_signature(objects: kit.Objects) -> SignedBatch:
    file = kit.seal_file(objects, rollouts(1), [0, 1], STEP)
    return kit.seal([file], STEP, RUN, signer=kit.STRANGER)


def _other_pool(objects: kit.Objects) -> SignedBatch:
    return kit.seal([kit.seal_file(objects, rollouts(1), [0, 1], STEP)], STEP, RUN, pool=8)


def _other_step(objects: kit.Objects) -> SignedBatch:
    return kit.seal([kit.seal_file(objects, rollouts(1), [0, 1], STEP)], STEP - 1, RUN)


def _other_run(objects: kit.Objects) -> SignedBatch:
    other = kit.run_definition(groups=5)
    return kit.seal([kit.seal_file(objects, rollouts(1), [0, 1], STEP)], STEP, other)


def _same_file_twice(objects: kit.Objects) -> SignedBatch:
    file = kit.seal_file(objects, rollouts(1), [0, 1], STEP)
    return kit.seal([file, file], STEP, RUN)


def _files_not_sorted(objects: kit.Objects) -> SignedBatch:
    files = [kit.seal_file(objects, rollouts(seed), [0, 1], STEP) for seed in (1, 2)]
    sorted_ = kit.seal(files, STEP, RUN).manifest
    manifest = sorted_.model_copy(update={"files": sorted_.files[::-1]})
    signature = kit.MANAGER.sign(manifest.statement(), kit.DOMAIN)
    return SignedBatch(manifest=manifest, signature=signature)


def _same_group_twice(objects: kit.Objects) -> SignedBatch:
    return kit.seal([kit.seal_file(objects, rollouts(1), [1, 1], STEP)], STEP, RUN)


def _group_that_is_not_there(objects: kit.Objects) -> SignedBatch:
    return kit.seal([kit.seal_file(objects, rollouts(1), [0, 9], STEP)], STEP, RUN)


def _file_spoiled_in_store(objects: kit.Objects) -> SignedBatch:
    file = kit.seal_file(objects, rollouts(1), [0, 1], STEP)
    objects.by_digest[file.sha256] = kit.file_of(rollouts(2))[: file.size].ljust(file.size, b"x")
    return kit.seal([file], STEP, RUN)


def _table_spoiled_in_store(objects: kit.Objects) -> SignedBatch:
    file = kit.seal_file(objects, rollouts(1), [0, 1], STEP)
    objects.by_digest[file.table] = objects.by_digest[file.table].replace(
        b"problem-0", b"problem-9"
    )
    return kit.seal([file], STEP, RUN)


def _table_of_another_file(objects: kit.Objects) -> SignedBatch:
    one = kit.seal_file(objects, rollouts(1), [0, 1], STEP)
    two = kit.seal_file(objects, rollouts(2), [0, 1], STEP)
    return kit.seal([one.model_copy(update={"table": two.table})], STEP, RUN)


def _schema_of_another_version(objects: kit.Objects) -> SignedBatch:
    with mock.patch.dict("prime_core.rollout.SCHEMAS", {"9": COLUMNS}):
        file = kit.seal_file(objects, rollouts(1), [0, 1], STEP, schema_version="9")
    return kit.seal([file], STEP, RUN)


def _row_missing(objects: kit.Objects) -> SignedBatch:
    return kit.seal([kit.seal_file(objects, rollouts(1)[:-1], [0, 1], STEP)], STEP, RUN)


def _mixed_prompts(objects: kit.Objects) -> SignedBatch:
    part = rollouts(1)
    part[1] = replace(part[1], prompt_tokens=(3, 3, 3))
    return kit.seal([kit.seal_file(objects, part, [0, 1], STEP)], STEP, RUN)


def _equal_rewards(objects: kit.Objects) -> SignedBatch:
    part = [replace(r, reward=0.5) if r.group == 0 else r for r in rollouts(1)]
    return kit.seal([kit.seal_file(objects, part, [0, 1], STEP)], STEP, RUN)


def _wrong_row_count(objects: kit.Objects) -> SignedBatch:
    return kit.seal([kit.seal_file(objects, rollouts(1), [0, 1], STEP)], STEP, RUN, rows=4)


def _unnamed_version(objects: kit.Objects) -> SignedBatch:
    file = kit.seal_file(objects, rollouts(1), [0, 1], STEP)
    return kit.seal([file], STEP, RUN, policy_versions=(STEP, STEP - 1))


def _version_of_rows_differs_from_files(objects: kit.Objects) -> SignedBatch:
    part = [replace(r, policy_version=STEP - 1) for r in rollouts(1)]
    file = kit.seal_file(objects, part, [0, 1], STEP)
    return kit.seal([file.model_copy(update={"policy_version": STEP})], STEP, RUN)


def _token_outside_vocabulary(objects: kit.Objects) -> SignedBatch:
    part = rollouts(1)
    part[0] = replace(part[0], output_tokens=(64, *part[0].output_tokens[1:]))
    return kit.seal([kit.seal_file(objects, part, [0, 1], STEP)], STEP, RUN)


def _output_beyond_the_runs_limit(objects: kit.Objects) -> SignedBatch:
    part = rollouts(1)
    part[0] = replace(part[0], output_tokens=(5,) * 41, logprobs=(-1.0,) * 41)
    return kit.seal([kit.seal_file(objects, part, [0, 1], STEP)], STEP, RUN)


def test_a_batch_of_more_groups_than_the_runs_is_refused_before_anything_is_fetched() -> None:
    objects = kit.Objects()
    small = kit.run_definition(groups=3)
    signed = kit.seal(
        [kit.seal_file(objects, rollouts(1, groups=4), [0, 1, 2, 3], STEP)], STEP, small
    )

    def fetch(*_: object) -> bytes:
        raise AssertionError("nothing is fetched")

    with pytest.raises(MalformedError, match="names 4 groups, and the run takes 3"):
        assemble(signed, STEP, kit.rules(small), fetch)


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (_strangers_signature, UntrustedError),
        (_other_pool, UntrustedError),
        (_other_step, UntrustedError),
        (_other_run, UntrustedError),
        (_same_file_twice, MalformedError),
        (_files_not_sorted, MalformedError),
        (_same_group_twice, MalformedError),
        (_group_that_is_not_there, UntrustedError),
        (_file_spoiled_in_store, UntrustedError),
        (_table_spoiled_in_store, UntrustedError),
        (_table_of_another_file, UntrustedError),
        (_schema_of_another_version, MalformedError),
        (_row_missing, UntrustedError),
        (_mixed_prompts, UntrustedError),
        (_equal_rewards, UntrustedError),
        (_wrong_row_count, UntrustedError),
        (_unnamed_version, UntrustedError),
        (_version_of_rows_differs_from_files, UntrustedError),
        (_token_outside_vocabulary, MalformedError),
        (_output_beyond_the_runs_limit, MalformedError),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_batch_with_one_broken_line_is_refused(spoil: Spoil, error: type[PrimeError]) -> None:
    objects = kit.Objects()
    with pytest.raises(error, match=rf"batch {STEP}\b|(file|row|group) .*0x[0-9a-f]{{64}}|table"):
        assemble(spoil(objects), STEP, kit.rules(RUN), objects.fetch)


@pytest.mark.parametrize(("version", "fresh"), [(1, False), (2, True), (4, True), (5, False)])
def test_rows_older_than_the_run_allows_or_from_the_future_are_refused(
    version: int, fresh: bool
) -> None:
    objects = kit.Objects()
    signed = sealed(objects, rollouts(1, version))
    if fresh:
        assert isinstance(assemble(signed, STEP, kit.rules(RUN), objects.fetch), TrainingBatch)
    else:
        with pytest.raises(PolicyError, match="old at step"):
            assemble(signed, STEP, kit.rules(RUN), objects.fetch)


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.sets(st.integers(0, 2))), min_size=1, max_size=4),
    st.randoms(),
)
def test_a_batch_holds_only_the_named_groups_each_once_in_any_order(
    shape: list[tuple[int, set[int]]], shuffle: random.Random
) -> None:
    objects = kit.Objects()
    expected: dict[tuple[str, int], list[Rollout]] = {}
    entries = []
    for number, (groups, wanted) in enumerate(shape):
        rows = rollouts(100 + number, groups=groups)
        taken = sorted(g for g in wanted if g < groups) or [0]
        entry = kit.seal_file(objects, rows, taken, STEP)
        entries.append(entry)
        for g in taken:
            expected[entry.sha256, g] = [row for row in rows if row.group == g]
    shuffle.shuffle(entries)
    batch = assemble(kit.seal(entries, STEP, RUN), STEP, kit.rules(RUN), objects.fetch)
    assert sorted(batch.keys) == sorted(expected)
    for key, group in zip(batch.keys, batch.groups, strict=True):
        theirs = expected[key]
        assert [row.output_tokens for row in group] == [row.output_tokens for row in theirs]
    names = [sha256 for sha256, _ in batch.keys]
    assert names == sorted(names)  # the manifest's order, not that of arrival


def test_a_group_trained_before_is_refused() -> None:
    objects = kit.Objects()
    signed = sealed(objects)
    first = assemble(signed, STEP, kit.rules(RUN), objects.fetch)
    with pytest.raises(UntrustedError, match="trained before"):
        assemble(signed, STEP, kit.rules(RUN), objects.fetch, trained={first.keys[0]})


def test_a_failed_download_is_an_error_and_never_an_empty_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # An ancestor's prefetcher swallowed download errors and marked the file as fetched.
    monkeypatch.setattr(feed, "OUTAGE_SECONDS", 0.2)
    name = Digest("0x" + "ab" * 32)
    with OrchestratorClient("http://127.0.0.1:9", timeout=0.5) as client:
        fetch = fetcher(client, {name: "http://127.0.0.1:9/none"}, threading.Event())
        with pytest.raises(UnavailableError, match=f"{name} cannot be fetched"):
            fetch(name, 10)
        with pytest.raises(UnavailableError, match="no URL"):
            fetch(Digest("0x" + "cd" * 32), 10)


def test_an_outage_of_the_object_store_does_not_end_the_trainer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Patient(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout)
            return False

    def download(self: OrchestratorClient, url: str, **_: object) -> bytes:
        if len(waits) < 3 * feed.FETCH_TRIES:
            raise UnavailableError("the store does not answer")
        return b"whole"

    waits: list[float | None] = []
    monkeypatch.setattr(OrchestratorClient, "download", download)
    name = Digest("0x" + "ab" * 32)
    with OrchestratorClient("http://127.0.0.1:9") as client:
        assert fetcher(client, {name: "http://127.0.0.1:9/file"}, Patient())(name, 10) == b"whole"
    assert waits[-1] == feed.LONGEST_PAUSE


@pytest.mark.parametrize("path", ["none", "page.html"])
def test_what_does_not_come_as_signed_says_nothing_about_the_batch(
    folder_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(feed, "FETCH_TRIES", 2)
    (tmp_path / "page.html").write_text("<html>busy</html>")
    name = Digest("0x" + "ab" * 32)
    with OrchestratorClient(folder_url, timeout=5.0) as client:
        fetch = fetcher(client, {name: f"{folder_url}/{path}"}, threading.Event())
        for limit in (10, 100):
            with pytest.raises(UnavailableError, match=f"{name} cannot be fetched"):
                fetch(name, limit)


@pytest.fixture
def folder_url(tmp_path: Path) -> Iterator[str]:
    """The address of an empty folder."""
    with served_folder(tmp_path) as url:
        yield url


def test_waiting_retries_until_an_answer_or_a_stop() -> None:
    answers = iter([UnavailableError("away"), UnavailableError("away"), "here"])

    def ask() -> str:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert insist(ask, threading.Event(), "asking", pause=0.001) == "here"

    stop = threading.Event()
    stop.set()

    def away() -> str:
        raise UnavailableError("away")

    with pytest.raises(StoppedError):
        insist(away, stop, "asking")


def numbered(step: int) -> TrainingBatch:
    """An empty batch of this step."""
    return TrainingBatch(Step(step), ZERO_DIGEST, (), ())


def test_a_download_that_fails_in_the_background_fails_the_loop() -> None:
    tries = iter([UnavailableError("the object is not here"), None])

    def produce(step: int, watch: Stopwatch) -> TrainingBatch:
        error = next(tries)
        if error is not None:
            raise error
        return numbered(step)

    prefetcher = Prefetcher(produce, limit=1)
    try:
        with pytest.raises(UnavailableError, match="not here"):
            prefetcher.take(0)
        assert prefetcher.take(0).batch.step == 0  # fetched again
    finally:
        prefetcher.close()


def test_the_prefetcher_holds_one_batch_ahead_and_never_goes_beyond_the_limit() -> None:
    asked: list[int] = []
    second = threading.Event()

    def produce(step: int, watch: Stopwatch) -> TrainingBatch:
        asked.append(step)
        if step == 1:
            second.set()
        return numbered(step)

    prefetcher = Prefetcher(produce, limit=3)
    try:
        assert prefetcher.take(0).batch.step == 0
        assert second.wait(120)  # batch 1 is on its way although no one asked
        assert asked == [0, 1]  # and batch 2 is not
        assert [prefetcher.take(s).batch.step for s in (1, 2)] == [1, 2]
    finally:
        prefetcher.close()
    assert asked == [0, 1, 2]
