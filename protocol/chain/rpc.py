"""JSON-RPC over HTTP to a list of endpoints: bounded, timed, with fail-over.

An endpoint that does not answer is passed over for a while; one on another chain is refused by
name. Only what an endpoint *answers* is an answer: a rate limit never looks like a revert.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx
from web3.providers.rpc import HTTPProvider
from web3.types import RPCEndpoint

from protocol.chain.errors import RpcError
from protocol.core.errors import UnavailableError, UserError

MAX_ANSWER_BYTES = 32 << 20
COOL_DOWN_SECONDS = 5.0

_BUSY_CODES = frozenset({-32005, -32016, -32097, -32007, 429})
_EVM_WORDS = (
    "revert", "evm error", "vm execution error", "out of gas", "gas required exceeds",
    "invalid opcode", "invalid jump", "stack underflow", "stack limit",
)  # fmt: skip
"""How endpoints say that the execution itself failed, which asking again will not change."""
_BUSY_WORDS = ("rate limit", "too many requests", "limit exceeded", "over capacity", "timed out")


class RevertSignal(Exception):  # noqa: N818 - not an error of ours: a message one floor up
    """The EVM reverted: raw data and the endpoint's words. Decoded one floor up."""

    def __init__(self, data: bytes, message: str) -> None:
        super().__init__(message)
        self.data = data
        self.message = message


class BoundedProvider(HTTPProvider):
    """web3's HTTP provider with a limit on an answer's size and on its total time, no retries."""

    def __init__(self, url: str, timeout: float) -> None:
        super().__init__(url, exception_retry_configuration=None)
        self._timeout = timeout
        local = urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")
        self._http = httpx.Client(
            timeout=httpx.Timeout(timeout, connect=min(timeout, 5.0)), trust_env=not local
        )

    def _make_request(self, method: RPCEndpoint, request_data: bytes) -> bytes:
        deadline = time.monotonic() + self._timeout
        body = bytearray()
        with self._http.stream(
            "POST",
            str(self.endpoint_uri),
            content=request_data,
            headers={"content-type": "application/json"},
        ) as response:
            if response.status_code in (408, 429) or response.status_code >= 500:
                raise UnavailableError(f"HTTP {response.status_code}")
            for chunk in response.iter_bytes():
                body += chunk
                if len(body) > MAX_ANSWER_BYTES:
                    raise UnavailableError(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
                if time.monotonic() > deadline:
                    raise UnavailableError(f"no whole answer within {self._timeout:g} s")
        return bytes(body)

    def close(self) -> None:
        self._http.close()


class Endpoint:
    """One RPC URL. Its chain id is checked before its first answer counts."""

    def __init__(self, url: str, chain_id: int, timeout: float) -> None:
        if not _is_address(url):
            raise UserError(
                f"{shown_url(url)!r} is no HTTP address of an RPC endpoint",
                hint="give --rpc http://HOST:PORT (a port is at most 65535) or https://…",
            )
        self.name = shown_url(url)
        self._chain_id = chain_id
        self._provider = BoundedProvider(url, timeout)
        self._checked = False
        self.cool_until = 0.0

    def request(self, method: str, params: Sequence[Any]) -> Any:
        """The result. Raises UnavailableError (try another), RevertSignal, RpcError, UserError."""
        if not self._checked:
            found = self._send("eth_chainId", ())
            try:
                chain = int(found, 16)
            except (TypeError, ValueError) as error:  # another RPC of this pool may know better
                raise UnavailableError(
                    f"it answers {str(found)[:40]!r} when asked for its chain: it is no Ethereum "
                    "RPC, check --rpc"
                ) from error
            if chain != self._chain_id:
                raise UserError(
                    f"the RPC {self.name} serves chain {chain}, not the "
                    f"deployment's chain {self._chain_id}",
                    hint="give the --rpc of that chain, or the --deployment of this one",
                )
            self._checked = True
        return self._send(method, params)

    def _send(self, method: str, params: Sequence[Any]) -> Any:
        try:
            answer = self._provider.make_request(RPCEndpoint(method), list(params))
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UnavailableError(f"{type(error).__name__} {error}".strip()) from error
        except (ValueError, RecursionError) as error:  # not JSON: a proxy's page, a cut answer
            raise UnavailableError(f"the answer is not JSON: {error}"[:200]) from error
        if not isinstance(answer, dict) or not ("result" in answer or "error" in answer):
            raise UnavailableError("the answer is not JSON-RPC")
        fault = answer.get("error")
        if fault is None:
            return answer.get("result")
        return _raise(method, fault)

    def close(self) -> None:
        self._provider.close()


def _raise(method: str, fault: Any) -> None:
    if not isinstance(fault, dict):
        raise UnavailableError(f"the endpoint says: {str(fault)[:200]}")
    code = fault.get("code")
    code = code if isinstance(code, int) else 0
    message = str(fault.get("message", ""))[:500]
    data = fault.get("data")
    if isinstance(data, dict):
        data = data.get("data") or data.get("result")
    text = data.removeprefix("Reverted ") if isinstance(data, str) else ""
    words = message.lower()
    calls = method in ("eth_call", "eth_estimateGas")
    failed = code == 3 or any(word in words for word in _EVM_WORDS)
    if calls and (failed or text.startswith("0x")):
        try:
            raw = bytes.fromhex(text.removeprefix("0x")) if text.startswith("0x") else b""
        except ValueError:
            raw = b""
        raise RevertSignal(raw, message)
    busy = code in _BUSY_CODES or any(word in words for word in _BUSY_WORDS)
    if busy and method != "eth_getLogs":  # there the same words mean: ask for a smaller range
        raise UnavailableError(f"the endpoint is busy: {message}")
    raise RpcError(method, code, message)


class RpcPool:
    """Endpoints in order of preference; those that lately failed come last."""

    def __init__(
        self,
        urls: Sequence[str],
        chain_id: int,
        *,
        timeout: float = 10.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        if not urls:
            raise UserError("no RPC endpoint was given", hint="give --rpc URL")
        self.endpoints = [Endpoint(url, chain_id, timeout) for url in dict.fromkeys(urls)]
        self._now = now

    def request(self, method: str, params: Sequence[Any] = ()) -> Any:
        """Asks endpoints in turn. Raises UnavailableError if none answers, and otherwise as
        `Endpoint.request`."""
        failures = []
        for endpoint in sorted(self.endpoints, key=lambda e: e.cool_until > self._now()):
            try:
                result = endpoint.request(method, params)
            except RpcError:
                raise
            except UnavailableError as error:
                endpoint.cool_until = self._now() + COOL_DOWN_SECONDS
                failures.append(f"{endpoint.name}: {error}")
            else:
                endpoint.cool_until = 0.0
                return result
        raise UnavailableError("no RPC endpoint answers: " + "; ".join(failures))

    def close(self) -> None:
        for endpoint in self.endpoints:
            endpoint.close()


def shown_url(url: str) -> str:
    """The URL without path, query or user: those may hold a provider's key."""
    try:
        parts = urlsplit(url)
    except ValueError:  # brackets without an address
        return "the URL"
    host = parts.hostname or url[:40]
    try:
        port = f":{parts.port}" if parts.port else ""
    except ValueError:  # the part after the colon may be anything, a password too
        port = ":?"
    return f"{parts.scheme}://{host}{port}"


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # a port that is no number up to 65535, or brackets without an address
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0
