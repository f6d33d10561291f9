"""A row that another accepted file had: its file is replayed whole, and only the replay accuses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'prime-open[torch]'")

import judging_kit
from copy_kit import made, one_problem
from judging_kit import HONEST, LIAR, JudgedPool

from prime_core import seeds
from prime_core.encoding import sha256
from prime_core.verdict import Reason
from prime_engine.base import Generation
from prime_orchestrator.store import row_marks, submissions
from prime_validator.judging import Validator
from prime_verify.build import PlannedRow
from prime_verify.repeats import mark, marks, repeated
from prime_verify.rollout_file import FileRow, read_rollout_file

ROWS = 8
OTHER = sha256(b"another file")


@pytest.fixture(autouse=True)
def _its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging_kit, "small_run", one_problem)


def test_a_row_copied_from_an_earlier_file_is_found_whichever_rows_are_drawn(
    panel: JudgedPool,
) -> None:
    kept: list[Generation] = []

    def keep(_: list[PlannedRow], rows: list[Generation]) -> list[Generation]:
        kept.extend(rows)
        return rows

    def copy_one(_: list[PlannedRow], rows: list[Generation]) -> list[Generation]:
        best = min(kept, key=lambda row: float(row.logprobs.sum()))
        return [*rows[:3], best, *rows[4:]]

    first = panel.judged(lambda *lease: made(panel, *lease, keep))
    assert first.status == "accepted"
    assert first.repeated_rows == 0
    copied = panel.judged(lambda *lease: made(panel, *lease, copy_one), LIAR)
    assert (copied.status, copied.reason) == ("rejected", Reason.WRONG_SAMPLING)
    assert copied.repeated_rows == 1
    evidence = panel.evidence(copied)
    assert sorted(evidence.rows_drawn) == list(range(ROWS)), "it was replayed whole"
    audit = panel.audit(panel.slash(copied))
    assert audit.result == "match", audit.detail
    with panel.mgr.store.read() as connection:
        assert submissions.repeating(connection) == {"rejected": 1}


def test_a_copy_judged_together_with_its_original_is_found(
    panel: JudgedPool, monkeypatch: pytest.MonkeyPatch
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

    assert panel.judged(lambda *lease: made(panel, *lease, keep)).status == "accepted"
    copied = panel.mgr.submit(LIAR, make=lambda *lease: made(panel, *lease, copy_one))
    with monkeypatch.context() as before:  # it was looked at before the original was accepted
        before.setattr(Validator, "_seen", lambda *_: frozenset())
        assert panel.validator.judge_next() == copied.digest
    assert panel.mgr.row(copied.digest).status == "submitted", "one more look, now whole"
    assert panel.validator.judge_next() == copied.digest
    judged = panel.mgr.row(copied.digest)
    assert (judged.status, judged.reason) == ("rejected", Reason.WRONG_SAMPLING)
    assert judged.repeated_rows == 1
    assert panel.validator.judge_next() is None


def test_an_honest_coincidence_is_replayed_whole_and_accused_of_nothing(panel: JudgedPool) -> None:
    mgr = panel.mgr
    row = mgr.submit(HONEST, make=panel.honest)
    file = read_rollout_file(panel.file(row))
    with mgr.store.begin() as connection:
        row_marks.remember(connection, OTHER, {mark(file.rows[5]): True}, now=mgr.now())
    assert panel.validator.judge_next() == row.digest
    judged = mgr.row(row.digest)
    assert (judged.status, judged.repeated_rows) == ("accepted", 1)
    assert judged.compute_share == 1.0


def test_a_file_is_not_its_own_repetition(panel: JudgedPool) -> None:
    """A second validator, or a claim that ran out, judges the same file again."""
    row = panel.judged(panel.honest)
    its = marks(read_rollout_file(panel.file(row)).rows)
    rare = {name for name, improbable in its.items() if improbable}
    assert rare
    with panel.mgr.store.read() as connection:
        assert row_marks.seen(connection, its, but=row.digest) == frozenset()
        assert row_marks.seen(connection, its, but=OTHER) == rare


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
    assert list(marks(sure).values()) == [False]
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
