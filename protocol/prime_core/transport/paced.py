"""An httpx client whose peers cannot take their time.

httpx limits each read of a socket. A peer that sends one byte before each limit ends (in the head,
in endless interim responses or in chunk headers, where no body arrives) would hold a thread for
ever. Here the time spent in all reads of one exchange is limited.
"""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import httpcore
import httpx

from prime_core.errors import UnavailableError, UntrustedError, UserError
from prime_core.transport.addresses import PrivateAddressError, authority, public_address

MAX_REDIRECTS = 5


class _Stream(httpcore.NetworkStream):
    """A connection whose reads since the last write take at most `seconds`, and one second more for
    each `rate` bytes received (if `rate` is not 0)."""

    def __init__(self, inner: httpcore.NetworkStream, seconds: float, rate: int) -> None:
        self._inner = inner
        self._seconds = seconds
        self._rate = rate
        self._waited = 0.0
        self._received = 0

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        earned = self._received / self._rate if self._rate else 0.0
        left = self._seconds + earned - self._waited
        began = time.monotonic()
        try:
            if left <= 0:
                raise httpcore.ReadTimeout
            data = self._inner.read(max_bytes, left if timeout is None else min(timeout, left))
        except httpcore.ReadTimeout as error:
            waited = self._waited + time.monotonic() - began
            raise httpcore.ReadTimeout(f"{self._received} bytes came in {waited:.0f} s") from error
        finally:
            self._waited += time.monotonic() - began
        self._received += len(data)
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._waited, self._received = 0.0, 0
        self._inner.write(buffer, timeout)

    def close(self) -> None:
        self._inner.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        secure = self._inner.start_tls(ssl_context, server_hostname, timeout)
        return _Stream(secure, self._seconds, self._rate)

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


class _Backend(httpcore.SyncBackend):
    def __init__(self, seconds: float, rate: int) -> None:
        self._seconds = seconds
        self._rate = rate

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        inner = super().connect_tcp(host, port, timeout, local_address, socket_options)
        return _Stream(inner, self._seconds, self._rate)


@lru_cache(maxsize=8)
def _authorities(settings: tuple[str | None, ...]) -> ssl.SSLContext:
    """The TLS settings of all clients under the same SSL_CERT_FILE and SSL_CERT_DIR (empty: neither
    counts). Reading the authorities takes 30 ms."""
    context = httpx.create_ssl_context(trust_env=bool(settings))
    context.set_alpn_protocols(["http/1.1"])
    # httpcore sets the same again for each connection, while other threads' connections read them.
    context.set_alpn_protocols = lambda alpn_protocols: None  # type: ignore[method-assign]
    return context


def paced_client(
    timeout: httpx.Timeout | float, *, seconds: float, rate: int = 0, trust_env: bool = True
) -> httpx.Client:
    """A client that follows no redirect. Reading one response takes at most `seconds`, and one
    second more for each `rate` bytes received (0: no more); else it raises httpx.ReadTimeout."""
    names = ("SSL_CERT_FILE", "SSL_CERT_DIR") if trust_env else ()
    authorities = _authorities(tuple(os.environ.get(name) for name in names))
    client = httpx.Client(
        verify=authorities, timeout=timeout, trust_env=trust_env, follow_redirects=False
    )
    # httpx has no public parameter for httpcore's network backend.
    for transport in (client._transport, *client._mounts.values()):
        if isinstance(transport, httpx.HTTPTransport):
            transport._pool._network_backend = _Backend(seconds, rate)
    return client


def at_public_address(url: httpx.URL) -> httpx.URL:
    """Returns the URL with its host replaced by one of the host's public addresses. Raises
    UntrustedError if an address is private, UnavailableError if the host has none."""
    try:
        return url.copy_with(host=public_address(url.host))
    except PrivateAddressError as error:
        raise UntrustedError(str(error)) from error
    except OSError as error:
        raise UnavailableError(f"{url.host} has no address: {error}") from error


@contextmanager
def opened(
    client: httpx.Client,
    url: str,
    *,
    public_only: bool = False,
    private_at: str = "",
    headers: Mapping[str, str] | None = None,
) -> Iterator[httpx.Response]:
    """The answer to a GET of `url`, after at most MAX_REDIRECTS redirects. With `public_only`,
    every address that is connected to is public, except at the authority `private_at`. The field
    Authorization of `headers` goes to the scheme and authority of `url` only. Raises UserError (no
    http(s) address), UntrustedError (private address), UnavailableError, and httpx's errors."""
    fields = {**(headers or {}), "Accept-Encoding": "identity"}
    secret = fields.pop("Authorization", "")
    home = (httpx.URL(url).scheme, authority(url))
    for _ in range(MAX_REDIRECTS + 1):
        target = httpx.URL(url)
        if target.scheme not in ("http", "https"):
            raise UserError(f"{url} is not an http(s) address")
        own = (
            {"Authorization": secret} if secret and (target.scheme, authority(url)) == home else {}
        )
        name = {"sni_hostname": target.host}
        host = authority(url)
        if public_only and host != private_at:
            target = at_public_address(target)
        sent = {**fields, **own, "Host": host}
        with client.stream("GET", target, headers=sent, extensions=name) as answer:
            if not answer.has_redirect_location:
                yield answer
                return
            url = str(httpx.URL(url).join(answer.headers["Location"]))
    raise UnavailableError(f"{url} redirects too often")
