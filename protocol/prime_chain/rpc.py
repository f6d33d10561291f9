"""JSON-RPC over HTTP to several endpoints: bounded, timed, with fail-over.

Any fault of one endpoint (no answer, a wrong chain, an answer of the wrong type, a JSON-RPC error,
a head far behind) makes that endpoint rest for a while, and the next one answers. Only a revert is
an answer for all: a rate limit never looks like one. If none answers and at least one only
limits the rate, the request is retried after a pause. An endpoint that answers nothing at all costs
one time-out: after that it is tested in the background until it answers again.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import random
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from prime_chain.errors import (
    BadAnswerError,
    NotThereError,
    RangeTooLargeError,
    RateLimitedError,
    RpcError,
    WrongChainError,
)
from prime_core.errors import MalformedError, UnavailableError, UserError
from prime_core.transport.paced import paced_client

log = logging.getLogger(__name__)
T = TypeVar("T")
Parse = Callable[[Any], T]
"""Turns a JSON-RPC result into a value. MalformedError makes it the endpoint's fault."""

MAX_ANSWER_BYTES = 32 << 20
COOL_DOWN_SECONDS = 5.0
LONGEST_COOL_DOWN = 120.0
SLOW_FACTOR, SLOW_SECONDS = 4.0, 0.5
"""An endpoint is asked last if it takes SLOW_FACTOR times as long as the fastest, and at least
SLOW_SECONDS."""
LATENCY_KEPT_SECONDS = 60.0
RATE_PAUSES = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Seconds to wait before each retry of a rate-limited request."""
RATE_WARNING_SECONDS = 60.0
"""A rate limit of an endpoint is reported once in this time."""
LONGEST_RATE_PAUSE = 10.0
"""If an endpoint asks for a longer pause, the request fails at once."""
MAX_LAG_SECONDS = 30.0
"""An endpoint whose newest block is this much older than the others' is stale."""

_BUSY_CODES = frozenset({-32005, -32016, -32097, -32007, 429})
_NOT_SUPPORTED = frozenset({-32601, -32602})
"""Method or parameters that this endpoint does not know: another may, and this is not a fault."""
_EVM_WORDS = (
    "revert", "evm error", "vm execution error", "out of gas", "gas required exceeds",
    "invalid opcode", "invalid jump", "stack underflow", "stack limit",
)  # fmt: skip
"""How endpoints say that the execution itself failed, which asking again will not change."""
_BUSY_WORDS = ("rate limit", "too many requests", "over capacity", "daily request")
_REJECTED = (-32000, -32003)
"""Codes that refuse a transaction, in EIP-1474 and in practice."""
_QUANTITY = re.compile("0x[0-9a-fA-F]{1,64}")
_SENDING = ("eth_call", "eth_estimateGas", "eth_sendRawTransaction")
"""Here a code of _REJECTED is about the transaction (no funds, used nonce, already known), not the
endpoint."""


class RevertSignal(Exception):  # noqa: N818 - not an error of ours: a message one floor up
    """The EVM reverted: raw data and the endpoint's words. Decoded one floor up."""

    def __init__(self, data: bytes, message: str) -> None:
        super().__init__(message)
        self.data = data
        self.message = message


class Endpoint:
    """One RPC URL. Its chain id is checked before its first answer counts, and again after each
    fault. Safe to use from several threads.

    `latency`: seconds of a request, smoothed.
    """

    def __init__(
        self, url: str, chain_id: int, timeout: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        if not _is_address(url):
            raise UserError(
                f"{shown_url(url)!r} is not an HTTP address of an RPC endpoint",
                hint="give --rpc http://HOST:PORT (a port is at most 65535) or https://…",
            )
        self.name = shown_url(url)
        self._url = url
        self._chain_id = chain_id
        self._now = now
        local = urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")
        limits = httpx.Timeout(timeout, connect=min(timeout, 5.0))
        self._http = paced_client(limits, seconds=timeout, trust_env=not local)
        self._ids = itertools.count(1)
        self._checked = False
        self._faults = 0
        self._probe: threading.Thread | None = None
        self.cool_until = 0.0
        self.hung = False
        self.latency = 0.0
        self._measured_at = 0.0
        self._limit_reported_at = -math.inf

    def request(self, method: str, params: Sequence[Any], parse: Parse[T]) -> T:
        """The parsed result. Raises UnavailableError in its kinds, or RevertSignal."""
        if not self._checked:
            found = self._send("eth_chainId", ())
            try:
                chain = number(found)
            except MalformedError as error:
                raise BadAnswerError(
                    f"it answers {str(found)[:40]!r} when asked for its chain: it is not an "
                    "Ethereum RPC, check --rpc"
                ) from error
            if chain != self._chain_id:
                raise WrongChainError(
                    f"the RPC {self.name} serves chain {chain}, not the "
                    f"deployment's chain {self._chain_id}"
                )
            self._checked = True
        result = self._send(method, params)
        try:
            return parse(result)
        except (MalformedError, TypeError, LookupError, AttributeError, ValueError) as error:
            raise BadAnswerError(f"{method}: {error}"[:300]) from error

    def resting(self) -> bool:
        """True while it is passed over because of a fault. One that hung rests until a request
        in the background has been answered."""
        if self.cool_until <= self._now() and self.hung:
            self._start_probe()
        return self.hung or self.cool_until > self._now()

    def slow(self, fastest: float) -> bool:
        """True if it recently took much longer than the fastest endpoint."""
        fresh = self._now() - self._measured_at < LATENCY_KEPT_SECONDS
        return fresh and self.latency > max(SLOW_FACTOR * fastest, SLOW_SECONDS)

    def failed(self, error: Exception) -> None:
        """Stops using the endpoint for a while, longer after each fault in a row."""
        limited = isinstance(error, RateLimitedError)
        known = limited and self._now() - self._limit_reported_at < RATE_WARNING_SECONDS
        if not self.resting() and not known:
            if limited:
                self._limit_reported_at = self._now()
            log.warning(
                "the RPC %s failed and is not used for a while: %s", self.name, str(error)[:300]
            )
        pause = min(LONGEST_COOL_DOWN, COOL_DOWN_SECONDS * 2 ** min(self._faults, 8))
        self._faults += 1
        self._checked = self._checked and limited
        self.hung = isinstance(error.__cause__, httpx.TimeoutException)
        self.cool_until = self._now() + pause

    def answered(self) -> None:
        """It gave a good answer."""
        self._faults, self.cool_until, self.hung = 0, 0.0, False

    def _start_probe(self) -> None:
        if self._probe is not None and self._probe.is_alive():
            return

        def probe() -> None:
            try:
                self.request("eth_blockNumber", (), number)
            except UnavailableError as error:
                self.failed(error)
            except RuntimeError:  # the client was closed meanwhile
                return
            else:
                self.answered()

        self._probe = threading.Thread(target=probe, name="rpc-probe", daemon=True)
        self._probe.start()

    def _send(self, method: str, params: Sequence[Any]) -> Any:
        number = next(self._ids)
        began = time.monotonic()
        body = {"jsonrpc": "2.0", "id": number, "method": method, "params": list(params)}
        try:
            raw = self._post(json.dumps(body).encode())
            answer = json.loads(raw)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UnavailableError(f"{type(error).__name__} {error}".strip()) from error
        except (ValueError, RecursionError) as error:  # not JSON: a proxy's page, a cut answer
            raise BadAnswerError(f"the answer is not JSON: {error}"[:200]) from error
        if not isinstance(answer, dict) or not ("result" in answer or "error" in answer):
            raise BadAnswerError("the answer is not JSON-RPC")
        took = time.monotonic() - began
        self.latency = took if not self.latency else 0.7 * self.latency + 0.3 * took
        self._measured_at = self._now()
        fault = answer.get("error")
        if fault is not None:
            _raise(method, fault)
        if answer.get("id") != number:
            raise BadAnswerError("the answer is to another request")
        return answer.get("result")

    def _post(self, body: bytes) -> bytes:
        received = bytearray()
        with self._http.stream(
            "POST", self._url, content=body, headers={"content-type": "application/json"}
        ) as response:
            if response.status_code == 413:
                raise RangeTooLargeError("HTTP", 413, "the answer is too large")
            if response.status_code == 429:
                after = response.headers.get("retry-after", "")
                seconds = float(after) if after.isascii() and after.isdigit() else 0.0
                raise RateLimitedError("HTTP 429 (rate limit)", seconds)
            if response.status_code == 408 or response.status_code >= 500:
                raise UnavailableError(f"HTTP {response.status_code}")
            for chunk in response.iter_bytes():
                received += chunk
                if len(received) > MAX_ANSWER_BYTES:
                    raise RangeTooLargeError(
                        "HTTP", 0, f"an answer of more than {MAX_ANSWER_BYTES} bytes"
                    )
        return bytes(received)

    def close(self) -> None:
        self._http.close()


def _raise(method: str, fault: Any) -> None:
    if not isinstance(fault, dict):
        raise BadAnswerError(f"the endpoint says: {str(fault)[:200]}")
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
    overrun = code == -32005 or code not in (*_BUSY_CODES, -32601, -32603)
    rate_limited = any(word in words for word in _BUSY_WORDS)
    if method == "eth_getLogs" and overrun and not rate_limited:
        raise RangeTooLargeError(method, code, message)  # said in many ways: any other code
    if busy:
        raise RateLimitedError(f"the endpoint is busy: {message}")
    raise RpcError(method, code, message)


class RpcPool:
    """Endpoints in order of preference; those at fault or slow come last."""

    def __init__(self, endpoints: Sequence[Endpoint], block_time: float = 1.0) -> None:
        self.endpoints = list(endpoints)
        self._lag = max(3, int(MAX_LAG_SECONDS / block_time))

    @classmethod
    def open(
        cls,
        urls: Sequence[str],
        chain_id: int,
        *,
        timeout: float,
        block_time: float,
        now: Callable[[], float],
    ) -> RpcPool:
        """A pool of its own endpoints. Raises UserError if a URL is none, or there is none."""
        if not urls:
            raise UserError("no RPC endpoint was given", hint="give --rpc URL")
        return cls(
            [Endpoint(url, chain_id, timeout, now) for url in dict.fromkeys(urls)], block_time
        )

    def ordered(self) -> list[Endpoint]:
        """The endpoints in the order in which they are asked now."""
        fastest = min((e.latency for e in self.endpoints if e.latency), default=0.0)
        return sorted(self.endpoints, key=lambda e: (e.resting(), e.slow(fastest)))

    def request(
        self, method: str, params: Sequence[Any] = (), parse: Parse[T] = lambda value: value
    ) -> T:
        """The first good answer.

        Raises RevertSignal; RpcError if endpoints answer with errors only; NotThereError if what
        is asked for is not there; WrongChainError if all endpoints serve another chain; else
        UnavailableError, for a rate limit after RATE_PAUSES.
        """
        for pause in RATE_PAUSES:
            try:
                return self._request(method, params, parse)
            except RateLimitedError as error:
                if error.after > LONGEST_RATE_PAUSE:
                    raise
                # Programs of one machine share a limit: they must not come back together.
                time.sleep(max(pause, error.after) * random.uniform(1.0, 1.5))
        return self._request(method, params, parse)

    def _request(self, method: str, params: Sequence[Any], parse: Parse[T]) -> T:
        failures: list[tuple[Endpoint, UnavailableError]] = []
        for endpoint in self.ordered():
            try:
                found = endpoint.request(method, params, parse)
            except RevertSignal:
                endpoint.answered()
                raise
            except UnavailableError as error:
                if not _without_fault(method, error):
                    endpoint.failed(error)
                failures.append((endpoint, error))
            else:
                endpoint.answered()
                return found
        errors = [error for _, error in failures]
        for kind in (NotThereError, RangeTooLargeError):
            for one in errors:
                if isinstance(one, kind):
                    raise one
        for one in errors:
            if isinstance(one, RpcError) and _without_fault(method, one):
                raise one
        if errors and all(isinstance(one, RpcError) for one in errors):
            raise errors[0]
        text = "; ".join(f"{endpoint.name}: {error}" for endpoint, error in failures)
        limited = [one.after for one in errors if isinstance(one, RateLimitedError)]
        if limited:
            raise RateLimitedError(f"no RPC endpoint answers: {text}", min(limited))
        kinds = {type(one) for one in errors}
        kind_of = kinds.pop() if len(kinds) == 1 else UnavailableError
        raise kind_of(f"no RPC endpoint answers: {text}")

    def highest(
        self,
        quorum: int,
        method: str,
        params: Sequence[Any],
        parse: Parse[int],
        *,
        heads: bool = False,
    ) -> int:
        """The largest number that `quorum` endpoints reach (all that answer, if they are fewer).

        With `heads`, the numbers are those of newest blocks: an endpoint that is far behind the
        result is stale and rests.
        """
        if len(self.endpoints) == 1:
            return self.request(method, params, parse)
        answers: dict[Endpoint, int] = {}
        failures: list[str] = []
        for endpoint in self.ordered():
            if endpoint.resting() and len(answers) >= quorum:
                continue
            try:
                answers[endpoint] = endpoint.request(method, params, parse)
            except UnavailableError as error:
                if not _without_fault(method, error):
                    endpoint.failed(error)
                failures.append(f"{endpoint.name}: {error}")
        if not answers:
            raise UnavailableError("no RPC endpoint answers: " + "; ".join(failures))
        found = sorted(answers.values(), reverse=True)[min(quorum, len(answers)) - 1]
        for endpoint, answer in answers.items():
            if heads and answer < found - self._lag:
                endpoint.failed(BadAnswerError(f"it is at block {answer}, others at {found}"))
            else:
                endpoint.answered()
        return found

    def close(self) -> None:
        for endpoint in self.endpoints:
            endpoint.close()


def _without_fault(method: str, error: UnavailableError) -> bool:
    """Whether an endpoint that said so may be asked the next question first again."""
    if isinstance(error, NotThereError | RangeTooLargeError):
        return True
    if not isinstance(error, RpcError):
        return False
    return error.code in _NOT_SUPPORTED or (error.code in _REJECTED and method in _SENDING)


def number(value: Any) -> int:
    """A JSON-RPC quantity. Raises MalformedError."""
    if not isinstance(value, str) or not _QUANTITY.fullmatch(value):
        raise MalformedError(f"the RPC gave {str(value)[:80]!r} for a number")
    return int(value, 16)


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
    except ValueError:  # a port that is not a number up to 65535, or brackets without an address
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0
