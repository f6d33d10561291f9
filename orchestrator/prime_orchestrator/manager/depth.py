"""What must lie deep enough on the chain before an intent is sent (prime_chain/certainty.py).

    join         the provider's stake covers the seat at the safe block
    propose      the root that holds the bad leaf is in a safe block
    reward_root  the block that the settlement was made at is final

Until then the intent waits in its queue. The other kinds rest on nothing that a reorganisation
could take away without taking them along.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from prime_chain.certainty import Purpose, block_for, counted_stake
from prime_chain.contracts import Contracts
from prime_core import ids
from prime_core.ids import Address
from prime_orchestrator.context import PoolContext
from prime_orchestrator.store import schema


@dataclass(frozen=True)
class Buried:
    """Block `number` has to be at least as deep as facts for `purpose` are read."""

    purpose: Purpose
    number: int


@dataclass(frozen=True)
class Staked:
    """`node`'s provider has to have `amount` wei of active stake at the safe block."""

    node: Address
    amount: int


Need = Buried | Staked


def need_of(
    connection: Connection, context: PoolContext, kind: str, payload: Mapping[str, Any]
) -> Need | None:
    """What an intent waits for, from the store; None if for nothing."""
    match kind:
        case "join":
            invite = payload["invite"]
            amount = context.run.stake_per_class * int(invite["speed_class"])
            return Staked(ids.address(invite["node"]), amount)
        case "propose":
            block = connection.execute(
                sa.select(schema.roots.c.block)
                .join(schema.submissions, schema.submissions.c.root_id == schema.roots.c.id)
                .where(schema.submissions.c.digest == payload["submission_digest"])
            ).scalar()
            return None if block is None else Buried("stake", int(block))
        case "reward_root":
            return Buried("payout", int(payload["as_of_block"]))
    return None


class Depths:
    """The chain's word on what is deep enough, for one tick: each block is asked for once."""

    def __init__(self, contracts: Contracts) -> None:
        self._contracts = contracts
        self._blocks: dict[Purpose, int] = {}

    def meets(self, need: Need | None) -> bool:
        """Whether an intent may go. Raises UnavailableError if no endpoint answers."""
        match need:
            case None:
                return True
            case Staked(node, amount):
                provider = self._contracts.registry.provider_of(node)
                # a node without provider goes: the contract's refusal says what is missing
                return provider is None or counted_stake(self._contracts, provider) >= amount
            case Buried(purpose, number):
                if purpose not in self._blocks:
                    self._blocks[purpose] = block_for(self._contracts.client, purpose).number
                return number <= self._blocks[purpose]
