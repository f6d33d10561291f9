"""Predicted program outputs, and JSON outputs: the answer ends with one JSON object.

`code_output_prediction`: {"output": …} (GENESYS) or {"code_output": …} (INTELLECT-2) equals the
gold value. `complex_json_output`: the object equals the gold one.
"""

from __future__ import annotations

import json
from typing import Any

from prime_core.errors import MalformedError
from prime_core.run import MICRO
from prime_envs.base import TaskScore
from prime_envs.graders.answers import final_section, last_json_object
from prime_envs.graders.base import Grader
from prime_envs.graders.code import same_value
from prime_envs.tasks import Task

_NO_OBJECT = "the answer does not end with one JSON object"


class OutputPrediction(Grader):
    """verification_info: `code_output` or `ground_truth` (a value; an object with `output` is
    unwrapped)."""

    version = 1

    def require(self, task: Task) -> None:
        _field, gold = _gold_output(task)
        if gold is None:
            raise MalformedError(
                f"{task.where}: verification_info has neither code_output nor ground_truth: the "
                "task has no answer"
            )

    def gold(self, task: Task) -> str:
        name, gold = _gold_output(task)
        return json.dumps({name: gold}, ensure_ascii=False)

    def grade(self, task: Task, output_text: str) -> TaskScore:
        name, gold = _gold_output(task)
        found = last_json_object(final_section(output_text))
        if found is None:
            return TaskScore(0, _NO_OBJECT)
        if set(found) != {name}:
            return TaskScore(0, f"the object is not of the form {{{name!r}: …}}")
        same = same_value(found[name], gold)
        return TaskScore(MICRO if same else 0, "the output" if same else "another output")


def _gold_output(task: Task) -> tuple[str, Any]:
    info = task.verification_info
    if "code_output" in info:
        return "code_output", info["code_output"]
    gold = info.get("ground_truth")
    if isinstance(gold, dict) and set(gold) == {"output"}:
        gold = gold["output"]
    return "output", gold


class JsonOutput(Grader):
    """verification_info: `ground_truth`, the object (or its JSON text)."""

    version = 1

    def require(self, task: Task) -> None:
        _gold_object(task)

    def gold(self, task: Task) -> str:
        return json.dumps(_gold_object(task), ensure_ascii=False)

    def grade(self, task: Task, output_text: str) -> TaskScore:
        found = last_json_object(final_section(output_text))
        if found is None:
            return TaskScore(0, _NO_OBJECT)
        gold = _gold_object(task)
        same = same_value(found, gold)
        right = sum(key in found and same_value(found[key], gold[key]) for key in gold)
        parts = {"fields": len(gold), "right": right}
        return TaskScore(MICRO if same else 0, f"{right} of {len(gold)} fields", parts=parts)


def _gold_object(task: Task) -> dict[str, Any]:
    from prime_envs.tasks import load_json

    gold = task.verification_info.get("ground_truth")
    if isinstance(gold, str):
        gold = load_json(gold, f"{task.where}: ground_truth")
    if not isinstance(gold, dict) or not gold:
        raise MalformedError(f"{task.where}: ground_truth is not a JSON object with fields")
    return gold
