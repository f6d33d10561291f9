"""Slashes of rejected files: queued by the manager, then what the chain says of them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from prime_core.ids import Address, Digest
from prime_orchestrator.store import schema
from prime_orchestrator.store.rows import insert_new, one_of, record, records

_slashes = schema.slashes.c
OPEN = ("queued", "proposed")
"""Statuses of slashes that are neither executed nor cancelled."""


@dataclass(frozen=True)
class SlashRow:
    """One row of `slashes`; `amount` in wei. Status: queued, proposed, executed, cancelled.
    `receipt`: JSON of the submission's ReceiptAnswer if the submission is archived."""

    submission_digest: Digest
    node: Address
    validator: str
    evidence: Digest
    reason: int
    amount: str
    status: str
    created_at: float
    executable_at: int | None = None
    propose_tx: Digest | None = None
    execute_tx: Digest | None = None
    receipt: str | None = None


def add(connection: Connection, row: SlashRow) -> None:
    """Writes a slash unless its submission has one."""
    insert_new(connection, schema.slashes, vars(row))


def get(connection: Connection, submission: Digest) -> SlashRow | None:
    """Returns a submission's slash, or None."""
    query = sa.select(schema.slashes).where(_slashes.submission_digest == submission)
    return record(SlashRow, connection.execute(query).mappings().first())


def newest(connection: Connection, limit: int) -> list[SlashRow]:
    """Returns the newest slashes, newest first."""
    query = (
        sa.select(schema.slashes)
        .order_by(_slashes.created_at.desc(), _slashes.submission_digest)
        .limit(limit)
    )
    return records(SlashRow, connection.execute(query).mappings().all())


def change(connection: Connection, submission: Digest, **values: Any) -> None:
    """Sets columns of a slash."""
    mine = _slashes.submission_digest == submission
    connection.execute(sa.update(schema.slashes).where(mine).values(**values))


def drop(connection: Connection, submission: Digest) -> None:
    """Deletes a submission's slash."""
    mine = _slashes.submission_digest == submission
    connection.execute(sa.delete(schema.slashes).where(mine))


def has_open(connection: Connection, node: Address) -> bool:
    """Whether a slash of `node` is queued or proposed."""
    query = sa.select(_slashes.node).where(_slashes.node == node, _slashes.status.in_(OPEN))
    return connection.execute(query.limit(1)).first() is not None


def open_of_provider(connection: Connection, provider: Address) -> Address | None:
    """Returns a node with an open slash whose provider, now or when it joined, is `provider`; None
    if there is none."""
    seated, bound = schema.nodes.c, schema.chain_state.c
    query = (
        sa.select(_slashes.node)
        .outerjoin(schema.nodes, seated.address == _slashes.node)
        .outerjoin(
            schema.chain_state,
            sa.and_(bound.kind == "provider", bound.account == _slashes.node),
        )
        .where(
            _slashes.status.in_(OPEN),
            sa.or_(seated.provider == provider, bound.value == provider),
        )
        .limit(1)
    )
    found = connection.execute(query).scalar()
    return None if found is None else Address(found)


def executable(connection: Connection, chain_time: int) -> list[Digest]:
    """Returns the proposed slashes whose window is over at `chain_time` (Unix seconds)."""
    query = sa.select(_slashes.submission_digest).where(
        _slashes.status == "proposed", _slashes.executable_at <= chain_time
    )
    return [Digest(leaf) for leaf in connection.execute(query).scalars()]


def queued_for(connection: Connection, reason: int) -> list[SlashRow]:
    """Returns the slashes with this reason that are not proposed, by submission."""
    query = (
        sa.select(schema.slashes)
        .where(_slashes.status == "queued", _slashes.reason == reason)
        .order_by(_slashes.submission_digest)
    )
    return records(SlashRow, connection.execute(query).mappings().all())


def queued(connection: Connection) -> list[tuple[Digest, Address, int | None]]:
    """Returns (submission, node, block time of its root) of slashes that are not proposed; None:
    no confirmed root."""
    submissions = schema.submissions.c
    query = (
        sa.select(_slashes.submission_digest, _slashes.node, schema.roots.c.posted_at)
        .join(schema.submissions, submissions.digest == _slashes.submission_digest)
        .outerjoin(schema.roots, schema.roots.c.id == submissions.root_id)
        .where(_slashes.status == "queued")
    )
    return [(Digest(leaf), Address(node), at) for leaf, node, at in connection.execute(query)]


def with_receipts(
    connection: Connection, node: Address | None = None
) -> list[tuple[Digest, Address, str, str]]:
    """Returns (submission, node, status, JSON of the submission's ReceiptAnswer) of the slashes, of
    one node if it is given."""
    submissions = schema.submissions.c
    receipt = sa.func.coalesce(_slashes.receipt, submissions.receipt)
    query = (
        sa.select(_slashes.submission_digest, _slashes.node, _slashes.status, receipt)
        .outerjoin(schema.submissions, submissions.digest == _slashes.submission_digest)
        .where(receipt.is_not(None))
    )
    if node is not None:
        query = query.where(_slashes.node == node)
    return [
        (Digest(leaf), Address(author), status, receipt)
        for leaf, author, status, receipt in connection.execute(query)
    ]


def keep_receipts(connection: Connection, names: Collection[Digest]) -> None:
    """Copies the receipts of these submissions, which are about to be archived, to their slashes:
    settlements and credits depend on them forever."""
    submissions = schema.submissions.c
    receipt = (
        sa.select(submissions.receipt)
        .where(submissions.digest == _slashes.submission_digest)
        .scalar_subquery()
    )
    mine = one_of(connection, _slashes.submission_digest, names)
    connection.execute(sa.update(schema.slashes).where(mine).values(receipt=receipt))
