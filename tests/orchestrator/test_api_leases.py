"""Leases over HTTP: who gets which, that they come back unchanged, that indices are used once."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import sqlalchemy as sa
from orchestrator_world import MakeWorld, World, signer

from bench import seats
from prime_core.draws import DrawList
from prime_core.encoding import sha256
from prime_core.ids import Address, Digest
from prime_core.messages import LeaseAnswer, LeaseRequest
from prime_core.run import SpeedClasses
from prime_core.task import SignedLease
from prime_core.verdict import Reason
from prime_orchestrator import scheduler
from prime_orchestrator.api import idle, leasing
from prime_orchestrator.api.idle import IdleCount
from prime_orchestrator.api.liveness import LifeTicks
from prime_orchestrator.manager import speed
from prime_orchestrator.manager.standing import VOID_FILES
from prime_orchestrator.store import leases, nodes, schema, submissions

ASK = b'{"policy_version":0}'


def ask(world: World, session: Any, version: int = 0) -> LeaseAnswer:
    answer = world.post("/v1/leases", b'{"policy_version":%d}' % version, session)
    assert answer.status_code == 200, answer.text
    return LeaseAnswer.model_validate_json(answer.content)


def test_a_lease_is_the_managers_and_names_all_that_pays(world: World) -> None:
    session = world.member(1, speed_class=2)
    signed = world.lease(session)
    lease = signed.lease
    assert lease.recover(world.domain("work"), signed.signature) == world.manager.address
    assert (lease.pool, lease.step, lease.node) == (1, 0, session.account.address)
    assert (lease.target, signed.policy_version) == (6, 0)
    assert lease.policy_digest == world.manifest(0).manifest.digest()
    assert lease.run_digest == world.backend.context.run.digest()
    assert lease.deadline == int(world.clock()) + 60


def test_an_open_lease_comes_back_unchanged_abandoned_or_not(world: World) -> None:
    session = world.member(1)
    first = world.lease(session)
    assert world.lease(session) == first
    digest = world.lease_digest(first)
    assert world.post(f"/v1/leases/{digest}/abandon", b"{}", session).json() == {}
    assert world.post(f"/v1/leases/{digest}/abandon", b"{}", session).json() == {}
    world.clock.advance(60)
    assert world.lease(session, 9) == first
    world.clock.advance(1)
    assert ask(world, session).reason == "its last lease has just expired"
    LifeTicks(world.backend).tick()  # as an orchestrator that was away: the expiry is excused
    assert world.lease(session) != first


@pytest.mark.slow
def test_no_salt_and_no_index_of_a_step_is_given_twice(world: World) -> None:
    given: list[SignedLease] = []
    for round_number in range(4):
        for number in (1, 2, 3):
            session = world.member(number) if round_number == 0 else world.login(_key(number))
            answer = ask(world, session)
            if answer.lease is not None:
                given.append(answer.lease)
        world.clock.advance(61)  # all expire; nothing was handed in
        LifeTicks(world.backend).tick()
        _beat_all(world)
    places = [(signed.lease.step, signed.lease.index) for signed in given]
    assert len(set(places)) == len(places) >= 8
    assert len({signed.lease.salt for signed in given}) == len(given)
    for step in {step for step, _ in places}:
        indices = [index for s, index in places if s == step]
        assert indices == list(range(len(indices)))


def _key(number: int) -> Any:
    from orchestrator_world import signer

    return signer(number)


def _beat_all(world: World) -> None:
    with world.backend.store.begin() as connection:
        for node in nodes.every(connection):
            nodes.set_status(connection, node.address, "active", last_heartbeat=world.clock())


@pytest.mark.slow
def test_work_is_given_out_until_the_lead_is_full(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 groups a batch, 2 a lease, 70 % informative: 9 leases reach the 3 batches of the lead."""
    monkeypatch.setattr(idle, "IDLE_ASK_MS", 400)
    world = make_world()
    world.publish(0)
    answers = [ask(world, world.member(number)) for number in range(1, 12)]
    steps = [answer.lease.lease.step for answer in answers if answer.lease is not None]
    assert steps == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    refused = answers[-1]
    assert refused.lease is None
    assert [one.retry_after_ms for one in answers[9:]] == [500, 800], "the more, the less often"
    assert "under way" in refused.reason


def test_an_answer_reads_no_more_in_a_pool_of_more_nodes(tmp_path: Path) -> None:
    """A given lease neither, while the pool's medians are recent."""
    small, large = (_answers(tmp_path / str(count), count) for count in (200, 1_000))
    assert small.keys() == large.keys() == {"given", "newcomers", "left for idle nodes", "enough"}
    for why, (statements, steps) in small.items():
        assert large[why][0] == statements, why
        assert large[why][1] <= 1.1 * steps, why


def _answers(folder: Path, count: int) -> dict[str, tuple[int, int]]:
    """The statements of a given lease, and by why a node of a pool with so many idle nodes gets
    none, those of a refusal; with SQLite's steps in them. The newest node is fast and alone has a
    record."""
    pool = seats.Pool.make(folder)
    store, change = pool.backend.store, sa.update(schema.nodes)
    pool.seat(1, honest=True)
    with store.begin() as connection:
        row = nodes.get(connection, pool.honest[0])
        assert row is not None
        names = [Address(f"0x{at:040x}") for at in range(1, count + 1)]
        idle_row = replace(row, provider=None, challenge_rate=5.0)
        rows = [asdict(replace(idle_row, address=one)) for one in names]
        connection.execute(sa.insert(schema.nodes), rows)
    pool.seat(1, honest=True)
    fast = pool.honest[1]
    with store.begin() as connection:
        connection.execute(change.where(schema.nodes.c.address == fast).values(kept=10.0))
    asking, seen, found = iter(names), [0, 0], {}

    def ask(node: Address, *holds: Digest) -> LeaseAnswer:
        seen[:] = 0, 0
        return leasing.lease(pool.backend, node, LeaseRequest(policy_version=0, holds=holds))

    def step() -> None:
        seen[1] += 1

    def statement(*_: object) -> None:
        seen[0] += 1

    def refused(reason: str) -> None:
        while (answer := ask(next(asking))).lease is not None:
            found["given"] = (seen[0], seen[1])
        assert answer.reason == reason
        assert ask(next(asking)).retry_after_ms == answer.retry_after_ms > idle.WAIT_MS

    sa.event.listen(store.engine, "before_cursor_execute", statement)
    with store.begin() as connection:  # one thread: one connection
        connection.connection.driver_connection.set_progress_handler(step, 1)  # type: ignore[union-attr]
    refused(scheduler.NEWCOMERS)
    found["newcomers"] = (seen[0], seen[1])
    held = ask(fast).lease  # that it has no accepted files ends its speed
    assert held is not None
    with store.begin() as connection:
        connection.execute(change.where(schema.nodes.c.address == fast).values(token_rate=1e6))
    assert ask(fast, pool.backend.digest(held.lease)).reason == scheduler.ENOUGH
    found["left for idle nodes"] = (seen[0], seen[1])
    with patch.object(IdleCount, "recently", return_value=0):  # an old count gives no lease
        assert ask(fast, pool.backend.digest(held.lease)).reason == scheduler.ENOUGH
    with store.begin() as connection:
        connection.execute(change.values(kept=10.0))
    refused(scheduler.ENOUGH)
    found["enough"] = (seen[0], seen[1])
    store.close()
    return found


def test_many_idle_nodes_are_counted_again_ten_times_in_a_wait() -> None:
    count = IdleCount()
    assert count.recently(1.0) is None
    count.note(10_000, 100.0)
    assert [count.recently(at) for at in (99.9, 100, 104.9, 105)] == [None, 10_000, 10_000, None]
    count.note(100, 100.0)  # they wait for the minimum time
    assert count.recently(100.0) is None


def test_only_a_large_pools_median_rates_are_kept_and_a_nodes_own_rate_counts_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "SMALL_POOL", 4)
    classes = SpeedClasses(ratios_micro=(3_000_000,))
    pool = seats.Pool.make(tmp_path, run=seats.definition().model_copy(update={"speed": classes}))
    pool.seat(4, honest=True)
    store, columns, medians = pool.backend.store, schema.nodes.c, speed.Medians()

    def change(rate: float, *some: Address) -> None:
        update = sa.update(schema.nodes).values(challenge_rate=rate)
        with store.begin() as connection:
            connection.execute(update.where(columns.address.in_(some)) if some else update)

    def read(at: float) -> float | None:
        with store.read() as connection:
            tokens, solved = medians.read(connection, at)
        assert tokens is None
        return solved

    def speed_class(node: Address) -> int:
        answer = leasing.lease(pool.backend, node, LeaseRequest(policy_version=0))
        assert answer.lease is not None
        with store.read() as connection:
            row = nodes.get(connection, node)
        assert row is not None
        return row.speed_class

    assert read(1000.0) is None
    change(1.0)
    assert read(1000.0) == 1.0
    change(2.0, *pool.honest[:2])
    assert read(1000.0) == 1.5
    pool.seat(8, honest=True)
    change(1.0)
    assert read(1000.0) == 1.0
    change(2.0)  # kept for 8 ms, and not where the clock was put back
    assert [read(at) for at in (1000.0, 1000.007, 1000.009, 1000.0)] == [1.0, 1.0, 2.0, 2.0]
    assert speed_class(pool.honest[0]) == 1
    change(20.0, pool.honest[1])
    assert speed_class(pool.honest[1]) == 2
    change(20.0)
    assert speed_class(pool.honest[2]) == 2, "the median of this second is still the old one"
    pool.clock[0] += 1
    assert speed_class(pool.honest[3]) == 1
    store.close()


@pytest.mark.slow
def test_a_silent_nodes_lease_no_longer_counts(world: World) -> None:
    sessions = [world.member(number) for number in range(1, 11)]
    answers = [ask(world, session) for session in sessions]
    assert answers[9].lease is None
    with world.backend.store.begin() as connection:
        nodes.set_status(
            connection, sessions[0].account.address, "silent", last_heartbeat=world.clock()
        )
    assert ask(world, sessions[9]).lease is not None


def test_a_straggler_is_made_up_for(world: World) -> None:
    sessions = [world.member(number) for number in range(1, 11)]
    answers = [ask(world, session) for session in sessions]
    assert answers[9].lease is None
    world.clock.advance(31)  # half a lease's life
    _beat_all(world)
    assert ask(world, sessions[9]).lease is not None


def test_before_the_first_policy_everybody_waits(make_world: MakeWorld) -> None:
    world = make_world()
    answer = ask(world, world.member(1))
    assert (answer.lease, answer.reason) == (None, "no policy is published yet")


def test_too_old_a_policy_waits(world: World) -> None:
    world.publish(5)
    assert "too old" in ask(world, world.member(1), 2).reason


@pytest.mark.parametrize("status", ["admitted", "silent", "quarantined"])
def test_who_is_not_active_waits(world: World, status: Any) -> None:
    session = world.member(1)
    world.lease(session)
    with world.backend.store.begin() as connection:
        nodes.set_status(connection, session.account.address, status, last_heartbeat=world.clock())
    answer = ask(world, session)
    assert (answer.lease, answer.reason) == (None, f"the node is {status}")


@pytest.mark.parametrize("status", ["left", "ejected", None])
def test_who_is_no_member_is_refused(world: World, status: Any) -> None:
    session = world.member(1) if status else world.login(_key(1))
    if status:
        with world.backend.store.begin() as connection:
            nodes.set_status(
                connection, session.account.address, status, last_heartbeat=world.clock()
            )
    assert world.post("/v1/leases", ASK, session).status_code == 403


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'{"policy_version":-1}', b'{"policy_version":"0"}',
     b'{"policy_version":0.5}', b'{"policy_version":0,"extra":1}', b'{"policy_version":0}{}',
     b"\xff"],
)  # fmt: skip
def test_a_body_that_is_not_exactly_a_lease_request_is_malformed(world: World, body: bytes) -> None:
    answer = world.post("/v1/leases", body, world.member(1))
    assert answer.status_code == 400
    assert "LeaseRequest" in answer.json()["detail"]


def test_another_nodes_lease_can_be_neither_abandoned_nor_uploaded_to(world: World) -> None:
    owner, other = world.member(1), world.member(2)
    digest = world.lease_digest(world.lease(owner))
    upload = b'{"sha256":"%s","size":1}' % sha256(b"x").encode()
    assert world.post(f"/v1/leases/{digest}/abandon", b"{}", other).status_code == 403
    assert world.post(f"/v1/leases/{digest}/upload", upload, other).status_code == 403
    for unknown in (sha256(b"none"), "0x00", "x"):
        code = world.post(f"/v1/leases/{unknown}/abandon", b"{}", owner).status_code
        assert code == (404 if len(unknown) == 66 else 400)


def test_an_ended_lease_cannot_be_abandoned_or_uploaded_to(world: World) -> None:
    session = world.member(1)
    digest = world.lease_digest(world.lease(session))
    with world.backend.store.begin() as connection:
        leases.set_status(connection, digest, "expired")
    upload = b'{"sha256":"%s","size":1}' % sha256(b"x").encode()
    assert world.post(f"/v1/leases/{digest}/abandon", b"{}", session).status_code == 409
    assert world.post(f"/v1/leases/{digest}/upload", upload, session).status_code == 409


def test_a_lease_names_the_draws_that_its_file_will_be_judged_by(world: World) -> None:
    lease = world.lease(world.member(1))
    assert lease.opens()
    assert lease.opening is not None
    where = world.http.get(f"/v1/objects/{lease.opening.draws}").headers["location"]
    listed = DrawList.model_validate_json(world.http.get(where).content)
    assert [c.validator for c in listed.commitments] == [signer(202).address]
    shown = world.http.get("/v1/draws").json()
    assert listed.commitments[0].model_dump(mode="json") in [info["signed"] for info in shown]
    assert not any(info["revealed"] for info in shown)


def test_no_lease_is_given_while_no_validator_has_committed(world: World) -> None:
    """No validator could judge its file by a draw that is older than it."""
    session = world.member(1)
    with world.backend.store.begin() as connection:
        connection.execute(schema.draw_commitments.delete())
    answer = world.post("/v1/leases", b'{"policy_version":0}', session).json()
    assert answer["lease"] is None
    assert "no validator could judge the file" in answer["reason"]


def test_a_heartbeat_tells_the_node_which_files_ended_badly_and_why(world: World) -> None:
    ours, other = world.member(1), world.member(2)
    for number, (session, reason) in enumerate(
        [(ours, Reason.MALFORMED), (ours, Reason.NONE), (other, Reason.LATE)]
    ):
        digest = world.hand_in(session, data=f"file {number}".encode())
        status = "void" if reason is not Reason.NONE else "accepted"
        with world.backend.store.begin() as connection:
            submissions.change(
                connection, digest, status=status, reason=int(reason), judged_at=world.clock()
            )

    given = world.http.get(f"/v1/nodes/{ours.account.address}/leases").json()
    assert [lease["status"] for lease in given] == ["void", "accepted"]

    def reported(heard_at: int) -> list[dict[str, Any]]:
        body = b'{"policy_version":0,"heard_at":%d}' % heard_at
        ends: list[dict[str, Any]] = world.post("/v1/heartbeat", body, ours).json()["endings"]
        return ends

    (ending,) = reported(0)
    assert (ending["status"], ending["reason"]) == ("void", Reason.MALFORMED)
    assert ending["detail"] == Reason.MALFORMED.sentence
    assert reported(int(world.clock())) == [ending], "again: the verdict may have come late"
    assert reported(int(world.clock()) + 100) == []


@pytest.mark.slow
def test_a_node_whose_files_are_all_void_waits_longer_each_time_and_hears_why(world: World) -> None:
    """Void files cost their node nothing, and validators a replay each where no one calibrated the
    setup: made-up ones came as fast as leases were asked for."""
    session = world.member(1)

    def judged(reason: Reason) -> None:
        digest = world.hand_in(session, str(world.clock()).encode())
        world.clock.advance(1)
        _beat_all(world)
        with world.backend.store.begin() as connection:
            connection.execute(
                schema.submissions.update()
                .where(schema.submissions.c.digest == digest)
                .values(
                    status="accepted" if reason is Reason.NONE else "void",
                    reason=int(reason),
                    judged_at=world.clock(),
                )
            )

    def waits() -> float:
        start = world.clock()
        while True:
            answer = ask(world, session)
            if answer.lease is not None:
                return world.clock() - start
            assert "were void (UNCALIBRATED)" in answer.reason
            assert "prime-node verify" in answer.reason
            world.clock.advance(answer.retry_after_ms / 1000)
            _beat_all(world)

    for _ in range(VOID_FILES - 1):
        judged(Reason.UNCALIBRATED)
        assert waits() == 0
    judged(Reason.UNAVAILABLE)  # the pool's fault
    assert waits() == 0
    found = []
    for _ in range(7):
        judged(Reason.UNCALIBRATED)
        found.append(round(waits(), 1))
    assert found == [7.5, 15, 30, 60, 120, 240, 240]
    digest = world.hand_in(session, b"not judged yet")
    _beat_all(world)
    waiting = ask(world, session)
    assert waiting.lease is None
    assert "once its files are judged" in waiting.reason
    with world.backend.store.begin() as connection:
        mine = schema.submissions.c.digest == digest
        connection.execute(schema.submissions.delete().where(mine))
    judged(Reason.NONE)
    judged(Reason.UNCALIBRATED)
    assert waits() == 0
