"""Amounts of the token: wei inside the programs, whole PRIME (18 places) where people read and type
them."""

from __future__ import annotations

from prime_core.errors import UserError

ETHER = 10**18
"""Wei in one PRIME (and in one ETH)."""


def prime(amount: int) -> str:
    """An amount of wei as people write it: `12.5 PRIME`."""
    return f"{_decimal(amount)} PRIME"


def ether(amount: int) -> str:
    """An amount of the chain's own coin, in wei, as people write it: `0.0021 ETH`."""
    return f"{_decimal(amount)} ETH"


def parse_amount(text: str) -> int:
    """An amount of PRIME as typed ("12.5" or "12.5 PRIME") in wei. Raises UserError unless it is
    one above 0."""
    whole, _, part = without_unit(text).partition(".")
    digits = whole + part
    if not digits.isascii() or not digits.isdigit() or len(part) > 18 or len(whole) > 30:
        raise UserError(f"{text!r} is not an amount of PRIME", hint="write it like 100 or 12.5")
    amount = int(whole or "0") * ETHER + int((part or "0").ljust(18, "0"))
    if amount == 0:
        raise UserError(f"{text!r} is not an amount of PRIME", hint="it must be more than 0")
    return amount


def parse_price(text: str) -> int:
    """A price as typed, in wei: with its unit ("0.0000004 PRIME", "400 wei"), or a whole number of
    wei alone. Raises UserError for anything else."""
    number = without_unit(text)
    if number != text.strip():
        return parse_amount(number)
    number = number.removesuffix("wei").rstrip()
    if not number.isascii() or not number.isdigit() or len(number) > 48:
        raise UserError(
            f"{text!r} is not a price",
            hint='write it with its unit, like "0.0000004 PRIME"; a number alone is whole wei',
        )
    return int(number)


def without_unit(text: str) -> str:
    """What stands before "PRIME", if that is the unit."""
    return text.strip().removesuffix("PRIME").rstrip()


def _decimal(amount: int) -> str:
    whole, part = divmod(abs(amount), ETHER)
    sign = "-" if amount < 0 else ""
    return f"{sign}{whole}" + f".{part:018d}".rstrip("0").rstrip(".")
