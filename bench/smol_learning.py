"""SmolLM2-135M-Instruct learns to use a tool on a whole network: an honest node, a validator, a
relay, a trainer and a local chain, each one process with one thread.

The task is docs/examples/run-local-python.toml: the model multiplies with the Python tool. Held-out
problems are answered by the base and by the last policy, with the same noise. The node generates
with vLLM if PRIME_VLLM_PYTHON names its interpreter (scripts/setup_vllm.sh).

    correct_base, correct_trained     share of held-out problems that were answered correctly
    correct_gain                      their difference
    step_s                            seconds from one policy to the next, on average
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.form import ROOT, Row
from bench.smol_network import SMOLLM, published, require_model
from devnet.network import BIN, Network
from devnet.plan import NodePlan, Plan, run_definition
from devnet.walk import Walk
from prime_core.deployment import Periods
from prime_core.errors import FatalError
from prime_core.ids import Digest
from prime_core.run import RunDefinition
from prime_trainer.local import local_run

PACKAGES = ("torch", "transformers")
SOURCE = ROOT / "docs/examples/run-local-python.toml"
STEPS, PROBLEMS = 10, 64
TASKS = ROOT / "docs/examples/products-tasks.jsonl"
STEP_SECONDS = 1800.0
PERIODS = Periods(
    epoch_length=8, validity=1200, slash_window=6, dispute_window=6, reward_delay=4, unbonding=1300
)
TASK = (
    "schema_version", "conversation", "chat", "budgets", "temperature_micro", "max_output_tokens",
    "samples_per_group", "groups_per_lease", "groups_per_batch", "detailed_tables",
)  # fmt: skip
"""Fields of the run that come from SOURCE."""


class LearningNetwork(Network):
    """A devnet that trains SmolLM2-135M-Instruct on the task of SOURCE."""

    model = SMOLLM
    trainer_flags = ("--learning-rate", "5e-5", "--warmup-steps", "3", "--round-weights")

    def definition(self, base: Digest) -> RunDefinition:
        """The demo's run with the task of SOURCE."""
        task = local_run(SOURCE, self.model)
        arguments = {**task.environment.arguments, "path": str(TASKS)}
        environment = task.environment.model_copy(update={"arguments": arguments})
        changes = {name: getattr(task, name) for name in TASK}
        changes |= {"environment": environment, "lease_seconds": 600}
        return run_definition(self.plan, base).model_copy(update=changes)


def play(root: Path, steps: int = STEPS, problems: int = PROBLEMS) -> list[Row]:
    """Trains `steps` policies under `root` and evaluates the last. Raises UnavailableError if the
    model is missing or the network does not get that far, FatalError if the evaluation fails."""
    require_model()
    vllm = os.environ.get("PRIME_VLLM_PYTHON", "")
    if vllm:
        command = f"{vllm} -m prime_node.worker --engine vllm"
        LearningNetwork.node_flags = ("--worker-command", command)
    plan = Plan(
        root=root,
        steps=steps,
        fixed_steps=True,
        nodes=(NodePlan("honest"),),
        periods=PERIODS,
        validators=1,
    )
    network = LearningNetwork(plan)
    started = time.monotonic()

    def note(words: str) -> None:
        print(f"[{time.monotonic() - started:6.1f} s] {words}", file=sys.stderr, flush=True)

    walk = Walk(network, note, tick=lambda: None)
    try:
        walk.bring_up()
        began = time.monotonic()
        for version in range(1, steps + 1):
            walk.until(f"policy {version}", published(version), STEP_SECONDS)
            note(f"policy {version}")
        seconds = (time.monotonic() - began) / steps
        walk.stop_nodes()
    finally:
        network.stop()
    return [*evaluated(root, network.run_file, problems), Row("step_s", seconds, "s")]


def evaluated(root: Path, run_file: Path, problems: int) -> list[Row]:
    """Exports the trainer's last policy and answers held-out problems with it and with the base."""
    trainer, finished = str(BIN / "trainer"), root / "finished"
    commands = (
        (trainer, "export", "--data", str(root / "trainer"), "--out", str(finished)),
        (
            *(trainer, "evaluate", "--model", str(finished), "--base", str(SMOLLM)),
            *("--run", str(run_file), "--problems", str(problems), "--json"),
        ),
    )
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise FatalError(f"{' '.join(command[:2])} failed: {done.stderr[-2000:]}")
    found = json.loads(done.stdout)
    (root / "evaluation.json").write_text(done.stdout)
    base, trained = (found[which]["pass_1"]["mean"] for which in ("base", "trained"))
    return [
        Row("correct_base", base, ""),
        Row("correct_trained", trained, ""),
        Row("correct_gain", trained - base, "", bar=0.25, better="higher"),
    ]


def run(quick: bool) -> list[Row]:
    """The rows, in half an hour or more; `quick` takes one step and four problems. The network's
    folder is kept below var/."""
    if quick:
        with tempfile.TemporaryDirectory(prefix="smol-learning-") as folder:
            return play(Path(folder), 1, 4)
    root = ROOT / "var/smol-learning"
    root.mkdir(parents=True, exist_ok=True)
    return play(Path(tempfile.mkdtemp(dir=root)))
