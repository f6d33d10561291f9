"""Reach: drawn from the first heartbeat in which a node names a policy, and from nothing else."""

from __future__ import annotations

import sqlalchemy as sa
from orchestrator_world import World

from prime_orchestrator.store import schema


def reach(world: World) -> list[dict[str, object]]:
    return list(world.http.get("/v1/status").json()["reach"])


def test_each_nodes_first_word_of_a_policy_is_its_arrival(world: World) -> None:
    one, two = world.member(1), world.member(2)
    world.publish(0)
    written: list[str] = []
    sa.event.listen(
        world.backend.store.engine,
        "before_cursor_execute",
        lambda _c, _cursor, statement, *_: written.append(statement),
    )
    world.clock.advance(2)
    world.post("/v1/heartbeat", b'{"policy_version":0}', one)
    world.clock.advance(3)
    world.post("/v1/heartbeat", b'{"policy_version":0}', one)
    world.post("/v1/heartbeat", b'{"policy_version":0}', two)
    (only,) = reach(world)
    assert (only["version"], only["nodes"], only["after_ms"]) == (0, 2, [2000, 5000])
    world.publish(1)
    world.clock.advance(1)
    world.post("/v1/heartbeat", b'{"policy_version":1}', two)
    assert [(p["version"], p["after_ms"]) for p in reach(world)] == [(0, [2000, 5000]), (1, [1000])]
    arrivals = [one for one in written if one.startswith("INSERT INTO arrivals")]
    assert len(arrivals) == 3, "the second word of the same costs no statement"
    text = world.http.get("/metrics").text
    assert 'prime_policy_reach_nodes{version="0"} 2' in text
    assert 'prime_policy_last_arrival_seconds{version="1"} 1.0' in text


def test_a_policy_that_was_not_published_has_no_reach(world: World) -> None:
    node = world.member(1)
    world.post("/v1/heartbeat", b'{"policy_version":7}', node)
    world.publish(0)
    world.post("/v1/heartbeat", b'{"policy_version":7}', node)
    world.post("/v1/heartbeat", b'{"policy_version":null}', node)
    assert [(p["version"], p["after_ms"]) for p in reach(world)] == [(0, [])]


def test_a_word_that_did_not_count_is_no_arrival_yet(world: World) -> None:
    """A policy named before its publication counts from the first word after it."""
    node = world.member(1)
    world.publish(0)
    world.post("/v1/heartbeat", b'{"policy_version":1}', node)
    world.publish(1)
    world.clock.advance(1)
    world.post("/v1/heartbeat", b'{"policy_version":1}', node)
    assert [p["after_ms"] for p in reach(world)] == [[], [1000]]


def test_arrivals_at_many_nodes_are_thinned_evenly(world: World) -> None:
    world.publish(0)
    with world.backend.store.begin() as connection:
        for number in range(1000):
            values = {"version": 0, "node": f"0x{number:040x}", "at": world.clock() + number + 1}
            connection.execute(sa.insert(schema.arrivals).values(values))
    (only,) = reach(world)
    times = [1000 * (5 * rank) for rank in range(1, 201)]
    assert (only["arrived"], only["after_ms"]) == (1000, times)
    text = world.http.get("/metrics").text
    assert 'prime_policy_reach_nodes{version="0"} 1000' in text
    assert 'prime_policy_last_arrival_seconds{version="0"} 1000.0' in text
