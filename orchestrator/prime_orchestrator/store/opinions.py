"""Validators' opinions on files, one row each, and which files were planted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy import Connection

from prime_core.ids import Address, Digest
from prime_core.verdict import Outcome, Reason, SignedOpinion
from prime_orchestrator.store import schema
from prime_orchestrator.store.rows import insert_new, records

HONEST = "honest"
"""Kind of a planted file that does not cheat."""
_opinions = schema.opinions.c
_planted = schema.planted.c


@dataclass(frozen=True)
class OpinionRow:
    """One validator's opinion on one file; `body` is JSON of SignedOpinion, `at` in Unix
    seconds."""

    submission_digest: Digest
    validator: Address
    reason: int
    body: str
    at: float

    @property
    def outcome(self) -> Outcome:
        return Reason(self.reason).outcome

    def signed(self) -> SignedOpinion:
        """Returns the opinion as the validator signed it."""
        return SignedOpinion.model_validate_json(self.body)


def add(connection: Connection, row: OpinionRow) -> bool:
    """Writes an opinion; returns False if this validator has given one."""
    return insert_new(connection, schema.opinions, vars(row))


def drop(connection: Connection, submission: Digest, validator: Address) -> None:
    """Removes an opinion that does not count."""
    connection.execute(
        sa.delete(schema.opinions).where(
            _opinions.submission_digest == submission, _opinions.validator == validator
        )
    )


def forget(connection: Connection, submission: Digest) -> None:
    """Deletes the opinions on a file that is to be judged again."""
    connection.execute(sa.delete(schema.opinions).where(_opinions.submission_digest == submission))


def of(connection: Connection, submission: Digest) -> list[OpinionRow]:
    """Returns the opinions on a file, oldest first."""
    query = (
        sa.select(schema.opinions)
        .where(_opinions.submission_digest == submission)
        .order_by(_opinions.at, _opinions.validator)
    )
    return records(OpinionRow, connection.execute(query).mappings().all())


def waiting(connection: Connection) -> dict[str, tuple[int, float]]:
    """Returns, for undecided files with an opinion, their number and when the oldest was first
    judged. Keys: "rejected" (at least one rejection) or "accepted"."""
    submissions = schema.submissions.c
    accused = sa.func.max(sa.case((_rejecting(), 1), else_=0))
    query = (
        sa.select(accused.label("accused"), sa.func.min(_opinions.at).label("at"))
        .join(schema.submissions, submissions.digest == _opinions.submission_digest)
        .where(submissions.status == "submitted")
        .group_by(_opinions.submission_digest)
    )
    since: dict[str, list[float]] = {"accepted": [], "rejected": []}
    for row in connection.execute(query):
        since["rejected" if row.accused else "accepted"].append(float(row.at))
    return {kind: (len(times), min(times)) for kind, times in since.items() if times}


def lapsed(connection: Connection) -> int:
    """Returns the number of files with a rejection that ended void because no other validator
    judged them in time."""
    submissions = schema.submissions.c
    query = (
        sa.select(sa.func.count(sa.distinct(_opinions.submission_digest)))
        .join(schema.submissions, submissions.digest == _opinions.submission_digest)
        .where(_rejecting(), submissions.reason == int(Reason.UNAVAILABLE))
    )
    return int(connection.execute(query).scalar_one())


def _rejecting() -> sa.ColumnElement[bool]:
    return _opinions.reason.in_([int(r) for r in Reason if r.outcome is Outcome.REJECTED])


def plant(connection: Connection, submission: Digest, kind: str, *, now: float) -> None:
    """Records the kind of a judged planted file: HONEST or the name of an attack."""
    values = {"submission_digest": submission, "kind": kind, "at": now}
    insert_new(connection, schema.planted, values)


def planted_among(connection: Connection, among: Sequence[Digest]) -> frozenset[Digest]:
    """Returns those of these submissions that are judged planted files."""
    query = sa.select(_planted.submission_digest).where(_planted.submission_digest.in_(among))
    return frozenset(Digest(name) for name in connection.execute(query).scalars())


@dataclass(frozen=True)
class Record:
    """One validator's known track record. `honest` and `lying`: planted files it judged; `accused`:
    honest ones it rejected; `missed`: lying ones it accepted; `opinions`: all its opinions;
    `overruled`: those contradicted by the file's verdict."""

    validator: Address
    opinions: int
    overruled: int
    honest: int
    accused: int
    lying: int
    missed: int


def track_records(connection: Connection) -> list[Record]:
    """Returns one record per validator, by address."""
    said = {
        outcome: _opinions.reason.in_([int(r) for r in Reason if r.outcome is outcome])
        for outcome in (Outcome.ACCEPTED, Outcome.REJECTED)
    }
    submissions = schema.submissions.c
    decided = submissions.status.in_(("accepted", "rejected"))
    honest, lying = _planted.kind == HONEST, _planted.kind != HONEST
    conditions: Sequence[tuple[str, sa.ColumnElement[bool]]] = (
        ("opinions", sa.true()),
        (
            "overruled",
            sa.and_(
                decided,
                sa.or_(
                    sa.and_(said[Outcome.ACCEPTED], submissions.status == "rejected"),
                    sa.and_(said[Outcome.REJECTED], submissions.status == "accepted"),
                ),
            ),
        ),
        ("honest", honest),
        ("accused", sa.and_(honest, said[Outcome.REJECTED])),
        ("lying", lying),
        ("missed", sa.and_(lying, said[Outcome.ACCEPTED])),
    )
    query = (
        sa.select(
            _opinions.validator,
            *(
                sa.func.coalesce(sa.func.sum(sa.case((condition, 1), else_=0)), 0).label(name)
                for name, condition in conditions
            ),
        )
        .outerjoin(schema.planted, _planted.submission_digest == _opinions.submission_digest)
        .outerjoin(schema.submissions, submissions.digest == _opinions.submission_digest)
        .group_by(_opinions.validator)
        .order_by(_opinions.validator)
    )
    return [
        Record(Address(row["validator"]), **{name: int(row[name]) for name, _ in conditions})
        for row in connection.execute(query).mappings()
    ]
