"""Choosing groups: nothing twice, nothing lost, order irrelevant, staleness bound."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_core.encoding import sha256
from prime_core.errors import FatalError
from prime_core.ids import Digest
from prime_orchestrator.manager.batches import (
    FreeGroup,
    batch_seed,
    choose,
    make_manifest,
    may_seal,
)

RUN = sha256(b"run")


def group(submission: int, number: int, version: int = 0, **changes: object) -> FreeGroup:
    name = sha256(f"submission {submission}".encode())
    values: dict[str, object] = {
        "submission_digest": name,
        "group_no": number,
        "policy_version": version,
        "rows": 4,
        "informative": True,
        "reward_micro_sum": 1_500_000,
        "accepted_at": 100.0 + submission,
        "sha256": sha256(f"file {submission}".encode()),
        "size": 1000,
        "table": sha256(f"table {submission}".encode()),
        **changes,
    }
    return FreeGroup(**values)  # type: ignore[arg-type]


@st.composite
def pools(draw: st.DrawFn) -> list[FreeGroup]:
    """Files of one policy each, with one to four groups, some of them uninformative."""
    found = []
    for submission in range(draw(st.integers(0, 12))):
        version = draw(st.integers(0, 6))
        accepted_at = draw(st.floats(0, 50))
        found += [
            group(submission, n, version, informative=draw(st.booleans()), accepted_at=accepted_at)
            for n in range(draw(st.integers(1, 4)))
        ]
    return found


def key(g: FreeGroup) -> tuple[Digest, int]:
    return g.submission_digest, g.group_no


@given(pools(), st.integers(0, 8), st.integers(1, 8), st.integers(0, 4), st.randoms())
def test_choice_is_full_fresh_informative_and_without_repetition(
    free: list[FreeGroup], step: int, size: int, staleness: int, shuffle: random.Random
) -> None:
    chosen = choose(free, step=step, groups_per_batch=size, max_staleness=staleness)
    fit = [g for g in free if g.informative and 0 <= step - g.policy_version <= staleness]
    if len(fit) < size:
        assert chosen is None
        return
    assert chosen is not None
    assert len(chosen) == size == len({key(g) for g in chosen})
    assert all(g in fit for g in chosen)
    newest = max((g.policy_version, g.accepted_at) for g in chosen)
    left = [g for g in fit if key(g) not in {key(c) for c in chosen}]
    assert all((g.policy_version, g.accepted_at) >= newest for g in left)

    again = list(free)
    shuffle.shuffle(again)
    assert choose(again, step=step, groups_per_batch=size, max_staleness=staleness) == chosen


@given(pools(), st.integers(1, 6))
def test_steps_sealed_one_after_another_take_every_group_at_most_once(
    free: list[FreeGroup], size: int
) -> None:
    taken: list[FreeGroup] = []
    for step in range(9):
        left = [g for g in free if g not in taken]
        chosen = choose(left, step=step, groups_per_batch=size, max_staleness=2)
        if chosen is not None:
            taken += chosen
            assert all(0 <= step - g.policy_version <= 2 for g in chosen)
    assert len({key(g) for g in taken}) == len(taken)


@given(pools(), st.randoms())
def test_manifest_does_not_depend_on_the_order_of_its_groups(
    free: list[FreeGroup], shuffle: random.Random
) -> None:
    if not free:
        return
    manifest = make_manifest(free, pool=1, step=7, run_digest=RUN)
    again = list(free)
    shuffle.shuffle(again)
    assert make_manifest(again, pool=1, step=7, run_digest=RUN).digest() == manifest.digest()
    assert [f.sha256 for f in manifest.files] == sorted(f.sha256 for f in manifest.files)
    assert sum(len(f.groups) for f in manifest.files) == len(free)
    assert manifest.rows == sum(g.rows for g in free)
    assert manifest.seed == batch_seed(RUN, 7)


def test_a_group_named_twice_is_refused() -> None:
    with pytest.raises(FatalError, match="contradict"):
        make_manifest([group(1, 0), group(1, 0)], pool=1, step=0, run_digest=RUN)


@pytest.mark.parametrize(
    ("step", "latest", "staleness", "answer"),
    [(0, None, 2, False), (0, 0, 0, True), (2, 0, 2, True), (3, 0, 2, False), (1, 0, 0, False)],
)
def test_a_step_is_sealed_only_near_the_newest_policy(
    step: int, latest: int | None, staleness: int, answer: bool
) -> None:
    assert may_seal(step, latest, staleness) is answer
