"""Admission and heartbeats: how a node comes in, and what it is answered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from orchestrator_world import MakeWorld, Session, World, signer
from sqlalchemy import Connection

from prime_core.encoding import sha256
from prime_core.errors import ConflictError
from prime_core.messages import (
    AdmissionAnswer,
    AdmissionRequest,
    Challenge,
    ChallengeAnswer,
    HeartbeatAnswer,
)
from prime_core.node import Requirements
from prime_orchestrator.api import admission
from prime_orchestrator.manager.members import active_stake
from prime_orchestrator.store import Store, chain, challenges, intents, nodes, schema
from prime_verify.proofs import hardware

GPU = {"model": "NVIDIA H100 80GB", "memory_mb": 81_920}
MACHINE = {"cpu_model": "x", "cpu_count": 2, "memory_mb": 100, "disk_mb": 100, "gpus": [GPU]}


def wish(**changes: Any) -> bytes:
    return json.dumps({"hardware": MACHINE | changes, "task_runtime": "process"}).encode()


def ask(world: World, session: Session) -> Challenge:
    answer = world.post("/v1/admission/challenge", wish(), session)
    assert answer.status_code == 200, answer.text
    challenge = ChallengeAnswer.model_validate_json(answer.content).challenge
    assert challenge is not None, answer.text
    return challenge


def solved(challenge: Challenge) -> bytes:
    return hardware.encode_solution(
        hardware.solve(challenge.seed, challenge.size, challenge.rounds)
    )


def admit(world: World, session: Session, seconds: float = 1.0) -> AdmissionAnswer:
    challenge = ask(world, session)
    world.clock.advance(seconds)
    answer = world.post(f"/v1/admission/solution/{challenge.id}", solved(challenge), session)
    assert answer.status_code == 200, answer.text
    return AdmissionAnswer.model_validate_json(answer.content)


def beat(world: World, session: Session, version: int | None = None) -> HeartbeatAnswer:
    body = json.dumps({"policy_version": version}).encode()
    answer = world.post("/v1/heartbeat", body, session)
    assert answer.status_code == 200, answer.text
    return HeartbeatAnswer.model_validate_json(answer.content)


def on_chain(world: World, what: str, session: Session, block: int = 1, **args: Any) -> None:
    """The chain shows an event of this node, as the indexer stores it."""
    from prime_orchestrator.manager.members import derive_node

    account = session.account.address
    with world.backend.store.begin() as connection:
        chain.add_event(
            connection,
            block_hash=sha256(what.encode()),
            log_index=block,
            block=block,
            block_time=1,
            tx_hash=sha256(b"tx"),
            name=what,
            args={"pool": 1, "node": account} | args,
        )
        derive_node(connection, world.backend.context, account, world.clock())


def join(world: World, session: Session) -> None:
    on_chain(world, "NodeJoined", session, provider=signer(9).address)


def test_a_right_answer_gives_the_managers_invite_and_queues_the_join(world: World) -> None:
    session = world.newcomer(1)
    answer = admit(world, session)
    invite = answer.invite
    assert invite.recover(world.domain("pools"), answer.signature) == world.manager.address
    assert (invite.pool, invite.node) == (1, signer(1).address)
    with world.backend.store.read() as connection:
        queued = intents.pending(connection)
    assert [(i.kind, i.arguments()["invite"]["node"]) for i in queued] == [
        ("join", signer(1).address)
    ]


def test_speed_is_measured_by_our_clock_and_slowness_only_lowers_the_class(world: World) -> None:
    """2 rounds of 16³ multiply-adds: 8,192 in 8 µs are 1,024 million a second."""
    fast = admit(world, world.newcomer(1), seconds=0.000008)
    slow = admit(world, world.newcomer(2), seconds=100)
    assert 990 <= fast.mmacs_per_second <= 1060
    assert slow.mmacs_per_second == 0
    with world.backend.store.read() as connection:
        found = [nodes.get(connection, signer(n).address) for n in (1, 2)]
    assert [node.speed_class for node in found if node] == [2, 1]


@pytest.mark.parametrize("where", [0, 1, -1])
def test_a_wrong_product_fails_and_uses_the_challenge_up(world: World, where: int) -> None:
    session = world.newcomer(1)
    challenge = ask(world, session)
    products = np.frombuffer(solved(challenge), dtype="<i8").copy()
    products[where] += 1
    path = f"/v1/admission/solution/{challenge.id}"
    assert world.post(path, products.tobytes(), session).status_code == 401
    assert world.post(path, solved(challenge), session).status_code == 409
    with world.backend.store.read() as connection:
        assert nodes.get(connection, signer(1).address) is None


def test_a_solution_counts_once_in_time_and_for_its_own_node(world: World) -> None:
    session, other = world.newcomer(1), world.newcomer(2)
    challenge = ask(world, session)
    path = f"/v1/admission/solution/{challenge.id}"
    assert world.post(path, solved(challenge), other).status_code == 403
    assert world.post("/v1/admission/solution/none", solved(challenge), session).status_code == 404
    world.clock.advance(121)
    assert world.post(path, solved(challenge), session).status_code == 403
    late = ask(world, session)
    path = f"/v1/admission/solution/{late.id}"
    assert world.post(path, solved(late)[:-1], session).status_code == 400
    again = ask(world, session)
    path = f"/v1/admission/solution/{again.id}"
    assert world.post(path, solved(again) + b"x", session).status_code == 400
    assert world.post(path, solved(again), session).status_code == 200
    assert world.post(path, solved(again), session).status_code == 409


def test_open_challenges_are_bounded(world: World) -> None:
    session = world.newcomer(1)
    for _ in range(8):
        ask(world, session)
    assert world.post("/v1/admission/challenge", wish(), session).status_code == 403
    world.clock.advance(121)
    ask(world, session)


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ({"gpu_count": 2}, "2 GPU(s), found 1"),
        ({"gpu_count": 1, "gpu_model": "b200"}, "1 b200 GPU(s), found 0"),
        ({"gpu_count": 1, "gpu_memory_mb": 90_000}, "90000 MiB"),
        ({"cpu_count": 3}, "3 CPUs, found 2"),
        ({"memory_mb": 101}, "101 MiB of memory"),
        ({"disk_mb": 101}, "101 MiB of disk"),
    ],
)
def test_a_machine_below_the_requirements_learns_what_is_missing(
    make_world: MakeWorld, asked: dict[str, Any], complaint: str
) -> None:
    world = make_world(requirements=Requirements(**asked))
    answer = world.post("/v1/admission/challenge", wish(), world.login(signer(1)))
    assert answer.status_code == 403
    assert complaint in answer.json()["detail"]


def test_a_machine_that_meets_them_is_challenged(make_world: MakeWorld) -> None:
    asked = Requirements(gpu_count=1, gpu_model="h100", gpu_memory_mb=80_000, cpu_count=2)
    world = make_world(requirements=asked)
    ask(world, world.newcomer(1))


def test_heartbeats_lead_a_node_from_stranger_to_worker(world: World) -> None:
    session = world.newcomer(1)
    assert beat(world, session).directive == "join"
    admit(world, session)
    waiting = beat(world, session)
    assert (waiting.directive, waiting.status) == ("wait", "admitted")
    join(world, session)
    working = beat(world, session, 0)
    assert (working.directive, working.status, working.latest_version) == ("work", "active", 0)
    info = world.http.get("/v1/nodes").json()
    assert [(n["status"], n["provider"], n["policy_version"]) for n in info] == [
        ("active", signer(9).address, 0)
    ]


def test_a_failed_join_is_said_and_may_be_tried_again(world: World) -> None:
    session = world.newcomer(1)
    admit(world, session)
    with world.backend.store.begin() as connection:
        [intent] = intents.pending(connection)
        intents.fail(connection, intent.id, "InsufficientStake", now=world.clock())
    reported = beat(world, session)
    assert (reported.directive, "InsufficientStake" in reported.reason) == ("join", True)
    world.clock.advance(1)
    admit(world, session)
    assert beat(world, session).directive == "wait"


def test_a_member_that_answers_again_needs_no_join(world: World) -> None:
    session = world.newcomer(1)
    admit(world, session)
    join(world, session)
    assert admit(world, session, seconds=0.000001).invite is None
    with world.backend.store.read() as connection:
        assert len(intents.pending(connection)) == 1
        row = nodes.get(connection, signer(1).address)
        assert row is not None
        assert row.status == "active"


def test_a_store_that_was_lost_finds_its_members_again(world: World) -> None:
    """The chain's events are indexed before the node is admitted again."""
    session = world.login(signer(1))
    join(world, session)
    admit(world, session)
    assert beat(world, session).directive == "work"
    with world.backend.store.read() as connection:
        assert intents.pending(connection) == []


@pytest.mark.parametrize(
    ("status", "directive"), [("quarantined", "wait"), ("ejected", "stop"), ("left", "join")]
)
def test_the_heartbeats_answer_says_what_to_do(world: World, status: Any, directive: str) -> None:
    session = world.member(1)
    with world.backend.store.begin() as connection:
        nodes.set_status(connection, signer(1).address, status, last_heartbeat=world.clock())
    reported = beat(world, session)
    assert (reported.directive, reported.status) == (directive, status)
    assert reported.reason


@pytest.mark.parametrize("status", ["quarantined", "ejected"])
def test_who_waits_for_a_slash_or_was_ejected_is_not_admitted(world: World, status: Any) -> None:
    session = world.member(1)
    with world.backend.store.begin() as connection:
        nodes.set_status(connection, signer(1).address, status, last_heartbeat=world.clock())
    assert world.post("/v1/admission/challenge", wish(), session).status_code == 403


def test_a_caught_provider_does_not_come_again_under_another_key(world: World) -> None:
    owner = signer(9)
    _, fresh = world.newcomer(1, owner), world.newcomer(2, owner)
    with world.backend.store.begin() as connection:
        connection.execute(
            schema.slashes.insert().values(
                submission_digest=sha256(b"bad"),
                node=signer(1).address,
                validator=signer(3).address,
                evidence=sha256(b"e"),
                reason=4,
                amount="50",
                status="proposed",
                created_at=3.0,
            )
        )
    refused = world.post("/v1/admission/challenge", wish(), fresh)
    assert refused.status_code == 403
    assert signer(1).address in refused.text
    stranger = world.newcomer(4)
    assert world.post("/v1/admission/challenge", wish(), stranger).status_code == 200
    with world.backend.store.begin() as connection:
        connection.execute(schema.slashes.update().values(status="cancelled"))
    assert world.post("/v1/admission/challenge", wish(), fresh).status_code == 200


def refusal(world: World, session: Session) -> str:
    """The sentence by which no challenge is given now, but may be later."""
    answer = world.post("/v1/admission/challenge", wish(), session)
    with world.backend.store.read() as connection:
        assert challenges.open_for(connection, session.account.address, world.clock()) == 0
    assert answer.status_code == 409, answer.text
    return str(answer.json()["detail"])


def test_a_node_without_provider_gets_no_challenge_but_the_command_to_type(world: World) -> None:
    session, owner, node = world.login(signer(1)), signer(9).address, signer(1).address
    assert "prime-node node add FILE" in refusal(world, session)
    world.on_chain("Deposited", provider=owner, amount=100)
    world.on_chain("NodeAdded", provider=owner, node=signer(2).address)  # another of its nodes
    assert "prime-node node add FILE" in refusal(world, session)
    world.on_chain("NodeAdded", provider=owner, node=node)
    ask(world, session)
    world.on_chain("NodeRemoved", provider=owner, node=node)
    world.clock.advance(121)
    assert "has no provider" in refusal(world, session)


@pytest.mark.parametrize(
    ("history", "active"),
    [
        ([], 0),
        ([("Deposited", 99)], 99),
        ([("Deposited", 150), ("UnbondStarted", 60)], 90),
        ([("Deposited", 150), ("UnbondStarted", 60), ("Rebonded", 10)], 100),
        ([("Deposited", 150), ("SlashHeld", 60)], 90),
        ([("Deposited", 150), ("SlashHeld", 60), ("SlashReleased", 60)], 150),
        ([("Deposited", 150), ("SlashHeld", 60), ("Slashed", 60)], 90),
        # a slash takes from what unbonds only what is not bonded
        (
            [
                ("Deposited", 50),
                ("UnbondStarted", 40),
                ("SlashHeld", 30),
                ("Slashed", 30),
                ("Deposited", 5),
            ],
            5,
        ),
    ],
)
def test_a_provider_below_the_minimum_stake_learns_how_much_to_add(
    world: World, history: list[tuple[str, int]], active: int
) -> None:
    session, owner = world.login(signer(1)), signer(9).address
    world.on_chain("NodeAdded", provider=owner, node=signer(1).address)
    for name, amount in history:
        world.on_chain(name, provider=owner, amount=amount)
        world.on_chain(name, provider=signer(8).address, amount=7 * amount)  # somebody else's
    with world.backend.store.read() as connection:
        assert active_stake(connection, owner) == active
    if active >= 100:
        ask(world, session)
    else:
        missing = f"stake add 0.{100 - active:018d}".rstrip("0")
        assert refusal(world, session).endswith(missing)


def test_a_provider_that_goes_before_the_answer_gets_no_invite(world: World) -> None:
    session = world.newcomer(1)
    challenge = ask(world, session)
    owner = signer(101).address
    world.on_chain("UnbondStarted", provider=owner, amount=1)
    path = f"/v1/admission/solution/{challenge.id}"
    assert world.post(path, solved(challenge), session).status_code == 409
    with world.backend.store.read() as connection:
        assert intents.pending(connection) == []


def test_the_end_of_the_pool_stops_everybody(world: World) -> None:
    session = world.member(1)
    on_chain(world, "PoolEnded", session)
    assert beat(world, session).directive == "stop"


def test_a_refused_writer_blocks_no_other_writer(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strangers may ask as often as they like: the chain's events are read for them, and for those
    who are challenged, without the store's one write lock."""
    stranger, newcomer = signer(1).address, world.newcomer(2).account.address
    request = AdmissionRequest.model_validate_json(wish())
    state, begin, writing = chain.state, Store.begin, [False]
    begun: list[str] = []

    @contextmanager
    def begins(store: Store) -> Iterator[Connection]:
        with begin(store) as connection:
            begun.append("begun")
            writing[0] = True
            try:
                yield connection
            finally:
                writing[0] = False

    def read_state(*arguments: Any, **options: Any) -> Any:
        assert not writing[0], "the chain's events are read under the write lock"
        return state(*arguments, **options)

    monkeypatch.setattr(Store, "begin", begins)
    monkeypatch.setattr(chain, "state", read_state)
    with pytest.raises(ConflictError, match="has no provider"):
        admission.challenge(world.backend, stranger, request)
    assert begun == []
    admission.challenge(world.backend, newcomer, request)
    assert begun == ["begun"]


def test_a_provider_that_goes_while_the_invite_is_made_gets_none(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was seen without the lock is looked at once more under it."""
    session = world.newcomer(1)
    challenge, look = ask(world, session), admission._look

    def looks(*arguments: Any) -> None:
        look(*arguments)
        world.on_chain("UnbondStarted", provider=signer(101).address, amount=1)

    monkeypatch.setattr(admission, "_look", looks)
    path = f"/v1/admission/solution/{challenge.id}"
    assert world.post(path, solved(challenge), session).status_code == 409
    with world.backend.store.read() as connection:
        assert intents.pending(connection) == []
