"""Rows of reasoning-gym's families (SYNTHETIC-2's and INTELLECT-2's `reasoning_gym` tasks).

verification_info: `answer` (or `ground_truth`) and `metadata` with `source_dataset`, or its JSON
text. The family's own scorer judges the text in `<answer>…</answer>`, or after the last `Answer:`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version as installed_version
from typing import Any

from prime_core.errors import MalformedError, UserError
from prime_core.run import MICRO
from prime_envs.base import TaskScore
from prime_envs.graders.answers import final_section
from prime_envs.graders.base import Grader
from prime_envs.reasoning import (
    START_SECONDS,
    only_data,
    reasoning_gym,
    require_fit,
    score,
)
from prime_envs.subprocess_grader import (
    GraderLimits,
    GradingCrashError,
    GradingTimeoutError,
    SubprocessGrader,
)
from prime_envs.tasks import Task, load_json

CPU_SECONDS = 5.0
SLACK = 8
MAX_ANSWER = 8192
_OPEN, _CLOSE = "<answer>", "</answer>"


class Families(Grader):
    """See the module's docstring."""

    version = 3

    def __init__(self) -> None:
        self._child = SubprocessGrader(
            "prime_envs.graders.families:score_entry",
            GraderLimits(CPU_SECONDS, START_SECONDS),
            fork=True,
            confined=True,
            warm=("prime_envs.reasoning:warm_up",),
        )

    def close(self) -> None:
        self._child.close()

    def pins(self) -> dict[str, str]:
        return {"reasoning_gym": installed_version("reasoning_gym")}

    def require(self, task: Task) -> None:
        try:
            require_fit(_entry(task)["metadata"]["source_dataset"])
        except UserError as error:
            raise MalformedError(f"{task.where}: {error}") from error

    def gold(self, task: Task) -> str | None:
        """None if the family provides none, or one that it would not accept (an integral that sympy
        could not evaluate)."""
        entry = _entry(task)
        answer = str(entry["answer"])
        shown = answer and only_data(entry["metadata"]["source_dataset"], answer)
        return f"<answer>{answer}</answer>" if shown else None

    def grade(self, task: Task, output_text: str) -> TaskScore:
        answers = answers_in(final_section(output_text))
        parts = {"answers": len(answers)}
        if len(answers) != 1:
            count = "no" if not answers else str(len(answers))
            return TaskScore(0, f"{count} answers after the thinking", parts=parts)
        if not 0 < len(answers[0]) <= MAX_ANSWER:
            return TaskScore(0, f"an answer of {len(answers[0])} characters", parts=parts)
        if not only_data(_entry(task)["metadata"]["source_dataset"], answers[0]):
            reason = "the answer is a program, or not what was asked for"
            return TaskScore(0, reason, parts=parts)
        try:
            reply = self._child.ask({"entry": _entry(task), "answer": answers[0]})
        except GradingTimeoutError:
            return TaskScore(0, "the grader ran out of time", uncertain=True, parts=parts)
        except GradingCrashError as error:
            return TaskScore(0, f"{task.where}: {error}", uncertain=True, parts=parts)
        slow = reply.cpu_seconds * SLACK > CPU_SECONDS
        reason = f"scored {reply.value / MICRO:g} by {_entry(task)['metadata']['source_dataset']}"
        return TaskScore(reply.value, reason, uncertain=slow, parts=parts)


def answers_in(text: str) -> list[str]:
    """Texts in `<answer>` tags, or without any tags, the texts after each `Answer:`. A single pass,
    because searching for the end from every opening tag would take hours on adversarial text."""
    tagged = []
    start = text.find(_OPEN)
    while start >= 0 and (end := text.find(_CLOSE, start)) >= 0:
        tagged.append(text[start + len(_OPEN) : end].strip())
        start = text.find(_OPEN, end)
    if tagged:
        return tagged
    return [part.strip() for part in text.split("Answer:")[1:]]


def _entry(task: Task) -> dict[str, Any]:
    info = dict(task.verification_info)
    if isinstance(info.get("metadata"), str):
        info["metadata"] = load_json(info["metadata"], f"{task.where}: metadata")
    answer = info.get("answer", info.get("ground_truth"))
    metadata = info.get("metadata")
    family = metadata.get("source_dataset") if isinstance(metadata, dict) else None
    if answer is None or not isinstance(family, str):
        raise MalformedError(
            f"{task.where}: verification_info needs answer and metadata.source_dataset: the task "
            "has no answer"
        )
    return {"question": task.prompt, "answer": answer, "metadata": metadata}


# --- in the child --------------------------------------------------------------------------------


def score_entry(request: dict[str, Any]) -> Callable[[], int]:
    """{entry, answer} → function that returns the score in millionths, by the entry's family."""
    entry = request["entry"]
    family = entry["metadata"]["source_dataset"]
    scorer = reasoning_gym().get_score_answer_fn(family)
    return lambda: score(family, scorer, request["answer"], entry)
