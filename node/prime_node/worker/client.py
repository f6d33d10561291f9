"""The worker's client for the bridge: one HTTP request per connection over a Unix socket."""

from __future__ import annotations

from http import HTTPStatus
from pathlib import Path
from typing import IO, TypeVar

import httpx

from prime_core.errors import MalformedError, PolicyError, UnavailableError
from prime_core.gateway import GatewayAnswer, GatewayCall
from prime_core.messages import ClassAnswer, ClassRequest
from prime_core.run import RunDefinition
from prime_core.signing import Strict
from prime_core.transport.problems import from_problem
from prime_core.version import HEADER, SPOKEN, check_answer
from prime_node.bridge_messages import (
    FILES,
    MAX_ANSWER_BYTES,
    Abandon,
    CallAnswer,
    Done,
    HandIn,
    HandInAnswer,
    LeaseOffer,
    LeaseWish,
)

Answer = TypeVar("Answer", bound=Strict)


class BridgeClient:
    """Raises UnavailableError if the agent does not answer, the error named by its problem document
    if it refuses, and PolicyError if the agent is too old for this worker."""

    def __init__(self, socket_path: Path, *, timeout: float = 60.0) -> None:
        self._http = httpx.Client(
            transport=httpx.HTTPTransport(
                uds=str(socket_path), limits=httpx.Limits(max_keepalive_connections=0)
            ),
            base_url="http://bridge",
            timeout=timeout,
        )

    def run(self) -> RunDefinition:
        return RunDefinition.parse(self._request("GET", "/run", b""))

    def exact_class(self, request: ClassRequest) -> ClassAnswer:
        """Asks whether an exact class is wanted, or announces it. Raises NotFoundError if the agent
        is older than exact classes."""
        return self._post("/class", request, ClassAnswer)

    def lease(self, wish: LeaseWish) -> LeaseOffer:
        return self._post("/lease", wish, LeaseOffer)

    def send_file(self, path: Path) -> None:
        """Sends a finished file's bytes; `submit` then refers to it by its name."""
        try:
            with path.open("rb") as content:  # bytes would be copied once per piece that is sent
                self._request("PUT", FILES + path.name, content)
        except OSError as error:
            raise UnavailableError(f"{path} cannot be read: {error.strerror}") from error

    def submit(self, body: HandIn) -> HandInAnswer:
        return self._post("/submit", body, HandInAnswer)

    def abandon(self, body: Abandon) -> None:
        self._post("/abandon", body, Done)

    def answer(self, call: GatewayCall) -> GatewayAnswer | None:
        """The answer of the pool's gateway to a call; None if there is none (see Answers)."""
        return self._post("/call", call, CallAnswer).answer

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
