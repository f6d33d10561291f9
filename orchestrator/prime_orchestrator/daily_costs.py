"""What a pool's manager pays in a day at a load that the pool may not have yet.

Gas is that of `python -m bench gas` (a pool of 400 nodes, roots of 64 files, two validators). The
L1 data fee of an OP-stack chain is asked of its GasPriceOracle for each size of transaction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from prime_chain.client import Call, ChainClient, Fees
from prime_chain.costs import has_l1_fee, l1_fee_at_most, unsigned_transaction
from prime_core.ids import ZERO_ADDRESS
from prime_core.run import RunDefinition

DAY_SECONDS = 86_400
LATE_NONCE = 1 << 20
LEFT_OUT = (
    "not included: what an owner types (deployment, stake, pool funds), and what validators, "
    "jurors and providers send"
)


@dataclass(frozen=True)
class Act:
    """One kind of transaction: its gas, and the bytes of its calldata."""

    gas: int
    data_bytes: int


ACTS = {
    "root": Act(81_334, 132),
    "reward_root": Act(136_490, 164),
    "propose": Act(177_013, 1_540),
    "execute": Act(121_441, 36),
    "policy": Act(63_312, 260),
    "join": Act(86_389, 260),
    "eject": Act(49_533, 68),
}
"""By the kind of intent."""


@dataclass(frozen=True)
class Load:
    """Files, slashes, policies, joins and ejections a day, and the run's settings that decide how
    many roots the files take."""

    files: int
    slashes: int = 0
    policies: int = 0
    joins: int = 0
    ejections: int = 0
    root_seconds: int = RunDefinition.model_fields["root_seconds"].default
    root_submissions: int = RunDefinition.model_fields["root_submissions"].default
    epoch_seconds: int = RunDefinition.model_fields["epoch_seconds"].default

    def transactions(self) -> dict[str, int]:
        """Returns the number of transactions a day by kind, if files come evenly."""
        full = math.ceil(self.files / self.root_submissions)
        return {
            "root": max(full, min(self.files, DAY_SECONDS // self.root_seconds)),
            "reward_root": min(self.files, DAY_SECONDS // self.epoch_seconds),
            "propose": self.slashes,
            "execute": self.slashes,
            "policy": self.policies,
            "join": self.joins,
            "eject": self.ejections,
        }


@dataclass(frozen=True)
class DailyCost:
    """All transactions of one kind in a day. `l1_bytes` are unsigned, as the L1 data fee counts
    them. `wei` for gas, None if no price is known; `l1_wei` on top, None also where the chain has
    no such fee."""

    kind: str
    transactions: int
    gas: int
    l1_bytes: int
    wei: int | None
    l1_wei: int | None


def daily_costs(load: Load, chain_id: int, client: ChainClient | None) -> list[DailyCost]:
    """Returns what `load` costs a day, by kind, at the fees that `client` sees now; without it, gas
    and bytes only. Raises UnavailableError if the endpoint does not answer."""
    fees = Fees(0, 10**6, 10**9) if client is None else client.fees()
    l1 = client is not None and has_l1_fee(client)
    found = []
    for kind, count in load.transactions().items():
        act = ACTS[kind]
        call = Call(ZERO_ADDRESS, b"\1" * act.data_bytes)
        size = len(unsigned_transaction(call, chain_id, LATE_NONCE, act.gas, fees))
        gas = count * act.gas
        found.append(
            DailyCost(
                kind=kind,
                transactions=count,
                gas=gas,
                l1_bytes=count * size,
                wei=None if client is None else gas * (fees.base_fee + fees.priority_fee),
                l1_wei=count * l1_fee_at_most(client, size) if client is not None and l1 else None,
            )
        )
    return found
