"""The template that `orchestrator env new` writes: a small environment that passes every check."""

from __future__ import annotations

from pathlib import Path

from prime_core.errors import UserError

ABOUT = """\
name = "{name}"
version = 1
description = "Say what a model learns from it."
author = "Your name or address"
license = "CC-BY-4.0"
"""

TASKS = """\
{"problem_id": "vowels-1", "task_type": "custom", "source": "made by hand", "prompt": "How many vowels has the word `orchestra`? End with a line `Answer: NUMBER`.", "gold_standard_solution": "o, e, a: three.\\nAnswer: 3", "verification_info": {"count": 3}, "wrong_answers": ["Answer: 4", "Answer: 3 or 4", "3"]}
{"problem_id": "vowels-2", "task_type": "custom", "source": "made by hand", "prompt": "How many vowels has the word `queue`? End with a line `Answer: NUMBER`.", "gold_standard_solution": "u, e, u, e: four.\\nAnswer: 4", "verification_info": {"count": 4}, "wrong_answers": ["Answer: 2"]}
{"problem_id": "vowels-3", "task_type": "custom", "source": "made by hand", "prompt": "How many vowels has the word `rhythm`? End with a line `Answer: NUMBER`.", "gold_standard_solution": "None.\\nAnswer: 0", "verification_info": {"count": 0}, "wrong_answers": ["Answer: 1"]}
"""  # noqa: E501

GRADER = '''\
"""Grades one answer. Pure: the same task and answer always give the same result.

Runs in a sandbox: no files, no network, the standard library's pure parts. Delete this file if all
your tasks have a task type that is graded already (verifiable_math, verifiable_code, ...).
"""

import re


def grade(task, answer):
    """`task` is the row of tasks.jsonl as a dict; `answer` is what the model wrote."""
    lines = [line for line in answer.splitlines() if line.startswith("Answer:")]
    if len(lines) != 1 or answer.strip().splitlines()[-1] != lines[0].strip():
        return {"score": 0.0, "reason": "it does not end with its one line `Answer:`"}
    number = re.fullmatch(r"Answer: ([0-9]{1,3})", lines[0].strip())
    if number is None:
        return {"score": 0.0, "reason": "the answer is no number"}
    right = int(number[1]) == task["verification_info"]["count"]
    return {"score": float(right), "reason": "counted" if right else "miscounted"}
'''


def write_template(folder: Path, name: str) -> list[Path]:
    """Writes the template into a new folder. Raises UserError if it exists."""
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be made: {error.strerror}") from error
    contents = {
        "environment.toml": ABOUT.format(name=name),
        "tasks.jsonl": TASKS,
        "grader.py": GRADER,
    }
    for file, text in contents.items():
        (folder / file).write_text(text, encoding="utf-8")
    return [folder / file for file in contents]
