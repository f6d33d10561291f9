"""Text by strangers, for a line of a log or a terminal."""

from __future__ import annotations


def printable(text: str, keep: str = "") -> str:
    """`text` with everything written out that does not print: control characters and escape
    sequences, line ends, marks that turn the reading direction. Letters of `keep` stay."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)
