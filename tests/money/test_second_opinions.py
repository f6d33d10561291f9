"""How many validators must agree, and that none sees what another said before it has sealed its own
opinion; opinions that do not count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'prime-open[torch]'")

import sqlalchemy as sa
from judges import Bench, appoint, judge_of
from judging_kit import HONEST, LIAR, JudgedPool
from money_kit import VALIDATOR, key

from prime_core.encoding import sha256
from prime_core.errors import (
    ConflictError,
    MalformedError,
    PolicyError,
    UnavailableError,
    UntrustedError,
)
from prime_core.ids import Digest
from prime_core.opinions import check_opinions
from prime_core.storage.base import digest_key, put_object
from prime_core.validator_messages import Job, KeepRequest, OpinionList, ReleaseRequest
from prime_core.verdict import (
    MAX_TABLE_BYTES,
    Outcome,
    Reason,
    SignedOpinion,
    Verdict,
    reason_digest,
)
from prime_orchestrator.api import validators
from prime_orchestrator.api.validators import SINGLE_SECONDS
from prime_orchestrator.manager.endings import void_unjudged
from prime_orchestrator.manager.history import draw_count
from prime_orchestrator.manager.judging import AGAIN_SECONDS, enough
from prime_orchestrator.manager.settlement import CHAIN_BLOCK, CHAIN_TIME
from prime_orchestrator.store import jobs, leases, meta, opinions, schema
from prime_orchestrator.store.opinions import OpinionRow

SECOND, THIRD = key(70), key(71)
A, R, V = Outcome.ACCEPTED, Outcome.REJECTED, Outcome.VOID


def said(panel: JudgedPool, digest: Digest) -> dict[str, int]:
    with panel.mgr.store.read() as connection:
        return {row.validator: row.reason for row in opinions.of(connection, digest)}


def published(panel: JudgedPool, digest: Digest) -> OpinionList:
    return validators.opinions_on(panel.mgr.backend, digest)


def test_a_slash_takes_two_validators_and_the_second_sees_nothing_of_the_first(
    panel: JudgedPool,
) -> None:
    second = panel.another(SECOND)
    row = panel.mgr.submit(LIAR, make=panel.forged)
    assert panel.validator.judge_next() == row.digest
    assert panel.mgr.row(row.digest).status == "submitted", "one opinion is not a verdict"
    assert panel.mgr.count(schema.slashes) == 0
    assert panel.mgr.node_status(LIAR.address) == "active"
    assert panel.validator.judge_next() is None, "the same key is not asked twice"
    assert published(panel, row.digest).opinions == (), "not while another judges"

    assert second.judge_next() == row.digest
    judged = panel.mgr.row(row.digest)
    assert (judged.status, judged.reason) == ("rejected", Reason.TAMPERED_LOGPROBS)
    assert panel.mgr.count(schema.slashes) == 1
    assert said(panel, row.digest) == {
        VALIDATOR.address: Reason.TAMPERED_LOGPROBS,
        SECOND.address: Reason.TAMPERED_LOGPROBS,
    }
    one, other = published(panel, row.digest).opinions
    assert one.opinion.law == other.opinion.law
    assert judged.verdict is not None
    raw = panel.mgr.objects.get(digest_key(judged.verdict), 1 << 20)
    assert Verdict.model_validate_json(raw).opinions == (one, other)
    assert panel.evidence(judged).validator == VALIDATOR.address, "the first's evidence"
    assert panel.audit(panel.slash(judged)).result == "match"
    with panel.mgr.store.read() as connection:
        job = jobs.get(connection, row.digest)
    assert job is not None
    assert job.whole, "the second replays every row, so that a lie in one is not lost"


def test_an_accusation_that_does_not_hold_elsewhere_slashes_no_one(panel: JudgedPool) -> None:
    """The first makes it up; the second finds the file honest, a third agrees."""
    second, third = panel.another(SECOND), panel.another(THIRD)
    row = panel.mgr.submit(HONEST, make=panel.honest)
    job = panel.validator.claim()
    assert job is not None
    panel.validator.say(job, Reason.WRONG_SAMPLING)
    judge_of(panel.mgr.backend).tick()
    judged = [second.judge_next(), third.judge_next(), second.judge_next(), third.judge_next()]
    assert judged.count(row.digest) == 2
    assert panel.mgr.row(row.digest).status == "accepted"
    assert panel.mgr.node_status(HONEST.address) == "active"
    assert panel.mgr.count(schema.slashes) == 0
    with panel.mgr.store.read() as connection:
        records = {record.validator: record for record in opinions.track_records(connection)}
    assert records[VALIDATOR.address].overruled == 1
    assert records[SECOND.address].overruled == 0


@pytest.mark.parametrize(
    ("outcome", "said", "named", "needed", "quorum", "expected"),
    [
        (R, [R], 1, 1, 1, True),
        (R, [R], 2, 1, 2, False),
        (R, [R, R], 2, 1, 2, True),
        (R, [R, R], 2, 1, 3, True),
        (R, [R, R], 3, 1, 3, False),
        (R, [R, R, R], 3, 1, 3, True),
        (R, [A, R, R], 3, 1, 3, False),
        (A, [A], 2, 1, 2, True),
        (A, [A], 3, 1, 3, True),
        (A, [A], 2, 2, 2, False),
        (A, [A, A], 2, 2, 2, True),
        (A, [R, A], 2, 2, 2, False),
        (A, [R, A, A], 3, 3, 3, True),
        (A, [R, A], 1, 1, 1, False),
        (V, [V], 2, 2, 2, True),
        (V, [A, V], 2, 2, 2, False),
    ],
)
def test_how_many_must_agree(
    outcome: Outcome, said: list[Outcome], named: int, needed: int, quorum: int, expected: bool
) -> None:
    assert enough(outcome, said, named, needed, quorum=quorum) is expected


def test_a_rejection_takes_as_many_validators_as_the_chain_asks_for(panel: JudgedPool) -> None:
    """With fewer, no slash is ever proposed."""
    benches = [panel.validator, panel.another(SECOND), panel.another(THIRD)]
    digest = panel.mgr.submit(LIAR, make=panel.honest).digest
    judge = judge_of(panel.mgr.backend, quorum=3)
    said_by = []
    for bench in benches * 3:
        if (job := bench.claim()) is not None:
            bench.say(job, Reason.WRONG_SAMPLING)
            said_by.append(bench.signer.address)
            assert judge.tick() == ([digest] if len(said_by) == 3 else [])
    assert len(set(said_by)) == 3
    assert panel.mgr.row(digest).status == "rejected"


def test_a_quorum_that_cannot_be_read_now_is_asked_for_once_and_holds_up_no_acceptance(
    panel: JudgedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validators, "AGAIN_ONE_IN", 1 << 256)
    second, asked = panel.another(SECOND), []

    def quorum() -> int:
        asked.append(1)
        raise UnavailableError("no RPC endpoint answers")

    judge = replace(judge_of(panel.mgr.backend), quorum=quorum)
    for _ in range(2):
        panel.mgr.submit(LIAR, make=panel.honest)
    for bench in (panel.validator, second, panel.validator, second):
        while (job := bench.claim()) is not None:
            bench.say(job, Reason.WRONG_SAMPLING)
    with pytest.raises(UnavailableError):
        judge.tick()
    assert len(asked) == 1
    honest = panel.mgr.submit(HONEST, make=panel.honest).digest
    for bench in (panel.validator, second):
        while (job := bench.claim()) is not None:
            bench.say(job, Reason.NONE, court_rows(panel, job, bench))
    assert judge.tick() == [honest]
    assert len(asked) == 1, "what waits for it is not tried in each tick"
    panel.mgr.now.time += AGAIN_SECONDS
    with pytest.raises(UnavailableError):
        judge.tick()
    assert len(asked) == 2


def test_one_file_in_sixteen_is_judged_twice_by_the_managers_secret_alone(
    panel: JudgedPool,
) -> None:
    one = panel.mgr.board
    panel.another(SECOND)
    row = panel.mgr.submit(HONEST)
    with panel.mgr.store.read() as connection:
        lease = leases.get(connection, row.lease_digest)
    assert lease is not None
    listed = one.listed(panel.mgr.objects, lease.signed())
    files = [sha256(str(number).encode()) for number in range(3200)]
    secret = sha256(b"second")
    twice = sum(validators.first_needed(listed, secret, file) == 2 for file in files)
    assert 150 < twice < 250
    alone = listed.model_copy(update={"commitments": listed.commitments[:1]})
    assert {validators.first_needed(alone, secret, file) for file in files} == {1}


def twice_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file is to be judged twice."""
    monkeypatch.setattr(validators, "AGAIN_ONE_IN", 1)


def two_claims(panel: JudgedPool, monkeypatch: pytest.MonkeyPatch) -> tuple[Bench, Job, Job]:
    """(second validator, the first's job, the second's) for one honest file."""
    twice_judged(monkeypatch)
    second = panel.another(SECOND)
    second.claim()  # it is live
    panel.mgr.submit(HONEST, make=panel.honest)
    mine, its = panel.validator.claim(), second.claim()
    assert mine is not None
    assert its is not None
    assert mine.submission_digest == its.submission_digest
    return second, mine, its


def test_no_opinion_is_taken_before_all_that_are_needed_are_sealed(
    panel: JudgedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    second, mine, its = two_claims(panel, monkeypatch)
    alone = draw_count(panel.mgr.context.run, 0, mine.second)
    assert mine.rows == its.rows == alone, "a claim does not show that another judges the file"
    rows = court_rows(panel, mine)
    first = panel.validator.opinion(mine, Reason.NONE, rows)
    assert not panel.validator.seal(first)
    with pytest.raises(ConflictError, match="not sealed yet"):
        panel.validator.give(first)
    assert published(panel, Digest(mine.submission_digest)).opinions == ()
    other = second.opinion(its, Reason.WRONG_SAMPLING)
    assert second.seal(other)
    copied = second.opinion(its, Reason.NONE, rows)  # it thinks better of it
    with pytest.raises(ConflictError, match="not the one that the caller sealed"):
        second.give(copied)
    with pytest.raises(ConflictError, match="no claim"):
        second.seal(copied)
    panel.validator.give(first)
    second.give(other)
    judge_of(panel.mgr.backend).tick()
    assert panel.mgr.row(Digest(mine.submission_digest)).status == "submitted", "they differ"


def court_rows(panel: JudgedPool, job: Job, by: Bench | None = None) -> Any:
    """Rows of an accepted file, as the real code of its validator finds them."""
    bench = by or panel.validator
    validator = bench.validator
    assert validator is not None
    draw = bench.draws.draw(job)
    return validator._verify(job, draw, panel.engines).table


def test_two_validators_accept_together_by_the_programs_own_way(
    panel: JudgedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    twice_judged(monkeypatch)
    second = panel.another(SECOND)
    assert second.judge_next() is None
    row = panel.mgr.submit(HONEST, make=panel.honest)
    assert panel.validator.judge_next() == row.digest
    assert said(panel, row.digest) == {}, "sealed"
    assert second.judge_next() == row.digest
    assert set(said(panel, row.digest)) == {SECOND.address}
    assert panel.validator.judge_next() is None
    assert panel.mgr.row(row.digest).status == "accepted"
    assert set(said(panel, row.digest)) == {VALIDATOR.address, SECOND.address}


@pytest.mark.slow
def test_an_acceptance_stands_alone_once_no_other_validator_has_come_for_long(
    panel: JudgedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second validator is down: the honest node is paid all the same."""
    twice_judged(monkeypatch)
    panel.another(SECOND)
    row = panel.mgr.submit(HONEST, make=panel.honest)
    assert panel.validator.judge_next() == row.digest
    assert panel.mgr.row(row.digest).status == "submitted"
    for _ in range(int(SINGLE_SECONDS / 60) + 1):
        assert panel.mgr.row(row.digest).status == "submitted"
        panel.mgr.now.time += 60
        panel.validator.judge_next()
    panel.validator.judge_next()
    assert panel.mgr.row(row.digest).status == "accepted"
    assert said(panel, row.digest) == {VALIDATOR.address: Reason.NONE}


@pytest.mark.parametrize("why", ["another version", "dismissed"])
def test_an_acceptance_with_which_no_other_counts_stands_alone_after_long(
    panel: JudgedPool, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """The honest node is paid: two acceptances differ in the verifier's version, or the author of
    one is dismissed, and there is no third validator."""
    second, mine, its = two_claims(panel, monkeypatch)
    digest, rows = Digest(mine.submission_digest), court_rows(panel, mine)
    first = panel.validator.opinion(mine, Reason.NONE, rows)
    other = second.opinion(its, Reason.NONE, rows, version="newer")
    panel.validator.seal(first)
    second.seal(other)
    panel.validator.give(first)
    second.give(other)
    appoint(panel.mgr.store, 1, SECOND.address, on=why != "dismissed")
    judge = judge_of(panel.mgr.backend)
    assert judge.tick() == []
    panel.mgr.now.time += SINGLE_SECONDS - 1
    assert panel.validator.claim() is None
    assert judge.tick() == []
    panel.mgr.now.time += 2
    assert panel.validator.claim() is None
    assert judge.tick() == [digest]
    assert panel.mgr.row(digest).status == "accepted"


@pytest.mark.parametrize("how", ["seals and keeps it back", "keeps its claim"])
def test_a_live_validator_that_hands_in_nothing_counts_as_absent(
    panel: JudgedPool, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The honest node is paid, as if the second validator were down."""
    monkeypatch.setattr(validators, "PATIENCE_SECONDS", 60.0)
    monkeypatch.setattr(validators, "SINGLE_SECONDS", 240.0)
    second, mine, its = two_claims(panel, monkeypatch)
    digest, mgr = Digest(mine.submission_digest), panel.mgr
    first = panel.validator.opinion(mine, Reason.NONE, court_rows(panel, mine))
    keep = KeepRequest(worker="kit", submissions=(digest,))
    judge, began, held = judge_of(mgr.backend), mgr.now(), its
    while not (decided := judge.tick()):
        if held is not None and how == "seals and keeps it back":
            second.seal(second.opinion(held))
        if panel.validator.seal(first):
            panel.validator.give(first)
        mgr.now.time += 20
        assert mgr.now() - began < 480, "it waits for ever"
        validators.keep(mgr.backend, SECOND.address, keep)
        held = second.claim()
        assert panel.validator.claim() is None
    assert decided == [digest]
    assert mgr.now() - began >= 240
    assert mgr.row(digest).status == "accepted"
    assert said(panel, digest) == {VALIDATOR.address: Reason.NONE}


def test_a_verdict_lists_no_acceptance_of_another_version(
    panel: JudgedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Auditors would refuse it, and with it the reward root of its epoch and all later ones."""
    twice_judged(monkeypatch)
    benches = [panel.validator, panel.another(SECOND), panel.another(THIRD)]
    for bench in benches:
        bench.claim()  # it is live
    digest = panel.mgr.submit(HONEST, make=panel.honest).digest
    claimed = [(bench, job) for bench in benches if (job := bench.claim()) is not None]
    assert len(claimed) == 2
    rows = court_rows(panel, claimed[0][1])
    said_of = [
        bench.opinion(job, Reason.NONE, rows, version=version)
        for (bench, job), version in zip(claimed, ("older", "test"), strict=True)
    ]
    for (bench, _), opinion in zip(claimed, said_of, strict=True):
        bench.seal(opinion)
    for (bench, _), opinion in zip(claimed, said_of, strict=True):
        bench.give(opinion)
        panel.mgr.now.time += 1
    judge = judge_of(panel.mgr.backend)
    assert judge.tick() == [], "they do not count together"
    (last,) = [bench for bench in benches if all(bench is not one for one, _ in claimed)]
    job = last.claim()
    assert job is not None
    last.say(job, Reason.NONE, rows)
    assert judge.tick() == [digest]
    named = panel.mgr.row(digest).verdict
    assert named is not None
    verdict = Verdict.model_validate_json(panel.mgr.objects.get(digest_key(named), 1 << 20))
    everyone = [bench.signer.address for bench in benches]
    check_opinions(verdict, digest, panel.mgr.context.deployment, everyone)
    assert verdict.deciding.validator == claimed[1][0].signer.address


@pytest.mark.slow
def test_a_rejection_never_stands_alone_and_is_counted_while_it_waits_and_when_it_lapses(
    panel: JudgedPool,
) -> None:
    panel.another(SECOND)
    mgr = panel.mgr
    row = mgr.submit(LIAR, make=panel.forged)
    assert panel.validator.judge_next() == row.digest
    at = mgr.now()
    for _ in range(100):
        mgr.now.time += SINGLE_SECONDS / 10
        assert panel.validator.judge_next() is None
    assert mgr.row(row.digest).status == "submitted"
    with mgr.store.begin() as connection:
        assert opinions.waiting(connection) == {"rejected": (1, at)}
        assert opinions.lapsed(connection) == 0
        meta.put(connection, CHAIN_BLOCK, "1")
        meta.put(connection, CHAIN_TIME, str(int(mgr.now())))
        root = sha256(b"root")
        connection.execute(
            sa.insert(schema.roots).values(
                id=1, root=root, leaves_object=root, count=1, created_at=1.0, chain_seq=0,
                epoch=0, posted_at=1, block=1,
            )
        )  # fmt: skip
        connection.execute(sa.update(schema.submissions).values(root_id=1))
    assert void_unjudged(mgr.store, mgr.context, mgr.now) == 1
    with mgr.store.read() as connection:
        assert opinions.waiting(connection) == {}
        assert opinions.lapsed(connection) == 1
    assert panel.mgr.count(schema.slashes) == 0


def test_files_that_wait_for_an_absent_validator_hold_up_no_other_file(
    panel: JudgedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second validator is down; more files wait for it than are looked at for one caller."""
    twice_judged(monkeypatch)
    monkeypatch.setattr(validators, "ROOM", 2)
    panel.another(SECOND)
    files = {panel.mgr.submit(HONEST).digest for _ in range(9)}
    judged = set()
    while (job := panel.validator.claim()) is not None:
        judged.add(job.submission_digest)
        panel.validator.seal(panel.validator.opinion(job))
    assert judged == files


def test_a_file_whose_objects_are_damaged_holds_up_no_verdict(panel: JudgedPool) -> None:
    """A bad sector of the object store's disk."""
    named = []
    for _ in range(2):
        panel.mgr.submit(HONEST, make=panel.honest)
        job = panel.validator.claim()
        assert job is not None
        said_of = panel.validator.say(job, Reason.NONE, court_rows(panel, job))
        named.append(said_of.opinion)
    place = panel.mgr.folder / "objects" / digest_key(Digest(named[0].table))
    whole = place.read_bytes()
    place.write_bytes(whole[:-1] + b" ")
    judge = judge_of(panel.mgr.backend)
    assert judge.tick() == [named[1].submission]
    panel.mgr.now.time += AGAIN_SECONDS
    with pytest.raises(UnavailableError, match="damaged"):
        judge.tick()
    place.write_bytes(whole)
    panel.mgr.now.time += AGAIN_SECONDS
    assert judge.tick() == [named[0].submission]


# ── opinions that do not count ──


def resigned(bench: Bench, signed: SignedOpinion, **changes: Any) -> SignedOpinion:
    """The opinion with other fields, signed again."""
    return bench.sign(signed.opinion.model_copy(update=changes), signed.law)


HOSTILE: dict[str, tuple[Callable[[JudgedPool, SignedOpinion], SignedOpinion], type[Exception]]] = {
    "another's address": (
        lambda panel, signed: signed.model_copy(update={"validator": SECOND.address}),
        UntrustedError,
    ),
    "another's signature": (
        lambda panel, signed: signed.model_copy(
            update={"signature": panel.another(SECOND).sign(signed.opinion, signed.law).signature}
        ),
        UntrustedError,
    ),
    "another pool": (
        lambda panel, signed: resigned(panel.validator, signed, pool=2),
        ConflictError,
    ),
    "another outcome than its reason": (
        lambda panel, signed: resigned(panel.validator, signed, outcome=int(V)),
        MalformedError,
    ),
    "a reason of the manager's": (
        lambda panel, signed: resigned(
            panel.validator, signed, outcome=int(V), reason=reason_digest(Reason.UNROOTED)
        ),
        MalformedError,
    ),
    "evidence with an acceptance": (
        lambda panel, signed: resigned(panel.validator, signed, evidence=sha256(b"e")),
        MalformedError,
    ),
    "another law than it states": (
        lambda panel, signed: resigned(panel.validator, signed, law=sha256(b"l")),
        MalformedError,
    ),
    "from the future": (
        lambda panel, signed: resigned(panel.validator, signed, judged_at=1 << 40),
        MalformedError,
    ),
}


@pytest.mark.parametrize("kind", sorted(HOSTILE))
def test_an_opinion_that_does_not_hold_is_refused(panel: JudgedPool, kind: str) -> None:
    change, refused = HOSTILE[kind]
    row = panel.mgr.submit(HONEST, make=panel.honest)
    job = panel.validator.claim()
    assert job is not None
    hostile = change(panel, panel.validator.opinion(job, Reason.NONE, court_rows(panel, job)))
    panel.validator.seal(hostile)
    with pytest.raises(refused):
        panel.validator.give(hostile)
    assert said(panel, row.digest) == {}
    assert judge_of(panel.mgr.backend).tick() == []


def test_an_opinion_is_no_opinion_on_another_file_and_counts_once(panel: JudgedPool) -> None:
    first = panel.mgr.submit(HONEST, make=panel.honest)
    job = panel.validator.claim()
    assert job is not None
    signed = panel.validator.say(job, Reason.NONE, court_rows(panel, job))
    panel.validator.give(signed)  # carried twice
    assert panel.mgr.count(schema.opinions) == 1
    other = panel.mgr.submit(LIAR, make=panel.forged)
    next_job = panel.validator.claim()
    assert next_job is not None
    moved = resigned(panel.validator, signed, submission=other.digest)
    panel.validator.seal(moved)
    with pytest.raises(ConflictError, match="another file"):
        panel.validator.give(moved)
    assert said(panel, other.digest) == {}
    assert judge_of(panel.mgr.backend).tick() == [first.digest]


def test_a_dismissed_validators_opinion_does_not_count_however_far_it_came(
    panel: JudgedPool,
) -> None:
    second = panel.another(SECOND)
    row = panel.mgr.submit(HONEST, make=panel.honest)
    job = panel.validator.claim()
    assert job is not None
    signed = panel.validator.opinion(job, Reason.NONE, court_rows(panel, job))
    assert panel.validator.seal(signed)
    appoint(panel.mgr.store, 1, VALIDATOR.address, on=False)
    with pytest.raises(PolicyError, match="not appointed"):
        panel.validator.give(signed)
    with pytest.raises(PolicyError, match="not appointed"):
        panel.validator.claim()
    keep = KeepRequest(worker="kit", submissions=(Digest(row.digest),))
    with pytest.raises(PolicyError, match="not appointed"):
        validators.keep(panel.mgr.backend, VALIDATOR.address, keep)
    appoint(panel.mgr.store, 1, VALIDATOR.address)
    panel.validator.give(signed)
    appoint(panel.mgr.store, 1, VALIDATOR.address, on=False)  # before the manager looks
    assert judge_of(panel.mgr.backend).tick() == []
    assert said(panel, row.digest) == {}
    assert second.judge_next() == row.digest
    assert panel.mgr.row(row.digest).validator == SECOND.address


@pytest.mark.parametrize(
    "lie", ["rows", "values", "fields", "file", "none", "calibration", "large"]
)
def test_an_opinion_whose_table_does_not_bear_it_out_is_taken_out(
    panel: JudgedPool, lie: str
) -> None:
    row = panel.mgr.submit(HONEST, make=panel.honest)
    job = panel.validator.claim()
    assert job is not None
    rows = court_rows(panel, job)
    if lie == "rows":
        rows = rows[:-1]
    if lie == "fields":  # a program of protocol 1 could not read them
        rows = [*rows[:-1], rows[-1].model_copy(update={"parts": {"task_micro": 1}})]
    signed = panel.validator.opinion(job, Reason.NONE, rows)
    if lie == "values":
        some = {"sketch": ("many",) * panel.mgr.context.run.least_drawn(len(rows))}
        signed = panel.validator.opinion(job, Reason.NONE, rows, row_statistics=some)
    if lie == "large":  # the trainer would not fetch it
        padding = {"padding": "0" * MAX_TABLE_BYTES}
        signed = panel.validator.opinion(job, Reason.NONE, rows, statistics=padding)
    if lie == "file":
        other = sha256(b"another")
        wrong = panel.validator.opinion(job.model_copy(update={"submission_digest": other}))
        signed = resigned(panel.validator, signed, table=wrong.opinion.table)
    if lie == "none":
        name = put_object(panel.mgr.objects, b"no table")
        signed = resigned(panel.validator, signed, table=name)
    if lie == "calibration":
        law = signed.law.model_copy(update={"verification_class": sha256(b"looser")})
        said_of = signed.opinion.model_copy(update={"law": law.struct_hash()})
        signed = panel.validator.sign(said_of, law)
    assert panel.validator.seal(signed)
    panel.validator.give(signed)
    assert judge_of(panel.mgr.backend).tick() == []
    assert said(panel, row.digest) == {}
    assert panel.validator.claim() is None, "it does not get the file again"
    assert panel.mgr.row(row.digest).status == "submitted"


def test_no_validator_chooses_a_file(panel: JudgedPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by asking, nor by ending another's claim, nor by refusing others."""
    monkeypatch.setattr(validators, "AGAIN_ONE_IN", 1 << 256)
    second = panel.another(SECOND)
    second.claim()
    rows = [panel.mgr.submit(HONEST) for _ in range(6)]
    given: dict[Digest, Bench] = {}
    for bench in (panel.validator, second) * 6:
        if (job := bench.claim()) is not None:
            assert job.submission_digest not in given, "one file, one validator"
            given[Digest(job.submission_digest)] = bench
    assert set(given) == {row.digest for row in rows}
    for digest, bench in given.items():
        stranger = second if bench is panel.validator else panel.validator
        request = ReleaseRequest(
            worker="kit", submission=digest, kind="abstain",
            reason=int(Reason.POLICY_MISSING), detail="",
        )  # fmt: skip
        with pytest.raises(ConflictError, match="no claim"):
            validators.release(panel.mgr.backend, stranger.signer.address, request)
        validators.release(panel.mgr.backend, bench.signer.address, request)
        again = stranger.claim()
        assert again is not None
        assert again.submission_digest == digest, "the other one gets it"
        assert bench.claim() is None, "and the first never again"


@pytest.mark.slow
def test_one_validator_alone_decides_alone(panel: JudgedPool) -> None:
    row = panel.judged(panel.tampered, LIAR)
    assert row.status == "rejected"
    assert row.compute_share is None, "nothing was replayed: the rewards gave it away"
    honest = panel.judged(panel.honest)
    assert honest.compute_share is not None
    assert 0 < honest.compute_share <= 1.0 + 1e-9


def test_a_validators_record_counts_planted_files_by_what_they_were(panel: JudgedPool) -> None:
    with panel.mgr.store.begin() as connection:
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
                OpinionRow(digest, VALIDATOR.address, int(reason), "{}", 1.0),
            )
        (record,) = opinions.track_records(connection)
    assert (record.honest, record.accused, record.lying, record.missed) == (2, 1, 3, 1)
