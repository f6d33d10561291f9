"""What the sender's tests share: a clock in the test's hands, and calls that move one wei."""

from __future__ import annotations

from collections.abc import Callable

from prime_chain.client import Call
from prime_chain.sender import Sender
from prime_core.ids import Address, address

GWEI = 10**9


class FakeTime:
    """Unix time in a test's hands; `sleep` moves it."""

    def __init__(self) -> None:
        self.time = 1_000_000.0

    def __call__(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


Make = Callable[..., Sender]


def transfer(to: Address, wei: int = 1) -> Call:
    """A call that sends `wei` wei."""
    return Call(to, b"", wei, f"send {wei} wei")


def target(number: int) -> Address:
    """An account that no one else uses."""
    return address("0x" + f"{number + 0xABC0000:040x}")
