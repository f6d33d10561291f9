"""What the owner of a node does on chain: become a provider, stake, take a node in, take it out.

    standing (read) → acts still missing (decided here, unsent) → sent, or printed for the owner

The node's own key sends nothing; where one wallet plays both parts (test networks) it sends these.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

from node.link import Link
from protocol.chain.client import Call
from protocol.chain.contracts import ETHER, prime
from protocol.chain.errors import ChainRevertedError
from protocol.chain.sender import Sender
from protocol.core.errors import UserError
from protocol.core.ids import Address, Digest
from protocol.core.messages import NodeInfo
from protocol.core.node import NodeConsent
from protocol.core.signing import LocalSigner, Signer

CONSENT_SECONDS = 7 * 86_400
_FAUCET_WEI = 10_000 * ETHER


@dataclass(frozen=True)
class Standing:
    """Where owner and node stand on chain. Amounts in wei."""

    provider: Address
    registered: bool
    owner_of_node: Address | None
    active: int
    balance: int
    allowance: int
    member_class: int

    def ready(self, needed: int) -> bool:
        """True once the node may be admitted with `needed` wei of active stake."""
        return self.registered and self.owner_of_node == self.provider and self.active >= needed


@dataclass(frozen=True)
class Act:
    """One transaction of the owner. `id` names it in the sender's journal."""

    id: str
    call: Call


def read_standing(link: Link, node: Address, provider: Address) -> Standing:
    """Reads it at the latest block. Raises UnavailableError if no RPC answers."""
    c = link.contracts
    return Standing(
        provider=provider,
        registered=c.registry.is_provider(provider),
        owner_of_node=c.registry.provider_of(node),
        active=c.vault.active(provider),
        balance=c.token.balance_of(provider),
        allowance=c.token.allowance(provider, c.vault.address),
        member_class=c.pools.class_of(link.pool, node),
    )


def stake_needed(
    stake_per_class: int, speed_class: int, node: Address, provider: Address,
    nodes: tuple[NodeInfo, ...],
) -> int:  # fmt: skip
    """Active stake that Pools.join will ask for: this node's class and those of the provider's
    other members of the pool, times the stake a class."""
    others = sum(
        info.speed_class
        for info in nodes
        if info.provider == provider
        and info.node != node
        and info.status in ("active", "silent", "quarantined")
    )
    return stake_per_class * (speed_class + others)


def missing_acts(link: Link, standing: Standing, needed: int, node: Signer, now: int) -> list[Act]:
    """The owner's transactions that are still missing, in order; empty if there are none.

    Raises UserError if the node belongs to another provider.
    """
    c, provider = link.contracts, standing.provider
    acts: list[Act] = []
    tag = secrets.token_hex(4)
    if not standing.registered:
        acts.append(Act(f"provider:{tag}", c.registry.register_provider(provider)))
    if standing.owner_of_node not in (None, provider):
        raise UserError(
            f"node {node.address} belongs to provider {standing.owner_of_node}, not {provider}",
            hint="name that provider by --provider, or let it remove the node first",
        )
    if standing.owner_of_node is None:
        consent = NodeConsent(
            provider=provider,
            node=node.address,
            salt=Digest("0x" + secrets.token_hex(32)),
            deadline=now + CONSENT_SECONDS,
        )
        signature = node.sign(consent, link.deployment.domain_of(consent))
        acts.append(Act(f"node:{tag}", c.registry.add_node(consent, signature)))
    if (short := needed - standing.active) > 0:
        acts += stake_acts(link, short, standing.allowance, tag)
    return acts


def stake_acts(link: Link, amount: int, allowance: int, tag: str) -> list[Act]:
    """Approve (where the allowance falls short) and deposit `amount` wei."""
    c = link.contracts
    acts = []
    if allowance < amount:
        acts.append(Act(f"approve:{tag}", c.token.approve(c.vault.address, amount)))
    acts.append(Act(f"deposit:{tag}", c.vault.deposit(amount)))
    return acts


class Owner:
    """An owner whose key is at this machine. Sends acts one by one, each journalled."""

    def __init__(self, link: Link, signer: LocalSigner, journal_folder: Path) -> None:
        self.address = signer.address
        self._link = link
        journal_folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        name = f"sender-{link.deployment.chain_id}-{signer.address}.sqlite"
        self._sender = Sender(link.client, signer, journal_folder / name)

    def close(self) -> None:
        self._sender.close()

    def settle_open(self, timeout: float = 120.0) -> None:
        """Waits for what was sent or queued before. Raises UnavailableError if it does not end."""
        for intent in self._sender.open_intents():
            self._sender.wait(intent.id, timeout)

    def perform(self, acts: list[Act]) -> list[Digest]:
        """Sends the acts in order and waits for each; their transaction hashes.

        Raises UserError without ETH for gas, ChainRevertedError with the contract's reason,
        UnavailableError if the chain does not take one (it stays journalled).
        """
        if acts and self._link.client.balance(self.address) == 0:
            raise UserError(
                f"the account {self.address} has no ETH to pay for transactions",
                hint=f"send it some on {self._link.client.network.name}, then run this again",
            )
        hashes = []
        for act in acts:
            intent = self._sender.send_and_wait(act.id, act.call)
            if intent.tx_hash is not None:
                hashes.append(intent.tx_hash)
        return hashes

    def fill_from_faucet(self, needed: int) -> None:
        """On test networks: takes tokens from the faucet until `needed` wei are there."""
        token = self._link.contracts.token
        while (balance := token.balance_of(self.address)) < needed:
            if needed - balance > 100 * _FAUCET_WEI:
                raise UserError(
                    f"{prime(needed)} is more than the faucet gives in a hundred turns",
                    hint="join with a smaller stake",
                )
            try:
                self.perform([Act(f"faucet:{secrets.token_hex(4)}", token.faucet())])
            except ChainRevertedError as error:
                raise UserError(
                    f"the token's faucet gives nothing here: {error.reason}",
                    hint=f"buy or ask for PRIME and send it to {self.address}",
                ) from error


def describe(acts: list[Act]) -> list[dict[str, str]]:
    """The acts as an owner elsewhere (a wallet, a multisig) needs them."""
    return [
        {"what": a.call.description, "to": str(a.call.to), "data": a.call.calldata()} for a in acts
    ]


def parse_amount(text: str) -> int:
    """An amount of PRIME as typed ("12.5") in wei. Raises UserError unless it is one above 0."""
    whole, _, part = text.strip().partition(".")
    if not (whole + part).isascii() or not (whole + part).isdigit() or len(part) > 18:
        raise UserError(f"{text!r} is no amount of PRIME", hint="write it like 100 or 12.5")
    amount = int(whole or "0") * ETHER + int((part or "0").ljust(18, "0"))
    if amount == 0 or len(whole) > 30:
        raise UserError(f"{text!r} is no amount of PRIME", hint="write it like 100 or 12.5")
    return amount
