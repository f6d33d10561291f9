"""Work roots: which root lists which submission, and what the chain says of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy import Connection

from prime_core import encoding
from prime_core.ids import ZERO_DIGEST, Address, Digest
from prime_orchestrator.store import schema
from prime_orchestrator.store.chain import EventRow
from prime_orchestrator.store.rows import record, records

_roots = schema.roots.c
_submissions = schema.submissions.c
_AT_ONCE = 10_000


@dataclass(frozen=True)
class RootRow:
    """One row of `roots`. The last four are None until the chain confirms the root; `posted_at` is
    its block's time, `epoch` follows from it."""

    id: int
    root: Digest
    leaves_object: Digest
    count: int
    created_at: float
    chain_seq: int | None
    epoch: int | None
    posted_at: int | None
    block: int | None


def add(
    connection: Connection,
    root: Digest,
    leaves_object: Digest,
    submissions: Sequence[Digest],
    *,
    now: float,
) -> bool:
    """Writes a root over `submissions`, its leaves in order. Returns False, and writes nothing, if
    one of them has a root already. The caller holds the lock "chain"."""
    free = sa.select(sa.func.count()).where(
        _submissions.digest.in_(submissions), _submissions.root_id.is_(None)
    )
    if connection.execute(free).scalar_one() != len(submissions):
        return False
    made = sa.insert(schema.roots).returning(_roots.id)
    values = {"root": root, "leaves_object": leaves_object, "count": len(submissions)}
    key = connection.execute(made.values(**values, created_at=now)).scalar_one()
    connection.execute(
        sa.update(schema.submissions)
        .where(_submissions.digest == sa.bindparam("leaf"))
        .values(root_id=key, leaf_index=sa.bindparam("index")),
        [{"leaf": digest, "index": index} for index, digest in enumerate(submissions)],
    )
    return True


def get(connection: Connection, root: Digest) -> RootRow | None:
    """Returns a root, or None."""
    query = sa.select(schema.roots).where(_roots.root == root)
    return record(RootRow, connection.execute(query).mappings().first())


def of(connection: Connection, submission: Digest) -> RootRow | None:
    """Returns the root that lists a submission, or None."""
    query = (
        sa.select(schema.roots)
        .join(schema.submissions, _submissions.root_id == _roots.id)
        .where(_submissions.digest == submission)
    )
    return record(RootRow, connection.execute(query).mappings().first())


def confirmed_among(connection: Connection, ids: Collection[int]) -> dict[int, Digest]:
    """Returns those of the roots, by id, that are on chain."""
    query = sa.select(_roots.id, _roots.root).where(
        _roots.id.in_(ids), _roots.chain_seq.is_not(None)
    )
    return {row.id: Digest(row.root) for row in connection.execute(query)}


def proof_of(connection: Connection, submission: Digest) -> tuple[int, list[Digest]] | None:
    """Returns the sequence number of the confirmed root that holds `submission`, and its Merkle
    proof; None while no such root is confirmed, and once files of the root are archived: then no
    proof of it is due any more."""
    root = of(connection, submission)
    if root is None or root.chain_seq is None:
        return None
    leaves = [
        Digest(leaf)
        for leaf in connection.execute(
            sa.select(_submissions.digest)
            .where(_submissions.root_id == root.id)
            .order_by(_submissions.leaf_index)
        ).scalars()
    ]
    if len(leaves) != root.count:
        return None
    return root.chain_seq, encoding.merkle_proof(leaves, leaves.index(submission))


def set_posted(connection: Connection, root: Digest, posted: EventRow | None) -> None:
    """Writes what a RootPosted says of a root; None: it is not on chain."""
    args = {} if posted is None else posted.arguments()
    values = {
        "chain_seq": args.get("seq"),
        "epoch": args.get("epoch"),
        "posted_at": posted and posted.block_time,
        "block": posted and posted.block,
    }
    connection.execute(sa.update(schema.roots).where(_roots.root == root).values(**values))


def drop_leaf(connection: Connection, leaf: Digest) -> None:
    """Deletes the root over one leaf that its node posted, so that the leaf may be rooted again."""
    posted = sa.and_(_roots.root == leaf, _roots.leaves_object == ZERO_DIGEST)
    connection.execute(
        sa.update(schema.submissions)
        .where(_submissions.root_id.in_(sa.select(_roots.id).where(posted)))
        .values(root_id=None, leaf_index=None)
    )
    connection.execute(sa.delete(schema.roots).where(posted))


# ── what settlements read ──


def unknown(connection: Connection) -> list[tuple[int, int]]:
    """Returns (number, epoch) of the manager's roots that are on chain and not in this store, as
    after the restore of a backup that was made before them."""
    known = sa.exists().where(
        _roots.root == schema.chain_events.c.subject, _roots.chain_seq.is_not(None)
    )
    query = sa.select(schema.chain_events).where(schema.chain_events.c.name == "RootPosted", ~known)
    found = records(EventRow, connection.execute(query).mappings().all())
    args = [event.arguments() for event in found]
    return [(one["seq"], one["epoch"]) for one in args if one["leaves_object"] != ZERO_DIGEST]


def first_epoch(connection: Connection, after: int, until: int) -> int | None:
    """Returns the first epoch with a confirmed root, from after + 1 to `until`; None if there is
    none."""
    query = sa.select(sa.func.min(_roots.epoch)).where(
        _roots.chain_seq.is_not(None), _roots.epoch > after, _roots.epoch <= until
    )
    return connection.execute(query).scalar()


class RootedFile(NamedTuple):
    """What a settlement reads of a file: columns of its submission, then the number of its root on
    chain and that root's block time (None if it is not confirmed). `body`: None unless `leaves`
    was asked for it."""

    digest: Digest
    node: Address
    step: int
    body: str | None
    receipt: str
    verdict: Digest | None
    units: int
    prompt_units: int
    root_seq: int | None
    posted_at: int | None


def leaves(
    connection: Connection, after: int, until: int, names: Collection[Digest], late: int
) -> Iterator[RootedFile]:
    """Yields the leaves of confirmed roots of the epochs after + 1 to `until`, and the files
    `names`, whose root may not be confirmed. With the bodies of `names` and of files that were
    received `late` seconds or more before their root: unpacking one takes longer than the rest."""
    one = _submissions
    asked = sa.or_(one.digest.in_(names), _roots.posted_at - one.received_at >= late)
    columns: list[sa.ColumnElement[Any]] = [
        *(one.digest, one.node, one.step, sa.case((asked, one.body)).label("body")),
        *(one.receipt, one.verdict),
        *(one.units, one.prompt_units, _roots.chain_seq, _roots.posted_at),
    ]
    query = (
        sa.select(*columns)
        .outerjoin(schema.roots, _roots.id == _submissions.root_id)
        .where(
            sa.or_(
                sa.and_(_roots.chain_seq.is_not(None), _roots.epoch.between(after + 1, until)),
                _submissions.digest.in_(names),
            ),
        )
        .execution_options(yield_per=_AT_ONCE)
    )
    for row in connection.execute(query):
        yield RootedFile(*row)
