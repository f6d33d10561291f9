"""The run definitions and settings in docs/examples are what the programs read."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from prime_orchestrator.cli.run import define
from prime_trainer.config import load
from prime_trainer.local import POOL_ONLY
from prime_trainer.objectives import REGISTRY, objective_of

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = DOCS / "examples"
DEFINITIONS = sorted(p for p in EXAMPLES.glob("run*.toml") if ".trainer." not in p.name)
SETTINGS = sorted(EXAMPLES.glob("run*.trainer.toml"))


@pytest.mark.parametrize("path", DEFINITIONS, ids=lambda p: p.stem)
def test_a_run_definition_is_read(path: Path, model: Path) -> None:
    values = tomllib.loads(path.read_text())
    if values["environment"]["name"] == "tasks":  # its dataset is the operator's own
        values["environment"] = {"name": "reverse", "train_size": 1000, "heldout_size": 64}
    values.pop("chat", None)  # the model has no template
    if path.stem.startswith("run-local"):
        values = {**POOL_ONLY, **values}
    run = define(values, path, model)
    assert run.groups_per_batch * run.samples_per_group in (32, 128, 512, 4096)
    longest = max(run.budgets.targets)
    assert longest < run.max_output_tokens


@pytest.mark.parametrize("path", SETTINGS, ids=lambda p: p.stem)
def test_the_trainers_settings_in_the_same_folder_are_read(path: Path) -> None:
    settings = load({}, path)
    assert settings.learning_rate > 0
    assert settings.objective.delta > 1 + settings.objective.clip
    assert objective_of(settings.objective.name) is not REGISTRY["one_sided"]
    assert (EXAMPLES / path.name.replace(".trainer", "")).is_file()


@pytest.mark.parametrize("path", SETTINGS, ids=lambda p: p.stem)
def test_several_optimizer_steps_a_batch_go_with_the_proximal_ratio(path: Path) -> None:
    """Against the behaviour policy, a batch's later steps would be clipped for its staleness."""
    settings = load({}, path)
    ratio = "proximal" if settings.optimizer_steps > 1 else "behaviour"
    assert settings.objective.ratio == ratio
