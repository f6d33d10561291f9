"""What proofs, lease slots and new policies cost an engine: `python -m bench engine [--json]
[--quick]`.

With vLLM on a CPU (scripts/setup_vllm.sh) and SmolLM2-135M-Instruct, or with the devnet's model
where that is not there; one thread. A GPU's shares differ: `make gpu` measures them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from bench.form import ROOT, Row
from bench.honest_files import VLLM_PYTHON
from prime_core.errors import UnavailableError

PACKAGES = ("torch", "transformers", "numpy")
DEVNET = ROOT / "devnet" / "model"
LENGTHS = (4_096, 16_384, 32_768)


def model_folder(quick: bool) -> Path:
    """The model of the timed rows."""
    home = os.environ.get("PRIME_SMOLLM_HOME", "")
    return Path(home) if home and not quick and Path(home).is_dir() else DEVNET


def asked(part: str, engine: str, model: Path, quick: bool) -> dict[str, float]:
    """The result of a part of engine_worker. Raises UnavailableError if its process fails."""
    python = VLLM_PYTHON if engine == "vllm" else Path(sys.executable)
    ours = os.pathsep.join((str(ROOT), str(ROOT / "protocol")))
    done = subprocess.run(
        [str(python), "-m", "bench.engine_worker", part, engine, str(model), str(int(quick))],
        capture_output=True, text=True, check=False, timeout=3600,
        env={**os.environ, "PYTHONPATH": ours},
    )  # fmt: skip
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UnavailableError(f"{part} with {engine}: {last[:300]}")
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def run(quick: bool) -> list[Row]:
    """All rows. Raises UnavailableError if vLLM is not installed."""
    if not VLLM_PYTHON.exists():
        raise UnavailableError("vLLM is not installed here: scripts/setup_vllm.sh")
    model = model_folder(quick)
    vllm, plain = (asked("proofs", engine, model, quick) for engine in ("vllm", "plain"))
    slots = asked("slots", "vllm", DEVNET, quick)
    rows = [
        Row("proof_overhead_share", vllm["proof_share"],
            f"of generation, vLLM, {model.name}", 0.05),
        Row("proof_overhead_share_plain", plain["proof_share"], "of generation, plain engine"),
        Row("proof_prefill_share", plain["prefill_share"],
            "of generation and proof pass, exact class, plain engine"),
        Row("generation_us_token", vllm["seconds"] / vllm["tokens"] * 1e6, "CPU µs, vLLM"),
        Row("slots_utilisation", slots["full_4"],
            "of token-steps with a full batch, four leases at once", 0.9, "higher",
            slots["full_1"], "one lease at a time"),
        Row("slots_filled", slots["filled_4"], "rows a step over a full batch's", None, "higher",
            slots["filled_1"], "one lease at a time"),
        Row("slots_steps", slots["steps_4"], "steps for the same leases", None, "lower",
            slots["steps_1"], "one lease at a time"),
        Row("swap_s_cpu", asked("swap", "vllm", model, quick)["seconds"],
            f"s to the next policy, vLLM on a CPU, {model.name}"),
        Row("swap_s_cpu_plain", asked("swap", "plain", model, quick)["seconds"],
            f"s to the next policy, plain engine, {model.name}"),
    ]  # fmt: skip
    for tokens in LENGTHS[: 1 if quick else None]:
        peak = asked(f"states:{tokens}", "plain", DEVNET, quick)["mb"]
        bar = 256.0 if tokens == LENGTHS[-1] else None
        rows.append(
            Row(f"states_peak_mb_{tokens // 1024}k", peak, "MiB, hidden size 5,120, one row", bar)
        )
    return rows
