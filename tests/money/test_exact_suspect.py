"""A class in which files of several providers differ is suspect: it costs no one stake."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'prime-open[torch]'")

from judging_kit import HONEST, JudgedPool, small_run
from money_kit import key
from test_exact_judged import ExactPool, _proven

from prime_core import encoding
from prime_core.ids import Address
from prime_core.messages import ClassRequest
from prime_core.run import RunDefinition
from prime_core.verdict import Reason
from prime_orchestrator.api import classes
from prime_orchestrator.manager import suspicion
from prime_orchestrator.manager.members import derive_node
from prime_orchestrator.store import chain, exact_classes, nodes, slashes

ACCOUNTS = [key(100 + number) for number in range(16)]


@pytest.fixture
def panel_run() -> RunDefinition:
    return small_run().model_copy(
        update={"replay_rows_micro": 250_000, "calibration": _proven().digest()}
    )


@pytest.fixture
def exact(panel: JudgedPool) -> ExactPool:
    made = ExactPool(panel, _proven())
    made.announce(*made.validators)
    return made


def _join(exact: ExactPool, providers: Sequence[int]) -> None:
    """Node n of ACCOUNTS joins under the provider of that number."""
    mgr = exact.panel.mgr
    for number, provider in enumerate(providers):
        node = ACCOUNTS[number]
        mgr.admit(node)
        name = encoding.sha256(f"join {number}".encode())
        with mgr.store.begin() as connection:
            chain.add_event(
                connection, block_hash=name, log_index=0, block=900_000 + number, block_time=1,
                tx_hash=name, name="NodeJoined",
                args={
                    "pool": 1, "node": node.address, "provider": key(200 + provider).address,
                },
            )  # fmt: skip
            derive_node(connection, mgr.context, node.address, mgr.now())
            row = nodes.get(connection, node.address)
            assert row is not None
            assert row.provider == key(200 + provider).address


def _count(
    exact: ExactPool, numbers: Sequence[int], *, mismatched: bool, now: float | None = None
) -> None:
    """One judged file of each of these nodes."""
    mgr = exact.panel.mgr
    with mgr.store.begin() as connection:
        for number in numbers:
            exact_classes.judged(
                connection, exact.numeric.key, ACCOUNTS[number].address,
                validator=exact.validators[0].signer.address, rows=4, longest=9,
                mismatched=mismatched, explained=False, now=mgr.now() if now is None else now,
            )  # fmt: skip


def _suspect(exact: ExactPool) -> bool:
    mgr = exact.panel.mgr
    with mgr.store.begin() as connection:
        calibration = mgr.context.run.calibration
        return suspicion.is_suspect(connection, exact.numeric.key, calibration, mgr.now())


def _statuses(exact: ExactPool) -> list[tuple[Address, str]]:
    with exact.panel.mgr.store.read() as connection:
        return [(row.node, row.status) for row in slashes.newest(connection, 10)]


@pytest.mark.slow
def test_the_third_provider_that_differs_ends_accusations_in_its_class(exact: ExactPool) -> None:
    """The first two are rejected; their slashes are given up, and all three go on."""
    mgr, lie = exact.panel.mgr, exact.proved_by("old1_1e6")
    _join(exact, range(3))
    first, second = (exact.judge(exact.submit(lie, node)) for node in ACCOUNTS[:2])
    for row in (first, second):
        assert (row.status, row.reason) == ("rejected", Reason.WRONG_PROOF_PASS)
        assert mgr.node_status(row.node) == "quarantined"
    assert suspicion.give_up_slashes(mgr.store, mgr.context, mgr.now) == [], "two may be cheats"
    with mgr.store.read() as connection:
        assert suspicion.may_execute(connection, mgr.context, first.digest)

    third = exact.judge(exact.submit(lie, ACCOUNTS[2]))
    assert (third.status, third.reason) == ("void", Reason.UNAVAILABLE), "the pool's fault"
    assert mgr.node_status(third.node) == "active"
    with mgr.store.read() as connection:
        assert not suspicion.may_execute(connection, mgr.context, first.digest)
    given_up = suspicion.give_up_slashes(mgr.store, mgr.context, mgr.now)
    assert {*given_up} == {first.digest, second.digest}
    assert {status for _, status in _statuses(exact)} == {"cancelled"}
    assert [mgr.node_status(one.address) for one in ACCOUNTS[:2]] == ["active", "active"]

    later = exact.judge(exact.submit(lie, ACCOUNTS[0]))
    assert (later.status, later.reason) == ("void", Reason.UNAVAILABLE)
    good = exact.judge(exact.submit(exact.panel.honest, ACCOUNTS[1]))
    assert good.status == "accepted", "a file that is equal is paid"
    with mgr.store.read() as connection:
        node = nodes.get(connection, ACCOUNTS[0].address)
    assert node is not None
    assert node.missed == 1, "from the rejection; the void files leave no record"


def test_no_lease_names_a_suspect_class_until_the_run_has_another_calibration(
    exact: ExactPool,
) -> None:
    backend, policy = exact.panel.mgr.backend, exact.panel.engines.digest(0)
    _join(exact, range(3))
    announced = ClassRequest(
        policy_version=0, policy_digest=policy, facts=dict(exact.numeric.facts),
        fingerprint=exact.numeric.fingerprint,
    )  # fmt: skip

    assert classes.announce(backend, HONEST.address, announced).wanted
    assert exact.leased() is not None
    _count(exact, range(3), mismatched=True)
    assert _suspect(exact)
    assert exact.leased() is None
    assert not classes.announce(backend, HONEST.address, announced).wanted

    other = encoding.sha256(b"another calibration")
    with exact.panel.mgr.store.read() as connection:
        named = [exact.numeric.digest()]
        assert exact_classes.without_suspects(connection, named, other) == {*named}
    with exact.panel.mgr.store.begin() as connection:
        known = suspicion.is_suspect(connection, exact.numeric.key, other, backend.now())
    assert not known, "what made it suspect before does not count under the next one"


@pytest.mark.parametrize(("others", "expected"), [(8, True), (9, False)])
def test_no_party_and_no_quarter_of_the_providers_makes_a_class_suspect(
    exact: ExactPool, others: int, expected: bool
) -> None:
    _join(exact, [0, 0, 0, 1, 2, *range(3, 3 + others)])
    _count(exact, range(4), mismatched=True)
    assert not _suspect(exact), "four nodes of two providers"
    _count(exact, range(5, 5 + others), mismatched=False)
    _count(exact, [4], mismatched=True)
    assert _suspect(exact) is expected, "three of eleven, three of twelve"


def test_differences_of_another_week_do_not_count(exact: ExactPool) -> None:
    _join(exact, range(3))
    now = exact.panel.mgr.now()
    _count(exact, [0, 1], mismatched=True, now=now - suspicion.WINDOW_SECONDS - 1)
    _count(exact, [2], mismatched=True)
    assert not _suspect(exact)
    _count(exact, [0, 1], mismatched=False)
    assert not _suspect(exact), "they differed long ago, and were judged again"
    _count(exact, [0, 1], mismatched=True)
    assert _suspect(exact)


def test_only_the_mismatch_itself_makes_a_class_suspect(exact: ExactPool) -> None:
    """Files with other evidence against them say nothing of the class."""
    mgr = exact.panel.mgr
    _join(exact, range(3))
    with mgr.store.begin() as connection:
        for node in ACCOUNTS[:3]:
            exact_classes.judged(
                connection, exact.numeric.key, node.address,
                validator=exact.validators[0].signer.address, rows=4, longest=9, mismatched=True,
                explained=True, now=mgr.now(),
            )  # fmt: skip
    assert not _suspect(exact)
