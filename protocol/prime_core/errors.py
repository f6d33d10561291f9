"""The tree of expected errors. Any other exception is a bug and crashes the program.

PrimeError
├── MalformedError        external bytes or fields that do not parse or exceed a limit
├── UntrustedError        it parses, but a signature, digest or statement is invalid
├── UnavailableError      a peer, RPC, object or engine is temporarily unavailable: retry
├── ConflictError         the request conflicts with the state (lease taken, already submitted)
├── PolicyError           refused by the pool's rules (too old, no stake, wrong class)
├── NotFoundError         it does not exist (yet)
├── UserError             the user can fix it; says what, why, what to type next
│   └── ProtocolError     two programs have no protocol version in common
└── FatalError            our own state is broken; stop and keep the evidence
"""

from __future__ import annotations


class PrimeError(Exception):
    """Base of all expected errors. `str(error)` is one clear sentence."""

    exit_code = 1
    problem = ""
    """Kind of the problem document by which a peer reported this error; empty if there was none."""

    def __init__(self, *words: object, public: str = "") -> None:
        """`public`: what a server answers to others, if the sentence itself names parts of this
        machine or its services (hosts, users, paths)."""
        super().__init__(*words)
        self.public = public


class MalformedError(PrimeError):
    """External input that fails strict parsing or exceeds a limit."""

    exit_code = 65  # EX_DATAERR


class UntrustedError(PrimeError):
    """An invalid signature, digest or claim."""

    exit_code = 65


class UnavailableError(PrimeError):
    """An external resource is currently unreachable; a retry may succeed."""

    exit_code = 69  # EX_UNAVAILABLE


class ConflictError(PrimeError):
    """The request conflicts with the current state."""

    exit_code = 75  # EX_TEMPFAIL


class PolicyError(PrimeError):
    """Refused by the pool's rules."""

    exit_code = 77  # EX_NOPERM


class NotFoundError(PrimeError):
    """The requested thing does not exist (yet)."""

    exit_code = 66  # EX_NOINPUT


class UserError(PrimeError):
    """An error the user can fix: what happened, why, and what to type next. Printed without a
    traceback."""

    exit_code = 64  # EX_USAGE

    def __init__(self, message: str, *, hint: str = "", exit_code: int | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        if exit_code is not None:
            self.exit_code = exit_code


class ProtocolError(UserError):
    """Two programs have no protocol version in common (prime_core/version.py).

    `spoken`: oldest and newest version of the server that refused; None if unknown.
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
