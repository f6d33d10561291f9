"""Whether a validator may judge for its pool, said in the log of `orchestrator validate`."""

from __future__ import annotations

import logging

from protocol.chain.contracts import Contracts
from protocol.core.ids import Address

log = logging.getLogger(__name__)


class Appointment:
    """Says once that the pool's manager has not appointed the account, and when it has: until then
    files are judged, but the chain refuses whatever slash is proposed."""

    def __init__(self, contracts: Contracts, pool: int, account: Address) -> None:
        self._contracts = contracts
        self._pool = pool
        self._account = account
        self._warned = self.known = False

    def look(self) -> None:
        """Asks until the account is appointed. Raises UnavailableError if no RPC answers."""
        if self.known:
            return
        if self._contracts.pools.is_validator(self._pool, self._account):
            self.known = True
            if self._warned:
                log.info("%s is appointed for pool %d now", self._account, self._pool)
        elif not self._warned:
            self._warned = True
            log.warning(
                "%s is not appointed for pool %d and may slash nobody until it is; the manager "
                "types: orchestrator pool set-validator %s --pool %d",
                *(self._account, self._pool) * 2,
            )
