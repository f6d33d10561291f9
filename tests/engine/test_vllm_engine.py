"""vLLM behind the engine port: the plain engine's rows, from exactly the policy's weights.

It runs under an interpreter of its own (scripts/setup_vllm.sh).
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("PRIME_VLLM_PYTHON", ROOT / "var/engines/vllm/bin/python"))
PATHS = os.pathsep.join(map(str, (ROOT, ROOT / "protocol", ROOT / "trainer")))
MISSING = "vLLM is not installed: scripts/setup_vllm.sh"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON.exists(), reason=MISSING)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    script = Path(__file__).with_name("vllm_checks.py")
    done = subprocess.run(
        [PYTHON, script, ROOT / "devnet" / "model", tmp_path_factory.mktemp("altered")],
        capture_output=True, text=True, check=False, timeout=280,
        env={**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout)  # vLLM writes to standard error only
    return result


def test_its_rows_are_the_plain_engines_and_the_same_every_time(found: dict[str, Any]) -> None:
    assert found["name"] == ["vllm/1", "float32", "cpu"]
    for name in ("same_rows", "same_ends", "same_again", "same_greedy"):
        assert all(found[name]), name


def test_evaluation_and_filter_find_the_same_on_both_engines(found: dict[str, Any]) -> None:
    """Its figures, the answers that are kept, and the filtered dataset."""
    assert found["evaluated"] == [True, True, True]
    assert found["mean_reward"] > 0


def test_a_replay_by_the_plain_engine_finds_nothing(found: dict[str, Any]) -> None:
    assert found["margin"] == 0
    assert found["logprob_gap"] < 1e-4
    assert found["states_equal"] > 0.99  # bf16 bits; float32 sums differ in their last place


@pytest.mark.parametrize("tensor", ["mlp.down_proj", "self_attn.k_proj", "input_layernorm"])
def test_one_number_of_another_policy_is_seen_at_loading(
    found: dict[str, Any], tensor: str
) -> None:
    assert f"model.layers.2.{tensor}.weight" in found[tensor]


def test_the_next_policy_is_loaded_in_the_same_process(found: dict[str, Any]) -> None:
    assert all(found["newer"])


def test_a_proof_pass_is_the_same_among_other_rows_which_go_on(found: dict[str, Any]) -> None:
    assert all(found["proof_again"])
    assert 0 < found["proof_gap"] < 1e-4, "the plain engine's are close, and not of the class"
    assert all(found["rows_go_on"])
    assert found["proof_waits"] == [True] * 4, "for room in the cache"
    assert "do not fit" in found["too_long_a_row"]


def test_another_process_is_of_the_same_class_and_8_bit_weights_are_not(
    found: dict[str, Any],
) -> None:
    assert found["exit"] == 0
    exact = found["exact"]
    assert all(exact["same_class"])
    names = {"vllm", "dtype", "device", "chunk", "attention", "tensor parallel", "block size"}
    assert names <= set(exact["facts"])
    assert exact["facts"]["engine"] == "vllm/1"
    assert len(found["8_bits"]) == 26
    assert all(found["8_bits"]), "equal facts, another fingerprint, other digests of all rows"


def test_a_validator_with_vllm_repeats_the_proof_passes_of_vllm_s_files(
    found: dict[str, Any],
) -> None:
    exact = found["exact"]
    assert exact["reason"] == "NONE"
    assert exact["statistics"]["exact_rows"] == 4
    assert exact["statistics"]["exact_mismatches"] == 0


def test_a_process_group_that_it_joined_outlives_it(found: dict[str, Any]) -> None:
    """A trainer's checkpoints use it after each policy."""
    assert found["group"] == "gloo"


def test_it_refuses_what_it_cannot_do_with_a_sentence(found: dict[str, Any]) -> None:
    assert "needs VLLM_USE_V2_MODEL_RUNNER=0" in found["other_runner"]
    assert "outside the vocabulary" in found["bad_prompt"]
    assert "do not fit" in found["too_long"]
    assert "validators replay with the plain engine" in found["replay"]
