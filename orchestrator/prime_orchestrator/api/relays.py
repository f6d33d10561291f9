"""Relay announcements: which accounts may announce, and which addresses are passed on to nodes.

Readers verify what a relay serves, so it needs no trust, but its address is given to every node. It
must therefore come from an account with a seat in the pool or the operator's permission, and
outside local networks it must not point into a private network.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from sqlalchemy import Connection

from prime_broadcast.sources import normal_url
from prime_chain.networks import LOCAL
from prime_core.errors import MalformedError, PolicyError
from prime_core.ids import Address
from prime_core.messages import RelayAnnouncement
from prime_core.transport.addresses import PrivateAddressError, public_address
from prime_orchestrator.api.backend import Backend
from prime_orchestrator.store import nodes, policies

MAX_RELAYS_EACH = 8
MAX_VERSIONS = 1024
NO_LEAVE = (
    "{account} has neither a seat in the pool nor a node that has one: the operator can allow it "
    "with orchestrator serve --allow-relay {account}"
)


def announce(backend: Backend, account: Address, relay: RelayAnnouncement) -> None:
    """Records a relay, which must announce itself again within `liveness.RELAY_SECONDS`.

    Raises MalformedError if the URL is not plain http(s) or lists too many versions; PolicyError if
    the account may not announce, the address is private, the URL belongs to another account, or the
    account names too many.
    """
    url = check_url(relay.url, local=backend.context.deployment.chain_id == LOCAL.chain_id)
    if len(relay.versions) > MAX_VERSIONS:
        raise MalformedError(f"a relay lists at most {MAX_VERSIONS} versions")
    now = backend.now()
    with backend.store.begin() as connection:
        if not has_leave(connection, backend, account):
            raise PolicyError(NO_LEAVE.format(account=account))
        owner = policies.relay_owner(connection, url)
        if owner not in (None, account):
            raise PolicyError("this relay's URL was announced by another account")
        if owner is None and policies.relay_count(connection, account) >= MAX_RELAYS_EACH:
            raise PolicyError(f"an account announces at most {MAX_RELAYS_EACH} relays")
        policies.see_relay(connection, url, account, relay.versions, now=now)


def has_leave(connection: Connection, backend: Backend, account: Address) -> bool:
    """Whether the account may announce: the pool's own keys, accounts that the operator allows,
    nodes with a seat and their providers."""
    return account in backend.own_accounts or nodes.seated(connection, account)


def check_url(url: str, *, local: bool) -> str:
    """Returns the normalized URL. Raises MalformedError unless it is a printable http(s) base URL
    without credentials, PolicyError if it points to a private address and the network is not
    `local`."""
    url = normal_url(url)
    if local:
        return url
    try:
        public_address(urlsplit(url).hostname or "")
    except PrivateAddressError as error:
        raise PolicyError(
            f"{error}: nodes cannot or must not reach it; announce a public address with "
            "--public-url"
        ) from error
    except OSError as error:
        raise PolicyError(f"{url} has no address: announce one that others reach") from error
    return url
