"""Planted files: kept off the chain and out of batches until judged, then recorded as planted.

    before the verdict  nothing in the store marks them: only this process knows the nodes, from
                        its settings, and excludes their files from roots and batches
    after it            `reveal` records what the file was and reverts the verdict's effects (pay,
                        groups, slash; without a root none can have reached the chain). The file
                        then counts as a shadow file

A file that has a root, even one that is not on chain yet, is an ordinary file of its node: it
is paid, slashed and settled, and no validator is charged for it.

See prime_verify.canaries.planting for how such files are made. A validator that reads the shared
store can see whose files were revealed before, so planted nodes change keys from time to time
(prime-node node move).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from prime_core.ids import Address, Digest
from prime_orchestrator.context import PoolContext
from prime_orchestrator.manager.members import apply_node_event
from prime_orchestrator.manager.settlement import CHAIN_LOCK
from prime_orchestrator.store import (
    Connection,
    drift,
    groups,
    intents,
    jobs,
    leases,
    nodes,
    opinions,
    rewards,
    roots,
    slashes,
    submissions,
)
from prime_orchestrator.store.engine import Store, lock
from prime_verify.canaries import planting

log = logging.getLogger(__name__)

HOUR = 3600


@dataclass(frozen=True)
class Planted:
    """The manager's planted nodes, the secret they share with it, and their share of leases: one in
    `one_in`."""

    accounts: frozenset[Address] = frozenset()
    secret: bytes = b""
    one_in: int = 50

    def may_lease(self, connection: Connection, account: Address, now: float) -> bool:
        """Whether a node may get a lease now: always, unless it is planted and has used its
        share."""
        if account not in self.accounts:
            return True
        mine = leases.given_to(connection, self.accounts, now - HOUR)
        return mine * self.one_in <= sum(leases.given_since(connection, now - HOUR))


def reveal(
    store: Store, context: PoolContext, planted: Planted, now: Callable[[], float]
) -> list[Digest]:
    """Settles planted files that have a verdict or were not judged in time; returns them."""
    if not planted.accounts:
        return []
    with store.read() as connection:
        too_old = now() - context.run.validity_seconds
        waiting = submissions.unrooted_of(connection, planted.accounts, too_old)
    revealed: list[Digest] = []
    for file in waiting:
        digest, node = file.digest, file.node
        with store.begin() as connection:
            jobs.lock_row(connection, digest)  # a verdict locks the file before its node
            lock(connection, CHAIN_LOCK)  # the indexer assigns roots to leaves posted by nodes
            nodes.lock_row(connection, node)
            if roots.of(connection, digest) is not None:
                continue
            judged = submissions.get(connection, digest)
            if judged is not None and judged.status != "submitted":
                kind = planting.kind(planted.secret, file.lease_digest)
                opinions.plant(connection, digest, kind, now=now())
            _take_back(connection, digest, node)
            row = nodes.get(connection, node)
            held = row is not None and row.status == "quarantined"
            if held and not slashes.has_open(connection, node):
                apply_node_event(connection, context, node, "slash_cancelled", now())
        revealed.append(digest)
        log.info("planted file %s is judged", digest)
    return revealed


def _take_back(connection: Connection, digest: Digest, node: Address) -> None:
    """Reverts a verdict's effects; the file is a shadow file from now on."""
    rewards.drop_credits(connection, [digest])
    groups.drop(connection, digest)
    slashes.drop(connection, digest)
    drift.forget(connection, node)
    intents.forget_waiting(connection, (f"propose:{digest}", f"eject:{node}:{digest}"))
    submissions.change(connection, digest, shadow=True)
