"""The whole network with SmolLM2-135M-Instruct: four steps, an attacker with 8-bit weights caught,
the memory of each process within its bar."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from e2e_kit import processes_of, require_anvil

from bench.smol_network import BARS, SMOLLM, play


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not (SMOLLM / "ready").exists(), reason="no SmolLM2 (scripts/setup_smollm.sh)")
def test_a_real_model_trains_on_a_network_and_an_8_bit_attacker_is_slashed(tmp_path: Path) -> None:
    require_anvil()
    root = tmp_path / "run"
    rows = {row.name: row for row in play(root)}
    print("\n".join(f"{row.name:24} {row.value:10.1f} {row.unit}" for row in rows.values()))
    assert {f"{name}_mb" for name in BARS} <= rows.keys()
    assert [row for row in rows.values() if not row.ok] == []
    steps = [json.loads(line) for line in (root / "trainer/metrics.jsonl").read_text().splitlines()]
    assert [line["applied"] for line in steps[:4]] == [True] * 4
    assert {part for line in steps for part in line["reward_by_environment"]} >= {"guess"}
    assert max(line["turns_mean"] for line in steps) > 1, "no row is a conversation"
    assert processes_of(root) == []
