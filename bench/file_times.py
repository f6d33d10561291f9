"""Files' times on a live devnet, one of its two nodes slowed fourfold.

Everything is real: chain, orchestrator, validator, trainer, relay and two agents that solve the
hardware challenge, are put into speed classes and take leases. The demo's model counts to 14, too
few for a fourfold difference, so it is first taught to count as far as the menu goes. A file's time
is the orchestrator's: from lease to receipt. Rows are generated four at a time, so that a file's
work is its tokens and not its call.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import sqlalchemy as sa
import torch

from bench.form import Row
from devnet.__main__ import QUICK_PERIODS
from devnet.model import COMMITTED, END, IGNORED, training_words
from devnet.network import Network
from devnet.plan import NodePlan, Plan, run_definition
from devnet.walk import Walk
from prime_core.errors import UnavailableError
from prime_core.ids import Digest
from prime_core.run import LengthBudgets, RunDefinition
from prime_envs.lengths import balanced_targets
from prime_envs.registry import environment_ref
from prime_orchestrator.store import open_store, schema, sqlite_url

SLOWED = 4
MENU = tuple(range(2, 59, 4))
ANSWER_TOKENS = 15
"""Of a file's time without its dots, in dots: the word, its end, and what any file costs. Measured:
files with targets of 2 took the slow node 1.33 times as long as those of 36 took the fast one."""
FILES = 10
"""Of each node, before its times are looked at; the first two warm up."""
PACKAGES = ("torch", "transformers")
LESSONS, BATCH = 160, 48


class EvenFiles(Network):
    """A devnet whose budgets follow the nodes' speed classes."""

    node_flags = ("--generation-batch", "4")

    def __init__(self, plan: Plan, model: Path, by_class: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__(plan)
        self.model, self._by_class = model, dict(by_class)

    def definition(self, base: Digest) -> RunDefinition:
        """The devnet's run with other budgets."""
        run = run_definition(self.plan, base)
        budgets = LengthBudgets(
            targets=tuple(sorted({t for some in self._by_class.values() for t in some})),
            by_class=self._by_class, min_share_micro=0, penalty_micro=20_000, form="clip",
        )  # fmt: skip
        sizes: dict[str, Any] = {"train_size": run.environment.train_size, "heldout_size": 256}
        return run.model_copy(
            update={
                "budgets": budgets,
                "environment": environment_ref("reverse", {}, budgets, **sizes),
                "max_output_tokens": 2 * max(MENU),
                "speed": run.speed.model_copy(update={"ratios_micro": (750_000,)}),
            }
        )


def teach(folder: Path) -> Path:
    """The demo's model, taught to count as far as the menu goes; about a minute on one core."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(COMMITTED, local_files_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(
        COMMITTED, local_files_only=True, dtype=torch.float32
    )
    words, rng = training_words(), random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for lesson in range(LESSONS):
        optimizer.param_groups[0]["lr"] = 1e-3 * min(1.0, (LESSONS - lesson) / 60)
        inputs, labels = [], []
        for _ in range(BATCH):
            word, target = rng.choice(words), rng.choice(MENU)
            prompt = tokenizer.encode(f"{target:02d}|{word}>", add_special_tokens=False)
            answer = tokenizer.encode(f"{'.' * target}={word[::-1]}{END}", add_special_tokens=False)
            inputs.append(prompt + answer)
            labels.append([IGNORED] * len(prompt) + answer)
        width = max(map(len, inputs))
        rows = torch.tensor([row + [0] * (width - len(row)) for row in inputs])
        wanted = torch.tensor([row + [IGNORED] * (width - len(row)) for row in labels])
        logits = model(input_ids=rows[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), wanted[:, 1:].flatten(), ignore_index=IGNORED
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)
    return folder


def file_seconds(database: Path) -> dict[str, list[float]]:
    """Each node's files in order: seconds from lease to receipt."""
    store = open_store(sqlite_url(database))
    try:
        leases, files = schema.leases.c, schema.submissions.c
        wanted = (
            sa.select(leases.node, files.received_at - leases.created_at)
            .join_from(schema.leases, schema.submissions, leases.digest == files.lease_digest)
            .order_by(files.received_at)
        )
        with store.read() as connection:
            found: dict[str, list[float]] = {}
            for node, seconds in connection.execute(wanted):
                found.setdefault(node, []).append(float(seconds))
            return found
    finally:
        store.close()


def run(quick: bool) -> list[Row]:
    """The rows, in some minutes; `quick` looks at fewer files. Raises UnavailableError if the
    network does not get that far."""
    with tempfile.TemporaryDirectory(prefix="file-times-") as folder:
        return live_file_times(Path(folder), 4 if quick else FILES)


def live_file_times(root: Path, files: int) -> list[Row]:
    """The rows, from `files` files of each node."""
    by_class = balanced_targets(
        MENU, {1: Fraction(1), 2: Fraction(SLOWED)}, answer_tokens=ANSWER_TOKENS
    )
    plan = Plan(
        root=root / "network",
        steps=1,
        fixed_steps=True,
        nodes=(NodePlan("fast"), NodePlan("slow", throttle=float(SLOWED))),
        periods=QUICK_PERIODS,
    )
    network = EvenFiles(replace(plan, groups_per_batch=16), teach(root / "model"), by_class)
    walk = Walk(network, note=lambda _words: None, tick=lambda: None)
    try:
        walk.start()
        database = network.root / "orchestrator" / "orchestrator.sqlite"
        names = network.names()

        def enough() -> bool:
            return min(map(len, times(database, names).values())) >= files

        network.supervisor.wait_for(f"{files} files of each node", enough, 240, interval=2.0)
        classes = {names[node.node]: node.speed_class for node in network.status().nodes}
        if classes != {"fast": 2, "slow": 1}:
            raise UnavailableError(f"the speed classes do not separate the nodes: {classes}")
        found = times(database, names)
    finally:
        network.stop()
    slow, fast = (statistics.median(found[name][2:]) for name in ("slow", "fast"))
    return [
        Row("file_seconds_slow", slow, f"s, targets {by_class['1']}"),
        Row("file_seconds_fast", fast, f"s, targets {by_class['2']}"),
        Row("file_time_ratio", max(slow / fast, fast / slow), "times", 1.25),
    ]


def times(database: Path, names: Mapping[str, str]) -> dict[str, list[float]]:
    """`file_seconds` by the nodes' names; both are there, with nothing if need be."""
    found: dict[str, list[float]] = {"fast": [], "slow": []}
    return found | {names[node]: seconds for node, seconds in file_seconds(database).items()}
