"""Evaluations of published policies on held-out problems, by the pool's nodes.

An evaluation asks the first `problems` held-out problems in blocks, one evaluation lease each. The
groups of accepted files are its results (`groups.HELD_OUT`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from prime_core.ids import Digest
from prime_core.messages import EvaluationInfo
from prime_core.run import MICRO
from prime_orchestrator.store import schema
from prime_orchestrator.store.rows import one_of, record, records
from prime_orchestrator.store.submissions import SubmissionRow

_evaluations = schema.evaluations.c
_RUNNING = (
    sa.select(schema.evaluations)
    .where(_evaluations.ended_at.is_(None))
    .order_by(_evaluations.id)
    .limit(1)
)
_leases = schema.leases.c
_files = schema.submissions.c
_groups = schema.groups.c

KEPT_SECONDS, FEW_PROBLEMS = 0.06, 100
"""For KeptInfos."""


@dataclass(frozen=True)
class EvaluationRow:
    """`problems`: how many it asks. Times in Unix seconds; `ended_at` None: it goes on. `archived`:
    see `keep_results`."""

    id: int
    policy_version: int
    problems: int
    started_at: float
    ended_at: float | None
    archived: str | None = None


@dataclass(frozen=True)
class BlockState:
    """The leases of one block. `taken`: one is open, awaits its verdict or was accepted. `failed`:
    how many ended without an accepted file."""

    taken: bool
    accepted: bool
    failed: int


@dataclass(frozen=True)
class ProblemResult:
    """The graded rows of accepted files of one held-out problem. `reward_micro_sum`: of all of
    them."""

    problem: int
    rows: int
    reward_micro_sum: int


def start(connection: Connection, policy_version: int, problems: int, *, now: float) -> int:
    """Writes a new evaluation and returns its id."""
    made = connection.execute(
        sa.insert(schema.evaluations).values(
            policy_version=policy_version, problems=problems, started_at=now
        )
    )
    (number,) = made.inserted_primary_key or (None,)
    assert isinstance(number, int)
    return number


def get(connection: Connection, number: int) -> EvaluationRow | None:
    """Returns the evaluation, or None."""
    query = sa.select(schema.evaluations).where(_evaluations.id == number)
    return record(EvaluationRow, connection.execute(query).mappings().first())


def newest(connection: Connection, limit: int) -> list[EvaluationRow]:
    """Returns `limit` evaluations, newest first: those that go on, and the newest others."""
    chosen = (_evaluations.ended_at.is_not(None), _evaluations.id.desc())
    query = sa.select(schema.evaluations).order_by(*chosen).limit(limit)
    found = records(EvaluationRow, connection.execute(query).mappings().all())
    return sorted(found, key=lambda row: -row.id)


def running(connection: Connection) -> EvaluationRow | None:
    """Returns the oldest evaluation that has not ended, or None."""
    return record(EvaluationRow, connection.execute(_RUNNING).mappings().first())


def end(connection: Connection, number: int, *, now: float) -> None:
    """Ends an evaluation that goes on; it gets no more leases."""
    connection.execute(
        sa.update(schema.evaluations)
        .where(_evaluations.id == number, _evaluations.ended_at.is_(None))
        .values(ended_at=now)
    )


def blocks(connection: Connection, number: int) -> dict[int, BlockState]:
    """Returns the state of each block that had a lease, by its first held-out problem."""
    accepted = _files.status == "accepted"
    taken = sa.or_(_leases.status == "open", _files.status == "submitted", accepted)

    def number_of(condition: sa.ColumnElement[bool]) -> sa.ColumnElement[int]:
        return sa.func.sum(sa.case((condition, 1), else_=0))

    query = (
        sa.select(_leases.heldout, number_of(taken), number_of(accepted), sa.func.count())
        .outerjoin(schema.submissions, _files.lease_digest == _leases.digest)
        .where(_leases.evaluation == number)
        .group_by(_leases.heldout)
    )
    return {
        int(first): BlockState(bool(held), bool(done), int(every) - int(held))
        for first, held, done, every in connection.execute(query)
    }


def given_since(connection: Connection, since: float) -> tuple[int, int]:
    """Returns how many paid leases were issued at `since` or later: (evaluation, others)."""
    query = (
        sa.select(_leases.evaluation.is_not(None), sa.func.count())
        .where(_leases.created_at >= since, _leases.shadow.is_(False))
        .group_by(_leases.evaluation.is_not(None))
    )
    found = {bool(evaluation): int(count) for evaluation, count in connection.execute(query)}
    return found.get(True, 0), found.get(False, 0)


def held_out(connection: Connection, lease_digests: Collection[Digest]) -> set[Digest]:
    """Returns the given leases that belong to an evaluation."""
    query = sa.select(_leases.digest).where(
        one_of(connection, _leases.digest, lease_digests), _leases.evaluation.is_not(None)
    )
    return {Digest(one) for one in connection.execute(query).scalars()}


def results(connection: Connection, number: int, problems: int) -> list[ProblemResult]:
    """Returns the results of the first `problems` held-out problems, in order. The last block may
    ask more of them."""
    query = _results().where(_leases.evaluation == number)
    found = [ProblemResult(*map(int, row[2:])) for row in connection.execute(query)]
    for own in _archived(connection, number).values():
        found += [ProblemResult(*one) for one in own]
    return sorted((one for one in found if one.problem < problems), key=lambda one: one.problem)


def _results() -> sa.Select[Any]:
    """The results of accepted files: evaluation, submission, problem, graded rows, sum of
    rewards. Problems without a graded row are left out."""
    problem, graded = _leases.heldout + _groups.group_no, _groups.rows - _groups.ungraded
    return (
        sa.select(_leases.evaluation, _files.digest, problem, graded, _groups.reward_micro_sum)
        .join_from(schema.groups, schema.submissions, _files.digest == _groups.submission_digest)
        .join(schema.leases, _leases.digest == _files.lease_digest)
        .where(_files.status == "accepted", graded > 0)
        .order_by(problem)
    )


def _archived(connection: Connection, number: int) -> dict[Digest, list[list[int]]]:
    query = sa.select(_evaluations.archived).where(_evaluations.id == number)
    found: dict[Digest, list[list[int]]] = json.loads(connection.execute(query).scalar() or "{}")
    return found


def archived(connection: Connection, number: int) -> list[Digest]:
    """Returns the archived accepted files of an evaluation, in the order of the archive."""
    return list(_archived(connection, number))


def keep_results(connection: Connection, names: Collection[Digest]) -> None:
    """Writes the results of these files, which are about to be archived, to their evaluations: by
    submission, lists of problem, rows and sum of rewards. One caller at a time."""
    query = _results().where(
        one_of(connection, _files.digest, names), _leases.evaluation.is_not(None)
    )
    found: dict[int, dict[Digest, list[list[int]]]] = {}
    for number, file, *result in connection.execute(query):
        own = found.setdefault(number, {name: [] for name in names})
        own[Digest(file)].append([int(value) for value in result])
    for number, own in found.items():
        known = _archived(connection, number) | {name: one for name, one in own.items() if one}
        connection.execute(
            sa.update(schema.evaluations)
            .where(_evaluations.id == number)
            .values(archived=json.dumps(known, separators=(",", ":")))
        )


def accepted(connection: Connection, number: int) -> list[SubmissionRow]:
    """Returns the accepted files of an evaluation that are not archived, by their first held-out
    problem."""
    query = (
        sa.select(schema.submissions)
        .join(schema.leases, _leases.digest == _files.lease_digest)
        .where(_leases.evaluation == number, _files.status == "accepted")
        .order_by(_leases.heldout, _files.digest)
    )
    return records(SubmissionRow, connection.execute(query).mappings().all())


def info(connection: Connection, row: EvaluationRow) -> EvaluationInfo:
    """Returns an evaluation with the results of its accepted files."""
    found = results(connection, row.id, row.problems)
    means = [one.reward_micro_sum / one.rows / MICRO for one in found]
    return EvaluationInfo(
        id=row.id,
        policy_version=row.policy_version,
        problems=row.problems,
        answered=len(found),
        rows=sum(one.rows for one in found),
        reward=fmean(means) if means else None,
        interval=1.96 * stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None,
        started_at=int(row.started_at),
        ended_at=None if row.ended_at is None else int(row.ended_at),
    )


class KeptInfos:
    """Caches what ended evaluations of more than FEW_PROBLEMS problems showed, for KEPT_SECONDS a
    problem: a file of theirs may still be judged, and an accepted one withdrawn. Reading one of
    1,000 problems takes 0.1 s of CPU time, and the status shows 20. Threads may share them."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[EvaluationInfo, float]] = {}

    def of(self, connection: Connection, row: EvaluationRow, now: float) -> EvaluationInfo:
        """Returns `info`; of an ended evaluation it may be older. `now` in Unix seconds."""
        kept = self._kept.get(row.id)
        if kept is not None and 0 <= now - kept[1] < KEPT_SECONDS * row.problems:
            return kept[0]
        found = info(connection, row)
        if row.ended_at is not None and row.problems > FEW_PROBLEMS:
            self._kept[row.id] = found, now
        return found
