"""The worker's client for the bridge: one HTTP request per connection over a Unix socket."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import IO, TypeVar

import httpx

from prime_core.errors import MalformedError, NotFoundError, PolicyError, UnavailableError
from prime_core.gateway import Answers, GatewayAnswer, GatewayCall
from prime_core.ids import Digest
from prime_core.messages import ClassAnswer, ClassRequest
from prime_core.run import RunDefinition
from prime_core.signing import Strict
from prime_core.transport.problems import from_problem
from prime_core.version import HEADER, SPOKEN, check_answer
from prime_node.bridge_messages import (
    CALLS,
    FILES,
    MAX_ANSWER_BYTES,
    Abandon,
    CallAnswer,
    Done,
    HandIn,
    HandInAnswer,
    LeaseOffer,
    LeaseWish,
    Pauses,
)

Answer = TypeVar("Answer", bound=Strict)


class BridgeClient:
    """Thread-safe. Raises UnavailableError if the agent does not answer, the error named by its
    problem document if it refuses, and PolicyError if the agent is too old for this worker."""

    def __init__(self, socket_path: Path, *, timeout: float = 60.0) -> None:
        self._http = httpx.Client(
            transport=httpx.HTTPTransport(
                uds=str(socket_path), limits=httpx.Limits(max_keepalive_connections=0)
            ),
            base_url="http://bridge",
            timeout=timeout,
        )
        self._sending = threading.Lock()
        self._several = False
        """Whether the agent said that this worker may hold several leases."""
        self._takes_pauses = True

    def run(self) -> RunDefinition:
        return RunDefinition.parse(self._request("GET", "/run", b""))

    def exact_class(self, request: ClassRequest) -> ClassAnswer:
        """Asks whether an exact class is wanted, or announces it. Raises NotFoundError if the agent
        is older than exact classes."""
        return self._post("/class", request, ClassAnswer)

    def lease(self, wish: LeaseWish) -> LeaseOffer:
        offer = self._post("/lease", wish, LeaseOffer)
        if offer.slots > 1:
            self._several = True
        return offer

    def send_file(self, path: Path) -> None:
        """Sends a finished file's bytes, one file at a time; `submit` then refers to it by its
        name."""
        try:
            with (
                self._sending,
                path.open("rb") as content,
            ):  # bytes would be copied once per piece that is sent
                self._request("PUT", FILES + path.name, content)
        except OSError as error:
            raise UnavailableError(f"{path} cannot be read: {error.strerror}") from error

    def submit(self, body: HandIn) -> HandInAnswer:
        return self._post("/submit", body, HandInAnswer)

    def abandon(self, body: Abandon) -> None:
        self._post("/abandon", body, Done)

    def pauses(self, body: Pauses) -> None:
        """Says for how long no tokens were made. An older agent is asked once."""
        if self._takes_pauses:
            try:
                self._post("/pauses", body, Done)
            except NotFoundError:
                self._takes_pauses = False

    def answer(self, call: GatewayCall, lease_digest: Digest | None = None) -> GatewayAnswer | None:
        """The answer of the pool's gateway to a call of this lease (None: of the only open one);
        None if there is none (see Answers). Agents that give one lease at a time are sent no
        digest."""
        path = f"{CALLS}{lease_digest}" if lease_digest and self._several else "/call"
        return self._post(path, call, CallAnswer).answer

    def for_lease(self, lease_digest: Digest) -> Answers:
        """Returns the gateway's answers to the calls of one lease."""
        return _AnswersToLease(self, lease_digest)

    def _post(self, path: str, body: Strict, answer: type[Answer]) -> Answer:
        raw = self._request("POST", path, body.model_dump_json().encode())
        try:
            return answer.model_validate_json(raw)
        except ValueError as error:
            raise MalformedError(
                f"the agent's answer is not a valid {answer.__name__}: {error}"
            ) from error

    def _request(self, method: str, path: str, body: bytes | IO[bytes]) -> bytes:
        content, headers = b"", {HEADER: str(SPOKEN[-1])}
        try:
            with self._http.stream(method, path, content=body or None, headers=headers) as response:
                for part in response.iter_bytes():
                    content += part
                    if len(content) > MAX_ANSWER_BYTES:
                        raise MalformedError("the agent's answer is too long")
        except httpx.HTTPError as error:
            raise UnavailableError(f"the agent does not answer on its socket: {error}") from error
        if response.status_code == HTTPStatus.NOT_IMPLEMENTED:
            raise PolicyError(
                f"the agent on this machine is older than this image: it knows no {method}; "
                "a newer prime-node works with it"
            )
        if response.status_code != 200:
            raise from_problem(response.status_code, content)
        check_answer(response.headers.get(HEADER), SPOKEN[-1], "the agent")
        return content


@dataclass(frozen=True)
class _AnswersToLease:
    """The gateway's answers to the calls of one lease (see Answers)."""

    bridge: BridgeClient
    lease_digest: Digest

    def answer(self, call: GatewayCall) -> GatewayAnswer | None:
        return self.bridge.answer(call, self.lease_digest)
