"""Tasksets of the package verifiers, where it is; one clear sentence where it is not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from prime_core.errors import UserError
from prime_core.run import MICRO, LengthBudgets
from prime_envs.registry import load_environment
from prime_envs.verifiers_adapter import VARIABLE, VerifiersEnvironment

BUDGETS = LengthBudgets(targets=(100,), penalty_micro=0)
ROOT = Path(__file__).resolve().parents[2]
OWN = ROOT / "var" / "bench" / "verifiers" / "bin" / "python"

TASKSET = """
import verifiers.v1 as vf

class SayData(vf.TaskData):
    answer: str = ""

class SayTask(vf.Task[SayData]):
    @vf.reward(weight=1.0)
    async def exact(self, trace: vf.Trace) -> float:
        if trace.last_reply == "raise":
            raise ValueError("a defect")
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 3)

class SayConfig(vf.TasksetConfig):
    pass

class SayTaskset(vf.Taskset[SayTask, SayConfig]):
    def load(self):
        for word in ("yes", "no", "maybe"):
            yield SayTask(SayData(prompt=f"Say {word}.", system_prompt="Be short.", answer=word))

__all__ = ["SayTaskset"]
"""


def _python() -> str:
    """An interpreter that has verifiers; "" if there is none here."""
    for python in (os.environ.get(VARIABLE, ""), str(OWN), sys.executable):
        if python and Path(python).exists():
            look = [python, "-c", "import verifiers.v1"]
            if subprocess.run(look, capture_output=True, check=False).returncode == 0:
                return python
    return ""


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[VerifiersEnvironment]:
    python = _python()
    if not python:
        pytest.skip("verifiers is not installed: scripts/setup_verifiers.sh")
    (tmp_path / "prime_say.py").write_text(TASKSET)
    monkeypatch.setenv(VARIABLE, python)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = load_environment("verifiers", {"environment": "prime_say", "size": 2}, BUDGETS)
    assert isinstance(made, VerifiersEnvironment)
    yield made
    made.close()


@pytest.mark.slow
def test_a_taskset_gives_prompts_and_its_own_rewards(environment: VerifiersEnvironment) -> None:
    assert len(environment) == 2
    problem = environment.problem(0)
    assert environment.prompt_text(problem, 100).startswith(
        "Be short.\n\nSay yes.\n\nThink for 100"
    )
    right = environment.check(problem, "yes", 1)
    assert (right.task_micro, dict(right.parts)) == (MICRO, {"exact": MICRO, "short": 0})
    assert environment.check(problem, "no", 1).task_micro == MICRO // 2
    assert environment.check(problem, "wrong", 1).task_micro == 0
    failed = environment.check(problem, "raise", 1)
    assert (failed.task_micro, failed.uncertain) == (0, True)
    assert "task 0" in failed.reason
    again = load_environment("verifiers", environment.arguments, BUDGETS)
    assert again.digest() == environment.digest()
    with pytest.raises(UserError, match="no_such_taskset"):
        load_environment("verifiers", {"environment": "no_such_taskset"}, BUDGETS)


def test_without_the_package_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, sys.executable)
    (tmp_path / "verifiers.py").write_text("raise ImportError('as where it is not installed')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(UserError, match="needs the package verifiers") as caught:
        load_environment("verifiers", {"environment": "x"}, BUDGETS)
    assert "pip install" in caught.value.hint


@pytest.mark.parametrize("arguments", [{}, {"environment": 3}, {"environment": "x", "size": 0},
                                       {"environment": "x", "colour": "red"}])  # fmt: skip
def test_wrong_arguments_are_refused(arguments: dict[str, int | str]) -> None:
    with pytest.raises(UserError, match="takes `environment`"):
        load_environment("verifiers", arguments, BUDGETS)
