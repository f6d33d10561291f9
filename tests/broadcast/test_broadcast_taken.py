"""Whether anybody has all of a policy, by what was sent."""

from __future__ import annotations

import pytest
from broadcast_world import CHUNK, Run

from protocol.broadcast.layout import address_of
from protocol.broadcast.taken import MOST_READERS, QUIET_SECONDS, Spans, Taken
from protocol.core.checkpoint import Manifest


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def policy(run: Run) -> Manifest:
    run.publish()
    return run.publish().manifest


def whole(taken: Taken, reader: str, policy: Manifest) -> None:
    for entry in policy.files:
        taken.sent(reader, address_of(1, entry.name), 0, entry.size)


def test_spans_meet_in_any_order_and_what_comes_twice_counts_once() -> None:
    spans = Spans()
    for start, end in ((30, 40), (0, 10), (5, 20), (0, 10)):
        spans.add(start, end)
        assert not spans.covers(40)
    spans.add(20, 30)
    assert spans.covers(40)
    assert not spans.covers(41)
    assert Spans().covers(0)


def test_the_halves_of_two_readers_are_no_whole(policy: Manifest) -> None:
    taken = Taken(1)
    first, *rest = policy.files
    taken.sent("a", address_of(1, first.name), 0, first.size)
    for entry in rest:
        taken.sent("b", address_of(1, entry.name), 0, entry.size)
    assert taken.by(policy) is None
    whole(taken, "b", policy)
    assert taken.by(policy) == "b"


def test_only_this_version_counts_and_not_the_manifest(policy: Manifest) -> None:
    taken = Taken(0)
    whole(taken, "a", policy)
    assert taken.by(policy) is None
    taken = Taken(1)
    taken.sent("a", address_of(1, "manifest.json"), 0, 1 << 20)
    assert taken.by(policy) is None


def test_a_whole_delta_counts_once_nothing_more_is_asked_for(policy: Manifest) -> None:
    clock = Clock()
    taken = Taken(1, clock)
    [delta] = policy.deltas
    taken.sent("a", address_of(1, "delta-0"), 0, delta.size)
    assert taken.by(policy) is None
    clock.now = QUIET_SECONDS
    assert taken.by(policy) == "a"
    model = max(policy.files, key=lambda entry: entry.size)
    taken.sent("a", address_of(1, model.name), 0, CHUNK)  # it lacks the base
    clock.now *= 3
    assert taken.by(policy) is None
    whole(taken, "a", policy)
    assert taken.by(policy) == "a"


def test_crowds_of_readers_cost_bounded_memory(policy: Manifest) -> None:
    taken = Taken(1)
    for number in range(2 * MOST_READERS):
        taken.sent(str(number), address_of(1, "config.json"), 0, 1)
    assert len(taken._sent) == MOST_READERS
