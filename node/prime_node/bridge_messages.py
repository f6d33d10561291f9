"""Messages between a worker and its agent over the bridge's socket.

| method and path | body → answer |
|---|---|
| GET  /run | → canonical RunDefinition bytes |
| POST /class | ClassRequest → ClassAnswer |
| POST /lease | LeaseWish → LeaseOffer (held open up to `wait_seconds`) |
| PUT /file/NAME | a finished file's bytes → {} ; replaces the one sent before |
| POST /submit | HandIn → HandInAnswer |
| POST /abandon | Abandon → {} |
| POST /pauses | Pauses → {} (older agents do not know it) |
| POST /call | GatewayCall → CallAnswer (only in runs with `[conversation.gateway]`) |
| POST /call/LEASE | the same, of the open lease with this digest |

A worker may hold several leases once an offer has `slots` > 1. It then lists them in its wishes
(`holds`), names the lease in each call, and sends a lease's file as `file_name`. It sends one wish
at a time. Agents that offer one slot know neither `holds` nor /call/LEASE and never receive them.

Errors are RFC 9457 problems, as everywhere; requests and answers carry `Prime-Protocol`.
"""

from __future__ import annotations

from pydantic import Field

from prime_core.gateway import GatewayAnswer
from prime_core.ids import Digest
from prime_core.messages import MOST_SLOTS, ReceiptAnswer
from prime_core.signing import Answer, DigestField, Domain, Strict
from prime_core.task import SignedLease

FILES = "/file/"
CALLS = "/call/"
MAX_BODY_BYTES = 16 << 10
MAX_WAIT_SECONDS = 30
MAX_ANSWER_BYTES = 4 << 20


class LeaseWish(Strict):
    """`holds`: the leases that the worker works on. An open lease that is not among them is offered
    again before any other."""

    wait_seconds: int = Field(default=20, ge=0, le=MAX_WAIT_SECONDS)
    holds: tuple[DigestField, ...] = Field(
        default=(), max_length=MOST_SLOTS, exclude_if=lambda leases: not leases
    )


class LeaseOffer(Answer):
    """A lease under `domain` (that of the Work contract), or none and how long to pause. The worker
    may hold `slots` leases at once."""

    lease: SignedLease | None
    domain: Domain | None = None
    retry_after_ms: int = Field(default=0, ge=0)
    reason: str = Field(default="", max_length=512)
    slots: int = Field(default=1, ge=1)


class HandIn(Strict):
    """`file`: plain name under which the finished file was sent. `tokens` generated in
    `milliseconds` (advisory, shown in heartbeats)."""

    lease_digest: DigestField
    file: str = Field(max_length=255)
    tokens: int = Field(default=0, ge=0, lt=2**40)
    milliseconds: int = Field(default=0, ge=0, lt=2**40)


class HandInAnswer(Answer):
    """`receipt` None: the file is in the agent's journal and not delivered yet."""

    submission_digest: DigestField
    receipt: ReceiptAnswer | None
    refused: str = ""


class Abandon(Strict):
    lease_digest: DigestField
    reason: str = Field(default="", max_length=512)


class Pauses(Strict):
    """For how long the engine made no tokens (advisory, shown by `prime-node status`): `swap_ms`
    while policy `policy_version` was loaded, `idle_ms` without work between the latest two files.
    """

    policy_version: int = Field(ge=0, lt=2**40)
    swap_ms: int = Field(ge=0, lt=2**40)
    idle_ms: int = Field(ge=0, lt=2**40)


class CallAnswer(Answer):
    """The gateway's signed answer to a call. None: there is none, which ends the row."""

    answer: GatewayAnswer | None
    reason: str = ""


class Done(Answer):
    """{}."""


def file_name(lease_digest: Digest) -> str:
    """Returns the name under which a worker with several leases sends the file of one."""
    return f"{lease_digest[2:]}.parquet"
