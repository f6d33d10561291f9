"""Who must agree before a verdict counts: two validators on a rejection, never one key twice."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'prime-open[torch]'")

import sqlalchemy as sa
from court_kit import HONEST, LIAR, Court, Shelf
from money_kit import VALIDATOR, key

from orchestrator import judging, validator
from orchestrator import opinions as rules
from orchestrator.claims import Patience
from orchestrator.context import MAX_OBJECT_BYTES
from orchestrator.store import jobs, leases, opinions, schema, submissions
from orchestrator.store.opinions import OpinionRow
from protocol.core import seeds
from protocol.core.encoding import sha256
from protocol.core.ids import ZERO_DIGEST, Digest
from protocol.core.task import SignedLease
from protocol.core.verdict import Evidence, Outcome, Reason
from protocol.proofs.thresholds import shipped
from protocol.storage.base import digest_key, put_object
from protocol.verification.audit import audit_slash
from protocol.verification.rollout_file import read_rollout_file, write_rollout_file

SECOND, THIRD = key(70), key(71)
A, R, V = Outcome.ACCEPTED, Outcome.REJECTED, Outcome.VOID


def count(court: Court, table: sa.Table) -> int:
    with court.shop.store.read() as connection:
        return int(connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one())


def said(court: Court, digest: Digest) -> list[tuple[str, int]]:
    with court.shop.store.read() as connection:
        return [(row.validator, row.reason) for row in opinions.of(connection, digest)]


def test_a_slash_takes_two_validators_and_the_second_replays_the_secrets_rows(court: Court) -> None:
    second = court.another(SECOND)
    row = court.shop.submit(LIAR, make=court.forged)
    assert court.validator.judge_next() == row.digest
    first = court.shop.row(row.digest)
    assert first.status == "submitted", "one opinion is no verdict"
    assert count(court, schema.slashes) == 0
    assert court.shop.node_status(LIAR.address) == "active"
    assert court.validator.judge_next() is None, "the same key is not asked twice"

    assert second.judge_next() == row.digest
    judged = court.shop.row(row.digest)
    assert (judged.status, judged.reason) == ("rejected", Reason.TAMPERED_LOGPROBS)
    assert count(court, schema.slashes) == 1
    assert set(said(court, row.digest)) == {
        (VALIDATOR.address, Reason.TAMPERED_LOGPROBS),
        (SECOND.address, Reason.TAMPERED_LOGPROBS),
    }
    evidence = court.evidence(judged)
    assert evidence.validator == VALIDATOR.address, "the first's evidence is what both rest on"
    assert evidence.calibration == shipped().digest(), "and it names its calibration"
    audit = court.audit(court.slash(judged))
    assert audit.result == "match", audit.detail


def test_an_accusation_that_does_not_hold_elsewhere_slashes_nobody(court: Court) -> None:
    """The first makes its evidence up; the second finds the file honest, a third agrees."""
    second, third = court.another(SECOND), court.another(THIRD)
    liar_row = court.shop.submit(LIAR, make=court.forged)
    assert court.validator.judge_next() == liar_row.digest
    with court.shop.store.read() as connection:
        (opinion,) = opinions.of(connection, liar_row.digest)
    assert opinion.evidence is not None
    true_evidence = Evidence.model_validate_json(_object(court, opinion.evidence))
    row = court.shop.submit(HONEST, make=court.honest)
    with court.shop.store.begin() as connection:
        job = jobs.claim(
            connection, "crook", now=court.shop.now(), seconds=60, validator=VALIDATOR.address
        )
    assert job is not None
    assert job.submission_digest == row.digest
    forged = true_evidence.model_copy(
        update={"submission": row.signed(), "lease": _lease(court, row.lease_digest)}
    )
    judgement = judging.Judgement(Reason.WRONG_SAMPLING, 0, None, forged.model_dump_json().encode())
    published = judging.publish_verdict(
        court.shop.objects, court.shop.context, VALIDATOR, row.digest, judgement,
        judged_at=int(court.shop.now()),
    )  # fmt: skip
    assert judging.record_verdict(
        court.shop.store, court.shop.context, row.digest, published,
        worker="crook", now=court.shop.now(), needed=2,
    )  # fmt: skip
    for other in (second, third):
        while (judged := other.judge_next()) is not None and judged != row.digest:
            pass
    assert court.shop.row(row.digest).status == "accepted"
    assert court.shop.node_status(HONEST.address) == "active"
    with court.shop.store.read() as connection:
        records = {r.validator: r for r in opinions.track_records(connection)}
    assert (records[VALIDATOR.address].opinions, records[VALIDATOR.address].overruled) == (2, 1)
    assert records[SECOND.address].overruled == 0


FALSE: list[dict[str, Any]] = [
    {"chance": "0"},
    {"statistics": {"logprob_max": "0.001"}},
    {"reason": int(Reason.WRONG_SKETCH)},
    {"reason": int(Reason.MALFORMED)},
    {"validator": THIRD.address},
    {"lease": None},
    {"lease": {"policy_version": 7}},
    {"chain_id": 5},
    {"run_digest": sha256(b"another run")},
    {"calibration": sha256(b"another calibration")},
    {"statistics": {"draw_commitment": sha256(b"another draw")}},
    {"detail": "x" * MAX_OBJECT_BYTES},
]


@pytest.mark.parametrize("false", FALSE, ids=lambda false: str(false)[:60])
def test_a_second_validator_vouches_for_no_evidence_that_an_audit_would_not_match(
    court: Court, false: dict[str, Any]
) -> None:
    """The lie is true, what the first states of it is not: its node would win the dispute."""
    second = court.another(SECOND)
    row = court.shop.submit(LIAR, make=court.forged)
    assert court.validator.judge_next() == row.digest
    _restate(court, row.digest, false)
    assert second.judge_next() == row.digest
    _is_rejected_by_the_seconds_evidence(court, row.digest)


def test_a_lie_that_a_second_validator_has_seen_is_not_lost_by_a_draw_of_its_own(
    court: Court, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row lies, and the second's own draw misses it: it replays every row instead."""
    whole, secrets = seeds.drawn_rows, list[Digest]()

    def drawn(secret: Digest, digest: Digest, rows: int, count: int) -> list[int]:
        if count >= rows:
            return whole(secret, digest, rows, count)
        secrets.append(secret)
        return [0, 1, 2, 3] if secret == secrets[0] else [4, 5, 6, 7]

    monkeypatch.setattr(seeds, "drawn_rows", drawn)
    monkeypatch.setattr(validator, "draw_count", lambda *_: 4)
    second = court.another(SECOND)
    row = court.shop.submit(LIAR, make=partial(_one_row_lies, court))
    assert court.validator.judge_next() == row.digest
    _restate(court, row.digest, {"reason": int(Reason.WRONG_SKETCH)})
    assert second.judge_next() == row.digest
    evidence = _is_rejected_by_the_seconds_evidence(court, row.digest)
    assert sorted(evidence.rows_drawn) == list(range(8))


def _one_row_lies(court: Court, signed: SignedLease, lease_digest: Digest) -> bytes:
    honest, forged = (
        read_rollout_file(make(signed, lease_digest)) for make in (court.honest, court.forged)
    )
    return write_rollout_file([forged.rows[0], *honest.rows[1:]], forged.metadata)


def _restate(court: Court, digest: Digest, false: dict[str, Any]) -> None:
    """Replaces what the first validator's evidence says, `false` where it is to be false."""
    with court.shop.store.begin() as connection:
        (opinion,) = opinions.of(connection, digest)
        assert opinion.evidence is not None
        stated = json.loads(_object(court, opinion.evidence))
        for name, value in false.items():
            stated[name] = stated[name] | value if isinstance(value, dict) else value
        raw = put_object(court.shop.objects, json.dumps(stated).encode())
        connection.execute(sa.update(schema.opinions).values(evidence=raw))


def _is_rejected_by_the_seconds_evidence(court: Court, digest: Digest) -> Evidence:
    """Which an audit matches."""
    judged = court.shop.row(digest)
    assert (judged.status, judged.reason) == ("rejected", Reason.TAMPERED_LOGPROBS)
    evidence = court.evidence(judged)
    assert evidence.validator == SECOND.address
    setting = court.setting()
    both = setting.validators | {SECOND.address}
    found = audit_slash(court.slash(judged), replace(setting, validators=both), Shelf(court.shop))
    assert found.result == "match", found
    return evidence


def _object(court: Court, digest: Digest) -> bytes:
    return court.shop.objects.get(digest_key(digest), 1 << 20)


def _lease(court: Court, digest: Digest) -> object:
    with court.shop.store.read() as connection:
        row = leases.get(connection, digest)
    assert row is not None
    return row.signed()


def test_one_validator_alone_decides_alone(court: Court) -> None:
    row = court.judged(court.tampered, LIAR)
    assert row.status == "rejected"
    assert row.compute_share is None, "nothing was replayed: the rewards gave it away"
    honest = court.judged(court.honest)
    assert honest.compute_share is not None
    assert 0 < honest.compute_share <= 1.0 + 1e-9


@pytest.mark.parametrize(
    ("outcome", "earlier", "validators", "expected"),
    [
        (R, [], 1, 1),
        (R, [], 2, 2),
        (V, [], 2, 1),
        (A, [R], 2, 2),
        (R, [A], 3, 2),
        (A, [R], 1, 2),
    ],
)
def test_how_many_must_agree(
    outcome: Outcome, earlier: list[Outcome], validators: int, expected: int
) -> None:
    secret = sha256(b"any")
    assert rules.needed(outcome, earlier, validators, secret) == expected


def test_a_share_of_accepted_files_is_looked_at_twice_by_their_own_secrets() -> None:
    secrets = [sha256(str(number).encode()) for number in range(3200)]
    twice = sum(rules.needed(A, [], 2, secret) == 2 for secret in secrets)
    assert 150 < twice < 250, "one in 16"
    assert {rules.needed(A, [], 1, secret) for secret in secrets} == {1}


@pytest.mark.parametrize(
    ("outcome", "earlier", "wanted", "expected"),
    [
        (R, [], 1, True),
        (R, [], 2, False),
        (R, [R], 2, True),
        (A, [R], 2, False),
        (A, [R, A], 2, True),
    ],
)
def test_two_that_agree_make_the_verdict(
    outcome: Outcome, earlier: list[Outcome], wanted: int, expected: bool
) -> None:
    assert rules.agreed(outcome, earlier, wanted) is expected


def test_a_validators_record_counts_planted_files_by_what_they_were(court: Court) -> None:
    with court.shop.store.begin() as connection:
        for number, (kind, reason) in enumerate(
            [
                (opinions.HONEST, Reason.NONE),
                (opinions.HONEST, Reason.WRONG_SAMPLING),
                ("int4", Reason.WRONG_ACTIVATIONS),
                ("int8", Reason.NONE),
                ("truncated", Reason.MALFORMED),
            ]
        ):
            digest = sha256(str(number).encode())
            opinions.plant(connection, digest, kind, now=1.0)
            opinions.add(
                connection,
                OpinionRow(digest, VALIDATOR.address, int(reason), ZERO_DIGEST, None, 1.0),
            )
        (record,) = opinions.track_records(connection)
    assert (record.honest, record.accused, record.lying, record.missed) == (2, 1, 3, 1)


def twice_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every acceptance is to be looked at twice."""
    monkeypatch.setattr(rules, "ACCEPTED_ONE_IN", 1)


def test_an_acceptance_stands_alone_once_nobody_else_has_come_for_long(
    court: Court, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second validator is down: the honest node is paid all the same."""
    twice_looked_at(monkeypatch)
    court.another(SECOND)
    row = court.shop.submit(HONEST, make=court.honest)
    assert court.validator.judge_next() == row.digest
    assert court.shop.row(row.digest).status == "submitted"
    long = min(Patience().lone_seconds, court.shop.context.run.validity_seconds / 4)
    court.shop.now.time += long - 1
    assert court.validator.judge_next() is None
    court.shop.now.time += 1
    assert court.validator.judge_next() == row.digest
    assert court.shop.row(row.digest).status == "accepted"
    assert said(court, row.digest) == [(VALIDATOR.address, Reason.NONE)]


def test_an_acceptance_does_not_stand_alone_once_somebody_contradicts(
    court: Court, monkeypatch: pytest.MonkeyPatch
) -> None:
    twice_looked_at(monkeypatch)
    court.another(SECOND)
    row = court.shop.submit(HONEST, make=court.honest)
    assert court.validator.judge_next() == row.digest
    with court.shop.store.begin() as connection:
        opinions.add(
            connection,
            OpinionRow(
                row.digest, SECOND.address, int(Reason.WRONG_SAMPLING), ZERO_DIGEST, None, 1.0
            ),
        )
    court.shop.now.time += 10 * Patience().lone_seconds
    assert court.validator.judge_next() is None


def test_a_validator_that_changes_its_mind_says_so_and_goes_on_to_other_files(
    court: Court, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its second look, alone, it finds a lie that it missed: it waits for another like any
    rejection, and neither is judged again and again nor holds up what came later."""
    twice_looked_at(monkeypatch)
    second = court.another(SECOND)
    row = court.shop.submit(LIAR, make=court.forged)
    with court.shop.store.begin() as connection:
        missed = OpinionRow(
            row.digest, VALIDATOR.address, int(Reason.NONE), ZERO_DIGEST, None, court.shop.now()
        )
        opinions.add(connection, missed)
    court.shop.now.time += Patience().lone_seconds
    later = court.shop.submit(HONEST, make=court.honest)
    assert court.validator.judge_next() == row.digest
    assert said(court, row.digest) == [(VALIDATOR.address, Reason.TAMPERED_LOGPROBS)]
    assert court.shop.row(row.digest).status == "submitted", "it is still one key alone"
    assert count(court, schema.slashes) == 0
    assert court.validator.judge_next() == later.digest
    assert second.judge_next() == row.digest
    assert court.shop.row(row.digest).status == "rejected"
    assert count(court, schema.slashes) == 1


def test_a_rejection_never_stands_alone_and_is_counted_while_it_waits_and_when_it_lapses(
    court: Court,
) -> None:
    court.another(SECOND)
    row = court.shop.submit(LIAR, make=court.forged)
    assert court.validator.judge_next() == row.digest
    at = court.shop.now()
    court.shop.now.time += 10 * Patience().lone_seconds
    assert court.validator.judge_next() is None
    with court.shop.store.begin() as connection:
        assert opinions.waiting(connection) == {"rejected": (1, at)}
        assert opinions.lapsed(connection) == 0
        submissions.judge(
            connection, row.digest, "void", reason=int(Reason.UNAVAILABLE), judged_at=1.0
        )
        assert opinions.waiting(connection) == {}
        assert opinions.lapsed(connection) == 1
    assert count(court, schema.slashes) == 0
