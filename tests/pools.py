"""A made-up pool: a small run, and contracts that are on no chain."""

from __future__ import annotations

from typing import Any

from prime_core import ids
from prime_core.deployment import Deployment, Periods
from prime_core.ids import ZERO_DIGEST
from prime_core.messages import ContractAddresses
from prime_core.run import EnvironmentRef, LengthBudgets, RunDefinition
from prime_core.signing import CONTRACT_NAMES
from prime_core.task import Task

RUN = RunDefinition(
    name="test",
    base_model=ZERO_DIGEST,
    environment=EnvironmentRef(name="reverse", digest=ZERO_DIGEST, train_size=100, heldout_size=10),
    max_output_tokens=16,
    samples_per_group=2,
    groups_per_lease=2,
    groups_per_batch=4,
    budgets=LengthBudgets(targets=(2, 6), penalty_micro=0),
    task=Task(image="process"),
    price_per_unit=10,
    stake_per_seat=100,
    slash_amount=50,
)


def run_definition(**changes: Any) -> RunDefinition:
    """RUN with other fields."""
    return RunDefinition(**({name: getattr(RUN, name) for name in RUN.model_fields_set} | changes))


def deployment(periods: Periods | None = None, block: int = 0) -> Deployment:
    """Contracts of chain 31337 at addresses where nothing is."""
    contracts = {
        name: ids.address("0x" + f"{number:02x}" * 20)
        for number, name in enumerate(CONTRACT_NAMES, start=0xA0)
    }
    return Deployment(
        chain_id=31337,
        contracts=ContractAddresses(**contracts),
        block=block,
        periods=periods or Periods(),
    )
