"""The protocol version, and how two programs agree on one.

Every request and response between our programs carries `Prime-Protocol: N`. A client first uses its
newest version. A server that supports it answers in it; otherwise it refuses with a problem
document of kind "protocol" that lists the versions it supports. The client then retries in the
newest common version, or exits with one sentence and the command that upgrades it.

Within a version, responses may gain fields (readers ignore unknown fields), and requests may not
(servers reject them). Signed statements are exact: changing one requires a new version.
"""

from __future__ import annotations

import re

from prime_core.errors import MalformedError, ProtocolError

HEADER = "Prime-Protocol"
SPOKEN = range(1, 2)
"""The versions that this program supports, ascending, without gaps."""
UPGRADE = "pip install --upgrade prime-open"
_NUMBER = re.compile(r"[1-9][0-9]{0,8}\Z")


def agree(asked: str | None, spoken: range = SPOKEN) -> int:
    """Returns the version in which a server answers a request.

    `asked` is the request's header or None; `spoken` are the server's versions. Raises
    ProtocolError if the server does not support the requested version.
    """
    number = _number(asked)
    if number in spoken:
        return number
    limits = (spoken[0], spoken[-1])
    if number > spoken[-1]:
        raise ProtocolError(
            f"this program speaks protocol {number}, newer than the server, which speaks at most "
            f"{spoken[-1]}",
            hint="ask the operator to upgrade the server, or install an older release",
            spoken=limits,
        )
    said = f"protocol {number}" if number else "no stated protocol"
    raise ProtocolError(
        f"this program is too old: it speaks {said}, the server needs at least {spoken[0]}",
        hint=f"upgrade it: {UPGRADE}",
        spoken=limits,
    )


def common(theirs: tuple[int, int] | None, mine: range = SPOKEN) -> int | None:
    """The newest version that both sides support; None if there is none or `theirs` is unknown."""
    if theirs is None:
        return None
    newest = min(theirs[1], mine[-1])
    return newest if newest >= max(theirs[0], mine[0]) else None


def check_answer(named: str | None, asked: int, who: str) -> None:
    """Raises ProtocolError if the response's version differs from `asked`, MalformedError if it
    names none: then a proxy or another program answered.

    `named` is the response's header or None; `who` is the server's name in the error sentence.
    """
    number = _number(named)
    if not number:
        raise MalformedError(f"{who} gave an answer without {HEADER}: it is another program's")
    if number != asked:
        raise ProtocolError(
            f"{who} answered in protocol {number}, asked in protocol {asked}",
            hint=f"upgrade this program: {UPGRADE}",
        )


def _number(text: str | None) -> int:
    """Parses a version header; 0 if it is missing or invalid."""
    return int(text) if text is not None and _NUMBER.match(text) else 0
