"""What a node claims about its rewards, and when a validator may call it a lie."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from prime_core.ids import ZERO_DIGEST
from prime_core.run import BUDGET_WORDING, Chat, LengthBudgets
from prime_envs.base import Grade
from prime_envs.crowd_check import NAMES as FINDINGS
from prime_envs.environments.reverse import Reverse
from prime_envs.environments.tasks import TaskDataset
from prime_envs.graders.base import BUILT_IN, Grader, grader_class
from prime_envs.lengths import budgets_from
from prime_envs.registry import BUILT_IN as ENVIRONMENTS
from prime_envs.registry import environment_class
from prime_envs.sources import file_digest

BUDGETS = LengthBudgets(targets=(100,), penalty_micro=1000, form="exact")


def test_a_claim_is_refuted_by_another_grade_unless_time_decided_or_the_claimant_gave_up() -> None:
    sure = Grade(900_000, {}, "", given_up_micro=-100_000)
    assert not sure.refutes(0.9)
    assert not sure.refutes(-0.1)  # its grader ran out of time: no one gains by that
    assert sure.refutes(1.0)
    assert sure.refutes(0.0)
    assert not Grade(0, {}, "", uncertain=True).refutes(1.0)
    assert Grade(900_000, {}, "").refutes(-0.1)


def test_only_environments_that_grade_in_processes_may_give_up(tmp_path: Path) -> None:
    row = {"problem_id": "1", "task_type": "verifiable_math", "prompt": "?",
           "verification_info": {"ground_truth": "2"}}  # fmt: skip
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row))
    data = TaskDataset({"sha256": file_digest(path), "path": str(path)}, BUDGETS)
    grade = data.grade(data.problem(0), 100, "\\boxed{2}", 90)
    assert (grade.reward_micro, grade.given_up_micro) == (990_000, -10_000)
    reverse = Reverse({}, BUDGETS)
    assert reverse.grade(reverse.problem(0), 100, "no", 2).given_up_micro is None


def test_the_documents_examples_are_right() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "environments.md").read_text()
    blocks = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    tables = {name: table for block in blocks for name, table in tomllib.loads(block).items()}
    assert tables["chat"].pop("prompts") == "template"
    assert Chat(template=ZERO_DIGEST, **tables["chat"]).budget == BUDGET_WORDING
    budgets = budgets_from(tables["budgets"])
    assert LengthBudgets.model_validate_json(json.dumps(budgets)).preferred(1)[0] == 1000
    assert all(f"`{name}`" in text for name in (*ENVIRONMENTS, *BUILT_IN))
    assert all(finding in text for finding in FINDINGS)


def test_every_built_in_name_is_a_class() -> None:
    for name in ENVIRONMENTS:
        assert environment_class(name).name == name
    for name in BUILT_IN:
        assert issubclass(grader_class(name), Grader)


@pytest.mark.parametrize("kind", ["prime_open.environments", "prime_open.graders"])
def test_plugins_are_found_by_entry_point(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = {"prime_open.environments": "environments.reverse:Reverse"}
    base = plugin.get(kind, "graders.formats:FormatFollowing")
    module = base.partition(":")[0]
    name = f"plugin_{kind.rpartition('.')[2]}"
    (tmp_path / f"{name}.py").write_text(
        f"from prime_envs.{module} import {base.partition(':')[2]} as Made\n"
    )
    info = tmp_path / "plugin_of_test-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin-of-test\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{kind}]\nmade_here = {name}:Made\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    find = environment_class if kind.endswith("environments") else grader_class
    assert find("made_here").__name__ in ("Reverse", "FormatFollowing")
