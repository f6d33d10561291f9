"""Grades answers to Harbor tasks (harbor.py): a program makes files, the package's verifier reads
them.

The answer is the last fenced block of Python. It runs in the sandbox on the package's files, held
in memory (sandbox/files.py); then the verifier runs in another program of the sandbox, on what the
first one left. So an answer never sees the tests, and neither of them has network, processes or
the machine's files.

The reward is 1 if all test functions pass ("pytest"), or what the verifier writes to
/logs/verifier/reward.json or reward.txt ("python").
"""

from __future__ import annotations

import ast
import math
import platform
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from prime_core.errors import MalformedError, UnavailableError, UserError
from prime_core.run import MICRO
from prime_envs.base import TaskScore
from prime_envs.graders.answers import final_section, python_code
from prime_envs.graders.base import Grader
from prime_envs.graders.code import ENDINGS, MAX_SOURCE, may_vary
from prime_envs.harbor import OS, Package, fenced, in_bounds, os_names
from prime_envs.sandbox.client import Program, ProgramLimits, ProgramOutcome, Sandbox
from prime_envs.tasks import Task, load_json, parse_task

LIMITS = ProgramLimits(cpu_seconds=4.0, memory_mb=256, output_bytes=4 << 20)
HIDDEN = ("/tests/", "/logs/")
"""The verifier's folders: answers see no file in them and leave none."""
_ENDINGS = {**ENDINGS, "output": f"wrote more than {LIMITS.output_bytes} bytes"}
_NUMBER = re.compile(r"[-+]?[0-9]{1,20}(\.[0-9]{1,20})?([eE][-+]?[0-9]{1,3})?")


class VerifierError(Exception):
    """Why a verifier gave no reward. `uncertain`: another machine may see another reason."""

    def __init__(self, reason: str, uncertain: bool = False) -> None:
        super().__init__(reason)
        self.uncertain = uncertain


class Harbor(Grader):
    """See the module's docstring. verification_info is that of `harbor.Package`."""

    version = 1

    def __init__(self, sandbox: Sandbox | None = None, limits: ProgramLimits = LIMITS) -> None:
        self._sandbox = sandbox or Sandbox()
        self._limits = limits

    def close(self) -> None:
        self._sandbox.close()

    def pins(self) -> dict[str, str]:
        return {"python": ".".join(platform.python_version_tuple()[:2])}

    def require(self, task: Task) -> None:
        Package.read(task.verification_info, task.where)

    def gold(self, task: Task) -> str | None:
        solution = task.gold_standard_solution
        return None if solution is None else fenced(solution)

    def grade(self, task: Task, output_text: str) -> TaskScore:
        source = python_code(final_section(output_text))
        if source is None:
            return TaskScore(0, "no fenced block of Python after the thinking")
        if len(source) > MAX_SOURCE:
            return TaskScore(0, f"a program of {len(source)} characters")
        varies = _varies(source)
        try:
            score = self.judge(task, source)
        except UnavailableError as error:
            return TaskScore(0, f"{task.where}: {error}", uncertain=True)
        except VerifierError as error:
            return TaskScore(0, f"the verifier {error}", uncertain=varies or error.uncertain)
        return replace(score, uncertain=score.uncertain or varies)

    def judge(self, task: Task, source: str) -> TaskScore:
        """The verifier's score of a program. Raises VerifierError, UnavailableError."""
        package = Package.read(task.verification_info, task.where)
        files = package.bytes()
        shown = {path: text for path, text in files.items() if not path.startswith(HIDDEN)}
        made = self._run("run_answer", source, shown, package.workdir)
        slow = made.uncertain(self._limits)
        if made.status != "ok":
            return TaskScore(0, f"the program {_ending(made)}", uncertain=slow)
        problem = _change(files, made.result)
        if problem:
            return TaskScore(0, f"the program {problem}", uncertain=slow)
        judged = self._run(
            "run_verifier", package.verifier, package.path, package.runner, files, package.workdir
        )
        slow = slow or judged.uncertain(self._limits)
        try:
            return replace(_reward(package.runner, judged), uncertain=slow)
        except VerifierError as error:
            raise VerifierError(str(error), uncertain=slow) from error

    def _run(self, function: str, *arguments: Any) -> ProgramOutcome:
        program = Program(source=_harness(), function=function, arguments=arguments)
        return self._sandbox.run(program, self._limits)


@cache
def _harness() -> str:
    return (Path(__file__).parents[1] / "sandbox" / "files.py").read_text(encoding="utf-8")


def _ending(outcome: ProgramOutcome) -> str:
    if outcome.status in _ENDINGS:
        return _ENDINGS[outcome.status]
    last = outcome.error.strip().splitlines()[-1:] or [f"exit code {outcome.code}"]
    return f"ended its process: {last[0][:120]}"


def _varies(source: str) -> bool:
    """As `may_vary`; the part of `os` that works on files in memory gives the same everywhere."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False  # it fails to compile everywhere
    return may_vary(source, but=frozenset({"os"})) or not os_names(tree) <= OS


def _change(files: dict[str, str], result: str) -> str:
    """Applies what an answer's program returned to the package's files; says what is wrong with it.
    A program may have taken over what reports its files, so this is only data."""
    try:
        changed = load_json(result, "the result")["changed"]
        for path, text in changed.items():
            if f"{path}/".startswith(HIDDEN):
                continue
            if text is None:
                files.pop(path, None)
            else:
                text.encode("latin-1")
                files[path] = text
    except (MalformedError, TypeError, AttributeError, LookupError, UnicodeEncodeError):
        return "returned no files"
    return in_bounds(files)


def _reward(runner: str, outcome: ProgramOutcome) -> TaskScore:
    """The score that a verifier gave. Raises VerifierError."""
    if outcome.status != "ok":
        raise VerifierError(_ending(outcome))
    try:
        found = load_json(outcome.result, "the result")
    except MalformedError as error:
        raise VerifierError("ended its process") from error
    if found["unsupported"]:
        raise VerifierError(f"needs what is not supported: {found['unsupported']}")
    passed, failed = found["passed"], found["failed"]
    if runner == "python":
        score = read_reward(*found["reward"])
        return TaskScore(score, f"the verifier gave {score / MICRO:g}")
    counted = {"tests": len(passed) + len(failed), "passed": len(passed)}
    if failed:
        name = failed[0].encode("ascii", "backslashreplace").decode()
        return TaskScore(0, f"{name[:100]} failed", parts=counted)
    if not passed:
        raise VerifierError("has no test function")
    return TaskScore(MICRO, f"all {len(passed)} tests passed", parts=counted)


def read_reward(as_json: str | None, as_text: str | None) -> int:
    """The reward in millionths from the texts of reward.json (an object of numbers with `reward`)
    or, if there is none, reward.txt (a decimal number). Raises VerifierError unless it is a number
    from 0 to 1."""
    if as_json is not None:
        try:
            value = load_json(as_json, "reward.json")
        except MalformedError as error:
            raise VerifierError(f"wrote no valid reward: {error}") from error
        reward = value.get("reward") if isinstance(value, dict) else None
        if isinstance(reward, bool) or not isinstance(reward, int | float):
            raise VerifierError("wrote a reward.json without a number `reward`")
    elif as_text is not None:
        if not _NUMBER.fullmatch(as_text.strip()):
            raise VerifierError(f"wrote {as_text[:40]!a}, which is not a number, as reward")
        reward = float(as_text)
    else:
        raise VerifierError("wrote no reward")
    if not math.isfinite(reward) or not 0 <= reward <= 1:
        raise VerifierError(f"gave {reward!r}, not a number from 0 to 1")
    return round(reward * MICRO)


def check_packages(rows: Sequence[dict[str, Any]]) -> None:
    """Grades each package's solution, which must be rewarded with 1, and a program that does
    nothing, which must get less. Raises UserError with the first package that fails."""
    grader = Harbor()
    try:
        for row in rows:
            task = parse_task(row, f"the Harbor task {row['problem_id']}")
            for program, ends_well in ((task.gold_standard_solution, True), ("pass", False)):
                if program is None:
                    continue
                what = "its solution" if ends_well else "a program that does nothing"
                try:
                    score = grader.judge(task, program)
                except VerifierError as error:
                    raise UserError(f"{task.where}: for {what} the verifier {error}") from error
                if (score.task_micro == MICRO) != ends_well:
                    given = score.task_micro / MICRO
                    raise UserError(f"{task.where}: {what} is given {given:g} ({score.reason})")
    finally:
        grader.close()
