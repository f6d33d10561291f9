"""Exact classes abused: validators that announce a class and do not judge, or announce without
end, and opinions that state mismatches of files they accept."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'prime-open[torch]'")

from judging_kit import HONEST, JudgedPool, small_run
from test_exact_judged import ExactPool

from prime_core.encoding import sha256
from prime_core.messages import ClassRequest
from prime_core.run import RunDefinition
from prime_core.validator_messages import ClassList, ExactClass
from prime_core.verdict import VerdictTable
from prime_orchestrator.api import classes
from prime_orchestrator.api import validators as api
from prime_orchestrator.store import jobs, schema
from prime_verify.finding import Finding


@pytest.fixture
def panel_run() -> RunDefinition:
    return small_run().model_copy(update={"replay_rows_micro": 250_000})


@pytest.fixture
def exact(panel: JudgedPool) -> ExactPool:
    return ExactPool(panel, None)


def test_validators_of_a_class_that_do_not_judge_hold_up_no_other_file(
    exact: ExactPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that they have no room for go to others; they would fill the window of files that are
    looked at, and no file of the pool would be judged."""
    monkeypatch.setattr(api, "OUTSIDE_ONE_IN", 1 << 255)
    monkeypatch.setattr(api, "AGAIN_ONE_IN", 1 << 255)
    monkeypatch.setattr(api, "ROOM", 2)
    honest, *idle = exact.validators
    exact.announce(*idle)
    mgr, window = exact.panel.mgr, 4 * 2
    many = [mgr.submit(HONEST, numeric_class=exact.numeric.digest()) for _ in range(4 + window)]
    last = mgr.submit(HONEST)
    for _ in range(2):
        assert all(one.claim() is not None for one in idle), "they claim, and never answer"
    with mgr.store.read() as connection:
        waiting = {one.submission_digest for one in jobs.short(connection, 100)}
    assert last.digest in waiting
    assert honest.claim() is not None
    with mgr.store.read() as connection:
        held = jobs.load_of(connection)
    assert held == {one.signer.address: 2 for one in exact.validators}
    assert len(many) > sum(held.values())


def test_who_accepts_a_file_states_no_mismatch_of_it(
    exact: ExactPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One validator could otherwise have every later file of an honest node replayed whole."""
    exact.announce(*exact.validators)
    table_of = Finding.verdict_table

    def lying(self: Finding, *given: Any) -> VerdictTable:
        table = table_of(self, *given)
        numbers = table.statistics | {"exact_mismatches": "1"}
        return table.model_copy(update={"statistics": numbers})

    monkeypatch.setattr(Finding, "verdict_table", lying)
    assert exact.judge(exact.submit(exact.panel.honest, HONEST)).status == "accepted"
    assert exact.records() in ({}, {HONEST.address: (1, 0, True)})


def _listed(exact: ExactPool, *fingerprints: str, version: int = 0) -> ClassList:
    facts = dict(exact.numeric.facts)
    policy = exact.panel.engines.digest(0)
    found = tuple(ExactClass(facts=facts, fingerprint=one) for one in fingerprints)
    return ClassList(policy_version=version, policy_digest=policy, classes=found)


def test_a_validator_that_announces_without_end_fills_no_table(exact: ExactPool) -> None:
    """What it takes back, and no one else announced, is forgotten."""
    backend, author = exact.panel.mgr.backend, exact.validators[0].signer.address
    exact.announce(exact.validators[1])
    for number in range(20):
        made_up = [sha256(f"{number} {n}".encode()) for n in range(4)]
        classes.announce_all(backend, author, _listed(exact, *made_up))
    with exact.panel.mgr.store.read() as connection:
        rows = connection.execute(schema.classes.select()).all()
    assert len(rows) == 5
    classes.announce_all(backend, author, _listed(exact))
    assert classes.info(backend, exact.numeric.digest()).fingerprint == exact.numeric.fingerprint


def test_a_class_is_wanted_with_every_policy_for_which_it_was_announced(exact: ExactPool) -> None:
    """Two policies with the same weights have the same fingerprint, and a validator may announce a
    fingerprint first for another policy."""
    mgr, manifest = exact.panel.mgr, exact.panel.mgr.publish(1)
    digest = manifest.manifest.digest()
    exact.announce(exact.validators[0])
    again = _listed(exact, exact.numeric.fingerprint, version=1)
    for one in exact.validators[1:]:
        listed = again.model_copy(update={"policy_digest": digest})
        classes.announce_all(mgr.backend, one.signer.address, listed)
    question = ClassRequest(policy_version=1, policy_digest=digest, facts=exact.numeric.facts)
    assert classes.announce(mgr.backend, HONEST.address, question).wanted
