"""Relays that announce themselves: whose word is taken, and which addresses are passed on to nodes.

What a relay serves is checked by whoever fetches, so it needs no trust; but its address is given to
every node. So it has to come from somebody with a stake in the pool or the operator's leave, and
off local networks it may not point into anybody's private network.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from sqlalchemy import Connection

from orchestrator.backend import Backend
from orchestrator.store import nodes, policies
from protocol.chain.networks import LOCAL
from protocol.core.errors import MalformedError, PolicyError
from protocol.core.ids import Address
from protocol.core.messages import RelayInfo

MAX_RELAYS_EACH = 8
MAX_VERSIONS = 1024
NO_LEAVE = (
    "{account} has neither a seat in the pool nor a node that has one: the operator can allow it "
    "with orchestrator serve --allow-relay {account}"
)


def announce(backend: Backend, account: Address, relay: RelayInfo) -> None:
    """Notes a relay; it says so again before `presence.RELAY_SECONDS` have passed.

    Raises MalformedError on a URL that is not plain http(s) or lists too much, PolicyError if the
    account has no say here, the address is a private one, the URL is another account's or the
    account names too many.
    """
    check_url(relay.url, local=backend.context.deployment.chain_id == LOCAL.chain_id)
    if len(relay.versions) > MAX_VERSIONS:
        raise MalformedError(f"a relay lists at most {MAX_VERSIONS} versions")
    now = backend.now()
    with backend.store.begin() as connection:
        if not has_leave(connection, backend, account):
            raise PolicyError(NO_LEAVE.format(account=account))
        owner = policies.relay_owner(connection, relay.url)
        if owner not in (None, account):
            raise PolicyError("this relay's URL was announced by another account")
        if owner is None and policies.relay_count(connection, account) >= MAX_RELAYS_EACH:
            raise PolicyError(f"an account announces at most {MAX_RELAYS_EACH} relays")
        policies.see_relay(connection, relay.url, account, relay.versions, now=now)


def has_leave(connection: Connection, backend: Backend, account: Address) -> bool:
    """Whether the account may announce: the pool's own keys, those that the operator allows, nodes
    with a seat and their providers."""
    own = {backend.trainer, backend.context.manager}
    if account in own or account in backend.relay_accounts:
        return True
    return nodes.seated(connection, account)


def check_url(url: str, *, local: bool) -> None:
    """Raises MalformedError unless `url` is plain http(s), PolicyError if it points to a private
    address though the network is not a `local` one."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise MalformedError("a relay's URL is http(s)://host[:port][/path]")
    if local:
        return
    private = [found for found in addresses_of(parts.hostname) if not _is_public(found)]
    if private:
        raise PolicyError(
            f"{parts.hostname} is the private address {private[0]}, which nodes cannot or must not "
            "reach: announce a public one with --public-url"
        )


def addresses_of(host: str) -> Sequence[str]:
    """The IP addresses that a host name stands for now. Raises PolicyError if it has none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise PolicyError(
            f"{host[:100]!r} has no address: announce one that others reach"
        ) from error
    return sorted({str(entry[4][0]) for entry in found})


def _is_public(text: str) -> bool:
    """Whether an IP address is of the open internet (RFC 6890), seen through IPv6's mappings."""
    address = ipaddress.ip_address(text.split("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is not None:
            return inner.is_global
    return address.is_global and not address.is_multicast
