"""Checks that need no replay: order, prompts, endings, proofs, improbable tokens, rewards.

Each raises RulingError at the first violation; see verify.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from prime_core.errors import MalformedError, UntrustedError
from prime_core.gateway import Recorded
from prime_core.ids import Digest
from prime_core.proof_form import PROOF_WINDOW
from prime_core.rollout import model_ranges
from prime_core.run import MICRO, RunDefinition
from prime_core.task import SignedLease
from prime_core.verdict import Outcome, Reason, VerdictRow
from prime_engine.base import Engine
from prime_envs.base import Environment, Grade, Reply
from prime_verify.build import PlannedRow, fits, reply_to
from prime_verify.proofs import activations, sampling, sketch
from prime_verify.proofs.tails import LEAST_CHANCE
from prime_verify.proofs.thresholds import SIGNIFICANCE
from prime_verify.rollout_file import FileRow


class RulingError(Exception):
    """Ends verification with a reason; never leaves verify_file. `chance` is as in verify.Finding;
    it defaults to 0 for rejections, because only token counts involve chance here."""

    def __init__(self, reason: Reason, detail: str, chance: float = 0.0) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail
        self.chance = chance if reason.outcome is Outcome.REJECTED else None


def check_rows(
    rows: Sequence[FileRow],
    plan: Sequence[PlannedRow],
    signed: SignedLease,
    run: RunDefinition,
    engine: Engine,
) -> None:
    """Checks the structure of every row (void), then the data that the seed dictates (rejected).

    Raises RulingError: WRONG_ROWS, MALFORMED; WRONG_TARGETS, WRONG_PROMPTS.
    """
    if [(row.group, row.sample) for row in rows] != [(row.group, row.sample) for row in plan]:
        raise RulingError(
            Reason.WRONG_ROWS, "the rows are not the lease's groups and samples in order"
        )
    for number, row in enumerate(rows):
        if row.policy_version != signed.policy_version:
            raise RulingError(Reason.WRONG_ROWS, f"row {number} names policy {row.policy_version}")
        if max(row.output_tokens) >= engine.vocabulary:
            raise RulingError(Reason.MALFORMED, f"row {number} has a token outside the vocabulary")
        _check_ending(number, row, run, engine.end_tokens)
    for number, (row, due) in enumerate(zip(rows, plan, strict=True)):
        if row.target_length != due.target_length:
            raise RulingError(
                Reason.WRONG_TARGETS,
                f"row {number} has target {row.target_length}, not the lease's {due.target_length}",
            )
        if row.problem_id != due.problem.problem_id or row.prompt_tokens != due.prompt_tokens:
            raise RulingError(
                Reason.WRONG_PROMPTS,
                f"row {number} was not asked problem {due.problem.problem_id!r} in the run's words",
            )


def _check_ending(
    number: int, row: FileRow, run: RunDefinition, end_tokens: frozenset[int]
) -> None:
    """Checks that each model span ends at its first end token; the last one may instead end at the
    length limit.

    Raises RulingError: WRONG_ROWS.
    """
    tokens = row.output_tokens
    turns = 1 if run.conversation is None else run.conversation.turns
    if len(tokens) > run.max_output_tokens or len(row.spans) > 2 * turns - 1:
        raise RulingError(Reason.WRONG_ROWS, f"row {number} is longer than the run allows")
    for start, end in model_ranges(row.spans, len(tokens)):
        if not end_tokens.isdisjoint(tokens[start : end - 1]):
            raise RulingError(Reason.WRONG_ROWS, f"row {number} continues after an end token")
        if end < len(tokens) and tokens[end - 1] not in end_tokens:
            raise RulingError(Reason.WRONG_ROWS, f"row {number} has a turn that does not end")
    ended = tokens[-1] in end_tokens
    if ended < (row.finish_reason != "length") or (
        run.conversation is None and ended != (row.finish_reason == "end")
    ):
        raise RulingError(Reason.WRONG_ROWS, f"row {number} misstates how it ended")
    if not ended and len(tokens) < run.max_output_tokens:
        raise RulingError(Reason.WRONG_ROWS, f"row {number} stops before its end")


def check_replies(
    rows: Sequence[FileRow],
    plan: Sequence[PlannedRow],
    run: RunDefinition,
    engine: Engine,
    environment: Environment,
    lease_digest: Digest,
) -> None:
    """Checks what the environment says after each turn of every row. Without a conversation there
    is nothing to check. Answers of the gateway are those that the row carries.

    Raises RulingError: WRONG_OBSERVATION, WRONG_ROWS.
    """
    if run.conversation is None:
        return
    for number, (row, due) in enumerate(zip(rows, plan, strict=True)):
        _check_replies(number, row, due, run, engine, environment, lease_digest)


def _check_replies(
    number: int,
    row: FileRow,
    due: PlannedRow,
    run: RunDefinition,
    engine: Engine,
    environment: Environment,
    lease_digest: Digest,
) -> None:
    """Checks the environment's reply after each turn, token by token. A reply that is not exact, or
    that differs on the second try, accuses no one; nor does a row that ended by a limit that the
    environment's tools have, which only another machine may have reached. An answer of the gateway
    counts if its signature covers this call of this row; a call without an answer, or one that
    ended by its limit, ends its row as `tool_limit`.

    Raises RulingError: WRONG_OBSERVATION, WRONG_ROWS.
    """
    tokens = row.output_tokens
    spans = row.spans or (len(tokens),)
    assert run.conversation is not None
    answers = None
    if run.conversation.gateway is not None:
        signed = {answer.turn: answer for answer in row.gateway}
        answers = Recorded(lease_digest, run.conversation.gateway.key, signed)
    for turn in range(0, len(spans), 2):
        said = tokens[: sum(spans[: turn + 1])]
        if said[-1] not in engine.end_tokens:
            continue  # the last turn, cut at the length limit

        def reply(said: Sequence[int] = said, turn: int = turn) -> Reply:
            return reply_to(
                due, run, environment, engine.tokenizer, said, spans[: turn + 1], answers
            )

        try:
            expected = reply()
        except UntrustedError as error:
            raise RulingError(
                Reason.WRONG_OBSERVATION,
                f"row {number} has an answer after turn {turn // 2} that its run's gateway did not "
                "sign for this call",
            ) from error
        last = turn + 1 == len(spans)
        found = () if last else tuple(tokens[len(said) :][: spans[turn + 1]])
        words = expected.tokens
        allowed = {(words, "end") if fits(run, said, words) else ((), "length" if words else "end")}
        if expected.unanswered:
            allowed = set()
        if expected.unanswered or expected.near_limit:
            allowed.add(((), "tool_limit"))
        if found not in {words for words, _ in allowed}:
            what = "leaves out" if not found else "makes up" if not expected.tokens else "changes"
            detail = f"row {number} {what} what the environment says after turn {turn // 2}"
            claims_limit = row.finish_reason == "tool_limit" and environment.tools_may_give_up
            if not expected.exact or (last and claims_limit):
                raise RulingError(Reason.WRONG_ROWS, f"{detail}, or its tools gave other answers")
            environment.close()  # the second try has processes of its own
            if reply() == expected:
                raise RulingError(Reason.WRONG_OBSERVATION, detail)
        elif last and ((), row.finish_reason) not in allowed:
            raise RulingError(Reason.WRONG_ROWS, f"row {number} misstates how it ended")
    if answers is not None and not set(answers.answers) <= answers.asked:
        raise RulingError(
            Reason.WRONG_ROWS, f"row {number} has an answer of the gateway to no call"
        )


def check_proofs(rows: Sequence[FileRow], engine: Engine) -> None:
    """Checks lengths (void), then contents that no honest program writes (rejected).

    Raises RulingError: MALFORMED; COPIED_ROWS, FORGED_PROOF.
    """
    unpacked = []
    sketches: dict[bytes, int] = {}
    for number, row in enumerate(rows):
        windows = activations.windows_of(len(row.places))
        try:
            unpacked.append(activations.unpack(row.proofs, windows))
            bits = sketch.decode(row.sketch, windows)
        except MalformedError as error:
            raise RulingError(Reason.MALFORMED, f"row {number}: {error}") from error
        for window in bits:
            if sketches.setdefault(window.tobytes(), number) != number and window.any():
                raise RulingError(
                    Reason.COPIED_ROWS,
                    f"row {number} repeats a sketch of row {sketches[window.tobytes()]}; their "
                    "keys differ",
                )
    for number, (row, proofs) in enumerate(zip(rows, unpacked, strict=True)):
        for window, proof in enumerate(proofs):
            tokens = min(PROOF_WINDOW, len(row.places) - window * PROOF_WINDOW)
            elements = tokens * engine.hidden_size
            if len(proof) != activations.proof_bytes(elements):
                raise RulingError(Reason.MALFORMED, f"row {number} has a proof of the wrong length")
            try:
                activations.decode(proof, elements)
            except MalformedError as error:
                raise RulingError(Reason.FORGED_PROOF, f"row {number}: {error}") from error


NOISE_SPAN = 26.1
"""Difference between the largest and smallest noise of proofs/sampling.py, 22.9 and −3.1."""
SPARE = 10.0


def least_logprob(vocabulary: int) -> float:
    """Lower bound on the log-probability of any sampled token, for every model: the most probable
    token has at least 1/vocabulary, noise lifts another token above it by at most NOISE_SPAN, and
    SPARE allows for rounding."""
    return -(math.log(vocabulary) + NOISE_SPAN + SPARE)


def check_improbable_tokens(rows: Sequence[FileRow], engine: Engine) -> None:
    """Checks the claimed log-probabilities alone: none below what noise can draw (its ratio in
    training would be infinite), and not too many small ones.

    Raises RulingError: IMPROBABLE_TOKENS.
    """
    least = least_logprob(engine.vocabulary)
    for number, row in enumerate(rows):
        if float(row.logprobs.min()) < least:
            raise RulingError(
                Reason.IMPROBABLE_TOKENS,
                f"row {number} claims a log-probability of {float(row.logprobs.min()):.4g}; no "
                f"noise draws a token below {least:.1f}, for any model",
            )
    counts = [
        sampling.improbable_tokens(row.logprobs[row.places], engine.vocabulary) for row in rows
    ]
    observed = sum(count for count, _ in counts)
    expected = sum(bound for _, bound in counts)
    chance = max(LEAST_CHANCE, sampling.poisson_tail(observed, expected))
    if chance < SIGNIFICANCE:
        raise RulingError(
            Reason.IMPROBABLE_TOKENS,
            f"{observed} tokens of nearly no probability; honest sampling draws at most "
            f"{expected:.2g} on average (chance {chance:.2g})",
            chance,
        )


def check_rewards(
    rows: Sequence[FileRow],
    plan: Sequence[PlannedRow],
    environment: Environment,
    engine: Engine,
) -> tuple[VerdictRow, ...]:
    """Recomputes every reward. A grade decided by a time limit, or one that changes on the second
    try, accuses no one.

    Raises RulingError: TAMPERED_REWARD.
    """
    table = []
    for number, (row, due) in enumerate(zip(rows, plan, strict=True)):

        def graded(due: PlannedRow = due, row: FileRow = row) -> Grade:
            return environment.grade_output(
                due.problem, due.target_length, row.output_tokens, engine.tokenizer, row.spans
            )

        grade = graded()
        if grade.refutes(row.reward) and graded().refutes(row.reward):
            raise RulingError(
                Reason.TAMPERED_REWARD,
                f"row {number} claims reward {row.reward:.9g}, the grader gives "
                f"{grade.reward_micro / MICRO:.6f} ({grade.reason})",
            )
        table.append(
            VerdictRow(
                problem_id=row.problem_id,
                group=row.group,
                sample=row.sample,
                reward_micro=grade.reward_micro,
                prompt_tokens=len(row.prompt_tokens),
                output_tokens=len(row.places),
                observation_tokens=len(row.output_tokens) - len(row.places),
            )
        )
    return tuple(table)
