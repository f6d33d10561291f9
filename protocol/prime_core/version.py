"""The protocol's version: what each program speaks, and how two programs agree on one version.

Every request and every answer between our programs carries `Prime-Protocol: N`. A client asks in
its newest version. A server that speaks it answers in it; otherwise it refuses with a problem
document of kind "protocol" that names the versions it speaks, and the client asks again in the
newest version that both speak, or ends with one sentence and the command that upgrades it.

Within one version, an answer may gain fields (readers ignore fields that they do not know) and a
request may not (servers reject them). Signed statements are exact: a change to one is a new
version.
"""

from __future__ import annotations

import re

from prime_core.errors import MalformedError, ProtocolError

HEADER = "Prime-Protocol"
SPOKEN = range(1, 2)
"""The versions that this program speaks, ascending, without gaps."""
UPGRADE = "pip install --upgrade prime-open"
_NUMBER = re.compile(r"[1-9][0-9]{0,8}\Z")


def agree(asked: str | None, spoken: range = SPOKEN) -> int:
    """Returns the version in which a server answers a request.

    Args: `asked`, the request's header or None; `spoken`, the versions of the server.
    Raises ProtocolError if the server does not speak that version.
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
    """The newest version that both sides speak; None if there is none or `theirs` is unknown."""
    if theirs is None:
        return None
    newest = min(theirs[1], mine[-1])
    return newest if newest >= max(theirs[0], mine[0]) else None


def check_answer(named: str | None, asked: int, who: str) -> None:
    """Raises ProtocolError if an answer is in another version than was asked for, MalformedError
    if it names none: then something between answered (a proxy), or another program.

    Args: `named`, the answer's header or None; `who`, the server's name in the sentence.
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
    """The version in a header; 0 if there is none."""
    return int(text) if text is not None and _NUMBER.match(text) else 0
