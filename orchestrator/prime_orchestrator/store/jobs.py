"""Judging jobs and their assignments: files are assigned to validators, never chosen by them.

job         open ─► full (every opinion it needs is submitted) ─► done, or open again
assignment  assigned ─► claimed ─► sealed ─► given
                      └► assigned (later) └► missed (silent for too long)
                      └► abstained: the validator never gets this file again
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy import Connection

from prime_core.ids import Address, Digest
from prime_orchestrator.store import schema
from prime_orchestrator.store.rows import (
    by_number,
    insert_all_new,
    one_of,
    record,
    records,
    update_each,
    upsert_all,
)

_jobs = schema.jobs.c
_work = schema.assignments.c
_validators = schema.validators.c
ACTIVE = ("assigned", "claimed", "sealed", "given")
"""Statuses of assignments that lead to an opinion."""
SEALED = ("sealed", "given")
AT_RANDOM = 8
"""One search for jobs in this many also looks at random ones (`short`)."""


@dataclass(frozen=True)
class JobRow:
    """Status: open, full (to be decided), done, quarantined (no validator is left). `needed`
    opinions are sealed before any is submitted; None: not decided yet."""

    submission_digest: Digest
    status: str
    needed: int | None
    assigned: int
    whole: bool
    created_at: float
    shadow: bool

    @property
    def short(self) -> bool:
        """Whether the job is open and lacks a validator."""
        return self.status == "open" and (self.needed is None or self.assigned < self.needed)


@dataclass(frozen=True)
class AssignmentRow:
    """One validator's assignment of one file; see the top of this module. Times in Unix seconds."""

    submission_digest: Digest
    validator: Address
    status: str
    worker: str | None
    until: float
    not_before: float
    attempts: int
    delays: int
    seal: Digest | None
    at: float


# ── jobs ──


def add(connection: Connection, given: Mapping[Digest, bool], *, now: float) -> None:
    """Queues the judging of submissions, each with whether it is a shadow one; those that are
    queued already stay as they are. Shadow submissions come after all others."""
    rows = [
        {
            "submission_digest": submission,
            "status": "open",
            "needed": None,
            "assigned": 0,
            "whole": False,
            "created_at": now,
            "shadow": shadow,
        }
        for submission, shadow in given.items()
    ]
    insert_all_new(connection, schema.jobs, rows)


def get(connection: Connection, submission: Digest) -> JobRow | None:
    """Returns the job of a submission, or None."""
    query = sa.select(schema.jobs).where(_jobs.submission_digest == submission)
    return record(JobRow, connection.execute(query).mappings().first())


def lock_row(connection: Connection, submission: Digest) -> JobRow | None:
    """Returns the job; no one else can change it until the transaction ends."""
    query = sa.select(schema.jobs).where(_jobs.submission_digest == submission).with_for_update()
    return record(JobRow, connection.execute(query).mappings().first())


def those(connection: Connection, submissions: Collection[Digest]) -> dict[Digest, JobRow]:
    """Returns the jobs by submission, without submissions that have none."""
    mine = one_of(connection, _jobs.submission_digest, submissions)
    query = sa.select(schema.jobs).where(mine)
    rows = records(JobRow, connection.execute(query).mappings().all())
    return {row.submission_digest: row for row in rows}


def lock_rows(connection: Connection, submissions: Collection[Digest]) -> dict[Digest, JobRow]:
    """Like `lock_row`, for several jobs. The caller holds the lock "assignments" if there is more
    than one."""
    query = (
        sa.select(schema.jobs)
        .where(one_of(connection, _jobs.submission_digest, submissions))
        .with_for_update()
    )
    rows = records(JobRow, connection.execute(query).mappings().all())
    return {row.submission_digest: row for row in rows}


def lock_free(connection: Connection, submissions: Collection[Digest]) -> dict[Digest, JobRow]:
    """Like `lock_row` for several jobs, but only those that no other transaction holds; never
    waits."""
    query = (
        sa.select(schema.jobs)
        .where(one_of(connection, _jobs.submission_digest, submissions))
        .with_for_update(skip_locked=True)
    )
    rows = records(JobRow, connection.execute(query).mappings().all())
    return {row.submission_digest: row for row in rows}


def set_full(connection: Connection, submissions: Collection[Digest]) -> None:
    """Marks the open jobs of files that have all needed opinions."""
    if submissions:
        named = one_of(connection, _jobs.submission_digest, submissions)
        connection.execute(
            sa.update(schema.jobs).where(named, _jobs.status == "open").values(status="full")
        )


def finish(connection: Connection, submissions: Collection[Digest]) -> None:
    """Ends the jobs of files that got a verdict."""
    named = one_of(connection, _jobs.submission_digest, submissions)
    connection.execute(sa.update(schema.jobs).where(named).values(status="done"))


def change(connection: Connection, submission: Digest, **values: object) -> None:
    """Sets columns of a job."""
    connection.execute(
        sa.update(schema.jobs).where(_jobs.submission_digest == submission).values(**values)
    )


def set_needed(connection: Connection, rows: Sequence[JobRow]) -> None:
    """Writes how many opinions each of these jobs needs."""
    update_each(connection, schema.jobs, rows, ("needed",))


def full(connection: Connection, limit: int) -> list[Digest]:
    """Returns submissions with all needed opinions, oldest first."""
    query = (
        sa.select(_jobs.submission_digest)
        .where(_jobs.status == "full")
        .order_by(_jobs.created_at, _jobs.submission_digest)
        .limit(limit)
    )
    return [Digest(name) for name in connection.execute(query).scalars()]


def late_reviews(connection: Connection, rooted_before: float) -> list[Digest]:
    """Returns the accepted files whose jobs wait for a validator although their root was put on
    chain before then (Unix seconds)."""
    files, roots = schema.submissions.c, schema.roots.c
    query = (
        sa.select(_jobs.submission_digest)
        .join(schema.submissions, files.digest == _jobs.submission_digest)
        .join(schema.roots, roots.id == files.root_id)
        .where(
            _jobs.status.in_(("open", "quarantined")),
            files.status == "accepted",
            roots.posted_at < rooted_before,
        )
    )
    return [Digest(digest) for digest in connection.execute(query).scalars()]


def short(
    connection: Connection,
    limit: int,
    able: Collection[Address] | None = None,
    but: Collection[Digest] = (),
) -> list[JobRow]:
    """Returns open jobs that lack a validator.

    First up to `limit` that one of `able` (None: any validator) has not had yet, except those of
    `but`: the oldest first, shadow ones last. Then up to `limit` of all at random, so that files
    that wait for absent validators are seen without delaying others. Sorting all open jobs takes
    the longer the more there are, so with `limit` jobs found it is done in one call of AT_RANDOM.
    """
    lacking = sa.select(schema.jobs).where(
        _jobs.status == "open",
        sa.or_(_jobs.needed.is_(None), _jobs.assigned < _jobs.needed),
    )
    oldest = lacking.order_by(_jobs.shadow, _jobs.created_at, _jobs.submission_digest)
    if able is not None:
        had = sa.select(sa.func.count()).where(
            _work.submission_digest == _jobs.submission_digest,
            _work.validator.in_(list(able)),
            _work.status != "missed",
        )
        oldest = oldest.where(had.scalar_subquery() < len(able))
    if but:
        oldest = oldest.where(_jobs.submission_digest.not_in(list(but)))
    rows = records(JobRow, connection.execute(oldest.limit(limit)).mappings().all())
    if len(rows) < limit or secrets.randbelow(AT_RANDOM) == 0:
        any_of_them = lacking.order_by(sa.func.random()).limit(limit)
        rows += records(JobRow, connection.execute(any_of_them).mappings().all())
    return list({row.submission_digest: row for row in rows}.values())


def reopen(connection: Connection, submission: Digest) -> bool:
    """Reopens a done job as if it had not been judged. Returns False if it is not done."""
    done = connection.execute(
        sa.update(schema.jobs)
        .where(_jobs.submission_digest == submission, _jobs.status == "done")
        .values(status="open")
    )
    if done.rowcount:
        start_over(connection, submission)
    return done.rowcount == 1


def start_over(connection: Connection, submission: Digest) -> None:
    """Lets any validator judge an open file again, replaying every row."""
    connection.execute(sa.delete(schema.assignments).where(_work.submission_digest == submission))
    change(connection, submission, needed=1, assigned=0, whole=True)


def counts(connection: Connection) -> dict[str, int]:
    """Returns the number of jobs that are not done, by status."""
    waiting = _jobs.status.in_(("open", "full", "quarantined"))
    query = sa.select(_jobs.status, sa.func.count()).where(waiting).group_by(_jobs.status)
    return {status: int(n) for status, n in connection.execute(query)}


# ── validators that ask for work ──


def note_validators(connection: Connection, validators: Collection[Address], now: float) -> None:
    """Records that validators asked for work."""
    rows = [{"address": one, "seen_at": now} for one in sorted(validators)]
    upsert_all(connection, schema.validators, rows)


def seen_since(
    connection: Connection, validators: Collection[Address], since: float
) -> set[Address]:
    """Returns the given validators that asked for work after `since`."""
    query = sa.select(_validators.address).where(
        _validators.address.in_(list(validators)), _validators.seen_at > since
    )
    return {Address(name) for name in connection.execute(query).scalars()}


def live(connection: Connection, since: float) -> set[Address]:
    """Returns the validators that asked for work at `since` or later."""
    query = sa.select(_validators.address).where(_validators.seen_at >= since)
    return {Address(name) for name in connection.execute(query).scalars()}


# ── assignments ──


def assign(connection: Connection, given: Sequence[tuple[Digest, Address]], *, now: float) -> None:
    """Assigns files to validators that have not abstained from them."""
    rows = [
        {
            "submission_digest": submission,
            "validator": validator,
            "status": "assigned",
            "worker": None,
            "until": now,
            "not_before": 0.0,
            "attempts": 0,
            "delays": 0,
            "seal": None,
            "at": now,
        }
        for submission, validator in given
    ]
    upsert_all(connection, schema.assignments, rows)
    for number, some in by_number(submission for submission, _ in given).items():
        mine = one_of(connection, _jobs.submission_digest, some)
        statement = sa.update(schema.jobs).where(mine)
        connection.execute(statement.values(assigned=_jobs.assigned + number))


def assignment(
    connection: Connection, submission: Digest, validator: Address
) -> AssignmentRow | None:
    """Returns a validator's assignment of a file, or None."""
    query = sa.select(schema.assignments).where(
        _work.submission_digest == submission, _work.validator == validator
    )
    return record(AssignmentRow, connection.execute(query).mappings().first())


def assignments(connection: Connection, submission: Digest) -> list[AssignmentRow]:
    """Returns all assignments of a file, by validator address."""
    query = (
        sa.select(schema.assignments)
        .where(_work.submission_digest == submission)
        .order_by(_work.validator)
    )
    return records(AssignmentRow, connection.execute(query).mappings().all())


def assignments_among(
    connection: Connection, submissions: Collection[Digest]
) -> dict[Digest, list[AssignmentRow]]:
    """Returns all assignments by file, without files that have none."""
    mine = one_of(connection, _work.submission_digest, submissions)
    query = sa.select(schema.assignments).where(mine)
    found: dict[Digest, list[AssignmentRow]] = {}
    for row in records(AssignmentRow, connection.execute(query).mappings().all()):
        found.setdefault(row.submission_digest, []).append(row)
    return found


def load_of(connection: Connection) -> dict[Address, int]:
    """Returns how many files each validator still has to judge."""
    query = (
        sa.select(_work.validator, sa.func.count())
        .where(_work.status.in_(("assigned", "claimed")))
        .group_by(_work.validator)
    )
    return {Address(name): int(number) for name, number in connection.execute(query)}


def set_assignment(
    connection: Connection, submission: Digest, validator: Address, **values: object
) -> None:
    """Sets columns of an assignment."""
    connection.execute(
        sa.update(schema.assignments)
        .where(_work.submission_digest == submission, _work.validator == validator)
        .values(**values)
    )


def set_assignments(connection: Connection, rows: Sequence[AssignmentRow]) -> None:
    """Writes status, seal and times of assignments. The caller has locked their jobs."""
    update_each(connection, schema.assignments, rows, ("status", "seal", "until", "at"))


def end_assignment(
    connection: Connection, submission: Digest, validator: Address, status: str, *, now: float
) -> None:
    """Ends an active assignment without an opinion: "abstained" or "missed"."""
    done = connection.execute(
        sa.update(schema.assignments)
        .where(
            _work.submission_digest == submission,
            _work.validator == validator,
            _work.status.in_(ACTIVE),
        )
        .values(status=status, worker=None, seal=None, at=now)
    )
    if done.rowcount:
        connection.execute(
            sa.update(schema.jobs)
            .where(_jobs.submission_digest == submission)
            .values(assigned=_jobs.assigned - 1)
        )


def abstaining(connection: Connection, least: int) -> set[Address]:
    """Returns the validators with at least `least` abstentions, ever."""
    query = (
        sa.select(_work.validator)
        .where(_work.status == "abstained")
        .group_by(_work.validator)
        .having(sa.func.count() >= least)
    )
    return {Address(name) for name in connection.execute(query).scalars()}


def latest_files(
    connection: Connection, validator: Address, since: float, limit: int
) -> tuple[int, int]:
    """Returns (abstentions, all) of the validator's newest assignments that ended with an opinion
    or an abstention at `since` or later, of files on which someone gave an opinion."""
    judged = sa.exists().where(schema.opinions.c.submission_digest == _work.submission_digest)
    newest = (
        sa.select(_work.status)
        .where(
            _work.validator == validator,
            _work.status.in_(("given", "abstained")),
            _work.at >= since,
            judged,
        )
        .order_by(_work.at.desc())
        .limit(limit)
        .subquery()
    )
    number = sa.func.count()
    query = sa.select(newest.c.status, number).group_by(newest.c.status)
    counts = {status: int(files) for status, files in connection.execute(query)}
    return counts.get("abstained", 0), sum(counts.values())


def overdue(connection: Connection, now: float) -> list[AssignmentRow]:
    """Returns assignments of open jobs whose time is over."""
    query = (
        sa.select(schema.assignments)
        .join(schema.jobs, _jobs.submission_digest == _work.submission_digest)
        .where(
            _work.status.in_(("assigned", "claimed", "sealed")),
            _work.until < now,
            _jobs.status == "open",
        )
    )
    return records(AssignmentRow, connection.execute(query).mappings().all())


@dataclass(frozen=True)
class Wish:
    """A request for up to `most` files; `worker` names the validator's process."""

    validator: Address
    worker: str
    most: int


def take(
    connection: Connection, wishes: Sequence[Wish], *, now: float, until: float
) -> list[list[Digest]]:
    """Claims, for each wish, the validator's oldest file and up to `most` − 1 more of the same
    policy; returns them. A file whose last claim timed out is judged alone."""
    submissions = schema.submissions.c
    waiting = (
        sa.select(
            _work.validator,
            _work.submission_digest,
            _work.attempts,
            _work.status,
            submissions.policy_version,
        )
        .join(schema.jobs, _jobs.submission_digest == _work.submission_digest)
        .join(schema.submissions, submissions.digest == _work.submission_digest)
        .where(_to_do({wish.validator for wish in wishes}, now))
        .order_by(_jobs.shadow, _jobs.created_at, _work.submission_digest)
    )
    free: dict[Address, list[_Free]] = {}
    for row in connection.execute(waiting):
        tried = row.attempts + (row.status == "claimed")
        file = _Free(Digest(row.submission_digest), row.policy_version, tried)
        free.setdefault(Address(row.validator), []).append(file)
    found = []
    for wish in wishes:
        taken = _together(free.get(wish.validator, []), wish.most)
        found.append([file.submission for file in taken])
        if not taken:
            continue
        free[wish.validator] = [file for file in free[wish.validator] if file not in taken]
        taken_now = one_of(connection, _work.submission_digest, found[-1])
        mine = sa.and_(taken_now, _work.validator == wish.validator)
        claimed = {"status": "claimed", "worker": wish.worker, "until": until, "at": now}
        connection.execute(
            sa.update(schema.assignments).where(mine).values(**claimed, attempts=taken[0].attempts)
        )
    return found


@dataclass(frozen=True)
class _Free:
    """A file that its validator can claim. `attempts`: claims that timed out."""

    submission: Digest
    policy_version: int
    attempts: int


def _together(free: Sequence[_Free], most: int) -> list[_Free]:
    """Returns the files, of one validator's in their order, that it judges together."""
    first = free[:1]
    if not first or first[0].attempts:
        return list(first)
    policy = first[0].policy_version
    return [file for file in free if file.policy_version == policy and not file.attempts][:most]


def postpone(
    connection: Connection,
    submissions: Collection[Digest],
    validator: Address,
    *,
    claimed_at: float,
    until: float,
) -> None:
    """Gives back claims that the validator made at `claimed_at`; it may claim the files again from
    `until` on."""
    connection.execute(
        sa.update(schema.assignments)
        .where(
            _work.submission_digest.in_(list(submissions)),
            _work.validator == validator,
            _work.status == "claimed",
            _work.at == claimed_at,
        )
        .values(status="assigned", worker=None, not_before=until, until=until)
    )


def waits_for(connection: Connection, validators: Collection[Address], now: float) -> bool:
    """Whether `take` would find a file for any of the validators."""
    query = (
        sa.select(_work.submission_digest)
        .join(schema.jobs, _jobs.submission_digest == _work.submission_digest)
        .where(_to_do(validators, now))
        .limit(1)
    )
    return connection.execute(query).first() is not None


def to_reveal(
    connection: Connection, validators: Collection[Address], limit: int
) -> dict[Address, list[Digest]]:
    """Returns, by validator, the files on which it and all others that are needed have sealed an
    opinion: the oldest, up to `limit` each. Validators without such a file are omitted."""
    other = schema.assignments.alias().c
    sealed = (
        sa.select(sa.func.count())
        .where(
            other.submission_digest == _work.submission_digest,
            other.status.in_(SEALED),
        )
        .scalar_subquery()
    )
    age = (_work.at, _work.submission_digest)
    due = (
        sa.select(
            _work.validator,
            _work.submission_digest,
            sa.func.row_number().over(partition_by=_work.validator, order_by=age).label("number"),
        )
        .join(schema.jobs, _jobs.submission_digest == _work.submission_digest)
        .where(
            _work.validator.in_(list(validators)),
            _work.status == "sealed",
            _jobs.status == "open",
            sealed >= _jobs.needed,
        )
        .subquery()
    )
    query = sa.select(due).where(due.c.number <= limit).order_by(due.c.number)
    found: dict[Address, list[Digest]] = {}
    for row in connection.execute(query):
        found.setdefault(Address(row.validator), []).append(Digest(row.submission_digest))
    return found


def keep(
    connection: Connection,
    validator: Address,
    worker: str,
    submissions: Collection[Digest],
    *,
    claimed_since: float,
    until: float,
) -> None:
    """Extends the listed claims that the worker made from `claimed_since` on and still holds."""
    connection.execute(
        sa.update(schema.assignments)
        .where(
            _work.validator == validator,
            _work.worker == worker,
            _work.status == "claimed",
            _work.at >= claimed_since,
            _work.submission_digest.in_(list(submissions)),
        )
        .values(until=until)
    )


def _to_do(validators: Collection[Address], now: float) -> sa.ColumnElement[bool]:
    return sa.and_(
        _work.validator.in_(list(validators)),
        _jobs.status == "open",
        sa.or_(
            sa.and_(_work.status == "assigned", _work.not_before <= now),
            sa.and_(_work.status == "claimed", _work.until < now),
        ),
    )
