"""Makes untrusted text safe for log lines and terminals."""

from __future__ import annotations

from prime_core.errors import PrimeError, UserError


def printable(text: str, keep: str = "") -> str:
    """Returns `text` with non-printable characters escaped: control characters, escape sequences,
    line ends, bidirectional marks. Characters in `keep` stay as they are."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


def last_words(program: str, error: PrimeError) -> str:
    """A program's final message: its name, what happened, and what to type next."""
    hint = error.hint if isinstance(error, UserError) else ""
    return printable(f"{program}: {error}" + (f"; {hint}" if hint else ""), keep="\n")
