"""bench smol_learning: its run, without training it."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.smol_learning import SMOLLM, LearningNetwork
from devnet.plan import Plan
from prime_core.ids import ZERO_DIGEST
from prime_core.run import RunDefinition


@pytest.mark.skipif(not (SMOLLM / "ready").exists(), reason="no SmolLM2 (scripts/setup_smollm.sh)")
def test_its_run_is_the_examples_task_and_a_run_definition(tmp_path: Path) -> None:
    run = LearningNetwork(Plan(root=tmp_path)).definition(ZERO_DIGEST)
    assert RunDefinition.parse(run.raw(), exact=True) == run
    assert run.conversation is not None
    assert run.detailed_tables
