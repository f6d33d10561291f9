"""Nodes whose cards have no limits: who has a place, who gets no lease, and what each of them and
the public pages say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from observations import table_of
from orchestrator_world import MakeWorld, Session, World
from test_dropped_leases import owned
from test_lease_slots import BOTH, ask
from test_lease_slots import store as store
from typer.testing import CliRunner

from prime_core.calibration import CalibrationSignature
from prime_core.encoding import sha256
from prime_core.errors import UserError
from prime_core.ids import ZERO_ADDRESS, ZERO_DIGEST, Address, Digest
from prime_core.messages import NodeInfo
from prime_core.node import Gpu, Hardware
from prime_core.storage.base import put_object
from prime_core.task import Task
from prime_core.verdict import (
    Law,
    Opinion,
    Outcome,
    Reason,
    SignedOpinion,
    Verdict,
    VerdictTable,
    reason_digest,
)
from prime_orchestrator.cli.calibrate import app
from prime_orchestrator.manager import uncalibrated
from prime_orchestrator.manager.uncalibrated import OUTSIDE, SECONDS, WINDOW
from prime_orchestrator.store import drift, leases, lock, meta, nodes, schema
from prime_verify import observed
from prime_verify.proofs.thresholds import (
    LEAST_LIE_SETS,
    LIES,
    STATISTICS,
    Calibration,
    FoundLies,
    load,
    shipped,
)

H200, L4 = "NVIDIA H200", "NVIDIA L4"
GPU_TASK = Task(image="python:local", gpus=True)


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    made = make_world(task=GPU_TASK, groups_per_batch=64)
    made.publish(0)
    return made


def member(world: World, number: int, card: str = "", owner: int | None = None) -> Session:
    """An active node with one card (none by default)."""
    session = world.member(number)
    gpus = (Gpu(model=card, memory_mb=1000),) if card else ()
    machine = Hardware(cpu_model="x", cpu_count=1, memory_mb=1, disk_mb=1, gpus=gpus)
    with world.backend.store.begin() as connection:
        connection.execute(
            schema.nodes.update()
            .where(schema.nodes.c.address == session.account.address)
            .values(hardware=machine.model_dump_json())
        )
    owned(world, session, owner or 1000 + number)
    world.clock.advance(1)
    return session


def info(world: World, session: Session) -> NodeInfo:
    answer = world.http.get(f"/v1/nodes/{session.account.address}")
    return NodeInfo.model_validate_json(answer.content)


def later(world: World, seconds: float = SECONDS) -> None:
    """Time passes in which all nodes live."""
    world.clock.advance(seconds)
    with world.backend.store.begin() as connection:
        for row in nodes.every(connection, ["active"]):
            nodes.set_status(connection, row.address, "active", last_heartbeat=world.clock())


def ended(world: World, session: Session, reason: Reason) -> None:
    """The node hands a file in, which gets this verdict."""
    digest = world.hand_in(session, str(world.clock()).encode())
    world.clock.advance(1)
    status = "accepted" if reason is Reason.NONE else "void"
    with world.backend.store.begin() as connection:
        connection.execute(
            schema.submissions.update()
            .where(schema.submissions.c.digest == digest)
            .values(status=status, reason=int(reason), judged_at=world.clock())
        )


@BOTH
def test_one_node_in_ten_may_use_a_card_without_limits(world: World) -> None:
    for number in range(1, 17):
        member(world, number)
    first, second = member(world, 17, H200), member(world, 18, L4)
    assert ask(world, first).lease is not None
    refused = ask(world, second)
    assert refused.lease is None
    assert refused.retry_after_ms > 0
    assert "no limits are calibrated for NVIDIA L4, and 1 of 18 active nodes" in refused.reason
    assert "prime-node join --shadow" in refused.reason
    assert "orchestrator calibrate" in refused.reason
    assert len(refused.reason) <= 512
    shown = info(world, second)
    assert (shown.uncalibrated_card, shown.uncalibrated_trouble) == (L4, refused.reason)
    assert (info(world, first).uncalibrated_card, info(world, first).uncalibrated_trouble) == (
        H200, "",
    )  # fmt: skip
    member(world, 19)
    member(world, 20)
    later(world)
    assert ask(world, second).lease is not None, "20 nodes have two places"
    assert info(world, second).uncalibrated_trouble == ""


def test_a_small_pool_has_one_place_and_a_provider_never_two(world: World) -> None:
    first, second = member(world, 1, H200, owner=7), member(world, 2, L4, owner=7)
    other = member(world, 3, L4, owner=8)
    assert ask(world, first).lease is not None
    assert "another node of this provider has its one place" in ask(world, second).reason
    assert "1 of 3 active nodes" in ask(world, other).reason
    with world.backend.store.begin() as connection:
        nodes.set_status(connection, first.account.address, "silent", last_heartbeat=world.clock())
    later(world)
    assert ask(world, second).lease is not None, "the place is free"


def test_measured_cards_and_processors_need_no_place(make_world: MakeWorld) -> None:
    """Neither do cards that the run's tasks do not get."""
    lies = tuple(FoundLies(lie=lie, sets=LEAST_LIE_SETS, found=LEAST_LIE_SETS) for lie in LIES)
    card = {"device": "NVIDIA H100 PCIe", "lies": lies}
    setup = shipped().setups[0].model_copy(update=card)
    of_card = shipped().model_copy(update={"setups": (setup,)})
    second = CalibrationSignature(made_at=1, signer="0x" + "2" * 40, signature="0x" + "00" * 65)
    measured = of_card.model_copy(update={"second": second})
    world = make_world(task=GPU_TASK, groups_per_batch=64, calibration=measured.digest())
    put_object(world.backend.objects, measured.canonical())
    world.publish(0)
    sessions = [
        member(world, 1), member(world, 2, "NVIDIA H100 80GB HBM3"),
        member(world, 3, "NVIDIA H100 NVL"), member(world, 4, L4),
    ]  # fmt: skip
    assert all(ask(world, session).lease is not None for session in sessions)
    assert [info(world, session).uncalibrated_card for session in sessions] == ["", "", "", L4]
    assert "no limits are calibrated" in ask(world, member(world, 5, L4)).reason


def test_without_a_gpu_task_the_cards_of_a_machine_do_not_count(make_world: MakeWorld) -> None:
    world = make_world(groups_per_batch=64)
    world.publish(0)
    sessions = [member(world, number, L4) for number in (1, 2, 3)]
    assert all(ask(world, session).lease is not None for session in sessions)


def test_a_calibration_that_cannot_be_read_refuses_no_node(
    make_world: MakeWorld, caplog: pytest.LogCaptureFixture
) -> None:
    world = make_world(task=GPU_TASK, groups_per_batch=64, calibration="0x" + "5" * 64)
    world.publish(0)
    assert all(ask(world, member(world, number, L4)).lease is not None for number in (1, 2))
    assert "cannot be read" in caplog.text


def test_a_node_whose_files_state_a_card_that_it_did_not_declare_needs_a_place(
    world: World,
) -> None:
    honest, liar = member(world, 1, H200), member(world, 2)
    ended(world, liar, Reason.NONE)
    assert info(world, liar).uncalibrated_card == ""
    setup = f"plain/1 float32 {L4} exact"
    with world.backend.store.begin() as connection:
        drift.add(connection, liar.account.address, setup, dict.fromkeys(STATISTICS, 0.5))
        drift.add(connection, honest.account.address, "plain/1 float32 cpu", {"sketch": 0.5})
    later(world)
    assert "no limits are calibrated for NVIDIA L4" in ask(world, liar).reason
    assert info(world, liar).uncalibrated_card == L4
    assert ask(world, honest).lease is not None


def test_new_keys_of_a_provider_that_showed_such_a_card_need_its_place(world: World) -> None:
    """Else each new key would be given a first lease before its files show the card."""
    first, old = member(world, 1, owner=7), member(world, 2, owner=7)
    other = member(world, 3, owner=8)
    with world.backend.store.begin() as connection:
        for session, setup in ((first, f"plain/1 float32 {L4}"), (old, "plain/1 float32 cpu")):
            drift.add(connection, session.account.address, setup, {"sketch": 0.5})
        nodes.set_status(connection, first.account.address, "left", last_heartbeat=world.clock())
    taken = member(world, 4, H200, owner=9)
    again = member(world, 5, owner=7)
    later(world)
    assert ask(world, taken).lease is not None
    assert "no limits are calibrated for NVIDIA L4" in ask(world, again).reason
    assert info(world, again).uncalibrated_card == L4
    assert ask(world, old).lease is not None, "its files show what it works on"
    assert ask(world, other).lease is not None


def test_other_leases_can_be_given_while_the_quota_is_read(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read once for new nodes, then once in SECONDS, each time without the lock of leases."""
    free, read = list[bool](), uncalibrated.read

    def reading(*arguments: Any) -> uncalibrated.Quota:
        with world.backend.store.begin() as connection:  # fails where the lock is held
            lock(connection, "leases")
            free.append(True)
        return read(*arguments)

    monkeypatch.setattr(uncalibrated, "read", reading)
    first, second = member(world, 1, H200), member(world, 2, L4)
    for _ in range(2):
        assert ask(world, first).lease is not None
        assert "1 of 2 active nodes" in ask(world, second).reason
    assert len(free) == 1
    third = member(world, 3, L4)
    assert "1 of 3 active nodes" in ask(world, third).reason
    assert len(free) == 2
    later(world)
    assert "1 of 3 active nodes" in ask(world, second).reason
    assert len(free) == 3


def test_nodes_without_a_place_are_not_idle(world: World) -> None:
    """Work is not kept for them."""
    member(world, 1, H200)
    second = member(world, 2, L4)
    ask(world, second)
    with world.backend.store.begin() as connection:
        quota = world.backend.quota.of(
            connection, world.backend.objects, world.backend.context.run, world.clock()
        )
        assert quota.troubles.keys() == {second.account.address}
        assert leases.idle_nodes(connection, world.clock()) == 2
        assert leases.idle_nodes(connection, world.clock(), list(quota.troubles)) == 1


def test_a_provider_whose_files_keep_failing_gets_no_more_such_leases(world: World) -> None:
    """Nothing of it is slashed, so the number of tries is what bounds it."""
    liar, honest = member(world, 1, H200, owner=7), member(world, 2, L4)
    waits = member(world, 3, L4, owner=7)
    for number in range(OUTSIDE - 1):
        ended(world, liar, Reason.UNCALIBRATED)
        ended(world, liar, Reason.NONE)  # one that is within the limits pays for no other
        assert ask(world, honest).lease is None, number
    ended(world, liar, Reason.UNAVAILABLE)
    ended(world, liar, Reason.UNCALIBRATED)
    refused = ask(world, liar)
    assert refused.lease is None, "at once, not when the quota is read again"
    assert (
        f"{OUTSIDE} of the newest {WINDOW} files of node {liar.account.address}" in refused.reason
    )
    later(world)
    assert "its provider gets no lease for a card" in ask(world, waits).reason
    assert info(world, waits).uncalibrated_trouble == ask(world, waits).reason
    assert ask(world, honest).lease is not None, "the place is another provider's now"
    with world.backend.store.begin() as connection:
        row = nodes.get(connection, liar.account.address)
        assert row is not None
        assert row.status == "active"
        assert connection.execute(schema.slashes.select()).first() is None
        for address in (liar.account.address, waits.account.address):
            nodes.set_status(connection, address, "left", last_heartbeat=world.clock())
    again = member(world, 4, H200, owner=7)
    later(world)
    assert "its provider gets no lease for a card" in ask(world, again).reason


def test_an_honest_node_with_rare_files_outside_keeps_its_place(world: World) -> None:
    session = member(world, 1, H200)
    for _ in range(OUTSIDE - 1):
        ended(world, session, Reason.UNCALIBRATED)
    for _ in range(WINDOW):
        ended(world, session, Reason.NONE)
    ended(world, session, Reason.UNCALIBRATED)
    assert ask(world, session).lease is not None


def test_the_quota_is_read_once_a_minute_and_for_a_new_node_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Any] = []
    read = uncalibrated.read

    def counted(*args: Any) -> uncalibrated.Quota:
        reads.append(args)
        return read(*args)

    monkeypatch.setattr(uncalibrated, "read", counted)
    plain, card = member(world, 1), member(world, 2, H200)
    for _ in range(3):
        ask(world, plain)
    assert len(reads) == 1
    for _ in range(3):
        ask(world, card)
    assert len(reads) == 1, "the first reading has seen it"
    new = member(world, 3, H200)
    for _ in range(3):
        assert ask(world, new).lease is None
    assert len(reads) == 2
    later(world)
    ask(world, new)
    assert len(reads) == 3


def observed_file(world: World, session: Session, table: VerdictTable, judged_by: Digest) -> None:
    """The node's file of an unmeasured card is accepted with this table."""
    digest = world.hand_in(session, str(world.clock()).encode())
    world.clock.advance(1)
    names = dict.fromkeys(Law.model_fields, ZERO_DIGEST)
    law = Law(**names | {"verification_class": judged_by})
    objects = world.backend.objects
    opinion = Opinion(
        pool=1, submission=digest, law=law.struct_hash(), outcome=int(Outcome.ACCEPTED),
        reason=reason_digest(Reason.NONE), table=put_object(objects, table.canonical()),
        evidence=ZERO_DIGEST, judged_at=1,
    )  # fmt: skip
    signed = SignedOpinion(
        opinion=opinion, law=law, validator=ZERO_ADDRESS, signature="0x" + "00" * 65
    )
    verdict = Verdict(outcome=int(Outcome.ACCEPTED), opinions=(signed,))
    with world.backend.store.begin() as connection:
        connection.execute(
            schema.submissions.update()
            .where(schema.submissions.c.digest == digest)
            .values(status="accepted", verdict=put_object(objects, verdict.canonical()))
        )
        drift.add(connection, session.account.address, table.setup, {"sketch": 0.1})


def test_observations_of_the_store_propose_limits_by_provider(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A provider's nodes count together. One whose files are often outside counts for nothing."""
    monkeypatch.setattr(observed, "LEAST_ROWS", 128)
    both = [member(world, number, owner=7) for number in (1, 2)]
    others = [member(world, number, owner=number + 5) for number in (3, 4, 5)]
    ours, foreign = shipped().digest(), Digest(sha256(b"another"))
    for number, session in enumerate([*both, others[0], others[0], others[2], others[2]]):
        observed_file(world, session, table_of(number), ours)
    observed_file(world, others[1], table_of(20), foreign)
    ended(world, others[2], Reason.UNCALIBRATED)
    with world.backend.store.begin() as connection:
        connection.execute(
            schema.submissions.update()
            .where(schema.submissions.c.reason == int(Reason.UNCALIBRATED))
            .values(verdict=ZERO_DIGEST)
        )
        meta.put(connection, meta.SERVES, "31337/0xPools/1")
        found, left_out = uncalibrated.observations(
            connection, world.backend.objects, shipped(), "NVIDIA H200 NVL"
        )
        assert uncalibrated.observations(connection, world.backend.objects, shipped(), L4) == (
            {},
            [],
        )
    assert sorted(map(len, found.values())) == [2, 2]
    assert left_out[0].endswith(": 1 of 3 files were outside the widest limits")
    assert left_out[1] == "1 files that another calibration judged (--keep names it)"

    url = world.backend.store.engine.url.render_as_string(hide_password=False)
    out = tmp_path / "proposal.json"
    objects = str(tmp_path / "objects")
    words = ["--from-observations", H200, "--out", str(out), "--database", url]
    words += ["--objects", objects]

    def said(*more: str) -> str:
        return (
            CliRunner()
            .invoke(app, [*words, *more], catch_exceptions=False, standalone_mode=False)
            .stdout
        )

    with pytest.raises(UserError, match=r"2 provider.s. with .* 3 are needed; provider 0x"):
        said()
    assert not out.exists()
    observed_file(world, others[1], table_of(21), ours)
    observed_file(world, others[1], table_of(22), ours)
    text = said()
    assert f"plain/1 bfloat16 on {H200}: 384 rows in 6 files of 3 providers" in text
    assert "It accuses no one. Next, on a machine with such a card: orchestrator calibrate" in text
    assert json.loads(said("--json"))["digest"] == sha256(out.read_bytes())
    made = load(out)
    assert made.signed is None
    assert not made.covers(H200)
    with pytest.raises(UserError, match="neither measured nor signed"):
        said("--model", "x")


def test_a_malformed_setup_is_no_card(world: World) -> None:
    calibration: Calibration = shipped()
    node = Address("0x" + "1" * 40)
    with world.backend.store.begin() as connection:
        for setup in ("", "x", "a b", "plain/1 float32 cpu", "plain/1 float8 cpu aarch64"):
            drift.add(connection, node, setup, {"sketch": 0.1})
        assert uncalibrated.shown(connection, calibration) == {}
