"""A validator that abstains too often is dismissed; nothing that others cause counts against it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st
from judges import appoint
from money_kit import VALIDATOR, ManagerSide, key, open_manager
from sqlalchemy.pool import QueuePool

from prime_chain.contracts.pools import Appointment
from prime_core.encoding import sha256
from prime_core.ids import Address
from prime_core.verdict import Outcome
from prime_orchestrator.manager.appointments import (
    LEAST,
    SHARE,
    WINDOW,
    abstains_too_often,
    end_appointments,
)
from prime_orchestrator.manager.transactions import quorum_of, requeue_wanted
from prime_orchestrator.store import intents, opinions, schema
from prime_orchestrator.store.opinions import OpinionRow

OTHER, THIRD = key(90), key(91)


@pytest.fixture
def mgr(tmp_path: Path) -> Iterator[ManagerSide]:
    made = open_manager(tmp_path)
    for one in (VALIDATOR, OTHER, THIRD):
        appoint(made.store, made.context.pool, one.address)
    yield made
    made.store.close()


def assigned(
    mgr: ManagerSide, validator: Address, abstained: int, given: int, *, judged: bool = True
) -> None:
    """So many files that a validator abstained from, then so many that it judged."""
    with mgr.store.begin() as connection:
        start = connection.execute(
            sa.select(sa.func.count()).select_from(schema.assignments)
        ).scalar_one()
        for number in range(start, start + abstained + given):
            name = sha256(b"file %d" % number)
            status = "abstained" if number < start + abstained else "given"
            connection.execute(
                sa.insert(schema.assignments).values(
                    submission_digest=name, validator=validator, status=status, until=0.0,
                    at=100.0 + number,
                )
            )  # fmt: skip
            if judged:
                opinions.add(connection, OpinionRow(name, OTHER.address, 0, "{}", 100.0))


def dismissed(mgr: ManagerSide, quorum: int = 2) -> list[Address]:
    def ask_chain() -> int:
        pool = mgr.store.engine.pool
        assert isinstance(pool, QueuePool)
        assert pool.checkedout() == 0, "no transaction is open while the chain is asked"
        return quorum

    return end_appointments(mgr.store, mgr.context, ask_chain, mgr.now)


@given(st.integers(0, WINDOW), st.integers(0, WINDOW))
def test_the_share_and_the_least_number_decide(abstained: int, given_: int) -> None:
    files = abstained + given_
    due = abstains_too_often(abstained, files)
    assert due == (abstained >= LEAST and abstained / max(files, 1) > 1 / SHARE)
    if due:
        assert abstains_too_often(abstained + 1, files + 1), "one more abstention changes nothing"


def test_a_validator_that_abstains_too_often_is_dismissed_once_for_each_appointment(
    mgr: ManagerSide,
) -> None:
    me = VALIDATOR.address
    assigned(mgr, me, LEAST, SHARE * LEAST - LEAST)
    assert dismissed(mgr) == [], "a quarter"
    assigned(mgr, me, 1, 0)
    assert dismissed(mgr) == [me]
    assert dismissed(mgr) == [], "once"
    with mgr.store.read() as connection:
        (intent,) = intents.pending(connection)
    assert (intent.kind, intent.arguments()) == ("dismiss", {"validator": me})
    with mgr.store.begin() as connection:
        intents.fail(connection, intent.id, "reverted", now=mgr.now())
    mgr.now.time += 60
    assert requeue_wanted(mgr.store, mgr.context, mgr.now) == 1
    appoint(mgr.store, mgr.context.pool, me, on=False)
    with mgr.store.begin() as connection:
        intents.fail(connection, intent.id, "reverted", now=mgr.now())
    mgr.now.time += 60
    assert requeue_wanted(mgr.store, mgr.context, mgr.now) == 0, "it is no longer appointed"


def test_what_happened_before_an_appointment_does_not_count(mgr: ManagerSide) -> None:
    me = VALIDATOR.address
    assigned(mgr, me, LEAST, 0)
    appoint(mgr.store, mgr.context.pool, me, on=False)
    assert dismissed(mgr) == []
    with mgr.store.begin() as connection:
        connection.execute(sa.update(schema.assignments).values(at=0.0))
    appoint(mgr.store, mgr.context.pool, me)
    assert dismissed(mgr) == []


def test_a_file_that_no_one_judged_and_a_needed_validator_are_left_alone(mgr: ManagerSide) -> None:
    me = VALIDATOR.address
    assigned(mgr, me, 2 * LEAST, 0, judged=False)
    assert dismissed(mgr) == [], "no one could judge them"
    assigned(mgr, me, LEAST, 0)
    assert dismissed(mgr, quorum=3) == [], "the quorum needs it"
    assert dismissed(mgr) == [me]


def test_a_slash_is_proposed_with_the_opinions_that_count_for_its_file(
    mgr: ManagerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The contract refuses a proposal with any other: THIRD was dismissed and appointed again."""
    roles = {
        VALIDATOR.address: Appointment(1, on=False, counts_from=0),
        THIRD.address: Appointment(2, on=True, counts_from=101),
        OTHER.address: Appointment(3, on=True, counts_from=100),
    }
    given = [
        SimpleNamespace(
            outcome=Outcome.REJECTED, validator=who,
            signed=lambda who=who: SimpleNamespace(opinion=SimpleNamespace(law="one"), by=who),
        )
        for who in roles
    ]  # fmt: skip
    contracts: Any = SimpleNamespace(
        pools=SimpleNamespace(
            validator_of=lambda pool, who: roles[who],
            judgement_of=lambda pool: SimpleNamespace(quorum=1),
        )
    )
    monkeypatch.setattr(opinions, "of", lambda connection, digest: given)
    with mgr.store.read() as connection:
        found: Any = quorum_of(connection, contracts, 1, sha256(b"file"), 100)
        assert [one.by for one in found] == [OTHER.address]
        assert quorum_of(connection, contracts, 1, sha256(b"file"), 99) is None


def test_a_dismissal_under_way_counts_so_that_the_quorum_stays(mgr: ManagerSide) -> None:
    """Its event is indexed ticks later; until then the validator is still among the appointed."""
    suspects = sorted((VALIDATOR.address, THIRD.address))
    for one in suspects:
        assigned(mgr, one, LEAST, 0)
    assert dismissed(mgr) == suspects[:1]
    assert dismissed(mgr) == [], "two of three stay, as many as the quorum"
    appoint(mgr.store, mgr.context.pool, suspects[0], on=False)
    assert dismissed(mgr) == []
    assert dismissed(mgr, quorum=1) == suspects[1:]
