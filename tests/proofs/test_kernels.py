"""The Triton kernels in Triton's interpreter, and vLLM's sampler next to them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VLLM = Path(os.environ.get("PRIME_VLLM_HOME", ROOT / "var" / "engines" / "vllm")) / "bin" / "python"


@pytest.mark.slow
def test_triton_kernels_and_vllm_draw_by_the_specified_noise() -> None:
    """numpy's reference, our kernels and vLLM's own kernel give the same tokens."""
    python = Path(sys.executable) if find_spec("triton") is not None else VLLM
    if not python.exists():
        pytest.skip("no Triton here: scripts/setup_vllm.sh brings one")
    done = subprocess.run(
        [str(python), str(Path(__file__).with_name("triton_checks.py"))],
        capture_output=True, text=True, check=False, timeout=280, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'protocol'}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["product"], "the second-lowest bytes of a product differ from numpy's"
    assert found["noise_gap"] < 1e-5
    assert found["same_tokens"]
    assert found["logprob_gap"] < 1e-5
    assert found["same_sketches"]
    if python == VLLM:
        assert found["vllm"], "vLLM is here without its Murmur3 sampler"
    if found["vllm"]:
        assert found["vllm_tokens"]
