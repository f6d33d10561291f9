"""Checks network addresses that another party named.

An orchestrator gives URLs to nodes, relays and auditors. None of them may lead into the recipient's
private network. The address is checked when the connection is made, because a name that resolved to
a public address before may resolve to another one now.
"""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

DEFAULT_PORTS = {"http": 80, "https": 443}


class PrivateAddressError(OSError):
    """The host is, or resolves to, an address outside the public internet."""


class NoHostError(OSError):
    """The host name does not exist."""


def is_public(text: str) -> bool:
    """Whether an IP address is publicly routable (RFC 6890); unwraps IPv4 addresses embedded in
    IPv6."""
    address = ipaddress.ip_address(text.split("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is None and address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return inner.is_global and not inner.is_multicast
    return address.is_global and not address.is_multicast


_NO_NAME = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def addresses_of(host: str) -> list[str]:
    """The IP addresses that a host name currently resolves to. Raises NoHostError if the name does
    not exist, OSError if it cannot be resolved now."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise NoHostError(f"{host[:100]!r} is not a host name") from error
    except socket.gaierror as error:
        if error.errno in _NO_NAME:
            raise NoHostError(f"there is no host {host[:253]!r}") from error
        raise
    return sorted({str(entry[4][0]) for entry in found})


def public_address(host: str) -> str:
    """Returns an address of `host` to connect to. Raises PrivateAddressError if any of its
    addresses is not public, OSError if it has none."""
    found = addresses_of(host)
    for address in found:
        if not is_public(address):
            raise PrivateAddressError(
                f"{host} is the private address {address}, and was named by another party; "
                "--allow-private permits it on a network of your own"
            )
    return found[0]


def connect_public(
    address: tuple[str, int],
    timeout: float | None = None,
    source_address: tuple[str, int] | None = None,
) -> socket.socket:
    """`socket.create_connection`, restricted to public addresses."""
    host, port = address
    return socket.create_connection((public_address(host), port), timeout, source_address)


def authority(url: str) -> str:
    """Host and port of an http(s) URL as in the Host header: lower case, without the scheme's
    default port."""
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname or ""
    port = parts.port
    return host if port in (None, DEFAULT_PORTS.get(parts.scheme)) else f"{host}:{port}"


def is_loopback(url: str) -> bool:
    """Whether the URL points to this machine."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
