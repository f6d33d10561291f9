"""Every expected error, as one tree. Anything else is a defect and crashes.

PrimeError
├── MalformedError        bytes or fields from outside that do not parse or break a bound
├── UntrustedError        it parses, but a signature, digest or statement does not hold
│   └── EvidenceError     … and the evidence is strong enough to reject a file (slashable)
├── UnavailableError      a peer, RPC, object or engine is not there now: try again
├── ConflictError         the request no longer fits the state (lease taken, already submitted)
├── PolicyError           refused by the pool's rules (too old, no stake, wrong class)
├── NotFoundError         there is no such thing (yet)
├── UserError             the person at the keyboard can mend it; says what, why, what to type next
│   └── ProtocolError     two programs speak no common version of the protocol
└── FatalError            our own state is broken; stop and keep the evidence
"""

from __future__ import annotations


class PrimeError(Exception):
    """Base of all expected errors. `str(error)` is one clear sentence."""

    exit_code = 1
    problem = ""
    """Kind of the problem document by which a peer said so; empty if nobody named it."""


class MalformedError(PrimeError):
    """Input from outside that does not parse strictly or exceeds a limit."""

    exit_code = 65  # EX_DATAERR


class UntrustedError(PrimeError):
    """A signature, digest or claim that does not hold."""

    exit_code = 65


class EvidenceError(UntrustedError):
    """A lie that the evidence shows."""


class UnavailableError(PrimeError):
    """Something outside is not reachable at present; trying again may help."""

    exit_code = 69  # EX_UNAVAILABLE


class ConflictError(PrimeError):
    """The request does not fit the present state."""

    exit_code = 75  # EX_TEMPFAIL


class PolicyError(PrimeError):
    """The pool's rules refuse it."""

    exit_code = 77  # EX_NOPERM


class NotFoundError(PrimeError):
    """There is no such thing (yet)."""

    exit_code = 66  # EX_NOINPUT


class UserError(PrimeError):
    """What happened, why, and what to type next; printed without a traceback."""

    exit_code = 64  # EX_USAGE

    def __init__(self, message: str, *, hint: str = "", exit_code: int | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        if exit_code is not None:
            self.exit_code = exit_code


class ProtocolError(UserError):
    """Two programs speak no common version of the protocol (prime_core/version.py).

    `spoken`: oldest and newest version of the server that refused; None if it is not known.
    """

    exit_code = 76  # EX_PROTOCOL

    def __init__(
        self, message: str, *, hint: str = "", spoken: tuple[int, int] | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.spoken = spoken


class FatalError(PrimeError):
    """Our own state is broken."""

    exit_code = 70  # EX_SOFTWARE
