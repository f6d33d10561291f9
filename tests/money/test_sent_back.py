"""A copy that was accepted before its original is judged once more, and found; an honest
node keeps all it has, and no one is asked forever."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'prime-open[torch]'")

import judging_kit
import sqlalchemy as sa
from copy_kit import Copyist, one_problem
from judges import Bench, appoint
from judging_kit import HONEST, LIAR, JudgedPool
from money_kit import VALIDATOR, key

from prime_core import seeds
from prime_core.encoding import sha256
from prime_core.ids import Digest
from prime_core.verdict import Reason
from prime_orchestrator.api import validators
from prime_orchestrator.manager import reviews
from prime_orchestrator.manager.endings import void_unjudged
from prime_orchestrator.manager.settlement import CHAIN_BLOCK, CHAIN_TIME
from prime_orchestrator.store import groups, jobs, meta, opinions, row_marks, schema
from prime_orchestrator.store.submissions import SubmissionRow
from prime_validator.judging import Validator
from prime_verify.finding import Finding
from prime_verify.repeats import marks
from prime_verify.rollout_file import read_rollout_file

OTHER = sha256(b"another file")
SECOND, THIRD = key(70), key(71)


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def store_url(request: pytest.FixtureRequest) -> str | None:
    """All of this holds in both stores, whose locks and whose deletes differ."""
    return request.getfixturevalue("empty_postgres") if request.param == "postgres" else None


@pytest.fixture(autouse=True)
def _its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging_kit, "small_run", one_problem)
    whole = seeds.drawn_rows
    monkeypatch.setattr(  # row 3, which lies, is replayed only with all others
        seeds,
        "drawn_rows",
        lambda secret, digest, rows, count: (
            whole(secret, digest, rows, count) if count >= rows else [0, 1]
        ),
    )
    # no file is drawn for a second opinion: which one that hits changes with every byte of a lease
    monkeypatch.setattr(validators, "AGAIN_ONE_IN", 1 << 256)


def accepted_first(
    panel: JudgedPool, judges: Bench, claimed: float = 1.0
) -> tuple[SubmissionRow, SubmissionRow]:
    """(original, copy): the copy is accepted, the original waits."""
    copyist = Copyist(panel)
    original = panel.mgr.submit(HONEST, make=copyist.original)
    copy = panel.mgr.submit(LIAR, make=copyist.copy(claimed))
    with panel.mgr.store.begin() as connection:  # as if it came later
        jobs.change(connection, original.digest, created_at=panel.mgr.now() + 1)
    assert judges.judge_next() == copy.digest
    assert panel.mgr.row(copy.digest).status == "accepted"
    return original, copy


def of_file(panel: JudgedPool, table: sa.Table, digest: Digest) -> list[Any]:
    with panel.mgr.store.read() as connection:
        query = sa.select(table).where(table.c.submission_digest == digest)
        return list(connection.execute(query).mappings())


def root_posted(panel: JudgedPool, row: SubmissionRow, *, ago: int) -> None:
    """Its root is on chain since `ago` seconds."""
    now = int(panel.mgr.now())
    with panel.mgr.store.begin() as connection:
        meta.put(connection, CHAIN_BLOCK, "1")
        meta.put(connection, CHAIN_TIME, str(now))
        connection.execute(sa.delete(schema.roots))
        connection.execute(
            sa.insert(schema.roots).values(
                id=1, root=OTHER, leaves_object=OTHER, count=1, created_at=1.0, chain_seq=0,
                epoch=0, posted_at=now - ago, block=1,
            )
        )  # fmt: skip
        mine = schema.submissions.c.digest == row.digest
        connection.execute(sa.update(schema.submissions).where(mine).values(root_id=1))


@pytest.mark.parametrize("claimed", [1.0, 0.001])
def test_a_copy_accepted_before_its_original_is_found_when_the_original_is_judged(
    panel: JudgedPool, claimed: float
) -> None:
    """Whether or not it says that the copied answer is a probable one."""
    mgr = panel.mgr
    original, copy = accepted_first(panel, panel.validator, claimed)
    assert of_file(panel, schema.credits, copy.digest)
    assert panel.validator.judge_next() == original.digest
    assert mgr.row(original.digest).status == "accepted"
    assert mgr.row(copy.digest).status == "accepted", "nothing is taken before it is judged"

    assert panel.validator.judge_next() == copy.digest
    judged = mgr.row(copy.digest)
    assert (judged.status, judged.repeated_rows) == ("rejected", 1)
    assert judged.reason == Reason.WRONG_SAMPLING
    assert of_file(panel, schema.credits, copy.digest) == []
    assert of_file(panel, schema.groups, copy.digest) == []
    assert len(of_file(panel, schema.slashes, copy.digest)) == 1
    assert mgr.node_status(LIAR.address) == "quarantined"
    audit = panel.audit(panel.slash(judged))
    assert audit.result == "match", audit.detail

    assert mgr.node_status(HONEST.address) == "active"
    assert of_file(panel, schema.credits, original.digest)
    assert panel.validator.judge_next() is None


@pytest.mark.slow
def test_a_copy_accepted_while_its_original_was_looked_at_is_found(
    panel: JudgedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, copy = accepted_first(panel, panel.validator)
    with monkeypatch.context() as before:  # no one had the row when the original was looked at
        before.setattr(Validator, "_seen", lambda *_: frozenset())
        assert panel.validator.judge_next() == original.digest
    assert panel.mgr.row(original.digest).status == "submitted", "once more, whole"
    assert panel.validator.judge_next() == original.digest
    assert panel.validator.judge_next() == copy.digest
    assert panel.mgr.row(original.digest).status == "accepted"
    assert panel.mgr.row(copy.digest).status == "rejected"


def test_an_honest_file_that_is_sent_back_keeps_its_verdict_and_is_never_sent_back_again(
    panel: JudgedPool,
) -> None:
    mgr = panel.mgr
    row = panel.judged(Copyist(panel).original)
    its = marks(read_rollout_file(panel.file(row)).rows)
    credit = of_file(panel, schema.credits, row.digest)
    for again in (False, True):
        with mgr.store.begin() as connection:
            row_marks.remember(connection, OTHER, its, now=mgr.now())
            sent = reviews.send_back(connection, mgr.context, OTHER, its)
        assert sent == ([] if again else [row.digest])
        assert panel.validator.judge_next() == (None if again else row.digest)
    after = mgr.row(row.digest)
    assert (after.status, after.verdict, after.units) == ("accepted", row.verdict, row.units)
    assert after.repeated_rows == sum(its.values())
    assert of_file(panel, schema.credits, row.digest) == credit


def test_a_review_for_which_no_validator_comes_ends_with_its_files_validity(
    panel: JudgedPool,
) -> None:
    """The lease names one validator, and it is not appointed any more."""
    mgr, validity = panel.mgr, panel.mgr.context.run.validity_seconds
    row = panel.judged(Copyist(panel).original)
    its = marks(read_rollout_file(panel.file(row)).rows)
    credit = of_file(panel, schema.credits, row.digest)
    with mgr.store.begin() as connection:
        row_marks.remember(connection, OTHER, its, now=mgr.now())
        assert reviews.send_back(connection, mgr.context, OTHER, its) == [row.digest]
    appoint(mgr.store, mgr.context.pool, VALIDATOR.address, on=False)
    assert panel.another(SECOND).claim() is None
    for ago, ended in ((validity, []), (validity + 1, [row.digest]), (validity + 1, [])):
        root_posted(panel, row, ago=ago)
        assert reviews.end_late(mgr.store, mgr.context) == ended
    with mgr.store.read() as connection:
        assert jobs.counts(connection) == {}
    after = mgr.row(row.digest)
    assert (after.status, after.verdict) == ("accepted", row.verdict)
    assert of_file(panel, schema.credits, row.digest) == credit
    assert of_file(panel, schema.row_marks, row.digest) == []


def test_a_file_that_is_found_to_be_no_work_is_not_paid_for_having_been_accepted_before(
    panel: JudgedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that no one can replay shows only where it is drawn: a copy must not save itself by
    one, when it is sent back and replayed whole."""
    mgr = panel.mgr
    row = panel.judged(Copyist(panel).original, LIAR)
    its = marks(read_rollout_file(panel.file(row)).rows)
    with mgr.store.begin() as connection:
        row_marks.remember(connection, OTHER, its, now=mgr.now())
        assert reviews.send_back(connection, mgr.context, OTHER, its) == [row.digest]
    found = Finding(Reason.MALFORMED, "row 3 does not fit the model")
    monkeypatch.setattr(Validator, "_verify", lambda *_: found)
    assert panel.validator.judge_next() == row.digest
    assert (mgr.row(row.digest).status, mgr.row(row.digest).reason) == ("void", Reason.MALFORMED)
    assert of_file(panel, schema.credits, row.digest) == []
    assert of_file(panel, schema.groups, row.digest) == []
    assert of_file(panel, schema.slashes, row.digest) == []


@pytest.mark.slow
def test_a_false_claim_that_an_answer_is_rare_has_files_replayed_whole_only_until_it_is_found(
    panel: JudgedPool,
) -> None:
    """A liar calls a foreseeable answer improbable, so that every file with it is replayed whole:
    the first of them sends the liar's back."""
    mgr, copyist = panel.mgr, Copyist(panel)
    assert panel.judged(copyist.original).status == "accepted"
    copyist.kept = [min(copyist.kept, key=lambda row: len(row.output_tokens))]
    with mgr.store.begin() as connection:
        connection.execute(sa.delete(schema.row_marks))  # the honest file is another one
    claimed = 25 / -float(copyist.kept[0].logprobs.sum())  # e^-25: rare, and yet to be drawn
    lying = panel.judged(copyist.copy(claimed=claimed), LIAR)
    assert lying.status == "accepted"
    its = marks(read_rollout_file(panel.file(lying)).rows)
    with mgr.store.begin() as connection:
        probable = dict.fromkeys(its, False)
        row_marks.remember(connection, OTHER, probable, now=mgr.now())
        sent = reviews.send_back(connection, mgr.context, OTHER, probable)
    assert sent == [lying.digest]
    assert panel.validator.judge_next() == lying.digest
    assert mgr.row(lying.digest).status == "rejected"
    with mgr.store.read() as connection:
        assert row_marks.seen(connection, probable, but=sha256(b"a third")) == frozenset()


@pytest.mark.slow
def test_what_is_paid_for_good_is_neither_sent_back_nor_taken_back(panel: JudgedPool) -> None:
    mgr, validity = panel.mgr, panel.mgr.context.run.validity_seconds
    original, copy = accepted_first(panel, panel.validator)
    root_posted(panel, copy, ago=validity + 1)
    assert panel.validator.judge_next() == original.digest
    assert panel.validator.judge_next() is None, "too late to send it back"
    assert of_file(panel, schema.row_marks, copy.digest) == [], "no file of it is replayed now"

    with mgr.store.begin() as connection:  # it becomes too late while it is judged
        assert jobs.reopen(connection, copy.digest)
        opinions.forget(connection, copy.digest)
    assert panel.validator.judge_next() == copy.digest
    assert mgr.row(copy.digest).status == "accepted"
    assert of_file(panel, schema.credits, copy.digest)
    assert of_file(panel, schema.slashes, copy.digest) == []
    assert panel.validator.judge_next() is None


def test_groups_that_a_batch_took_stay_there(panel: JudgedPool) -> None:
    original, copy = accepted_first(panel, panel.validator)
    with panel.mgr.store.begin() as connection:
        assert groups.take(connection, [(copy.digest, 0)], 0) == 1
    root_posted(panel, copy, ago=1)
    for digest in (original.digest, copy.digest):
        assert panel.validator.judge_next() == digest
    assert panel.mgr.row(copy.digest).status == "rejected"
    assert [row["group_no"] for row in of_file(panel, schema.groups, copy.digest)] == [0]


@pytest.mark.slow
def test_one_validator_alone_takes_no_stake_but_what_it_contradicts_is_not_paid(
    panel: JudgedPool,
) -> None:
    """The second is down: the file is as good as never judged, and lapses."""
    panel.another(SECOND)
    original, copy = accepted_first(panel, panel.validator)
    for digest in (original.digest, copy.digest):
        assert panel.validator.judge_next() == digest
    waiting = panel.mgr.row(copy.digest)
    assert (waiting.status, waiting.verdict, waiting.units) == ("submitted", None, 0)
    assert of_file(panel, schema.credits, copy.digest) == []
    assert of_file(panel, schema.slashes, copy.digest) == []
    assert panel.mgr.node_status(LIAR.address) == "active"
    assert panel.validator.judge_next() is None
    root_posted(panel, copy, ago=panel.mgr.context.run.validity_seconds + 1)
    assert void_unjudged(panel.mgr.store, panel.mgr.context, panel.mgr.now) == 1
    assert panel.mgr.row(copy.digest).reason == Reason.UNAVAILABLE


@pytest.mark.slow
def test_a_second_validator_confirms_what_the_first_found_in_a_file_sent_back(
    panel: JudgedPool,
) -> None:
    second = panel.another(SECOND)
    original, copy = accepted_first(panel, panel.validator)
    for digest in (original.digest, copy.digest):
        assert panel.validator.judge_next() == digest
    assert second.judge_next() == copy.digest
    judged = panel.mgr.row(copy.digest)
    assert (judged.status, judged.reason) == ("rejected", Reason.WRONG_SAMPLING)
    assert len(of_file(panel, schema.slashes, copy.digest)) == 1


@pytest.mark.slow
def test_what_two_others_find_honest_is_accepted_again_and_paid(
    panel: JudgedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first validator accuses a file that was sent back, wrongly: another machine's rounding,
    say."""
    mgr, others = panel.mgr, [panel.another(SECOND), panel.another(THIRD)]
    row = panel.judged(Copyist(panel).original)
    its = marks(read_rollout_file(panel.file(row)).rows)
    with mgr.store.begin() as connection:
        row_marks.remember(connection, OTHER, its, now=mgr.now())
        assert reviews.send_back(connection, mgr.context, OTHER, its) == [row.digest]
    verify = Validator._verify

    def wrong(*arguments: Any) -> Any:
        finding = verify(*arguments)
        changed = {**vars(finding), "reason": Reason.WRONG_SAMPLING, "table": (), "whole": False}
        return type(finding)(**changed)

    with monkeypatch.context() as first:
        first.setattr(Validator, "_verify", wrong)
        assert panel.validator.judge_next() == row.digest
    assert of_file(panel, schema.credits, row.digest) == []
    assert [other.judge_next() for other in others] == [row.digest, row.digest]
    assert mgr.row(row.digest).status == "accepted"
    assert len(of_file(panel, schema.credits, row.digest)) == 1
    assert len(of_file(panel, schema.groups, row.digest)) == 2
    with mgr.store.begin() as connection:
        assert reviews.send_back(connection, mgr.context, OTHER, its) == [], "never again"
    assert mgr.node_status(HONEST.address) == "active"
