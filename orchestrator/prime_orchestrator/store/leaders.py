"""Leader election among orchestrators on one store: a lease decides which one runs the manager's
loops.

    the holder increments `beat` about once a second
    the others watch it, and take the lease if it has not changed for `LEASE_SECONDS` by their clock

Clocks of different machines are never compared. A holder stops relying on its lease well before
another may take it. A process that was killed and restarts from the same data folder has the same
name, so it need not wait.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import sqlalchemy as sa
from sqlalchemy import Connection

from prime_orchestrator.store import schema
from prime_orchestrator.store.engine import Store
from prime_orchestrator.store.rows import insert_new

log = logging.getLogger(__name__)

LEASE_SECONDS = 3.5
"""Another process, which looks every BEAT_SECONDS, takes over 3.2 to 4.9 s after a kill."""
BEAT_SECONDS = 0.8
"""Interval at which to call `tick`."""
_TRUSTED = 0.6
"""Fraction of the lease for which its holder relies on its last beat."""

_table = schema.loop_leases
_NAME = "manager"


def holder_and_beat(connection: Connection) -> tuple[str, int] | None:
    """Returns the lease's holder and its beat, which a live holder increments; None if no process
    has the lease."""
    row = connection.execute(
        sa.select(_table.c.holder, _table.c.beat).where(_table.c.name == _NAME)
    ).first()
    return None if row is None else (str(row.holder), int(row.beat))


class LoopLease:
    """One process's view of the lease. `now` returns monotonic seconds (time.monotonic); `holder`
    names the process's data folder. Thread-safe if only one thread ticks."""

    def __init__(
        self,
        store: Store,
        holder: str,
        *,
        now: Callable[[], float],
    ) -> None:
        self._store = store
        self._holder = holder
        self._now = now
        self._until = float("-inf")
        self._seen: tuple[str, int] | None = None
        self._seen_at = float("-inf")

    def held(self) -> bool:
        """Whether this process may run the loops now."""
        return self._now() < self._until

    def tick(self) -> bool:
        """Renews, takes or watches the lease; returns whether it is held.

        Raises UnavailableError while the database is unavailable; a held lease then expires.
        """
        started, was = self._now(), self.held()
        with self._store.begin() as connection:
            first = {"name": _NAME, "holder": self._holder, "beat": 0}
            row = None
            while row is None:  # PostgreSQL: between the two, the holder may release it
                insert_new(connection, _table, first)
                row = connection.execute(
                    sa.select(_table.c.holder, _table.c.beat)
                    .where(_table.c.name == _NAME)
                    .with_for_update()
                ).first()
            mine = row.holder == self._holder or self._stands_still((row.holder, int(row.beat)))
            if mine:
                connection.execute(
                    sa.update(_table)
                    .where(_table.c.name == _NAME)
                    .values(holder=self._holder, beat=_table.c.beat + 1)
                )
        if mine:
            self._until = started + _TRUSTED * LEASE_SECONDS
        if mine and not was:
            log.info("this process runs the manager's loops")
        elif was and not mine:
            log.warning("another process runs the manager's loops now")
        return mine

    def _stands_still(self, seen: tuple[str, int]) -> bool:
        """Whether the holder's beat has not changed for a whole lease, as observed here."""
        if seen != self._seen:
            self._seen, self._seen_at = seen, self._now()
            return False
        return self._now() - self._seen_at >= LEASE_SECONDS

    def release(self) -> None:
        """Releases the lease, so that another process need not wait. Call it after the loops have
        ended."""
        self._until = float("-inf")
        with self._store.begin() as connection:
            connection.execute(
                sa.delete(_table).where(_table.c.name == _NAME, _table.c.holder == self._holder)
            )
