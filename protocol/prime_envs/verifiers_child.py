"""The part of the `verifiers` adapter that imports verifiers (its v1, 0.4): tasks and scores.

Runs in a child (subprocess_grader.py), in the interpreter that has the package; imports none of our
code. Only tasksets whose rewards depend on a single-turn answer alone are accepted.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
from functools import lru_cache
from typing import Any

MICRO = 1_000_000


def answer(request: dict[str, Any]) -> Any:
    """{"do": "describe" | "task" | "score", "id", "size", …} → a JSON value; {"refused": sentence}
    where the taskset cannot be used."""
    tasks = _tasks(request["id"], request["size"])
    if request["do"] == "describe":
        return _describe(tasks)
    task = tasks[request["index"]]
    if request["do"] == "task":
        prompt = task.data.prompt_text
        system = task.data.system_prompt
        return {"prompt": f"{system}\n\n{prompt}" if system else prompt, "key": task.key}
    return _score(task, request["text"])


@lru_cache(maxsize=1)
def _tasks(name: str, size: int) -> list[Any]:
    from verifiers.v1.utils.loaders import load_taskset, taskset_config_type

    taskset = load_taskset(taskset_config_type(name)(id=name))
    return list(itertools.islice(iter(taskset), size))


def _describe(tasks: list[Any]) -> dict[str, Any]:
    from importlib.metadata import version

    for task in tasks:
        kind = type(task)
        if kind.NEEDS_CONTAINER or kind.toolsets(task.config):
            return {"refused": "its tasks need tools or a container, more than one turn of text"}
        if task.plugged_judges():
            return {"refused": "a model judges its answers, so a validator could not repeat it"}
        if not task.hooks("reward"):
            return {"refused": "a task of it has no reward"}
    digest = hashlib.sha256(b"".join(task.hash.encode() for task in tasks)).hexdigest()
    return {"count": len(tasks), "digest": f"0x{digest}", "version": version("verifiers")}


def _score(task: Any, text: str) -> dict[str, Any]:
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.trace import AgentInfo, Trace, TraceTask
    from verifiers.v1.types import AssistantMessage, UserMessage

    trace: Any = Trace(
        task=TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        agent=AgentInfo(config=AgentConfig()),
    )
    trace.nodes = [
        MessageNode(message=UserMessage(content=task.data.prompt_text)),
        MessageNode(parent=0, sampled=True, message=AssistantMessage(content=text)),
    ]
    asyncio.run(task.score(trace))
    parts = {}
    for name, reward in sorted(trace.rewards.items()):
        if reward is None or not math.isfinite(reward.score):
            raise ValueError(f"the reward {name!r} gave no number")
        parts[str(name)] = round(reward.score * MICRO)
    total = min(1.0, max(0.0, float(trace.reward)))
    return {"score": round(total * MICRO), "parts": parts}
