"""Contributed environments: the template passes the check; each kind of unfitness is found."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from prime_core.errors import MalformedError, UserError
from prime_core.run import MICRO, LengthBudgets
from prime_envs.base import TaskScore
from prime_envs.crowd_check import NAMES, Report, check
from prime_envs.environments.crowd import CustomGrader, open_packed, pack, write_template
from prime_envs.registry import environment_ref, load_environment
from prime_envs.sandbox import kernel
from prime_envs.sources import file_digest
from prime_envs.tasks import Task

pytestmark = pytest.mark.skipif(
    not kernel.supported(), reason="the sandbox needs Linux on x86-64 or aarch64"
)
BUDGETS = LengthBudgets(targets=(1000,), penalty_micro=0)


def packed(folder: Path) -> Path:
    path = folder.parent / f"{folder.name}.jsonl"
    path.write_bytes(pack(folder))
    return path


def template(tmp_path: Path, grader: str | None = None) -> Path:
    folder = tmp_path / "vowels"
    write_template(folder, "vowels")
    if grader is not None:
        (folder / "grader.py").write_text(grader)
        rows = (folder / "tasks.jsonl").read_text().splitlines(keepends=True)
        (folder / "tasks.jsonl").write_text("".join(rows[:2]))
    return folder


def faults(report: Report) -> set[str]:
    return {name for name, found in report.faults.items() if found}


@pytest.mark.slow
def test_the_template_is_fit_to_be_trained_on(tmp_path: Path) -> None:
    report = check(packed(template(tmp_path)))
    assert report.ok, report.faults
    assert tuple(report.faults) == NAMES
    assert (report.tasks, report.graded > 60) == (3, True)


def test_a_packed_environment_is_what_a_run_pins_and_grades_with(tmp_path: Path) -> None:
    path = packed(template(tmp_path))
    arguments: dict[str, int | str] = {"sha256": file_digest(path), "path": str(path)}
    ref = environment_ref("crowd", arguments, BUDGETS, train_size=2, heldout_size=1)
    environment = load_environment("crowd", ref.arguments, BUDGETS)
    assert environment.digest() == ref.digest
    for index in range(3):
        problem = environment.problem(index)
        assert environment.check(problem, problem.answer, 5).task_micro == MICRO
        assert environment.check(problem, "Answer: 99", 5).task_micro == 0
    environment.close()


def test_the_same_folder_packs_into_the_same_bytes_and_a_changed_grader_into_others(
    tmp_path: Path,
) -> None:
    folder = template(tmp_path)
    first = pack(folder)
    assert pack(folder) == first
    (folder / "grader.py").write_text((folder / "grader.py").read_text() + "\n# changed\n")
    assert pack(folder) != first


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grader", "found"),
    [
        ("def grade(t, a): return {'score': 1, 'reason': ''}", {"refuses", "unhackable"}),
        ("def grade(t, a): return {'score': 0, 'reason': ''}", {"answered"}),
        ("def grade(t, a): return {'score': int(str(t['verification_info']['count']) in a), "
         "'reason': ''}", {"refuses", "unhackable"}),
        ("def grade(t, a): return {'score': eval(a.split('Answer: ')[-1]) == "
         "t['verification_info']['count'], 'reason': ''}", {"bounded", "refuses"}),
        ("def grade(t, a): 1/0", {"answered", "bounded"}),
        ("def grade(t, a): return {'score': 2, 'reason': ''}", {"answered", "bounded"}),
        ("def grade(t, a): return 'fine'", {"answered", "bounded"}),
        ("def grade(t, a): return {'score': 1, 'reason': '\\ud800'}", {"answered", "bounded"}),
        ("import time\ndef grade(t, a): return {'score': 0, 'reason': str(time.time_ns())}",
         {"answered", "deterministic"}),
        ("this is no Python", {"answered", "bounded"}),
        ("import socket", {"answered", "bounded"}),
    ],
)  # fmt: skip
def test_an_unfit_grader_is_found_out(tmp_path: Path, grader: str, found: set[str]) -> None:
    report = check(packed(template(tmp_path, grader)))
    assert not report.ok
    assert found <= faults(report), report.faults
    assert all("row" in sentence for name in found for sentence in report.faults[name])


@pytest.mark.slow
def test_a_machine_that_was_busy_for_a_moment_makes_no_grader_unfit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, times = CustomGrader.grade, itertools.count()

    def grade(self: CustomGrader, task: Task, output_text: str) -> TaskScore:
        if next(times) in (3, 10):
            return TaskScore(0, "the grader failed: idle", uncertain=True)
        return real(self, task, output_text)

    monkeypatch.setattr(CustomGrader, "grade", grade)
    path = packed(template(tmp_path))
    assert check(path).ok
    always = TaskScore(0, "the grader failed: idle", uncertain=True)
    monkeypatch.setattr(CustomGrader, "grade", lambda *_: always)
    assert "bounded" in faults(check(path))


def rows(*changes: dict[str, Any]) -> str:
    base = {
        "problem_id": "a", "task_type": "verifiable_math", "prompt": "1+1?",
        "verification_info": {"ground_truth": "2"}, "wrong_answers": ["\\boxed{3}"],
    }  # fmt: skip
    return "".join(json.dumps({**base, **change}) + "\n" for change in changes)


def only_data(tmp_path: Path, tasks: str) -> Path:
    folder = template(tmp_path)
    (folder / "grader.py").unlink()
    (folder / "tasks.jsonl").write_text(tasks)
    return folder


def test_data_alone_is_checked_with_the_built_in_graders(tmp_path: Path) -> None:
    other = {"problem_id": "b", "prompt": "2+2?", "verification_info": {"ground_truth": "4"}}
    assert check(packed(only_data(tmp_path, rows({}, other)))).ok


def test_programs_are_checked_too_and_no_trick_passes_their_tests(tmp_path: Path) -> None:
    code = {
        "task_type": "verifiable_code",
        "verification_info": {"test_cases": [{"input": "3\n", "output": "6\n"},
                                             {"input": "5\n", "output": "10\n"}]},
        "gold_standard_solution": "print(2 * int(input()))",
        "wrong_answers": ["```python\nprint(6)\n```"],
    }  # fmt: skip
    report = check(packed(only_data(tmp_path, rows(code))))
    assert report.ok, report.faults


def test_a_gold_answer_that_is_wrong_and_missing_wrong_ones_are_found(tmp_path: Path) -> None:
    code = {
        "task_type": "verifiable_code",
        "verification_info": {"test_cases": [{"input": "3\n", "output": "6\n"}]},
        "gold_standard_solution": "print(7)",
        "wrong_answers": [],
    }
    report = check(packed(only_data(tmp_path, rows(code))))
    assert {"answered", "refuses"} <= faults(report)
    generous = {"wrong_answers": ["\\boxed{2}"]}
    folder = only_data(tmp_path / "second", rows(generous))
    assert faults(check(packed(folder))) == {"refuses"}


@pytest.mark.parametrize(
    ("file", "text", "named"),
    [
        ("environment.toml", "name = ", "TOML"),
        ("environment.toml", 'name = "Big Name"\nversion = 1', "name"),
        ("environment.toml", 'name = "a"', "environment.toml"),
        ("environment.toml", "a." * 10_000 + "a = 1", "more than 16384 bytes"),
        ("environment.toml", f"a = {'[' * 8000}", "TOML"),
        ("tasks.jsonl", "{\n", r"tasks\.jsonl row 1"),
        ("other.txt", "", "other.txt"),
    ],
)
def test_a_folder_that_cannot_be_packed_says_which_file(
    tmp_path: Path, file: str, text: str, named: str
) -> None:
    folder = template(tmp_path)
    (folder / file).write_text(text)
    with pytest.raises((UserError, MalformedError), match=named):
        pack(folder)


def test_a_packed_file_without_header_or_with_a_bad_task_is_malformed(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(rows({}))
    with pytest.raises(MalformedError, match=r"p\.jsonl row 1 is not a header"):
        open_packed(path)
    path.write_text("")
    with pytest.raises(MalformedError, match="row 1"):
        open_packed(path)
    good = pack(template(tmp_path)).decode().splitlines()
    good[2] = rows({"verification_info": None}).strip()
    path.write_text("\n".join(good))
    with pytest.raises(MalformedError, match=r"p\.jsonl row 3"):
        open_packed(path)


def test_a_custom_task_without_a_grader_is_malformed(tmp_path: Path) -> None:
    folder = template(tmp_path)
    (folder / "grader.py").unlink()
    with pytest.raises(MalformedError, match=r"row 2.*grader\.py"):
        check(packed(folder))


def test_a_template_is_never_written_over_something(tmp_path: Path) -> None:
    template(tmp_path)
    with pytest.raises(UserError, match="cannot be made"):
        template(tmp_path)
