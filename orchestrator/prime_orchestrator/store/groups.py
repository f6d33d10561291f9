"""Accepted groups: free for training, in a batch, or of an evaluation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy import Connection

from prime_core.batch import FreeGroup
from prime_core.ids import Address, Digest
from prime_orchestrator.store import schema
from prime_orchestrator.store.rows import insert_all_new, records

_groups = schema.groups.c
_targets = schema.batch_targets.c
HELD_OUT = -1
"""`batch_step` of the groups of an evaluation, which no batch ever takes."""


@dataclass(frozen=True)
class GroupRow:
    """`informative`: the rewards of the rows that are trained on are not all equal. `batch_step`
    None: still free; HELD_OUT: its problem is held out. `ungraded` of its `rows` have no reward."""

    submission_digest: Digest
    group_no: int
    policy_version: int
    rows: int
    informative: bool
    reward_micro_sum: int
    accepted_at: float
    batch_step: int | None = None
    ungraded: int = 0


def add(connection: Connection, rows: Iterable[GroupRow]) -> None:
    """Writes the groups of an accepted file; existing ones are left unchanged."""
    insert_all_new(connection, schema.groups, [vars(row) for row in rows])


def of(connection: Connection, among: Sequence[Digest]) -> dict[Digest, list[GroupRow]]:
    """Returns the groups of these submissions, ordered by number within each."""
    query = (
        sa.select(schema.groups)
        .where(_groups.submission_digest.in_(among))
        .order_by(_groups.submission_digest, _groups.group_no)
    )
    found: dict[Digest, list[GroupRow]] = defaultdict(list)
    for row in records(GroupRow, connection.execute(query).mappings().all()):
        found[row.submission_digest].append(row)
    return found


def free_counts(connection: Connection, *, oldest_version: int) -> list[tuple[int, int]]:
    """Returns (policy version, number) of the informative groups in no batch, made by policy
    `oldest_version` or later."""
    query = (
        sa.select(_groups.policy_version, sa.func.count())
        .where(
            _groups.batch_step.is_(None),
            _groups.informative.is_(True),
            _groups.policy_version >= oldest_version,
        )
        .group_by(_groups.policy_version)
        .order_by(_groups.policy_version)
    )
    return [(int(version), int(n)) for version, n in connection.execute(query)]


def take(connection: Connection, chosen: Sequence[tuple[Digest, int]], step: int) -> int:
    """Puts free groups into batch `step`, and counts its groups by target length; returns how many
    were still free."""
    taken = 0
    for submission, group_no in chosen:
        done = connection.execute(
            sa.update(schema.groups)
            .where(
                _groups.submission_digest == submission,
                _groups.group_no == group_no,
                _groups.batch_step.is_(None),
            )
            .values(batch_step=step)
        )
        taken += done.rowcount
    files, given = schema.submissions.c, schema.leases.c
    counted = (
        sa.select(_groups.batch_step, given.target, sa.func.count())
        .join(schema.submissions, files.digest == _groups.submission_digest)
        .join(schema.leases, given.digest == files.lease_digest)
        .where(_groups.batch_step == step)
        .group_by(_groups.batch_step, given.target)
    )
    connection.execute(sa.delete(schema.batch_targets).where(_targets.step == step))
    connection.execute(
        sa.insert(schema.batch_targets).from_select(["step", "target", "groups"], counted)
    )
    return taken


def by_target(connection: Connection, first_step: int, end: int) -> dict[int, int]:
    """Returns the number of groups in the batches first_step … end - 1, by target length."""
    query = (
        sa.select(_targets.target, sa.func.sum(_targets.groups))
        .where(_targets.step >= first_step, _targets.step < end)
        .group_by(_targets.target)
    )
    return {int(target): int(count) for target, count in connection.execute(query)}


@dataclass(frozen=True)
class RewardSums:
    """Sums over groups of their mean rewards, and of the squares of these."""

    groups: int
    total: float
    squares: float


def reward_sums(connection: Connection, newest: int) -> dict[tuple[int, bool], RewardSums]:
    """Returns the sums of the newest groups that may be trained on, at most `newest`, by target
    length and by whether their lease issued the groups of an expired one again."""
    submissions, leases = schema.submissions.c, schema.leases.c
    graded = _groups.rows - _groups.ungraded
    latest = (
        sa.select(
            _groups.submission_digest,
            (_groups.reward_micro_sum / (1e6 * graded)).label("mean"),
        )
        .where(graded > 0, _groups.batch_step.is_distinct_from(HELD_OUT))
        .order_by(_groups.accepted_at.desc())
        .limit(newest)
        .subquery()
    )
    # A bound parameter would make two expressions of it, which PostgreSQL refuses to group by.
    mean, again = latest.c.mean, leases.tries > sa.literal_column("0")
    query = (
        sa.select(
            leases.target, again, sa.func.count(), sa.func.sum(mean), sa.func.sum(mean * mean)
        )
        .select_from(latest)
        .join(schema.submissions, submissions.digest == latest.c.submission_digest)
        .join(schema.leases, leases.digest == submissions.lease_digest)
        .group_by(leases.target, again)
    )
    return {
        (int(target), bool(repeated)): RewardSums(int(count), float(total), float(squares))
        for target, repeated, count, total, squares in connection.execute(query)
    }


def may_fill(connection: Connection, least: int, *, step: int, max_staleness: int) -> bool:
    """Whether `free` may return at least `least` groups; False if there are certainly fewer."""
    some = sa.select(sa.literal(1)).where(*_fit(step, max_staleness)).limit(least).subquery()
    return (
        int(connection.execute(sa.select(sa.func.count()).select_from(some)).scalar_one()) >= least
    )


def _fit(step: int, max_staleness: int) -> tuple[sa.ColumnElement[bool], ...]:
    return (
        _groups.batch_step.is_(None),
        _groups.informative.is_(True),
        _groups.policy_version >= step - max_staleness,
        _groups.policy_version <= step,
    )


def free(
    connection: Connection, *, step: int, max_staleness: int, without: Collection[Address] = ()
) -> list[FreeGroup]:
    """Returns the informative groups of accepted files that no batch has taken and that are fresh
    at `step`, except those of the nodes in `without`."""
    files = schema.submissions.c
    query = (
        sa.select(
            *(_groups.submission_digest, _groups.group_no, _groups.policy_version, _groups.rows),
            *(_groups.informative, _groups.reward_micro_sum, _groups.accepted_at),
            _groups.ungraded,
            *(files.sha256, files.size, files.verdict_table.label("table")),
        )
        .join(schema.submissions, files.digest == _groups.submission_digest)
        .where(
            *_fit(step, max_staleness),
            files.status == "accepted",
            files.shadow.is_(False),
            files.node.not_in(without),
        )
    )
    return records(FreeGroup, connection.execute(query).mappings().all())


def drop_free(connection: Connection, submission: Digest) -> None:
    """Deletes a file's groups that no batch has taken, also those of an evaluation."""
    untrained = sa.or_(_groups.batch_step.is_(None), _groups.batch_step == HELD_OUT)
    connection.execute(
        sa.delete(schema.groups).where(_groups.submission_digest == submission, untrained)
    )


def drop(connection: Connection, submission: Digest) -> None:
    """Deletes all groups of a file."""
    connection.execute(sa.delete(schema.groups).where(_groups.submission_digest == submission))


def informative_share(connection: Connection, recent: int) -> tuple[int, int]:
    """Returns (informative, all) among the last `recent` accepted groups to train on."""
    last = (
        sa.select(_groups.informative)
        .where(sa.or_(_groups.batch_step.is_(None), _groups.batch_step != HELD_OUT))
        .order_by(_groups.accepted_at.desc(), _groups.submission_digest.desc())
        .limit(recent)
    )
    found = [bool(value) for value in connection.execute(last).scalars()]
    return sum(found), len(found)
