"""Credits of accepted files, and the reward roots that pay them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy import Connection

from prime_core.ids import Address, Digest
from prime_orchestrator.store import schema
from prime_orchestrator.store.rows import insert_all_new, one_of, record, records, upsert

_credits = schema.credits.c
_roots = schema.reward_roots.c
_MAX_NAMES = 500
"""Most names in one SQL condition."""


@dataclass(frozen=True)
class CreditRow:
    """One row of `credits`; `amount` in wei, `earned_at` is when its file was received (Unix
    seconds). Status: earned, held, forfeited."""

    submission_digest: Digest
    node: Address
    units: int
    amount: str
    earned_at: int
    status: str = "earned"


def add_credits(connection: Connection, rows: Sequence[CreditRow]) -> None:
    """Writes credits, unless their submission has one."""
    insert_all_new(connection, schema.credits, [vars(row) for row in rows])


def credits_of(connection: Connection, node: Address, statuses: Collection[str]) -> list[CreditRow]:
    """Returns a node's credits with one of these statuses."""
    query = sa.select(schema.credits).where(_credits.node == node, _credits.status.in_(statuses))
    return records(CreditRow, connection.execute(query).mappings().all())


def held_before(connection: Connection, since: float) -> int:
    """Returns the sum in wei of held credits for files received before `since` (Unix seconds)."""
    slashes = schema.slashes.c
    accused = sa.select(slashes.node).where(slashes.status.in_(("queued", "proposed")))
    query = sa.select(_credits.amount).where(
        _credits.node.in_(accused), _credits.status == "held", _credits.earned_at < since
    )
    return sum(int(amount) for amount in connection.execute(query).scalars())


def withheld_among(connection: Connection, nodes: Collection[Address]) -> set[Address]:
    """Returns the given nodes that have a credit held or forfeited, or a slash."""
    slashes = schema.slashes.c
    credited = sa.select(_credits.node).where(
        one_of(connection, _credits.node, nodes), _credits.status.in_(("held", "forfeited"))
    )
    slashed = sa.select(slashes.node).where(one_of(connection, slashes.node, nodes))
    found = connection.execute(credited.union(slashed)).scalars()
    return {Address(node) for node in found}


def set_credit_status(connection: Connection, submission: Digest, status: str) -> None:
    """Sets a credit to earned, held or forfeited."""
    mine = _credits.submission_digest == submission
    connection.execute(sa.update(schema.credits).where(mine).values(status=status))


def drop_credits(connection: Connection, submissions: Sequence[Digest]) -> None:
    """Deletes the credits of these submissions."""
    for start in range(0, len(submissions), _MAX_NAMES):
        some = _credits.submission_digest.in_(submissions[start : start + _MAX_NAMES])
        connection.execute(sa.delete(schema.credits).where(some))


def pending_units(connection: Connection, node: Address, settled: int) -> int:
    """Returns the units of `node`'s credits that no reward root up to epoch `settled` has
    decided."""
    submissions, roots = schema.submissions.c, schema.roots.c
    undecided = sa.or_(roots.epoch.is_(None), roots.epoch > settled, _credits.status == "held")
    query = (
        sa.select(sa.func.sum(_credits.units))
        .join(schema.submissions, submissions.digest == _credits.submission_digest)
        .outerjoin(schema.roots, roots.id == submissions.root_id)
        .where(_credits.node == node, _credits.status != "forfeited", undecided)
    )
    return int(connection.execute(query).scalar() or 0)


# ── reward roots ──


@dataclass(frozen=True)
class RewardRootRow:
    """One row of `reward_roots`; `cumulative_total` in wei, `object` names the settlement.
    `claimable_at` (Unix seconds) is None until the chain confirms the root."""

    epoch: int
    root: Digest
    cumulative_total: str
    object: Digest
    created_at: float
    claimable_at: int | None = None


def newest_root(connection: Connection, *, confirmed: bool = False) -> RewardRootRow | None:
    """Returns the reward root of the latest epoch, or the latest on chain if `confirmed`; None if
    there is none."""
    query = sa.select(schema.reward_roots).order_by(_roots.epoch.desc()).limit(1)
    if confirmed:
        query = query.where(_roots.claimable_at.is_not(None))
    return record(RewardRootRow, connection.execute(query).mappings().first())


def newest_claimable(connection: Connection, time: int) -> int:
    """Returns the latest epoch whose reward root could be claimed at `time` (Unix seconds), or
    −1."""
    query = sa.select(sa.func.max(_roots.epoch)).where(_roots.claimable_at <= time)
    found = connection.execute(query).scalar()
    return -1 if found is None else int(found)


def root_of(connection: Connection, epoch: int) -> RewardRootRow | None:
    """Returns an epoch's reward root, or None."""
    query = sa.select(schema.reward_roots).where(_roots.epoch == epoch)
    return record(RewardRootRow, connection.execute(query).mappings().first())


def confirmed_root(connection: Connection, settlement: Digest) -> RewardRootRow | None:
    """Returns the reward root on chain that names a settlement, or None."""
    query = sa.select(schema.reward_roots).where(
        _roots.object == settlement, _roots.claimable_at.is_not(None)
    )
    return record(RewardRootRow, connection.execute(query).mappings().first())


def add_root(connection: Connection, row: RewardRootRow) -> None:
    """Writes an epoch's reward root. Raises IntegrityError if it has one."""
    connection.execute(sa.insert(schema.reward_roots).values(**vars(row)))


def put_root(connection: Connection, row: RewardRootRow) -> None:
    """Writes an epoch's reward root, in place of the one that it has."""
    upsert(connection, schema.reward_roots, vars(row))


def drop_root(connection: Connection, epoch: int) -> None:
    """Deletes an epoch's reward root."""
    connection.execute(sa.delete(schema.reward_roots).where(_roots.epoch == epoch))
