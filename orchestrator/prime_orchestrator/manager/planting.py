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

import sqlalchemy as sa

from prime_core.ids import Address, Digest
from prime_core.run import RunDefinition
from prime_orchestrator.context import PoolContext
from prime_orchestrator.manager.members import apply_node_event, has_open_slash
from prime_orchestrator.manager.settlement import CHAIN_LOCK
from prime_orchestrator.store import Connection, leases, nodes, opinions, schema
from prime_orchestrator.store.engine import Store, lock
from prime_orchestrator.store.submissions import has_root
from prime_verify.canaries import planting

log = logging.getLogger(__name__)

HOUR = 3600
_submissions = schema.submissions.c


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
        waiting = _ended(connection, context.run, planted, now())
    revealed: list[Digest] = []
    for digest, node, lease, judged in waiting:
        with store.begin() as connection:
            lock(connection, CHAIN_LOCK)  # the indexer assigns roots to leaves posted by nodes
            nodes.lock_row(connection, node)
            if has_root(connection, digest):
                continue
            if judged:
                kind = planting.kind(planted.secret, lease)
                opinions.plant(connection, digest, kind, now=now())
            _take_back(connection, digest, node)
            row = nodes.get(connection, node)
            held = row is not None and row.status == "quarantined"
            if held and not has_open_slash(connection, node):
                apply_node_event(connection, context, node, "slash_cancelled", now())
        revealed.append(digest)
        log.info("planted file %s is judged", digest)
    return revealed


def _ended(
    connection: Connection, run: RunDefinition, planted: Planted, now: float
) -> list[tuple[Digest, Address, Digest, bool]]:
    too_old = _submissions.received_at < now - run.validity_seconds
    judged = _submissions.status.in_(("accepted", "rejected", "void"))
    rows = connection.execute(
        sa.select(
            _submissions.digest, _submissions.node, _submissions.lease_digest, _submissions.status
        ).where(
            _submissions.node.in_(planted.accounts),
            _submissions.shadow.is_(False),
            _submissions.root_id.is_(None),
            sa.or_(judged, too_old),
        )
    )
    return [
        (Digest(row.digest), Address(row.node), Digest(row.lease_digest), row.status != "submitted")
        for row in rows
    ]


def _take_back(connection: Connection, digest: Digest, node: Address) -> None:
    """Reverts a verdict's effects; the file is a shadow file from now on."""
    for table in (schema.credits, schema.groups, schema.slashes):
        connection.execute(sa.delete(table).where(table.c.submission_digest == digest))
    connection.execute(sa.delete(schema.drift).where(schema.drift.c.node == node))
    names = (f"propose:{digest}", f"eject:{node}:{digest}")
    intents = schema.intents.c
    connection.execute(
        sa.delete(schema.intents).where(intents.id.in_(names), intents.status == "waiting")
    )
    connection.execute(
        sa.update(schema.submissions).where(_submissions.digest == digest).values(shadow=True)
    )
