"""What status, page, log and command show of each target length, and when one is said to starve."""

from __future__ import annotations

import logging
import math
import re
from typing import Any

import pytest
import sqlalchemy as sa
from orchestrator_world import World

from prime_core.encoding import sha256
from prime_orchestrator.api.status import status
from prime_orchestrator.cli.status import text
from prime_orchestrator.manager import targets
from prime_orchestrator.store import batches, groups, schema
from prime_orchestrator.store.batches import BatchRow
from prime_orchestrator.store.groups import GroupRow


def given(
    world: World, target: int, count: int, state: str, *, tries: int = 0, reward: int | None = None
) -> None:
    """`count` leases of one target, given now: expired, or submitted with an accepted file, whose
    only group of one row has `reward` (micro)."""
    with world.backend.store.begin() as connection:
        for _ in range(count):
            number = next(world.nonces)
            digest = sha256(str(number).encode())
            connection.execute(
                sa.insert(schema.leases).values(
                    digest=digest, node="0x" + "01" * 20, step=0,
                    lease_index=number, policy_version=0,
                    status="expired" if state == "expired" else "submitted",
                    deadline=int(world.clock()) + 60, created_at=world.clock(), uploads=0,
                    body="", shadow=False, target=target, tries=tries,
                )
            )  # fmt: skip
            if state != "expired":
                connection.execute(
                    sa.insert(schema.submissions).values(
                        digest=digest, lease_digest=digest, node="0x" + "01" * 20, step=0,
                        policy_version=0, sha256=digest, size=1, body="", receipt="",
                        received_at=world.clock(), status=state,
                    )
                )  # fmt: skip
            if reward is not None:
                groups.add(connection, [GroupRow(digest, 0, 0, 1, False, reward, world.clock())])


def test_a_target_that_starves_is_shown_and_logged(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    run = world.backend.context.run  # targets 2 and 6, each of which keeps a quarter
    given(world, 2, 17, "accepted")
    given(world, 6, 2, "accepted")
    given(world, 6, 3, "expired")
    given(world, 6, 2, "open")
    found: dict[int, Any] = {share.target: share for share in status(world.backend).targets}
    assert [(found[t].asked, found[t].accepted) for t in (2, 6)] == [(17, 17), (7, 2)]
    assert [found[t].starving for t in (2, 6)] == [False, True]
    assert "STARVES" in text(status(world.backend))
    with caplog.at_level(logging.WARNING), world.backend.store.read() as connection:
        targets.warn(connection, run, world.clock())
    assert [r.getMessage().split(":")[0] for r in caplog.records] == ["target 6 starves"]
    given(world, 6, 3, "accepted")
    assert not any(share.starving for share in status(world.backend).targets)


def test_a_target_whose_leases_expire_more_than_others_is_shown_logged_and_measured(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    run = world.backend.context.run
    given(world, 2, 18, "accepted")
    given(world, 2, 2, "expired")
    given(world, 6, 4, "accepted")
    given(world, 6, 3, "expired")
    found: dict[int, Any] = {share.target: share for share in status(world.backend).targets}
    assert [(found[t].expired, found[t].expiring) for t in (2, 6)] == [(2, False), (3, False)]
    given(world, 6, 1, "expired")
    with world.backend.store.begin() as connection:  # excused ones count for nothing
        newest = sa.select(sa.func.max(schema.leases.c.lease_index)).scalar_subquery()
        excuse = sa.update(schema.leases).where(schema.leases.c.lease_index == newest)
        connection.execute(excuse.values(excused=1))
    assert not any(share.expiring for share in status(world.backend).targets)
    given(world, 6, 1, "expired")
    assert [share.expiring for share in status(world.backend).targets] == [False, True]
    assert "EXPIRES" in text(status(world.backend))
    with caplog.at_level(logging.WARNING), world.backend.store.read() as connection:
        targets.warn(connection, run, world.clock())
    assert [r.getMessage().split(":")[0] for r in caplog.records] == ["target 6 is dropped"]
    metrics = world.http.get("/metrics").text
    assert 'prime_target_leases{state="expired",target="6"} 4.0' in metrics
    assert 'prime_target_expiring{target="6"} 1.0' in metrics


def test_nodes_that_drop_hard_problems_are_logged_and_measured(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Other nodes answer dropped problems of length 2 as well as others, of length 6 worse."""

    def warned() -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING), world.backend.store.read() as connection:
            targets.warn(connection, world.backend.context.run, world.clock())
        return [r.getMessage() for r in caplog.records if "nodes drop" in r.getMessage()]

    for target in (2, 6):
        given(world, target, 30, "accepted", reward=1_000_000)
        given(world, target, 10, "accepted", reward=0)
        given(world, target, 12, "accepted", tries=1, reward=1_000_000 if target == 2 else 0)
    assert warned() == [], "too few groups"
    given(world, 2, 4, "accepted", tries=1, reward=0)
    given(world, 6, 4, "accepted", tries=2, reward=0)
    (found,) = warned()
    assert "target 6" in found
    assert "harder than others: their 16 groups" in found
    assert "mean reward of 0; the other 40 have 0.75" in found
    metrics = world.http.get("/metrics").text
    errors = {
        target: float(re.findall(rf'dropped_reward_errors{{target="{target}"}} (\S+)', metrics)[0])
        for target in (2, 6)
    }
    assert errors == {2: 0.0, 6: pytest.approx(-0.75 / math.sqrt(15 / 28 * 13 / 28 * 7 / 80))}


def test_groups_are_sealed_until_the_policy_of_their_batch_is_published(world: World) -> None:
    with world.backend.store.begin() as connection:
        for step in range(3):
            row = BatchRow(step, sha256(b"%d" % step), "{}", 8, 500_000, 0, world.clock())
            assert batches.add(connection, row)
            taken = {"step": step, "target": 2, "groups": 4}
            connection.execute(sa.insert(schema.batch_targets).values(taken))

    def shown() -> tuple[list[tuple[int, int]], list[int | str]]:
        found = status(world.backend)
        counts = [(share.sealed, share.trained) for share in found.targets]
        return counts, [batch["state"] for batch in found.batches]

    world.publish(1)
    assert shown() == ([(8, 4), (0, 0)], ["trained", "sealed", "sealed"])
    lines = [line.split() for line in text(status(world.backend)).splitlines()]
    assert ["0", "8", "0.500", "0", "trained"] in lines
    assert ["2", "8", "0.500", "0", "sealed"] in lines
    world.publish(3)
    assert shown() == ([(0, 12), (0, 0)], ["trained"] * 3)


def test_little_work_starves_no_target(world: World) -> None:
    given(world, 2, 15, "accepted")
    assert not any(share.starving for share in status(world.backend).targets)


def test_a_node_without_accepted_files_is_asked_to_be_measured(world: World) -> None:
    session = world.member(1)
    beat = world.post("/v1/heartbeat", b'{"policy_version":0}', session).json()
    assert beat["measure"]
    with world.backend.store.begin() as connection:
        connection.execute(schema.nodes.update().values(token_rate=5.0))
    assert not world.post("/v1/heartbeat", b'{"policy_version":0}', session).json()["measure"]
