"""A node's rewards: the orchestrator's statement, what the chain has paid, and the claim."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from prime_chain.claims import Payable, fetch_info
from prime_chain.client import Call
from prime_chain.explain import Explanation, explain
from prime_chain.history import read_events
from prime_chain.rewards import Rebuilder, history_of
from prime_core.errors import UserError
from prime_core.ids import Address
from prime_core.messages import RewardInfo
from prime_core.settlement import settled_until
from prime_core.transport.client import OrchestratorClient, run_bytes
from prime_node.config import Settings
from prime_node.link import Link, connect, naming_mirrors
from prime_node.spool import Spool
from prime_node.state import DataFolder


@dataclass(frozen=True)
class NodeRewards:
    """In wei; None without an RPC. `paid`: paid on chain. `own`: what the files in this machine's
    journal earned up to the end of the newest settled epoch, without prompts' pay; None also if
    there is no journal."""

    info: RewardInfo
    paid: int | None
    own: int | None = None

    @property
    def payable(self) -> int | None:
        """Wei that a claim would pay, now or once it is claimable."""
        return None if self.paid is None else int(self.info.cumulative) - self.paid

    @property
    def difference(self) -> int | None:
        """What the reward root gives more (or, below 0, less) than the node's own files."""
        return None if self.own is None else int(self.info.cumulative) - self.own

    def as_json(self) -> dict[str, Any]:
        known: dict[str, Any] = self.info.model_dump(mode="json")
        paid = None if self.paid is None else str(self.paid)
        payable = None if self.payable is None else str(self.payable)
        own = None if self.own is None else str(self.own)
        difference = None if self.difference is None else str(self.difference)
        return known | {
            "paid": paid, "payable": payable, "own_files": own, "difference": difference,
        }  # fmt: skip


def read_rewards(settings: Settings, node: Address) -> NodeRewards:
    """Reads the rewards from the orchestrator and, if an RPC is named, the chain."""
    with OrchestratorClient(settings.need_orchestrator()) as client:
        with naming_mirrors("type prime-node rewards explain with a mirror's URL"):
            info = fetch_info(client, node)
            pool = client.pool() if settings.rpc else None
        if pool is None:
            return NodeRewards(info, None)
        link = connect(settings, pool)
        try:
            paid = link.contracts.rewards.claimed(link.pool, node)
            until = settled_until(info.epoch, link.deployment.periods.epoch_length)
        finally:
            link.close()
    data = DataFolder(settings.data)
    if not (data.spool / "journal.sqlite").is_file():
        return NodeRewards(info, paid)
    spool = Spool(data.spool, now=time.time, sweep=False)
    return NodeRewards(info, paid, spool.worth_before(until, node))


def claim_calls(settings: Settings, link: Link, accounts: Sequence[Address]) -> list[Call]:
    """Returns the transaction that claims for one or several nodes or validators. With several,
    those with nothing payable are skipped. Raises as `Payable.claim_of`."""
    with (
        naming_mirrors("give a mirror's URL there"),
        OrchestratorClient(settings.need_orchestrator()) as client,
    ):
        claim = Payable(client, link.contracts, link.pool).claim_of
        if len(accounts) == 1:
            return [link.contracts.rewards.claim(claim(accounts[0]))]
        claims, why = [], UserError("this owner has no node")
        for account in accounts:
            try:
                claims.append(claim(account))
            except UserError as error:
                why = error
    if not claims:
        raise why
    return [link.contracts.rewards.claim_many(claims)]


def explain_rewards(settings: Settings, node: Address, epoch: int | None) -> Explanation:
    """Explains the node's amount in the chain's reward root from the chain's events and the
    published settlements. Raises NotFoundError if there is no valid root yet."""
    with OrchestratorClient(settings.need_orchestrator()) as client:
        with naming_mirrors("give a mirror's URL there"):
            info = client.pool()
        link = connect(settings, info)
        try:
            events = read_events(
                link.client,
                link.deployment,
                contracts=("pools", "work", "rewards", "slasher"),
                pool=link.pool,
            )
            runs = history_of(events, link.pool, partial(run_bytes, client))
            rebuilder = Rebuilder(events, link.deployment, link.pool, runs, client)
            return explain(rebuilder, node, epoch)
        finally:
            link.close()
