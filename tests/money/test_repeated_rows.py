"""A row that another accepted file had: its file is replayed whole, and only the replay accuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'prime-open[torch]'")

import court_kit
import sqlalchemy as sa
from court_kit import HONEST, LIAR, Court, small_run

from orchestrator.store import row_marks, schema, submissions
from orchestrator.validator import Validator
from protocol.core import seeds
from protocol.core.encoding import sha256
from protocol.core.ids import Digest
from protocol.core.run import LengthBudgets, RunDefinition
from protocol.core.task import SignedLease
from protocol.core.verdict import Reason
from protocol.engine.base import Generation
from protocol.environments.registry import environment_ref
from protocol.verification import build
from protocol.verification.build import PlannedRow
from protocol.verification.repeats import mark, memorable, repeated
from protocol.verification.rollout_file import FileRow, read_rollout_file, write_rollout_file

ROWS = 8
OTHER = sha256(b"another file")


def one_problem() -> RunDefinition:
    """Every row has the same prompt, answers are improbable, one row in eight is drawn (two of a
    newcomer's)."""
    budgets = LengthBudgets(by_class={"1": (6,)}, penalty_micro=150_000)
    return small_run().model_copy(
        update={
            "environment": environment_ref("reverse", {}, budgets, train_size=1, heldout_size=1),
            "budgets": budgets,
            "temperature_micro": 3_000_000,
            "replay_rows_micro": 125_000,
        }
    )


@pytest.fixture(autouse=True)
def _its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(court_kit, "small_run", one_problem)


def made(
    court: Court,
    signed: SignedLease,
    lease_digest: Digest,
    change: Callable[[list[PlannedRow], list[Generation]], list[Generation]],
) -> bytes:
    """A file whose generations went through `change`; all else is honest."""
    run, engine = court.shop.context.run, court.engines.engine(0, signed.lease.policy_digest)
    plan = build.plan_rows(signed.lease, lease_digest, run, court.environment, engine.tokenizer)
    rows = change(plan, build.generate_rows(plan, run, engine))
    rewards = build.grade_rows(plan, rows, court.environment, engine.tokenizer)
    proofs = build.prove_rows(lease_digest, plan, rows)
    whole = build.assemble_rows(signed, plan, rows, rewards, proofs)
    return write_rollout_file(whole, build.metadata_of(lease_digest, engine))


def test_a_row_copied_from_an_earlier_file_is_found_whichever_rows_are_drawn(court: Court) -> None:
    kept: list[Generation] = []

    def keep(_: list[PlannedRow], rows: list[Generation]) -> list[Generation]:
        kept.extend(rows)
        return rows

    def copy_one(_: list[PlannedRow], rows: list[Generation]) -> list[Generation]:
        best = min(kept, key=lambda row: float(row.logprobs.sum()))
        return [*rows[:3], best, *rows[4:]]

    first = court.judged(lambda *lease: made(court, *lease, keep))
    assert first.status == "accepted"
    assert first.repeated_rows == 0
    copied = court.judged(lambda *lease: made(court, *lease, copy_one), LIAR)
    assert (copied.status, copied.reason) == ("rejected", Reason.WRONG_SAMPLING)
    assert copied.repeated_rows == 1
    evidence = court.evidence(copied)
    assert sorted(evidence.rows_drawn) == list(range(ROWS)), "it was replayed whole"
    audit = court.audit(court.slash(copied))
    assert audit.result == "match", audit.detail
    with court.shop.store.read() as connection:
        assert submissions.repeating(connection) == {"rejected": 1}


def test_a_copy_judged_beside_its_original_is_found_all_the_same(
    court: Court, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither was accepted when the other was looked at; the copied row is not drawn, and said to
    be probable."""
    whole = seeds.drawn_rows
    monkeypatch.setattr(
        seeds,
        "drawn_rows",
        lambda secret, digest, rows, count: (
            whole(secret, digest, rows, count) if count >= rows else (0, 1)
        ),
    )
    kept: list[Generation] = []

    def keep(_: list[PlannedRow], rows: list[Generation]) -> list[Generation]:
        kept.extend(rows)
        return rows

    def copy_one(_: list[PlannedRow], rows: list[Generation]) -> list[Generation]:
        best = min(kept, key=lambda row: float(row.logprobs.sum()))
        return [*rows[:3], replace(best, logprobs=best.logprobs / 2), *rows[4:]]

    assert court.judged(lambda *lease: made(court, *lease, keep)).status == "accepted"
    copied = court.shop.submit(LIAR, make=lambda *lease: made(court, *lease, copy_one))
    with monkeypatch.context() as before:  # it was looked at before the original was accepted
        before.setattr(Validator, "_seen", lambda *_: frozenset())
        assert court.validator.judge_next() == copied.digest
    assert court.shop.row(copied.digest).status == "submitted", "one more look, now whole"
    assert court.validator.judge_next() == copied.digest
    judged = court.shop.row(copied.digest)
    assert (judged.status, judged.reason) == ("rejected", Reason.WRONG_SAMPLING)
    assert judged.repeated_rows == 1
    assert court.validator.judge_next() is None


def test_an_honest_coincidence_is_replayed_whole_and_accused_of_nothing(court: Court) -> None:
    shop = court.shop
    row = shop.submit(HONEST, make=court.honest)
    file = read_rollout_file(court.file(row))
    with shop.store.begin() as connection:
        marks = [mark(file.rows[5])]
        row_marks.remember(connection, OTHER, marks, now=shop.now())
    assert court.validator.judge_next() == row.digest
    judged = shop.row(row.digest)
    assert (judged.status, judged.repeated_rows) == ("accepted", 1)
    assert judged.compute_share == 1.0


def test_a_file_is_not_its_own_repetition(court: Court) -> None:
    """A second validator, or a claim that ran out, judges the same file again."""
    row = court.judged(court.honest)
    file = read_rollout_file(court.file(row))
    marks = memorable(file.rows)
    assert marks
    with court.shop.store.read() as connection:
        assert row_marks.seen(connection, marks, but=row.digest) == frozenset()
        assert row_marks.seen(connection, marks, but=OTHER) == frozenset(marks)


def test_marks_are_kept_a_week_and_stay_with_the_first_file(court: Court) -> None:
    store, now = court.shop.store, court.shop.now()
    with store.begin() as connection:
        row_marks.remember(connection, OTHER, ["aa", "bb"], now=now)
        row_marks.remember(connection, sha256(b"later"), ["bb", "cc"], now=now + 1)
        assert row_marks.seen(connection, ["bb"], but=OTHER) == frozenset()
        row_marks.forget(connection, now + row_marks.KEPT_SECONDS + 0.5)
        left = connection.execute(sa.select(schema.row_marks.c.mark)).scalars().all()
    assert left == ["cc"]


def a_row(tokens: tuple[int, ...], logprob: float, prompt: tuple[int, ...] = (1, 2)) -> FileRow:
    return FileRow(
        problem_id="p", group=0, sample=0, prompt_tokens=prompt, output_tokens=tokens,
        logprobs=np.full(len(tokens), logprob, dtype=np.float32), target_length=1,
        finish_reason="end", policy_version=0, reward=0.0, proofs=b"", sketch=b"",
    )  # fmt: skip


def nothing_seen(marks: object) -> frozenset[str]:
    return frozenset()


def test_foreseeable_answers_are_never_looked_for() -> None:
    sure = [a_row((5, 6, 7), -0.5), a_row((5, 6, 7), -0.5)]
    assert memorable(sure) == ()
    assert repeated(sure, nothing_seen) == ()


def test_an_improbable_answer_twice_in_one_file_is_a_repetition() -> None:
    """Even if its copy is said to be probable."""
    answer = tuple(range(10))
    rows = [a_row(answer, -3.0), a_row((1,), -3.0), a_row(answer, -0.01)]
    assert repeated(rows, nothing_seen) == (0, 2)


def test_another_prompt_or_token_is_another_mark() -> None:
    row = a_row((5, 6), -3.0)
    others = [a_row((5, 7), -3.0), a_row((5, 6), -3.0, (1, 3)), a_row((2, 5, 6), -3.0, (1,))]
    assert len({mark(other) for other in (row, *others)}) == 4
    assert mark(row) == mark(replace(row, logprobs=row.logprobs / 2, group=7))
