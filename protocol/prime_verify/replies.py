"""The check of conversations: what the environment says after each turn is computed again."""

from __future__ import annotations

from collections.abc import Sequence

from prime_core.errors import UntrustedError
from prime_core.gateway import Recorded
from prime_core.ids import Digest
from prime_core.run import RunDefinition
from prime_core.verdict import Reason
from prime_engine.base import Engine
from prime_envs import tools
from prime_envs.base import Environment, Reply
from prime_verify.build import PlannedRow, fits, reply_to
from prime_verify.finding import RulingError
from prime_verify.rollout_file import FileRow


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
    """Checks the environment's reply after each turn, token by token. Where the file has another
    reply than one that is not exact, or that differs on the second try, it is void (docs/adr/0012)
    and no one is accused; nor is a row that ended by a limit that the environment's tools have,
    which only another machine may have reached. An answer of the gateway counts if its signature
    covers this call of this row; a call without an answer, one that ended by its limit, or a reply
    whose code raises ends its row as `tool_limit`.

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
            tools.close()
            if reply() == expected:
                raise RulingError(Reason.WRONG_OBSERVATION, detail)
            raise RulingError(Reason.WRONG_ROWS, f"{detail}, which was not the same twice here")
        if last and ((), row.finish_reason) not in allowed:
            raise RulingError(Reason.WRONG_ROWS, f"row {number} misstates how it ended")
    if answers is not None and not set(answers.answers) <= answers.asked:
        raise RulingError(
            Reason.WRONG_ROWS, f"row {number} has an answer of the gateway to no call"
        )
