"""What one demo run is: sizes, periods, who lies and how, and the run definition it trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from devnet.kinds import LIES, Ending
from prime_core.deployment import DEMO_PERIODS, Periods
from prime_core.ids import Digest
from prime_core.run import LengthBudgets, RunDefinition, SpeedClasses
from prime_core.task import Task
from prime_envs.registry import environment_ref

PERIODS = DEMO_PERIODS.model_copy(update={"validity": 120, "unbonding": 240})
"""A file's verdict and slash must come within its validity. On two cores that other programs kept
busy (load average 20 to 30), some came 65 s after the file."""
TOKEN = 10**18
HELDOUT = 256
TARGETS = (2, 6, 10, 14)
PREFERRED = {"1": (2, 6), "2": TARGETS}
"""By speed class: the slow node is asked for short answers first."""
PENALTY_MICRO = 150_000
"""0.15 for each thinking dot off the target."""
CHALLENGE_SIZE = 512
CHALLENGE_ROUNDS = 2

LIARS = ("int4", "best_of_4", "copied_proof", "made_up_proof")
"""Who lies unless others are named; devnet.kinds has all."""


@dataclass(frozen=True)
class NodePlan:
    """One node: its name, whether and how it lies (a name of devnet.kinds), how many
    times slower than this machine it is, whether it has no seat, whether its files are planted."""

    name: str
    liar: str | None = None
    throttle: float = 1.0
    shadow: bool = False
    planted: bool = False

    @property
    def ends(self) -> Ending | None:
        """What should come of its lies; None for an honest node."""
        return None if self.liar is None else LIES[self.liar].ends

    @property
    def paid(self) -> bool:
        """Whether it works honestly for pay."""
        return self.liar is None and not self.shadow and not self.planted


@dataclass(frozen=True)
class Plan:
    """The whole run. `steps` is where it gives up; with `fixed_steps` it runs just that many and
    `learned` is not asked of it."""

    root: Path
    steps: int = 80
    fixed_steps: bool = False
    nodes: tuple[NodePlan, ...] = ()
    periods: Periods = PERIODS
    port: int = 0
    runtime: Literal["process", "docker"] = "process"
    image: str = ""
    validators: int = 3
    groups_per_batch: int = 32
    samples_per_group: int = 16
    groups_per_lease: int = 4
    evaluate_every: int = 6
    rpc_faults: float = 0.0
    """Seconds for which RPC endpoints fail, one of three at a time; 0: one endpoint, no faults."""
    foreign_events: int = 0
    """Events of a stranger's that the contracts emit while endpoints fail."""

    @property
    def judges(self) -> tuple[str, ...]:
        """The validators' names."""
        return ("validator", *(f"validator-{i + 2}" for i in range(self.validators - 1)))

    def to_json(self) -> dict[str, Any]:
        """Plain data; the folder is left out, since a run may be moved."""
        data = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "root"}
        data["nodes"] = [vars(node) for node in self.nodes]
        data["periods"] = self.periods.model_dump()
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any], root: Path) -> Plan:
        """What `to_json` gave."""
        nodes = tuple(NodePlan(**node) for node in data["nodes"])
        return cls(**{**data, "nodes": nodes, "periods": Periods(**data["periods"]), "root": root})

    def quick(self) -> Plan:
        """The same walk with small batches, for tests."""
        return replace(self, groups_per_batch=8, groups_per_lease=2, samples_per_group=8)


def node_plans(
    nodes: int, liars: int, kinds: Sequence[str] = (), shadows: int = 0, planted: int = 0
) -> tuple[NodePlan, ...]:
    """`nodes` in all, `liars` of them lying, each in one of `kinds` (by default 4-bit first, then
    best-of-4, …); the second honest one is slow, so that two speed classes are seen. `shadows`
    without a seat and `planted` ones come next to them."""
    kinds = kinds or LIARS
    honest = nodes - liars
    plans = [
        NodePlan(f"honest-{i + 1}", throttle=5.0 if i == 1 and honest > 1 else 1.0)
        for i in range(honest)
    ]
    plans += [
        NodePlan(f"liar-{i + 1}-{kinds[i % len(kinds)]}", liar=kinds[i % len(kinds)])
        for i in range(liars)
    ]
    plans += [NodePlan(f"shadow-{i + 1}", shadow=True) for i in range(shadows)]
    plans += [NodePlan(f"planted-{i + 1}", planted=True) for i in range(planted)]
    return tuple(plans)


def run_definition(plan: Plan, base_model: Digest) -> RunDefinition:
    """The demo's run."""
    budgets = LengthBudgets(
        targets=TARGETS, by_class=PREFERRED, penalty_micro=PENALTY_MICRO, form="clip"
    )
    return RunDefinition(
        name="devnet",
        base_model=base_model,
        environment=environment_ref(
            "reverse", {}, budgets, train_size=reverse_train_size(budgets), heldout_size=HELDOUT
        ),
        max_output_tokens=40,
        samples_per_group=plan.samples_per_group,
        groups_per_lease=plan.groups_per_lease,
        groups_per_batch=plan.groups_per_batch,
        max_staleness=2,
        budgets=budgets,
        speed=SpeedClasses(
            ratios_micro=(500_000,),
            challenge_size=CHALLENGE_SIZE,
            challenge_rounds=CHALLENGE_ROUNDS,
        ),
        task=Task(image=plan.image or "process", memory_mb=2048, cpus_milli=1000, pids=128),
        price_per_unit=TOKEN // 10_000,
        price_per_prompt_token=TOKEN // 200_000,
        price_per_judged_file=TOKEN // 500,
        stake_per_seat=100 * TOKEN,
        slash_amount=50 * TOKEN,
        risk_factor_micro=900_000,
        epoch_seconds=plan.periods.epoch_length,
        validity_seconds=plan.periods.validity,
        lease_seconds=60,
        heartbeat_seconds=1,
        death_seconds=20,
        root_seconds=4,
        root_submissions=64,
    )


def reverse_train_size(budgets: LengthBudgets) -> int:
    """All of the demo's problems but the last HELDOUT are for training."""
    from prime_envs.registry import load_environment

    return len(load_environment("reverse", {}, budgets)) - HELDOUT
