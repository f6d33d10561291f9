"""bench smol_learning and smol_network: their runs, without training them."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.smol_learning import SMOLLM, LearningNetwork
from bench.smol_network import SmolNetwork
from devnet.network import Network
from devnet.plan import Plan
from prime_core.ids import ZERO_DIGEST
from prime_core.run import RunDefinition


@pytest.mark.skipif(not (SMOLLM / "ready").exists(), reason="no SmolLM2 (scripts/setup_smollm.sh)")
@pytest.mark.parametrize("network", [LearningNetwork, SmolNetwork])
def test_its_run_is_a_run_definition_with_the_python_tool(
    network: type[Network], tmp_path: Path
) -> None:
    run = network(Plan(root=tmp_path)).definition(ZERO_DIGEST)
    assert RunDefinition.parse(run.raw(), exact=True) == run
    assert run.conversation is not None
    assert run.conversation.tools == ("python-2",)
    assert run.detailed_tables == (network is LearningNetwork)
