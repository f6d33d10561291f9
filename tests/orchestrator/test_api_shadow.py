"""Shadow nodes over HTTP: no seat, real leases of no pool, within bounds, behind the paid."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import sqlalchemy as sa
from orchestrator_world import Session, World, signer, sweep

from prime_core.encoding import sha256
from prime_core.errors import PolicyError
from prime_core.ids import ZERO_DIGEST
from prime_core.messages import (
    AdmissionAnswer,
    AdmissionRequest,
    ChallengeAnswer,
    HeartbeatAnswer,
    LeaseAnswer,
    LeaseRequest,
    Status,
)
from prime_core.storage.base import digest_key, put_object
from prime_core.task import shadow_pool
from prime_core.verdict import Law, Opinion, SignedOpinion
from prime_orchestrator.api import admission, leasing, shadow
from prime_orchestrator.api.leasing import rules_of
from prime_orchestrator.api.liveness import LifeTicks
from prime_orchestrator.api.pool_view import supply_of
from prime_orchestrator.api.shadow import Load
from prime_orchestrator.manager import uploads
from prime_orchestrator.manager.speed import Turns
from prime_orchestrator.scheduler import Grant, SchedulingRules, Wait
from prime_orchestrator.store import Store, intents, jobs, leases, nodes, schema, shadows
from prime_verify.proofs import hardware

MACHINE = {"cpu_model": "x", "cpu_count": 2, "memory_mb": 100, "disk_mb": 100, "gpus": []}
WISH = {"hardware": MACHINE, "task_runtime": "process", "shadow": True}


def enter(world: World, number: int) -> Session:
    """A node that went through admission with --shadow."""
    session = world.login(signer(number))
    raw = world.post("/v1/admission/challenge", json.dumps(WISH).encode(), session).content
    challenge = ChallengeAnswer.model_validate_json(raw).challenge
    assert challenge is not None, raw
    products = hardware.solve(challenge.seed, challenge.size, challenge.rounds)
    world.clock.advance(1)
    answer = world.post(
        f"/v1/admission/solution/{challenge.id}", hardware.encode_solution(products), session
    )
    assert answer.status_code == 200, answer.text
    admitted = AdmissionAnswer.model_validate_json(answer.content)
    assert admitted.invite is None
    assert admitted.invite is admitted.signature is None
    return session


def ask(world: World, session: Session) -> LeaseAnswer:
    answer = world.post("/v1/leases", b'{"policy_version":0}', session)
    assert answer.status_code == 200, answer.text
    return LeaseAnswer.model_validate_json(answer.content)


def status_of(world: World) -> Status:
    return Status.model_validate_json(world.http.get("/v1/status").content)


def test_a_shadow_node_works_at_once_and_nothing_is_sent_to_the_chain(world: World) -> None:
    session = enter(world, 1)
    beat = HeartbeatAnswer.model_validate_json(
        world.post("/v1/heartbeat", b'{"policy_version":0}', session).content
    )
    assert (beat.directive, beat.status) == ("work", "shadow")
    lease = world.lease(session).lease
    assert lease.shadow
    assert lease.pool == shadow_pool(1)
    assert lease.recover(world.domain("work"), world.lease(session).signature) == (
        world.manager.address
    ), "it is the manager's, and comes back unchanged"
    with world.backend.store.read() as connection:
        assert intents.counts(connection) == {}


def test_a_node_with_a_seat_is_refused_with_the_next_step(world: World) -> None:
    session = world.member(1)
    answer = world.post("/v1/admission/challenge", json.dumps(WISH).encode(), session)
    assert answer.status_code == 403
    assert "prime-node leave" in answer.json()["detail"]


def test_a_seat_taken_between_challenge_and_answer_is_not_lost(world: World) -> None:
    session = world.login(signer(1))
    raw = world.post("/v1/admission/challenge", json.dumps(WISH).encode(), session).content
    challenge = ChallengeAnswer.model_validate_json(raw).challenge
    assert challenge is not None, raw
    world.member(1)
    products = hardware.solve(challenge.seed, challenge.size, challenge.rounds)
    answer = world.post(
        f"/v1/admission/solution/{challenge.id}", hardware.encode_solution(products), session
    )
    assert answer.status_code == 403
    with world.backend.store.read() as connection:
        node = nodes.get(connection, session.account.address)
    assert node is not None
    assert node.status == "active"


def test_a_shadow_lease_counts_as_no_supply_open_or_handed_in(world: World) -> None:
    def supply() -> object:
        with world.backend.store.read() as connection:
            return supply_of(connection, world.backend)

    session, before = enter(world, 1), supply()
    world.lease(session)
    assert supply() == before
    world.hand_in(session)
    assert supply() == before
    world.hand_in(world.member(2), b"another file")
    assert supply() != before


def test_few_shadow_files_are_under_way_at_once_in_the_whole_pool(world: World) -> None:
    sessions = [enter(world, number) for number in range(1, shadow.UNDER_WAY + 2)]
    for session in sessions[:-1]:
        assert ask(world, session).lease is not None
    waiting = ask(world, sessions[-1])
    assert waiting.lease is None
    assert "under way" in waiting.reason
    world.hand_in(sessions[0])
    assert ask(world, sessions[-1]).lease is None, "its file waits for a verdict still"
    world.clock.advance(61)  # the other open lease runs out
    assert ask(world, sessions[-1]).lease is not None
    assert ask(world, world.member(9)).lease is not None, "paid work is never held back for it"


def test_shadow_work_gets_its_share_of_an_hour_and_no_more() -> None:
    rules = SchedulingRules(groups_per_batch=4, groups_per_lease=2, max_staleness=2)

    def decide(shadow_given: int, paid: int) -> Grant | Wait:
        return shadow.decide(3, Load(3, 0, (shadow_given, paid)), rules)

    assert decide(shadow.AN_HOUR - 1, 0) == Grant(step=3, policy_version=3)
    assert isinstance(decide(shadow.AN_HOUR, shadow.ONE_IN - 1), Wait)
    assert isinstance(decide(shadow.AN_HOUR, shadow.ONE_IN), Grant)


@pytest.mark.parametrize(("has", "latest"), [(0, None), (0, 3)])
def test_a_shadow_lease_asks_for_a_fresh_policy(has: int, latest: int | None) -> None:
    rules = SchedulingRules(groups_per_batch=4, groups_per_lease=2, max_staleness=2)
    assert isinstance(shadow.decide(has, Load(latest, 0, (0, 0)), rules), Wait)


def test_the_paid_are_judged_first_however_late_they_come(world: World) -> None:
    unpaid = world.hand_in(enter(world, 1))
    world.clock.advance(1)
    paid = world.hand_in(world.member(2), b"another file")
    with world.backend.store.begin() as connection:
        assert [job.submission_digest for job in jobs.short(connection, 9)] == [paid, unpaid]


def test_shadow_work_is_shown_apart(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    member = world.member(2)
    world.clock.advance(1)
    session = enter(world, 1)
    world.hand_in(session)
    shown = status_of(world)
    assert (shown.files, shown.shadow_files) == ({}, {"submitted": 1})
    node = shown.nodes[1]
    assert (node.status, node.units, node.accepted) == ("shadow", 0, 0)
    monkeypatch.setattr("prime_orchestrator.api.status.MAX_NODES", 1)
    world.clock.advance(5)
    (first,) = status_of(world).nodes
    assert first.node == member.account.address, "a newer shadow node displaced a member"
    metrics = world.http.get("/metrics").text
    assert 'prime_shadow_submissions{status="submitted"} 1' in metrics
    assert "prime_submissions{" not in metrics


def test_a_shadow_node_that_comes_to_stay_joins_like_any_other(world: World) -> None:
    session = enter(world, 1)
    held = world.lease(session).lease
    world.newcomer(1)  # its owner's part, which no shadow needs
    wish = json.dumps(WISH | {"shadow": False}).encode()
    raw = world.post("/v1/admission/challenge", wish, session).content
    challenge = ChallengeAnswer.model_validate_json(raw).challenge
    assert challenge is not None, raw
    products = hardware.solve(challenge.seed, challenge.size, challenge.rounds)
    solution = hardware.encode_solution(products)
    answer = world.post(f"/v1/admission/solution/{challenge.id}", solution, session)
    assert AdmissionAnswer.model_validate_json(answer.content).invite is not None
    with world.backend.store.begin() as connection:
        nodes.set_status(
            connection, session.account.address, "active", last_heartbeat=world.clock()
        )
        rows = connection.execute(sa.select(schema.leases.c.shadow)).scalars().all()
    assert rows == [True]
    now_paid = world.lease(session).lease
    assert (now_paid.pool, now_paid.shadow) == (1, False)
    assert now_paid != held


def test_rules_of_the_run_apply_to_shadow_leases_too(world: World) -> None:
    assert rules_of(world.backend).max_staleness == 2
    world.publish(3)
    session = enter(world, 1)
    assert ask(world, session).lease is None, "policy 0 is too old at version 3"


def test_a_shadows_word_of_a_policy_is_no_arrival(world: World) -> None:
    """Anyone may be one: its word would tell the trainer that the pool has a policy."""
    node = enter(world, 5)
    world.publish(0)
    world.post("/v1/heartbeat", b'{"policy_version":0}', node)
    assert [policy.after_ms for policy in status_of(world).reach] == [()]


def test_shadow_nodes_are_forgotten_when_silent(world: World) -> None:
    first, second = enter(world, 1), enter(world, 2)
    world.clock.advance(shadow.FORGOTTEN_AFTER - 10)
    assert world.post("/v1/heartbeat", b'{"policy_version":null}', second).status_code == 200
    world.clock.advance(20)
    LifeTicks(world.backend).tick()
    listed = {info["node"] for info in world.http.get("/v1/nodes").json()}
    assert listed == {second.account.address}
    assert first.account.address not in listed


def test_one_address_adds_few_shadow_nodes_at_all_processes_and_after_a_restart(
    world: World,
) -> None:
    wish = AdmissionRequest.model_validate_json(json.dumps(WISH))

    def challenge(number: int, address: str) -> None:
        process = replace(world.backend, turns=Turns())  # shares nothing but the store
        admission.challenge(process, signer(number).address, wish, address)

    for number in range(1, shadow.NODES_EACH + 1):
        challenge(number, f"2001:db8:1:2::{number}")
    challenge(1, "2001:db8:1:2::9")
    with pytest.raises(PolicyError, match="4 shadow nodes came from this network"):
        challenge(99, "2001:db8:1:2::9")
    challenge(99, "2001:db8:1:3::9")
    for number in range(100, 99 + shadow.NODES_EACH_SITE - shadow.NODES_EACH):
        challenge(number, f"2001:db8:1:{number}::9")
    with pytest.raises(PolicyError, match="16 shadow nodes came from this network"):
        challenge(120, "2001:db8:1:fff::9")
    challenge(120, "2001:db8:2:2::9")
    world.clock.advance(shadow.HOUR + 1)
    LifeTicks(world.backend).tick()
    challenge(99, "2001:db8:1:2::9")


def test_one_address_cannot_take_the_whole_budget_of_shadow_leases(world: World) -> None:
    world.publish(0)
    first, second = (enter(world, number).account.address for number in (1, 2))
    taken = "2001:db8:1::/48"
    with world.backend.store.begin() as connection:
        for _ in range(shadow.AN_HOUR_EACH - 1):
            assert shadows.take(connection, taken, world.clock(), most=10, within=shadow.HOUR)
    wish = LeaseRequest(policy_version=0)
    assert leasing.lease(world.backend, first, wish, "2001:db8:1:2::5").lease is not None
    refused = leasing.lease(world.backend, second, wish, "2001:db8:1:3::6")
    assert refused.lease is None
    assert "went to this network" in refused.reason
    assert leasing.lease(world.backend, second, wish, "2001:db8:9::1").lease is not None


def test_a_shadow_node_that_goes_silent_leaves_no_row_and_no_object(world: World) -> None:
    world.publish(0)
    node = enter(world, 1)
    lease = ask(world, node).lease
    assert lease is not None
    assert world.upload(node, lease, b"file").status_code == 204
    signed = world.claim(node.account, lease, b"file")
    digest = world.post("/v1/submissions", signed).json()["receipt"]["submission_digest"]
    world.clock.advance(10)
    dropped = ask(world, node).lease
    assert dropped is not None
    seated = world.member(2)
    paid = world.lease(seated)

    def left() -> list[int]:
        tables = (schema.submissions, schema.jobs, schema.assignments, schema.opinions)
        with world.backend.store.read() as connection:
            query = sa.select(sa.func.count()).where(schema.leases.c.shadow.is_(True))
            counted = [sa.select(sa.func.count()).select_from(table) for table in tables]
            return [connection.execute(one).scalar_one() for one in (query, *counted)]

    def pass_time(seconds: float) -> None:
        world.clock.advance(seconds)
        LifeTicks(world.backend).tick()

    pass_time(2 * shadow.HOUR + 60)
    assert left() == [1, 1, 1, 0, 0], "the file still waits for its verdict"
    objects = world.backend.objects
    ours = put_object(objects, b"an object of ours that an opinion names")
    about = put_object(objects, b"a verdict table of " + digest.encode())
    opinion = Opinion(
        pool=1, submission=digest, law=ZERO_DIGEST, outcome=1, reason=ZERO_DIGEST,
        table=about, evidence=ours, judged_at=0,
    )  # fmt: skip
    judge = signer(9)
    signed_opinion = SignedOpinion(
        opinion=opinion,
        law=Law(**dict.fromkeys(("lease", "run", "verification_class", "verifier", "draws"), ours)),
        validator=judge.address,
        signature=judge.sign(opinion, world.backend.context.domain(opinion)),
    )
    with world.backend.store.begin() as connection:
        connection.execute(
            sa.insert(schema.opinions).values(
                submission_digest=digest,
                validator=judge.address,
                reason=0,
                at=0.0,
                body=signed_opinion.model_dump_json(),
            )
        )
        connection.execute(sa.update(schema.submissions).values(status="accepted"))
        connection.execute(sa.update(schema.jobs).values(status="quarantined"))
    pass_time(1)
    assert left()[0] == 1, "the file is under review"
    with world.backend.store.begin() as connection:
        connection.execute(sa.update(schema.jobs).values(status="done"))
    assert sweep(world.backend) == 0
    assert uploads.size_of(objects, lease.lease.deadline, sha256(b"file")) == 4
    pass_time(1)
    assert left() == [0, 0, 0, 0, 0]
    assert sweep(world.backend) == 1
    assert objects.exists(digest_key(ours))
    assert not objects.exists(digest_key(about))
    assert list(objects.keys(uploads.PREFIX)) == []
    with world.backend.store.read() as connection:
        assert leases.get(connection, world.lease_digest(paid)) is not None
        assert leases.next_index(connection, paid.lease.step) == paid.lease.index + 1


def test_the_highest_lease_index_of_a_step_is_never_given_twice(world: World) -> None:
    world.publish(0)
    lease = ask(world, enter(world, 1)).lease
    assert lease is not None
    world.clock.advance(3 * shadow.HOUR)
    LifeTicks(world.backend).tick()
    with world.backend.store.read() as connection:
        assert leases.next_index(connection, lease.lease.step) == lease.lease.index + 1


def test_a_pool_has_so_many_shadow_nodes_of_which_idle_ones_give_way(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that only sends heartbeats keeps no newcomer out; one that works keeps its place."""

    def refuses(number: int) -> None:
        late = world.login(signer(number))
        answer = world.post("/v1/admission/challenge", json.dumps(WISH).encode(), late)
        assert answer.status_code == 403
        assert "the pool has its 3 shadow nodes" in answer.json()["detail"]

    def held() -> set[str]:
        with world.backend.store.read() as connection:
            return {node.address for node in nodes.every(connection, ("shadow",))}

    monkeypatch.setattr(shadow, "MOST_NODES", 3)
    accepted = enter(world, 1)
    world.hand_in(accepted)
    with world.backend.store.begin() as connection:
        connection.execute(sa.update(schema.submissions).values(status="accepted"))
    filed = enter(world, 2)
    world.hand_in(filed, b"not judged yet")
    enter(world, 3)
    refuses(4)
    world.clock.advance(shadow.KEEPS_PLACE + 1)
    for number, left in ((4, {1, 2, 4}), (5, {1, 4, 5})):
        enter(world, number)
        assert held() == {signer(one).address for one in left}
    refuses(6)


def test_forgetting_is_the_same_on_both_databases(either_store: Store) -> None:
    with either_store.begin() as connection:
        for index, status in enumerate(("expired", "submitted", "accepted", "expired")):
            digest = sha256(b"%d" % index)
            connection.execute(
                sa.insert(schema.leases).values(
                    digest=digest, node="0x1", step=0, lease_index=index, policy_version=0,
                    status="expired" if status == "expired" else "submitted",
                    deadline=0, created_at=0.0, body="{}", shadow=True, target=1,
                )
            )  # fmt: skip
            if status != "expired":
                connection.execute(
                    sa.insert(schema.submissions).values(
                        digest=digest, lease_digest=digest, node="0x1", step=0, policy_version=0,
                        sha256=digest, size=1, body="{}", receipt="{}", received_at=0.0,
                        status=status, shadow=True,
                    )
                )  # fmt: skip
        gone = shadows.find(connection, given_before=1.0)
        assert len(gone) == 2
        shadows.forget(connection, gone)
        left = connection.execute(sa.select(schema.leases.c.lease_index)).scalars().all()
        assert sorted(left) == [1, 3], "one waits for its verdict, one is the highest"
        assert shadows.find(connection, given_before=1.0) == []
        assert shadows.idle_longest(connection, held_since=1.0) is None
