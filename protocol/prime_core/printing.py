"""Text by strangers, for a line of a log or a terminal."""

from __future__ import annotations

from prime_core.errors import PrimeError, UserError


def printable(text: str, keep: str = "") -> str:
    """`text` with everything written out that does not print: control characters and escape
    sequences, line ends, marks that turn the reading direction. Letters of `keep` stay."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


def last_words(program: str, error: PrimeError) -> str:
    """What a program ends with: its name, what happened, and what to type next."""
    hint = error.hint if isinstance(error, UserError) else ""
    return printable(f"{program}: {error}" + (f"; {hint}" if hint else ""), keep="\n")
