"""Three RPC endpoints before the chain of a network, of which one at a time fails in some way."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter

from prime_chain.faulty import KINDS, Fault, FaultyRpc

ENDPOINTS = 3
SHORT_SECONDS, LONG_SECONDS = 1.0, 5.0
"""How long an endpoint fails in one way."""


class FaultyEndpoints:
    """Proxies of the chain at `target`. From `begin` on, one of them is at fault for `seconds`."""

    def __init__(self, target: str, seconds: float, *, seed: int = 7) -> None:
        self._proxies = [FaultyRpc(target, seed=seed + at) for at in range(ENDPOINTS)]
        self._seconds = seconds
        self._dice = random.Random(seed)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.urls = tuple(proxy.url for proxy in self._proxies)

    def begin(self) -> None:
        """Starts the faults, once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._fail, name="rpc-faults", daemon=True)
            self._thread.start()

    def over(self) -> bool:
        """Whether the faults have begun and ended."""
        return self._thread is not None and not self._thread.is_alive()

    def injected(self) -> Counter[str]:
        """Faults so far, by kind."""
        return sum((proxy.injected for proxy in self._proxies), Counter())

    def close(self) -> None:
        """Ends faults and proxies."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        for proxy in self._proxies:
            proxy.close()

    def _fail(self) -> None:
        end = time.monotonic() + self._seconds
        kinds: list[str] = []
        while time.monotonic() < end and not self._stop.is_set():
            kinds = kinds or self._dice.sample(KINDS, len(KINDS))  # each before one comes again
            kind = next(one for one in KINDS if one == kinds[-1])
            kinds.pop()
            victim = self._dice.choice(self._proxies)
            seconds = 0.2 if kind == "delay" else 20.0
            victim.faults = (Fault(kind, self._dice.choice([0.3, 1.0]), seconds=seconds),)
            self._stop.wait(self._dice.uniform(SHORT_SECONDS, LONG_SECONDS))
            victim.faults = ()
