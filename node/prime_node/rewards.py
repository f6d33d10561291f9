"""A node's rewards: the orchestrator tells, the chain decides, and a claim is checked before it is
sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from prime_chain.amounts import prime
from prime_chain.client import Call
from prime_chain.contracts import Claim
from prime_chain.explain import Explanation, explain
from prime_chain.history import read_events
from prime_chain.rewards import Rebuilder, history_of
from prime_core.encoding import merkle_verify, reward_leaf
from prime_core.errors import ConflictError, UntrustedError, UserError
from prime_core.ids import Address
from prime_core.messages import RewardInfo
from prime_core.transport.client import OrchestratorClient, run_bytes
from prime_node.config import Settings
from prime_node.link import Link, connect


@dataclass(frozen=True)
class NodeRewards:
    """`paid` in wei by the chain, None without an RPC."""

    info: RewardInfo
    paid: int | None

    @property
    def payable(self) -> int | None:
        """What a claim would pay now or once it is claimable, in wei."""
        return None if self.paid is None else int(self.info.cumulative) - self.paid

    def as_json(self) -> dict[str, Any]:
        known: dict[str, Any] = self.info.model_dump(mode="json")
        paid = None if self.paid is None else str(self.paid)
        payable = None if self.payable is None else str(self.payable)
        return known | {"paid": paid, "payable": payable}


def fetch_info(client: OrchestratorClient, node: Address) -> RewardInfo:
    return client.get(f"/v1/rewards/{node}", RewardInfo)


def read_rewards(settings: Settings, node: Address) -> NodeRewards:
    """From the orchestrator and, if an RPC is named, the chain."""
    with OrchestratorClient(settings.need_orchestrator()) as client:
        info = fetch_info(client, node)
        if not settings.rpc:
            return NodeRewards(info, None)
        link = connect(settings, client.pool())
        try:
            return NodeRewards(info, link.contracts.rewards.claimed(link.pool, node))
        finally:
            link.close()


def claim_calls(settings: Settings, link: Link, nodes: Sequence[Address]) -> list[Call]:
    """The transaction that claims for one node, or for several at once; nodes that have nothing
    payable are passed over if there are several. Raises as `payable_claim`."""
    if len(nodes) == 1:
        c = payable_claim(settings, link, nodes[0])
        return [link.contracts.rewards.claim(c.pool, c.epoch, c.node, c.cumulative, c.proof)]
    claims, why = [], UserError("this owner has no node")
    for node in nodes:
        try:
            claims.append(payable_claim(settings, link, node))
        except UserError as error:
            why = error
    if not claims:
        raise why
    return [link.contracts.rewards.claim_many(claims)]


def payable_claim(settings: Settings, link: Link, node: Address) -> Claim:
    """What can be claimed for a node now, its proof checked against the root on chain.

    Raises UserError if there is nothing to claim or not yet, UntrustedError if the orchestrator's
    proof does not lead to the root, ConflictError if that root was disabled.
    """
    with OrchestratorClient(settings.need_orchestrator()) as client:
        info = fetch_info(client, node)
    if info.epoch is None or int(info.cumulative) == 0:
        raise UserError(
            f"node {node} has no settled rewards yet",
            hint="an epoch is settled once its last file's validity has passed; see rewards show",
        )
    rewards, cumulative = link.contracts.rewards, int(info.cumulative)
    on_chain = rewards.reward_root(link.pool, info.epoch)
    if on_chain is None:
        raise UserError(
            f"the reward root of epoch {info.epoch} is not on chain yet",
            hint="try again in a little while",
        )
    if on_chain.disabled:
        raise ConflictError(f"the arbiter disabled the reward root of epoch {info.epoch}")
    if not merkle_verify(on_chain.root, reward_leaf(node, cumulative), info.proof):
        raise UntrustedError("the orchestrator's proof does not lead to the reward root on chain")
    paid = rewards.claimed(link.pool, node)
    if paid >= cumulative:
        raise UserError(f"all {prime(paid)} of epoch {info.epoch} and before are paid already")
    now = link.client.block("latest").time
    if now < on_chain.claimable_at:
        raise UserError(
            f"the rewards of epoch {info.epoch} can be claimed in {on_chain.claimable_at - now} s",
            hint="the delay lets anyone check the root first",
        )
    return Claim(link.pool, info.epoch, node, cumulative, info.proof)


def explain_rewards(settings: Settings, node: Address, epoch: int | None) -> Explanation:
    """Why the node is owed what the chain's reward root gives it, from the chain's events and the
    published settlements. Raises NotFoundError if no root stands yet."""
    with OrchestratorClient(settings.need_orchestrator()) as client:
        link = connect(settings, client.pool())
        try:
            events = read_events(
                link.client, link.deployment, contracts=("pools", "work", "rewards", "slasher")
            )
            runs = history_of(events, link.pool, partial(run_bytes, client))
            rebuilder = Rebuilder(events, link.deployment, link.pool, runs, client)
            return explain(rebuilder, node, epoch)
        finally:
            link.close()
