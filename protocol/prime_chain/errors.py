"""The chain's own branches of the error tree.

UnavailableError
├── RpcError               an endpoint answered with an error that is not a revert
│   └── RangeTooLargeError … because the range of blocks holds too much: ask for a smaller one
├── RateLimitedError       an endpoint limits the rate of requests
├── BadAnswerError         an endpoint's answer has the wrong form or type
├── NotThereError          no endpoint has the block or transaction (yet)
├── WrongChainError        an endpoint serves another chain
└── DisagreementError      endpoints that must agree do not (yet)
ConflictError
└── ChainRevertedError     the contract refuses; carries the decoded custom error
"""

from __future__ import annotations

from typing import Any

from prime_chain import reasons
from prime_core.errors import ConflictError, UnavailableError, UserError

_WANTS_ANOTHER_COMMAND = frozenset({"UnknownPool", "NotMember", "StakeNotFree"})
"""Refusals that waiting does not cure: the same command would be refused again."""


class RpcError(UnavailableError):
    """A JSON-RPC error that is not a revert. `code` and `message` as the endpoint gave them."""

    def __init__(self, method: str, code: int, message: str) -> None:
        super().__init__(f"the RPC refused {method}: {message} (code {code})")
        self.method = method
        self.code = code
        self.message = message


class RangeTooLargeError(RpcError):
    """An answer would be, or was, too large: a smaller range of blocks may do."""


class RateLimitedError(UnavailableError):
    """An endpoint refused a request because of a rate limit. `after`: how many seconds it asks the
    client to wait; 0 if it does not say."""

    def __init__(self, message: str, after: float = 0.0) -> None:
        super().__init__(message)
        self.after = after


class BadAnswerError(UnavailableError):
    """An endpoint's answer has the wrong form or type."""


class NotThereError(UnavailableError):
    """No endpoint has the block or transaction (yet)."""


class WrongChainError(UnavailableError):
    """An endpoint serves another chain than the deployment's."""

    exit_code = UserError.exit_code


class DisagreementError(UnavailableError):
    """Endpoints gave different answers to what they must agree on."""


class ChainRevertedError(ConflictError):
    """A call or transaction that a contract reverts.

    `name` is the Solidity error ("InsufficientStake"; "Error" for a text; "Panic" for a code;
    "Unknown" for data that no committed ABI explains), `arguments` its decoded fields by name.
    Exit code 75 (try again), or 64 where waiting does not help.
    """

    def __init__(self, name: str, arguments: dict[str, Any], doing: str = "") -> None:
        self.name = name
        self.arguments = arguments
        said = f"{doing or 'the call'} is refused by the contract: {self.reason}"
        super().__init__(f"{said}: {self.meaning}" if self.meaning else said)
        if name in _WANTS_ANOTHER_COMMAND:
            self.exit_code = UserError.exit_code

    @property
    def meaning(self) -> str:
        """The refusal in a sentence; empty if there is none for it."""
        return reasons.sentence(self.name, self.arguments)

    @property
    def reason(self) -> str:
        """Short text, e.g. `NotManager(caller=0x…)`."""
        if self.name == "Error":
            return str(self.arguments.get("message", ""))
        fields = ", ".join(f"{key}={value}" for key, value in self.arguments.items())
        return f"{self.name}({fields})"
