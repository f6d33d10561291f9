r"""Parses plain numbers as written in answers, exactly and without an algebra system.

If the gold answer is a plain number, the answer must be one too: `\boxed{17 \cdot 23}` repeats the
question, and `\boxed{\max(3,5)}` and `\boxed{3 \text{ or } 5}` hedge, so all three are rejected.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_DIGITS = 400
MAX_EXPONENT = 400
_DIGITS = r"(?:\d{1,3}(?:(?:,|\{,\}|\\,|\\!,?)\d{3})+|\d+)"
_DECIMAL = rf"{_DIGITS}?\.\d+|{_DIGITS}\.?"
_NUMBER = re.compile(
    rf"(?P<sign>[+-]*)\s*(?:"
    rf"(?:(?P<whole>\d+)\s*)?\\[dt]?frac\s*\{{\s*(?P<nsign>-?)(?P<num>\d+)\s*\}}\s*\{{\s*(?P<den>\d+)\s*\}}"
    rf"|\\[dt]?frac\s*(?P<num1>\d)(?P<den1>\d)"
    rf"|(?P<snum>\d+)\s*(?:/|:)\s*(?P<sden>\d+)"
    rf"|(?P<base>{_DECIMAL})\s*(?:(?:\\times|\\cdot|\*|×|·)\s*10\s*\^\s*(?:\{{\s*(?P<exp>-?\d+)\s*\}}|(?P<exp1>-?\d)))?"
    rf")\s*(?P<percent>\\?%)?"
)  # fmt: skip
_UNIT = re.compile(
    r"(?:\\(?:text|mathrm|textrm|mbox)\s*\{([^{}\\]{0,32})\}|\^\s*(?:\\circ|\{\s*\\circ\s*\})|°)"
)
_HEDGE = re.compile(
    r"\b(?:or|and|not|either|maybe|approximately|approx|about|between|to)\b|\d|[,;]", re.I
)
_CURRENCY = re.compile(r"^\\?\$")
_NAMED = re.compile(r"^\s*[A-Za-z](?:_\{?\w{1,4}\}?)?(?:\([A-Za-z]\))?\s*=(?!=)")
_SPACE = re.compile(r"\\[,;:! ]|\\q?quad\b|~")


@dataclass(frozen=True)
class Numeral:
    """A number as written. `exact` is its value; `decimal` says whether it has a decimal point."""

    exact: Fraction
    decimal: bool
    percent: bool


def read_numeral(text: str) -> Numeral | None:
    """Parses `text` if it is exactly one plain number: with a sign, thousands separators, a
    fraction, a power of ten, percent, a unit, or `x =` before it. Otherwise returns None. Only
    ASCII digits count."""
    if len(text) > 2 * MAX_DIGITS or any(c.isdigit() and not c.isascii() for c in text):
        return None
    body = text.strip().strip("$").strip()
    body = body.replace("\\left", "").replace("\\right", "").replace("−", "-")
    body = _NAMED.sub("", body, count=1).strip()
    body = _CURRENCY.sub("", body).strip()
    units = _UNIT.findall(body)
    if any(_HEDGE.search(unit) for unit in units) or len(units) > 2:
        return None
    body = _UNIT.sub("", body)
    spaced = re.sub(r"(?<=\d)\\[,!](?=\d{3})", ",", body)
    spaced = _SPACE.sub(" ", spaced).strip()
    match = _NUMBER.fullmatch(spaced)
    if match is None:
        return None
    return _value(match)


def _value(match: re.Match[str]) -> Numeral | None:
    part = match.groupdict()
    sign = -1 if (part["sign"] or "").count("-") % 2 else 1
    numerator, denominator = part["num"] or part["num1"], part["den"] or part["den1"]
    decimal = False
    try:
        if part["snum"] is not None:
            value = Fraction(int(part["snum"]), int(part["sden"]))
        elif numerator is not None:
            value = Fraction(int(numerator), int(denominator))
            if part["nsign"]:
                value = -value
            if part["whole"] is not None:
                value += int(part["whole"])
        else:
            plain = re.sub(r"[^\d.]", "", part["base"])
            if not plain.strip("."):
                return None
            exponent = int(part["exp"] or part["exp1"] or 0)
            if abs(exponent) > MAX_EXPONENT:
                return None
            decimal = "." in plain.rstrip(".")
            value = Fraction(plain.rstrip(".")) * Fraction(10) ** exponent
    except (ValueError, ZeroDivisionError):
        return None
    percent = bool(part["percent"])
    return Numeral(sign * value / (100 if percent else 1), decimal, percent)


def same_number(gold: Numeral, found: Numeral) -> bool:
    """Whether two numbers are equal. If the gold answer is not an integer, a decimal may round it
    (six decimals and six digits must agree). A gold answer in percent may be given without the
    sign."""
    candidates = [gold.exact] + ([gold.exact * 100] if gold.percent and not found.percent else [])
    for value in candidates:
        if value == found.exact:
            return True
        close = abs(value - found.exact)
        rounded = gold.decimal or (found.decimal and value.denominator != 1)
        if rounded and close * 2_000_000 < 1 and close * 1_000_000 <= abs(value):
            return True
    return False
