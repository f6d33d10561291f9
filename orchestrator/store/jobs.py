"""Judging jobs: each submission is claimed by one validator at a time, for a limited time."""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy import Connection

from orchestrator.store import schema
from orchestrator.store.rows import insert_new, record
from protocol.core.ids import Address, Digest
from protocol.core.verdict import Reason

_jobs = schema.jobs.c


@dataclass(frozen=True)
class JobRow:
    """Status: ready, claimed, done, quarantined (tried too often). Times in Unix seconds.

    `attempts`: claims that were not given back by their holder; `abstentions`: those that were.
    A ready job's `claimed_by` is who abstained from it last.
    """

    submission_digest: Digest
    status: str
    claimed_by: str | None
    claimed_until: float | None
    attempts: int
    abstentions: int
    created_at: float
    not_before: float
    shadow: bool


def add(connection: Connection, submission: Digest, *, now: float, shadow: bool = False) -> bool:
    """Queues the judging of a submission; False if it is queued already. A shadow one is taken
    only when no other waits."""
    values = {
        "submission_digest": submission,
        "status": "ready",
        "attempts": 0,
        "abstentions": 0,
        "created_at": now,
        "not_before": 0.0,
        "shadow": shadow,
    }
    return insert_new(connection, schema.jobs, values)


def get(connection: Connection, submission: Digest) -> JobRow | None:
    """The job of a submission, or None."""
    query = sa.select(schema.jobs).where(_jobs.submission_digest == submission)
    return record(JobRow, connection.execute(query).mappings().first())


def claim(
    connection: Connection,
    worker: str,
    *,
    now: float,
    seconds: float,
    max_deaths: int = 3,
    validator: Address | None = None,
    lone_seconds: float | None = None,
    beside: Digest | None = None,
) -> JobRow | None:
    """Takes the oldest job that is ready, or whose claim has run out, for `seconds`.

    Files of which `validator` has given an opinion are left to others, but for those it accepted
    `lone_seconds` ago or longer and of which nobody else has said a word. With `beside`: only one
    of the same policy as that submission, that nobody has claimed in vain.

    A job from which `worker` itself abstained last waits for its `not_before`; others may take it
    at once. One whose claims ran out `max_deaths` times (its holders died) is quarantined.
    PostgreSQL skips rows that others are just taking (FOR UPDATE SKIP LOCKED); on SQLite the write
    transaction itself keeps others out. Every claim counts as one attempt until it is given back.
    """
    ran_out = sa.and_(_jobs.status == "claimed", _jobs.claimed_until < now)
    connection.execute(
        sa.update(schema.jobs)
        .where(ran_out, _jobs.attempts >= max_deaths)
        .values(status="quarantined", claimed_by=None, claimed_until=None)
    )
    free = _free(worker, now, validator, lone_seconds)
    if beside is not None:
        free = sa.and_(free, _jobs.attempts == 0, _of_same_policy(beside))
    oldest = (
        sa.select(_jobs.submission_digest)
        .where(free)
        .order_by(_jobs.shadow, _jobs.created_at, _jobs.submission_digest)
        .limit(1)
        .with_for_update(skip_locked=True)
    )
    submission = connection.execute(oldest).scalar()
    if submission is None:
        return None
    taken = connection.execute(
        sa.update(schema.jobs)
        .where(_jobs.submission_digest == submission, free)
        .values(
            status="claimed",
            claimed_by=worker,
            claimed_until=now + seconds,
            attempts=_jobs.attempts + 1,
        )
    )
    return get(connection, Digest(submission)) if taken.rowcount == 1 else None


def extend(
    connection: Connection, submission: Digest, worker: str, *, now: float, seconds: float
) -> bool:
    """Keeps a claim for `seconds` more. False if `worker` holds it no longer."""
    done = connection.execute(
        sa.update(schema.jobs).where(_held(submission, worker)).values(claimed_until=now + seconds)
    )
    return done.rowcount == 1


def finish(connection: Connection, submission: Digest, worker: str) -> bool:
    """Marks a claimed job done. False if `worker` holds it no longer: drop the verdict then."""
    done = connection.execute(
        sa.update(schema.jobs)
        .where(_held(submission, worker))
        .values(status="done", claimed_by=None, claimed_until=None)
    )
    return done.rowcount == 1


def give_back(
    connection: Connection,
    submission: Digest,
    worker: str,
    *,
    not_before: float,
    max_abstentions: int | None,
) -> bool:
    """Returns a job after an abstention: ready again, for `worker` itself from `not_before`, or
    quarantined after `max_abstentions`. With None nothing is counted: an outage on our side says
    nothing about the file. False if `worker` holds it no longer."""
    counted = 0 if max_abstentions is None else 1
    spent = _jobs.abstentions + 1 >= max_abstentions if max_abstentions is not None else sa.false()
    done = connection.execute(
        sa.update(schema.jobs)
        .where(_held(submission, worker))
        .values(
            status=sa.case((spent, "quarantined"), else_="ready"),
            claimed_until=None,
            attempts=_jobs.attempts - 1,
            abstentions=_jobs.abstentions + counted,
            not_before=not_before,
        )
    )
    return done.rowcount == 1


def counts(connection: Connection) -> dict[str, int]:
    """Number of jobs by status."""
    query = sa.select(_jobs.status, sa.func.count()).group_by(_jobs.status)
    return {status: int(n) for status, n in connection.execute(query)}


def waiting(
    connection: Connection,
    worker: str,
    *,
    now: float,
    validator: Address | None = None,
    lone_seconds: float | None = None,
) -> bool:
    """Whether `claim` would find a job: a look that takes no lock."""
    free = _free(worker, now, validator, lone_seconds)
    query = sa.select(_jobs.submission_digest).where(free).limit(1)
    return connection.execute(query).first() is not None


def hand_on(connection: Connection, submission: Digest, worker: str) -> bool:
    """Leaves a claimed job to another validator, after an opinion on it; nothing is counted. False
    if `worker` holds it no longer."""
    done = connection.execute(
        sa.update(schema.jobs)
        .where(_held(submission, worker))
        .values(status="ready", claimed_until=None, attempts=_jobs.attempts - 1, not_before=0.0)
    )
    return done.rowcount == 1


def reopen(connection: Connection, submission: Digest) -> bool:
    """Makes a done job ready again, as if nobody had tried it. False if it is not done."""
    done = connection.execute(
        sa.update(schema.jobs)
        .where(_jobs.submission_digest == submission, _jobs.status == "done")
        .values(status="ready", attempts=0, abstentions=0, not_before=0.0)
    )
    return done.rowcount == 1


def holds(connection: Connection, submission: Digest, worker: str) -> bool:
    """Whether `worker` holds the job; nobody else takes it until the transaction ends."""
    query = sa.select(_jobs.submission_digest).where(_held(submission, worker)).with_for_update()
    return connection.execute(query).first() is not None


def _free(
    worker: str, now: float, validator: Address | None, lone_seconds: float | None
) -> sa.ColumnElement[bool]:
    ready = _ready(worker, now)
    if validator is None:
        return ready
    opinions = schema.opinions.c
    of_it = opinions.submission_digest == _jobs.submission_digest
    given = sa.exists().where(of_it, opinions.validator == validator)
    mine = sa.not_(given)
    if lone_seconds is not None:
        accepted_long_ago = sa.exists().where(
            of_it,
            opinions.validator == validator,
            opinions.reason == int(Reason.NONE),
            opinions.at <= now - lone_seconds,
        )
        others = sa.exists().where(of_it, opinions.validator != validator)
        mine = sa.or_(mine, sa.and_(accepted_long_ago, sa.not_(others)))
    return sa.and_(ready, mine)


def _of_same_policy(submission: Digest) -> sa.ColumnElement[bool]:
    this, other = schema.submissions.alias().c, schema.submissions.alias().c
    version = sa.select(other.policy_version).where(other.digest == submission).scalar_subquery()
    return sa.exists().where(this.digest == _jobs.submission_digest, this.policy_version == version)


def _ready(worker: str, now: float) -> sa.ColumnElement[bool]:
    return sa.or_(
        sa.and_(
            _jobs.status == "ready",
            sa.or_(_jobs.not_before <= now, _jobs.claimed_by != worker),
        ),
        sa.and_(_jobs.status == "claimed", _jobs.claimed_until < now),
    )


def _held(submission: Digest, worker: str) -> sa.ColumnElement[bool]:
    return sa.and_(
        _jobs.submission_digest == submission,
        _jobs.status == "claimed",
        _jobs.claimed_by == worker,
    )
