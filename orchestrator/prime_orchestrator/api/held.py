"""Claims that wait for work.

A request costs an orchestrator several times what looking for work does. So a claim for which there
is nothing waits before it is answered, and the claims that wait in one process look together, every
LOOK_SECONDS. Each look also waits up to LOOK_SECONDS for claims of validators that asked in the
last second, so that they share its transactions and those of their next requests.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from operator import itemgetter

from prime_core.ids import Address
from prime_core.validator_messages import ClaimAnswer, ClaimRequest
from prime_orchestrator.api import validators
from prime_orchestrator.api.backend import Backend
from prime_orchestrator.api.gathered import Gathered

HOLD_SECONDS = 2.0
"""Seconds that a claim waits. A validator that stops may have to wait for its open claim."""
LOOK_SECONDS = 0.2
SHARE_SECONDS = 0.02
"""How long another request of a validator waits for those of other active ones, to share
transactions."""
HELD_EACH = 8
"""Claims of one account that wait at once; others are answered immediately."""


class HeldClaims:
    """Answers the claims that reach this process, each after `seconds` at the latest if there is no
    work. Use it on the event loop only."""

    def __init__(self, backend: Backend, seconds: float = HOLD_SECONDS) -> None:
        self._seconds = seconds
        self._gathered = Gathered[tuple[Address, ClaimRequest], ClaimAnswer](
            partial(validators.claim_all, backend, unassigned=validators.Unassigned()),
            wait=LOOK_SECONDS,
            caller=itemgetter(0),
        )
        self._held: Counter[Address] = Counter()

    async def ask(
        self, account: Address, wish: ClaimRequest, gone: Callable[[], Awaitable[bool]]
    ) -> ClaimAnswer:
        """Returns the answer to a claim once there is work, or without any in time. `gone`
        says whether the caller has disconnected: it is given no files then. Raises PolicyError if
        the account is not appointed."""
        found = await self._gathered.ask((account, wish))
        if found.jobs or found.reveal or self._held[account] >= HELD_EACH:
            return found
        self._held[account] += 1
        try:
            return await self._wait(account, wish, gone, found)
        finally:
            self._held[account] -= 1

    async def _wait(
        self,
        account: Address,
        wish: ClaimRequest,
        gone: Callable[[], Awaitable[bool]],
        found: ClaimAnswer,
    ) -> ClaimAnswer:
        clock = asyncio.get_running_loop().time
        until = clock() + self._seconds
        while not (found.jobs or found.reveal) and clock() < until:
            await asyncio.sleep(LOOK_SECONDS - clock() % LOOK_SECONDS)  # all at the same time
            if await gone():
                break
            found = await self._gathered.ask((account, wish))
        return found
