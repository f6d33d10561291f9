"""Registry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from prime_chain.amounts import prime
from prime_chain.client import BlockId, Call
from prime_chain.contracts.base import Contract, or_none
from prime_chain.contracts.token import Permit
from prime_core.ids import ZERO_DIGEST, Address, Signature
from prime_core.node import Invite, NodeConsent


class Registry(Contract):
    """Providers and their nodes."""

    NAME = "registry"

    def provider_of(self, node: Address, block: BlockId = "latest") -> Address | None:
        """The node's owner, or None if it has none."""
        return or_none(self._one("providerOf", node, block=block))

    def payout_of(self, provider: Address, block: BlockId = "latest") -> Address | None:
        return or_none(self._one("payoutOf", provider, block=block))

    def is_provider(self, account: Address, block: BlockId = "latest") -> bool:
        return bool(self._one("isProvider", account, block=block))

    def revoked_before(self, node: Address, block: BlockId = "latest") -> int:
        """Sessions of `node` granted before this time do not count."""
        return cast(int, self._one("revokedBefore", node, block=block))

    def register_provider(self, payout: Address) -> Call:
        what = f"register the sender as a provider paid at {payout}"
        return self.write("registerProvider", payout, what=what)

    def set_payout(self, payout: Address) -> Call:
        return self.write("setPayout", payout, what=f"pay rewards to {payout} from now on")

    def add_node(self, consent: NodeConsent, node_signature: Signature) -> Call:
        what = f"add node {consent.node} to provider {consent.provider}"
        return self.write("addNode", consent, node_signature, what=what)

    def enroll(
        self,
        payout: Address,
        stake: int,
        consent: NodeConsent,
        node_signature: Signature,
        invite: Invite,
        manager_signature: Signature,
        permit: Permit | None = None,
    ) -> Call:
        """All a newcomer needs at once: provider, stake (an allowance for the vault or a permit),
        node, seat."""
        p = permit or Permit(0, 0, ZERO_DIGEST, ZERO_DIGEST)
        return self.write(
            "enroll", payout, stake, p.deadline, p.v, p.r, p.s, consent, node_signature, invite,
            manager_signature,
            what=f"stake {prime(stake)} and enter node {consent.node} in pool {invite.pool}",
        )  # fmt: skip

    def moved_to(self, node: Address, block: BlockId = "latest") -> Address | None:
        """The key that a node was moved to; None if it was not."""
        return or_none(self._one("movedTo", node, block=block))

    def move_node(
        self, old: Address, consent: NodeConsent, node_signature: Signature, pools: Sequence[int]
    ) -> Call:
        """Gives a node a new key, whose consent this is; its seats in `pools` go with it."""
        return self.write(
            "moveNode", old, consent, node_signature, tuple(pools),
            what=f"move node {old} to its new key {consent.node}",
        )  # fmt: skip

    def remove_node(self, node: Address) -> Call:
        return self.write("removeNode", node, what=f"remove node {node}")

    def set_revoked_before(self, node: Address, at: int) -> Call:
        what = f"end all sessions of {node} granted before {at}"
        return self.write("setRevokedBefore", node, at, what=what)
