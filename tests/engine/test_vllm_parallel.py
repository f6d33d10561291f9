"""vLLM over two ranks: one engine's rows, each rank with its part of the policy's weights.

It runs under an interpreter of its own (scripts/setup_vllm.sh), on CPUs.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("PRIME_VLLM_PYTHON", ROOT / "var/engines/vllm/bin/python"))
MISSING = "vLLM is not installed: scripts/setup_vllm.sh"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON.exists(), reason=MISSING)]


def test_two_ranks_make_the_plain_engine_s_rows(tmp_path: Path) -> None:
    script = Path(__file__).with_name("vllm_parallel_checks.py")
    done = subprocess.run(
        [PYTHON, script, ROOT / "devnet" / "model", tmp_path],
        capture_output=True, text=True, check=False, timeout=500,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'protocol'}", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert "4 attention heads cannot be split over 3 cards" in found["unsplit"]
    assert (found["children"], found["children_left"]) == (1, 0)
    assert not found["lost_by_closing"]
    assert found["lost"] == found["said"] == "rank 1 of the engine ended while in use: status -9"
    assert all(found["same_rows"])
    assert all(found["same_again"])
    assert found["logprob_gap"] < 1e-4
    assert 0 < found["proof_gap"] < 1e-4
    assert all(found["rows_go_on"])
    assert found["split"] == "2"
    assert found["states_equal"] > 0.99  # bf16 bits; float32 sums differ in their last place
    for tensor in ("mlp.down_proj", "self_attn.v_proj", "mlp.up_proj"):
        assert f"model.layers.2.{tensor}.weight" in found[tensor]
