"""Answers of a pool's gateway to tool calls that cannot be repeated, such as HTTP requests.

A worker has no network. Its call goes over the bridge to the node's agent, and from there to the
pool's gateway, which signs the answer for exactly this place of this row. The rollout file carries
the signed answers, so a validator checks them without a network. See docs/adr/0013.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol

from pydantic import Field, TypeAdapter, ValidationError

from prime_core import encoding
from prime_core.errors import MalformedError, UntrustedError, UserError
from prime_core.given import read_given
from prime_core.ids import Address, Digest, Signature
from prime_core.signing import (
    U32,
    U64,
    AddressField,
    ContractName,
    DigestField,
    Domain,
    SignatureField,
    Signer,
    Statement,
    Strict,
)
from prime_core.task import SignedLease

MAX_ARGUMENTS = 2048
"""Maximum characters of a call's arguments."""
MAX_TEXT = 65_536
"""Maximum characters of an answer, and maximum UTF-8 bytes that a gateway signs."""
MAX_ANSWERS_BYTES = 1 << 20
"""Maximum bytes of a row's answers in a rollout file."""
ANSWER_DOMAIN = Domain(chain_id=0, contract=Address("0x0000000000000000000000000000000000000000"))
"""Domain of signed answers. The lease digest in each already names chain, contract and pool."""


class GatewayAnswered(Statement):
    """What the gateway signs: the answer to one call at one place.

    `turn` is the model's turn that made the call, from 0. `prefix` is the digest of all the row's
    tokens up to the end of that turn, `request` that of tool and arguments, `answer` the SHA-256 of
    the answer's UTF-8 text.
    """

    CONTRACT: ClassVar[ContractName] = "work"
    lease_digest: DigestField
    group: U32
    sample: U32
    turn: U32
    prefix: DigestField
    request: DigestField
    answer: DigestField


class GatewayCall(Strict):
    """One call of a tool: its place in the lease's rows, and what is asked."""

    group: U32
    sample: U32
    turn: U32
    prefix: DigestField
    tool: str = Field(max_length=64)
    arguments: dict[str, str] = Field(max_length=16)

    @property
    def place(self) -> tuple[int, int, int]:
        return self.group, self.sample, self.turn

    def request(self) -> Digest:
        """Digest of tool and arguments. Raises MalformedError for text that is not Unicode."""
        return request_digest(self.tool, self.arguments)

    def statement(self, lease_digest: Digest, text: str) -> GatewayAnswered:
        """The statement that `text` answers this call. Raises MalformedError as `request`."""
        return GatewayAnswered(
            lease_digest=lease_digest,
            group=self.group,
            sample=self.sample,
            turn=self.turn,
            prefix=self.prefix,
            request=self.request(),
            answer=encoding.sha256(text.encode()),
        )

    def answered(self, lease_digest: Digest, text: str, signer: Signer) -> GatewayAnswer:
        """The signed answer."""
        signature = signer.sign(self.statement(lease_digest, text), ANSWER_DOMAIN)
        return GatewayAnswer(turn=self.turn, text=text, signature=signature)


class GatewayAnswer(Strict):
    """A signed answer, as it travels and as a rollout file keeps it."""

    turn: U32
    text: str = Field(max_length=MAX_TEXT)
    signature: SignatureField

    def require(self, call: GatewayCall, lease_digest: Digest, key: Address) -> None:
        """Raises UntrustedError unless `key` signed this text for this call of this lease."""
        if call.statement(lease_digest, self.text).recover(ANSWER_DOMAIN, self.signature) != key:
            raise UntrustedError("the gateway did not sign this answer to this call")


class GatewayRequest(Strict):
    """Body of POST /v1/call: a call of the lease's node. `signature` is the node's, of the same
    statement with an empty answer, under the pool's Work domain."""

    lease: SignedLease
    call: GatewayCall
    signature: SignatureField


class Gateway(Strict):
    """A run's gateway, in [conversation.gateway]."""

    url: str = Field(max_length=512, pattern=r"^https?://")
    key: AddressField
    """Account whose signatures of answers count."""
    tools: tuple[str, ...] = Field(min_length=1, max_length=16)
    """The names among `conversation.tools` that it answers, each with a version ("fetch-1")."""


class Answers(Protocol):
    """Where the answers to calls come from: a live gateway, a file, or a cassette."""

    def answer(self, call: GatewayCall) -> GatewayAnswer | None:
        """The answer; None if there is none, which ends the row as `tool_limit`."""
        ...


@dataclass
class Recorded:
    """The answers that a row of a rollout file carries, each checked against its call. `asked`
    collects the turns that asked."""

    lease_digest: Digest
    key: Address
    answers: Mapping[int, GatewayAnswer]
    asked: set[int] = field(default_factory=set)

    def answer(self, call: GatewayCall) -> GatewayAnswer | None:
        """See Answers. Raises UntrustedError for an answer that was not signed for this call."""
        self.asked.add(call.turn)
        found = self.answers.get(call.turn)
        if found is not None:
            found.require(call, self.lease_digest, self.key)
        return found


class Recording(Strict):
    """One line of a cassette: what a request was answered in a step."""

    step: U64
    tool: str = Field(max_length=64)
    arguments: dict[str, str] = Field(max_length=16)
    text: str = Field(max_length=MAX_TEXT)


class Cassette:
    """Recorded answers to requests, for training without a network. They are not signed for the
    row, so a rollout file cannot carry them."""

    def __init__(self, recordings: Iterable[Recording]) -> None:
        """Of several answers to one request, the last counts."""
        self._texts = {request_digest(one.tool, one.arguments): one.text for one in recordings}

    @classmethod
    def read(cls, path: Path) -> Cassette:
        """Reads JSON lines, as `orchestrator gateway export` writes them. Raises UserError with the
        line's number."""

        hint = "make it with: orchestrator gateway export FILE"
        raw = read_given(path, "cassette", hint)

        def recordings() -> Iterator[Recording]:
            for number, line in enumerate(raw.splitlines(), 1):
                try:
                    yield Recording.model_validate_json(line)
                except ValidationError as error:
                    raise UserError(
                        f"line {number} of {path} is not a recorded answer: "
                        f"{error.errors()[0]['msg']}",
                        hint=hint,
                    ) from error

        return cls(recordings())

    def answer(self, call: GatewayCall) -> GatewayAnswer | None:
        """See Answers. None if the request was not recorded."""
        text = self._texts.get(call.request())
        if text is None:
            return None
        return GatewayAnswer(turn=call.turn, text=text, signature=_UNSIGNED)


_UNSIGNED = Signature("0x" + "00" * 65)


def request_digest(tool: str, arguments: Mapping[str, str]) -> Digest:
    """SHA-256 of a call's canonical JSON. Raises MalformedError for text that is not Unicode."""
    try:
        raw = encoding.canonical_json({"tool": tool, "arguments": dict(arguments)})
    except UnicodeEncodeError as error:
        raise MalformedError("a call's arguments are not Unicode text") from error
    return encoding.sha256(raw)


def tokens_digest(*parts: Sequence[int]) -> Digest:
    """SHA-256 of token ids as little-endian int32, of all parts in turn."""
    return encoding.sha256(b"".join(struct.pack(f"<{len(part)}i", *part) for part in parts))


_ANSWERS = TypeAdapter(tuple[GatewayAnswer, ...])


def encode_answers(answers: Sequence[GatewayAnswer]) -> str:
    """A row's answers as JSON text; empty if there are none."""
    return _ANSWERS.dump_json(tuple(answers)).decode() if answers else ""


def decode_answers(text: str) -> tuple[GatewayAnswer, ...]:
    """Parses a row's answers: at most one for each turn, in order. Raises MalformedError."""
    if not text:
        return ()
    try:
        answers = _ANSWERS.validate_json(text, strict=True)
    except ValidationError as error:
        raise MalformedError("its gateway answers do not parse") from error
    turns = [answer.turn for answer in answers]
    if turns != sorted(set(turns)):
        raise MalformedError("its gateway answers are not in the order of turns")
    return answers
