"""The texts of a step's rollouts: what `samples.jsonl` holds and `trainer samples` shows."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from prime_core.errors import UserError
from prime_core.printing import printable
from prime_core.rollout import Rollout
from prime_core.run import Conversation, RunDefinition
from prime_envs.base import texts_of
from prime_envs.samples import Style, openai_messages, reward_text, sample_text
from prime_envs.tools import TOOL_ERRORS, first_call
from prime_trainer.disk import whole_lines, writing
from prime_trainer.metrics import read_lines

SAMPLES = "samples.jsonl"
ORDERS = ("written", "best", "worst")
SHOWN = (
    "step", "policy", "problem", "reward", "parts", "reason", "prompt", "turns", "tokens", "finish",
)  # fmt: skip
"""Fields of a sample that `trainer samples` shows."""
Row = TypeVar("Row")


def sample_line(
    step: int,
    rollout: Rollout,
    run: RunDefinition,
    tokenizer: Any,
    parts: Mapping[str, int],
    *,
    reason: str = "",
    verdict: str = "",
) -> dict[str, Any]:
    """A line of samples.jsonl. `parts` are the components of the reward and `reason` the grader's
    sentence; the reward of a row that could not be graded is None. `verdict` on its file; empty if
    no validator judges."""
    return {
        "step": step,
        "policy": rollout.policy_version,
        "staleness": step - rollout.policy_version,
        "verdict": verdict,
        "problem": rollout.problem_id,
        "target": rollout.target_length,
        "prompt": tokenizer.decode(list(rollout.prompt_tokens)),
        "turns": texts_of(tokenizer, rollout.output_tokens, rollout.spans),
        "messages": openai_messages(
            run, tokenizer, rollout.target_length,
            rollout.prompt_tokens, rollout.output_tokens, rollout.spans,
        ),
        "tokens": rollout.generated,
        "finish": rollout.finish_reason,
        "reward": None if rollout.finish_reason == "ungraded" else rollout.reward,
        "parts": dict(parts),
        "reason": reason,
    }  # fmt: skip


def spread(rows: Sequence[Row], wanted: int) -> Sequence[Row]:
    """At most `wanted` of the rows, evenly spread."""
    return rows[:: max(1, len(rows) // max(1, wanted))][:wanted]


def append_samples(folder: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Adds lines to the folder's samples.jsonl, after cutting off an incomplete last one. Raises
    UnavailableError on a disk error."""
    path = folder / SAMPLES
    with writing("the rollouts' texts", path):
        whole_lines(path)
        with path.open("a", encoding="utf-8", errors="replace") as file:
            file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def tool_figures(
    rollouts: Sequence[Rollout], conversation: Conversation | None, tokenizer: Any
) -> dict[str, float]:
    """Metrics of the replies to calls of tools, the run's own and those of a verifiers taskset:
    calls answered per row, and the share of answers that report no error. Empty for a run without
    tools."""
    if conversation is None or not (conversation.tools or conversation.calls == "hermes-1"):
        return {}
    said = []
    for rollout in rollouts:
        texts = texts_of(tokenizer, rollout.output_tokens, rollout.spans)
        for turn, reply in zip(texts[::2], texts[1::2], strict=False):
            if first_call(turn, conversation) is not None:
                said.append(reply)
    found = {"tool_calls": len(said) / max(1, len(rollouts))}
    if said:
        failed = sum(any(sign in text for sign in TOOL_ERRORS) for text in said)
        found["tool_success"] = 1 - failed / len(said)
    return found


def chosen_samples(
    folder: Path, *, step: int | None, order: str, count: int
) -> list[dict[str, Any]]:
    """At most `count` samples of a step (None: the last one) in the folder of a run. By reward,
    those without one come last.

    Raises UserError if there are none, `order` is not one of ORDERS, or the file is damaged.
    """
    if order not in ORDERS:
        raise UserError(f"the order {order!r} is not one of {', '.join(ORDERS)}")
    path = folder / SAMPLES
    lines = read_lines(path, *SHOWN)
    known = sorted({int(line["step"]) for line in lines})
    wanted = known[-1] if step is None and known else step
    found = [line for line in lines if line["step"] == wanted]
    if not found:
        if known:
            raise UserError(
                f"{path} has no samples of step {wanted}",
                hint=f"it has some of steps {known[0]} to {known[-1]}",
            )
        raise UserError(
            f"{path} has no samples",
            hint="name the folder of `trainer local --out` or `trainer run --data`, once it has "
            "made a step",
        )
    if order != "written":
        sign = -1 if order == "best" else 1
        found.sort(
            key=lambda line: math.inf if line["reward"] is None else sign * float(line["reward"])
        )
    return found[:count]


def samples_text(samples: Sequence[Mapping[str, Any]], style: Style) -> str:
    """The samples as text, separated by blank lines."""
    return "\n\n".join(
        f"step {sample['step']}, policy {sample['policy']} "
        f"({sample['step'] - sample['policy']} old), "
        + (f"{sample['verdict']}, " if sample.get("verdict") else "")
        + f"{printable(sample['problem'])}: "
        f"{reward_text(sample['reward'], sample['parts'], sample['reason'])}\n"
        + sample_text(
            sample["prompt"],
            sample["turns"],
            tokens=sample["tokens"],
            finish=sample["finish"],
            style=style,
        )
        for sample in samples
    )
