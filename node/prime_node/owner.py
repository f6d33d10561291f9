"""The owner's actions on chain: become a provider, stake, add a node, remove it.

    standing (read) → missing calls (computed here, unsent) → sent, or printed by --calldata

The node's own key sends nothing. If one wallet plays both parts (test networks), it sends these.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from prime_chain import flows
from prime_chain.client import Call, ChainClient
from prime_chain.contracts import ETHER, prime
from prime_chain.errors import ChainRevertedError
from prime_chain.sender import Sender, left_of
from prime_chain.transaction_queue import Intent
from prime_core.errors import UserError
from prime_core.ids import Address, Digest
from prime_core.node import NodeConsent
from prime_core.signing import LocalSigner, Signer
from prime_node.link import Link

CONSENT_SECONDS = 7 * 86_400
_MULTI_SEND_CALL_ONLY = Address("0x9641d764fc13c8B624c04430C7356C1C7C8102e2")
"""MultiSendCallOnly of Safe 1.4.1, at the same address on Base and Base Sepolia."""
_MULTI_SEND = bytes.fromhex("8d80ff0a")
"""Selector of multiSend(bytes)."""
_FAUCET_WEI = 10_000 * ETHER


@dataclass(frozen=True)
class Standing:
    """State of owner and node on chain. Amounts in wei; `committed`: what the owner's seats in all
    pools need."""

    provider: Address
    registered: bool
    owner_of_node: Address | None
    active: int
    committed: int
    member: bool
    allows: bool

    def ready(self, needed: int) -> bool:
        """Whether the node may be admitted with `needed` wei of active stake."""
        bound = self.registered and self.owner_of_node == self.provider
        return bound and self.active >= needed and self.allows


def read_standing(link: Link, node: Address, provider: Address) -> Standing:
    """Reads the state at the latest block. Raises UnavailableError if no RPC answers."""
    c = link.contracts
    committed = c.vault.committed(provider)  # before `member`: so a seat taken now counts once
    return Standing(
        provider=provider,
        registered=c.registry.is_provider(provider),
        owner_of_node=c.registry.provider_of(node),
        active=c.vault.active(provider),
        committed=committed,
        member=c.pools.is_member(link.pool, node),
        allows=c.pools.allows(provider, link.pool),
    )


def missing_calls(
    link: Link, standing: Standing, needed: int, node: Signer, now: int
) -> list[Call]:
    """Returns the owner's missing transactions, in order; empty if there are none.

    Raises UserError if the node belongs to another provider.
    """
    provider = standing.provider
    if standing.owner_of_node not in (None, provider):
        raise UserError(
            f"node {node.address} belongs to provider {standing.owner_of_node}, not {provider}",
            hint="name that provider by --provider, or let it remove the node first",
        )
    calls = flows.register_and_stake(link.contracts, provider, provider, needed)
    if standing.owner_of_node is None:
        consent = NodeConsent(
            provider=provider,
            node=node.address,
            salt=Digest("0x" + secrets.token_hex(32)),
            deadline=now + CONSENT_SECONDS,
        )
        signature = node.sign(consent, link.deployment.domain_of(consent))
        calls += flows.add_node(link.contracts, consent, signature)
    return calls + flows.allow(link.contracts, provider, link.pool)


class Owner:
    """An owner whose key is on this machine. Sends calls one by one, each journalled."""

    def __init__(self, link: Link, signer: LocalSigner, journal_folder: Path) -> None:
        self.address = signer.address
        self._link = link
        journal_folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        name = f"sender-{link.deployment.chain_id}-{signer.address}.sqlite"
        self._sender = Sender(link.client, signer, journal_folder / name)

    def close(self) -> None:
        self._sender.close()

    def finish_open(self, tell: Callable[[str], None], command: str = "join") -> list[Intent]:
        """Finishes what an interrupted command or agent left (see Sender.finish_open)."""
        return self._sender.finish_open(tell, command)

    def perform(self, calls: Sequence[Call], act: str = "") -> list[Digest]:
        """Sends the calls in order and waits for each; returns their transaction hashes. `act`: see
        Sender.acting.

        Raises UserError without ETH for gas, ChainRevertedError with the contract's reason,
        UnavailableError if the chain does not accept a call (it stays journalled).
        """
        if calls:
            self._link.client.require_funds(self.address)
        act, hashes = act or secrets.token_hex(8), []
        for number, call in enumerate(calls):
            intent = self._sender.send_and_wait(f"{act}:{number}", call)
            assert intent.tx_hash is not None, "a confirmed intent has its transaction"
            hashes.append(intent.tx_hash)
        return hashes

    def act(
        self,
        command: str,
        decide: Callable[[Sequence[Intent]], Sequence[Call]],
        tell: Callable[[str], None],
    ) -> list[dict[str, str]]:
        """Carries out one command (`command`: with its arguments, see Sender.acting): finishes what
        an interrupted one left, and sends what the calls of `decide` add to it. Returns all of
        these with their transactions. `decide` gets what was finished, `tell` a sentence for each
        of it. Raises what `finish_open` and `perform` do."""
        finished = self.finish_open(tell, command)
        decided = decide(finished)
        with self._sender.acting(command) as act:
            calls = left_of(decided, finished, act)
            sent = self.perform(calls, act)
        hashes = [*(one.tx_hash for one in finished), *sent]
        rows = describe([*(one.call for one in finished), *calls])
        return [row | {"transaction": str(h)} for row, h in zip(rows, hashes, strict=True)]

    def fill_from_faucet(self, needed: int) -> None:
        """On test networks: takes tokens from the faucet until the balance is `needed` wei."""
        token = self._link.contracts.token
        while (balance := token.balance_of(self.address)) < needed:
            if needed - balance > 100 * _FAUCET_WEI:
                raise UserError(
                    f"{prime(needed)} is more than the faucet gives in a hundred turns",
                    hint="join with a smaller stake",
                )
            try:
                self.perform([token.faucet()])
            except ChainRevertedError as error:
                raise UserError(
                    f"the token's faucet gives nothing here: {error.reason}",
                    hint=f"buy or ask for PRIME and send it to {self.address}",
                ) from error


def describe(calls: Sequence[Call]) -> list[dict[str, str]]:
    """Returns the calls in the form that an owner elsewhere (a wallet, a multisig) needs."""
    return [{"what": c.description, "to": str(c.to), "data": c.calldata()} for c in calls]


def as_one(client: ChainClient, calls: Sequence[Call]) -> dict[str, str]:
    """Returns the calls as one transaction of a Safe: a delegatecall to MultiSendCallOnly. Raises
    UserError on a chain without that contract: a delegatecall to nothing succeeds and does nothing.

    Source: safe-smart-account v1.4.1, contracts/libraries/MultiSendCallOnly.sol: for each call, its
    operation (0), target, value and length, packed, and its data.
    """
    if not client.code(_MULTI_SEND_CALL_ONLY):
        raise UserError(
            f"{client.network.name} has no MultiSendCallOnly of Safe 1.4.1 at "
            f"{_MULTI_SEND_CALL_ONLY}, so a Safe cannot send this as one transaction",
            hint="print the transactions one by one with --calldata instead of --multisig",
        )
    packed = b""
    for call in calls:
        assert call.to is not None, "an owner deploys nothing"
        packed += b"\0" + bytes.fromhex(call.to[2:])
        packed += call.value.to_bytes(32) + len(call.data).to_bytes(32) + call.data
    padded = packed + bytes(-len(packed) % 32)
    data = _MULTI_SEND + (32).to_bytes(32) + len(packed).to_bytes(32) + padded
    return {
        "what": "; ".join(call.description for call in calls),
        "to": _MULTI_SEND_CALL_ONLY,
        "operation": "1 (delegatecall)",
        "data": "0x" + data.hex(),
    }
