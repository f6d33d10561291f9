"""An owner's nodes on chain: consent files, the list of nodes, their seats.

at the node consent (signed by its key, names the owner) ──► a file at the owner add: the file, one
transaction · move: the same for the node's new key
"""

from __future__ import annotations

import json
import secrets
from pathlib import Path

from pydantic import ValidationError

from prime_chain.client import Call
from prime_chain.events import NodeAdded, NodeJoined, NodeRemoved
from prime_chain.history import read_events
from prime_core.errors import UserError
from prime_core.given import read_given
from prime_core.ids import Address, Digest
from prime_core.node import NodeConsent
from prime_core.signing import Domain, SignatureField, Signer, Strict
from prime_node.link import Link

MAX_CONSENT_BYTES = 1 << 16


class SignedConsent(Strict):
    """A node's consent to belong to an owner, as a file. It names both and can be used once."""

    consent: NodeConsent
    signature: SignatureField


def sign_consent(node: Signer, provider: Address, domain: Domain, deadline: int) -> SignedConsent:
    """Returns the node's consent to belong to `provider`, valid until `deadline` (Unix seconds)."""
    consent = NodeConsent(
        provider=provider,
        node=node.address,
        salt=Digest("0x" + secrets.token_hex(32)),
        deadline=deadline,
    )
    return SignedConsent(consent=consent, signature=node.sign(consent, domain))


def read_consent(path: Path) -> SignedConsent:
    """Reads a signed consent from a file. Raises UserError if it cannot be read or is invalid."""
    hint = "make one at the node: prime-node node consent --provider ADDRESS --out FILE"
    raw = read_given(path, "signed consent", hint, limit=MAX_CONSENT_BYTES)
    try:
        return SignedConsent.model_validate(json.loads(raw))
    except (ValidationError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a signed consent", hint=hint) from error


def check_owner(signed: SignedConsent, account: Address) -> None:
    """Raises UserError if the consent names an owner other than the sending account."""
    if signed.consent.provider != account:
        raise UserError(
            f"the consent is for {signed.consent.provider}, not for {account}",
            hint="sign another one, or send it from that account",
        )


def pools_of(link: Link, node: Address) -> list[int]:
    """Returns the pools in which the node has a seat, from the chain's events and state."""
    events = read_events(link.client, link.deployment, names=("NodeJoined",))
    joined = {
        event.pool for event in events if isinstance(event, NodeJoined) and event.node == node
    }
    return [pool for pool in sorted(joined) if link.contracts.pools.is_member(pool, node)]


def nodes_of(link: Link, provider: Address) -> list[Address]:
    """Returns the provider's nodes, in order of addition."""
    found: dict[Address, None] = {}
    # a move also emits NodeRemoved and NodeAdded
    for event in read_events(link.client, link.deployment, names=("NodeAdded", "NodeRemoved")):
        match event:
            case NodeAdded(provider=owner, node=node) if owner == provider:
                found[node] = None
            case NodeRemoved(provider=owner, node=node) if owner == provider:
                found.pop(node, None)
    return list(found)


def move_calls(link: Link, old: Address, signed: SignedConsent) -> list[Call]:
    """Returns the call that gives node `old` the key that signed the consent, with all its
    seats."""
    pools = pools_of(link, old)
    registry = link.contracts.registry
    return [registry.move_node(old, signed.consent, signed.signature, pools)]
