"""What an account can claim: an entry of a reward root, checked against the root on chain.

The orchestrator gives each account its entry. A mirror has settlements only, so the entry is read
from the one behind the newest reward root that is payable.
"""

from __future__ import annotations

from functools import cached_property

from prime_chain.amounts import prime
from prime_chain.contracts import Claim, Contracts
from prime_chain.history import read_events
from prime_chain.rewards import MAX_OBJECT_BYTES, standing_roots
from prime_core.encoding import merkle_verify, reward_leaf
from prime_core.errors import (
    ConflictError,
    MalformedError,
    NotFoundError,
    UntrustedError,
    UserError,
)
from prime_core.ids import Address
from prime_core.messages import RewardInfo
from prime_core.settlement import Settlement, parse_settlement
from prime_core.transport.client import OrchestratorClient


def fetch_info(client: OrchestratorClient, account: Address) -> RewardInfo:
    """What the orchestrator says that a node or validator has earned, with the proof of it."""
    return client.get(f"/v1/rewards/{account}", RewardInfo)


class Payable:
    """What the accounts of a pool can claim, from the orchestrator or a mirror."""

    def __init__(self, client: OrchestratorClient, contracts: Contracts, pool: int) -> None:
        self._client = client
        self._contracts = contracts
        self._pool = pool

    def claim_of(self, account: Address) -> Claim:
        """What can be claimed for a node or validator now, its proof checked against the root on
        chain.

        Raises UserError if there is nothing to claim or not yet, UntrustedError if the
        orchestrator's proof does not lead to the root, ConflictError if that root was disabled,
        NotFoundError if a mirror does not serve the settlement, MalformedError if the object is
        not a settlement.
        """
        try:
            info = fetch_info(self._client, account)
        except NotFoundError:
            claim = self._settled(account)
        else:
            claim = None
            if info.epoch is not None:
                claim = Claim(self._pool, info.epoch, account, int(info.cumulative), info.proof)
        if claim is None or claim.cumulative == 0:
            raise UserError(
                f"{account} has no settled rewards yet",
                hint="an epoch is settled once its last file's validity has passed",
            )
        return checked_claim(self._contracts, claim)

    def _settled(self, account: Address) -> Claim | None:
        """The account's entry in the settlement; None if it has none."""
        found = self._settlement
        if found is None or all(entry.node != account for entry in found.entries):
            return None
        cumulative, proof = found.proof(account)
        return Claim(self._pool, found.epoch, account, cumulative, tuple(proof))

    @cached_property
    def _settlement(self) -> Settlement | None:
        """The settlement of the newest payable reward root, or of the newest one if none is payable
        yet; None if no root stands."""
        contracts = self._contracts
        events = read_events(
            contracts.client, contracts.deployment, contracts=("rewards",), pool=self._pool
        )
        roots = standing_roots(events)
        if not roots:
            return None
        now = contracts.vault.window_time()
        payable = [root for root in roots if root.claimable_at <= now]
        name = (payable or roots)[-1].object
        try:
            return parse_settlement(self._client.get_object(name, MAX_OBJECT_BYTES))
        except ValueError as error:
            raise MalformedError(f"object {name} is not a settlement") from error


def checked_claim(contracts: Contracts, claim: Claim) -> Claim:
    """Returns `claim` after checking it against the root on chain. Its proof may come from anyone.
    Raises like `Payable.claim_of`."""
    rewards = contracts.rewards
    on_chain = rewards.reward_root(claim.pool, claim.epoch)
    if on_chain is None:
        raise UserError(
            f"the reward root of epoch {claim.epoch} is not on chain yet",
            hint="try again in a little while",
        )
    if on_chain.disabled:
        raise ConflictError(f"the arbiter disabled the reward root of epoch {claim.epoch}")
    if not merkle_verify(on_chain.root, reward_leaf(claim.node, claim.cumulative), claim.proof):
        raise UntrustedError("the proof does not lead to the reward root on chain")
    paid = rewards.claimed(claim.pool, claim.node)
    if paid >= claim.cumulative:
        raise UserError(f"all {prime(paid)} of epoch {claim.epoch} and before are paid already")
    now = contracts.vault.window_time()
    if now < on_chain.claimable_at:
        raise UserError(
            f"the rewards of epoch {claim.epoch} can be claimed in {on_chain.claimable_at - now} s",
            hint="the delay lets anyone check the root first",
        )
    return claim
