"""Conversations from lease to verdict: paid by the model's tokens, and lies about the environment
rejected on evidence that an auditor replays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
from judging_kit import LIAR, JudgedPool, small_run

from prime_core.ids import Digest
from prime_core.run import Conversation, RunDefinition
from prime_core.task import SignedLease
from prime_core.verdict import Reason
from prime_envs.registry import BUILT_IN, environment_ref
from prime_verify.rollout_file import FileRow, read_rollout_file, write_rollout_file


@pytest.fixture
def panel_run() -> Iterator[RunDefinition]:
    BUILT_IN["words"] = "bench.multiturn"
    run = small_run()
    yield run.model_copy(
        update={
            "environment": environment_ref(
                "words", {}, run.budgets, train_size=100, heldout_size=10
            ),
            "conversation": Conversation(turns=3),
            "max_output_tokens": 64,
            "schema_version": 3,
        }
    )
    del BUILT_IN["words"]


def test_an_honest_conversation_is_accepted_and_paid_by_the_models_tokens(
    panel: JudgedPool,
) -> None:
    row = panel.judged(panel.honest)
    assert (row.status, row.reason) == ("accepted", Reason.NONE), row
    rows = read_rollout_file(panel.file(row)).rows
    assert any(len(one.spans) == 5 for one in rows)
    assert row.units == sum(len(one.model_tokens) for one in rows)


def forged(row: FileRow) -> FileRow:
    """One token of the environment's is another."""
    tokens = list(row.output_tokens)
    tokens[row.spans[0] + 1] ^= 1
    return replace(row, output_tokens=tuple(tokens))


def dropped(row: FileRow) -> FileRow:
    """The row ends before the environment answers."""
    kept = row.spans[0]
    return replace(
        row, output_tokens=row.output_tokens[:kept], logprobs=row.logprobs[:kept], spans=(),
        finish_reason="end",
    )  # fmt: skip


def of_another_row(rows: Sequence[FileRow]) -> list[FileRow]:
    """What the environment said in the row of another problem."""
    talking = [n for n, row in enumerate(rows) if len(row.spans) > 1]
    first = talking[0]
    other = next(rows[n] for n in talking if rows[n].problem_id != rows[first].problem_id)
    row, at = rows[first], rows[first].spans[0]
    said = other.output_tokens[other.spans[0] :][: other.spans[1]]
    tokens = row.output_tokens[:at] + said + row.output_tokens[at + row.spans[1] :]
    spans = (row.spans[0], len(said), *row.spans[2:])
    return [
        replace(row, output_tokens=tokens, spans=spans, logprobs=_padded(row, len(said)))
        if n == first else one for n, one in enumerate(rows)
    ]  # fmt: skip


def _padded(row: FileRow, said: int) -> object:
    import numpy as np

    at = row.spans[0]
    zeros = np.zeros(said, dtype=np.float32)
    return np.concatenate([row.logprobs[:at], zeros, row.logprobs[at + row.spans[1] :]])


def one_row(change: Callable[[FileRow], FileRow]) -> Callable[[Sequence[FileRow]], list[FileRow]]:
    def changed(rows: Sequence[FileRow]) -> list[FileRow]:
        first = next(n for n, row in enumerate(rows) if len(row.spans) > 1)
        return [change(row) if n == first else row for n, row in enumerate(rows)]

    return changed


@pytest.mark.parametrize("lie", [one_row(forged), one_row(dropped), of_another_row])
def test_a_lie_about_the_environment_is_slashed_on_evidence(
    panel: JudgedPool, lie: Callable[[Sequence[FileRow]], list[FileRow]]
) -> None:
    def make(signed: SignedLease, lease_digest: Digest) -> bytes:
        file = read_rollout_file(panel.honest(signed, lease_digest))
        return write_rollout_file(lie(file.rows), file.metadata)

    row = panel.judged(make, LIAR)
    assert (row.status, row.reason) == ("rejected", Reason.WRONG_OBSERVATION), row
    found = panel.audit(panel.slash(row))
    assert found.result == "match", found
