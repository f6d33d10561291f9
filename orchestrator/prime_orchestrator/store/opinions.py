"""Validators' opinions on files, one row each, and which files were planted."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy import Connection

from prime_core.ids import Address, Digest
from prime_core.verdict import Outcome, Reason, SignedOpinion
from prime_orchestrator.store import schema, totals
from prime_orchestrator.store.rows import insert_all_new, insert_new, one_of, records

HONEST = "honest"
"""Kind of a planted file that does not cheat."""
RECENT = 2000
"""Newest opinions that validators' records count, besides those on planted files."""
_LAPSED = "lapsed"
_ON_PLANTED = ("honest", "accused", "lying", "missed")
"""Names in store/totals.py, of archived files: the second ones by validator, as in TrackRecord."""
_opinions = schema.opinions.c
_planted = schema.planted.c


@dataclass(frozen=True)
class OpinionRow:
    """One validator's opinion on one file; `body` is JSON of SignedOpinion, `at` in Unix seconds.
    `overruled`: the file's verdict contradicts it, which the database keeps up to date."""

    submission_digest: Digest
    validator: Address
    reason: int
    body: str
    at: float
    overruled: bool = False

    @property
    def outcome(self) -> Outcome:
        return Reason(self.reason).outcome

    def signed(self) -> SignedOpinion:
        """Returns the opinion as the validator signed it."""
        return SignedOpinion.model_validate_json(self.body)


def add(connection: Connection, row: OpinionRow) -> bool:
    """Writes an opinion; returns False if this validator has given one."""
    return insert_new(connection, schema.opinions, vars(row))


def add_all(connection: Connection, rows: Sequence[OpinionRow]) -> None:
    """Writes opinions, but for those of validators that have given one on the file."""
    insert_all_new(connection, schema.opinions, [vars(row) for row in rows])


def acceptances(
    connection: Connection, validator: Address, since: int, until: int, limit: int
) -> list[tuple[SignedOpinion, Digest]]:
    """Returns at most `limit` of a validator's acceptances of files that have a verdict, each with
    its lease's digest. They are drawn at random from those whose leases were given from `since` to
    before `until` (Unix seconds)."""
    leases, submissions = schema.leases.c, schema.submissions.c
    mine = (_opinions.validator == validator, _opinions.reason == int(Reason.NONE))
    files = sa.join(
        schema.submissions, schema.leases, leases.digest == submissions.lease_digest
    ).join(schema.opinions, _opinions.submission_digest == submissions.digest)
    drawn = (
        sa.select(submissions.digest)
        .select_from(files)
        .where(*mine, submissions.verdict.is_not(None))
        .where(leases.shadow.in_([False, True]))  # for the index
        .where(leases.created_at >= since, leases.created_at < until)
        .order_by(sa.func.random())
        .limit(limit)
    )
    query = (
        sa.select(_opinions.body, submissions.lease_digest)
        .join(schema.submissions, submissions.digest == _opinions.submission_digest)
        .where(*mine, _opinions.submission_digest.in_(drawn))
    )
    return [
        (SignedOpinion.model_validate_json(body), Digest(lease))
        for body, lease in connection.execute(query)
    ]


def numbers(connection: Connection, submissions: Collection[Digest]) -> dict[Digest, int]:
    """Returns the number of opinions by file, without files that have none."""
    query = (
        sa.select(_opinions.submission_digest, sa.func.count())
        .where(one_of(connection, _opinions.submission_digest, submissions))
        .group_by(_opinions.submission_digest)
    )
    return {Digest(name): int(number) for name, number in connection.execute(query)}


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


def of_those(
    connection: Connection, submissions: Collection[Digest]
) -> dict[Digest, list[OpinionRow]]:
    """Returns the opinions on the given files that have any, oldest first."""
    query = (
        sa.select(schema.opinions)
        .where(one_of(connection, _opinions.submission_digest, submissions))
        .order_by(_opinions.at, _opinions.validator)
    )
    found: dict[Digest, list[OpinionRow]] = {}
    for row in records(OpinionRow, connection.execute(query).mappings().all()):
        found.setdefault(row.submission_digest, []).append(row)
    return found


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
    return _lapsed(connection) + totals.get(connection, _LAPSED, "")


def _lapsed(connection: Connection, *which: sa.ColumnElement[bool]) -> int:
    submissions = schema.submissions.c
    query = (
        sa.select(sa.func.count(sa.distinct(_opinions.submission_digest)))
        .join(schema.submissions, submissions.digest == _opinions.submission_digest)
        .where(
            _rejecting(),
            submissions.status == "void",
            submissions.reason == int(Reason.UNAVAILABLE),
            *which,
        )
    )
    return int(connection.execute(query).scalar_one())


def keep_counts(connection: Connection, names: Collection[Digest]) -> None:
    """Adds the opinions on these files, which are about to be archived, to what is counted for
    ever."""
    mine = one_of(connection, _opinions.submission_digest, names)
    totals.add(connection, _LAPSED, {"": _lapsed(connection, mine)})
    found = _on_planted(connection, one_of(connection, _planted.submission_digest, names))
    for at, name in enumerate(_ON_PLANTED):
        totals.add(connection, name, {who: numbers[at] for who, numbers in found.items()})


def _rejecting() -> sa.ColumnElement[bool]:
    return _opinions.reason.in_([int(r) for r in Reason if r.outcome is Outcome.REJECTED])


def plant(connection: Connection, submission: Digest, kind: str, *, now: float) -> None:
    """Records the kind of a judged planted file: HONEST or the name of an attack."""
    values = {"submission_digest": submission, "kind": kind, "at": now}
    insert_new(connection, schema.planted, values)


@dataclass(frozen=True)
class PlantedOpinion:
    """An opinion on a planted file: what the file was, the file's step, and the opinion."""

    kind: str
    step: int
    opinion: OpinionRow


def on_planted(connection: Connection, since: float, until: float) -> list[PlantedOpinion]:
    """Returns the opinions on judged planted files received from `since` to before `until` (Unix
    seconds), without files that have a root: those are settled as ordinary files."""
    submissions = schema.submissions.c
    query = (
        sa.select(schema.opinions, _planted.kind, submissions.step)
        .join(schema.planted, _planted.submission_digest == _opinions.submission_digest)
        .join(schema.submissions, submissions.digest == _opinions.submission_digest)
        .where(
            submissions.received_at >= since,
            submissions.received_at < until,
            submissions.root_id.is_(None),
        )
        .order_by(_opinions.submission_digest, _opinions.validator)
    )
    return [
        PlantedOpinion(
            row.kind,
            row.step,
            OpinionRow(
                Digest(row.submission_digest),
                Address(row.validator),
                row.reason,
                row.body,
                row.at,
                row.overruled,
            ),
        )
        for row in connection.execute(query)
    ]


def planted_among(connection: Connection, among: Sequence[Digest]) -> frozenset[Digest]:
    """Returns the given submissions that are judged planted files."""
    query = sa.select(_planted.submission_digest).where(_planted.submission_digest.in_(among))
    return frozenset(Digest(name) for name in connection.execute(query).scalars())


@dataclass(frozen=True)
class TrackRecord:
    """One validator's known track record. `honest` and `lying`: planted files it judged; `accused`:
    honest ones it rejected; `missed`: lying ones it accepted; `opinions`: its share of the newest
    RECENT opinions; `overruled`: those contradicted by the file's verdict."""

    validator: Address
    opinions: int
    overruled: int
    honest: int
    accused: int
    lying: int
    missed: int


def track_records(connection: Connection) -> list[TrackRecord]:
    """Returns one record per validator, by address."""
    newest = (
        sa.select(_opinions.validator, _opinions.overruled)
        .order_by(_opinions.at.desc())
        .limit(RECENT)
        .subquery()
    )
    recent = sa.select(
        newest.c.validator, sa.func.count(), _number(newest.c.overruled.is_(True))
    ).group_by(newest.c.validator)
    counted = {row[0]: [int(n) for n in row[1:]] for row in connection.execute(recent)}
    truth = _on_planted(connection)
    for at, name in enumerate(_ON_PLANTED):
        for validator, number in totals.of(connection, name).items():
            truth.setdefault(validator, [0, 0, 0, 0])[at] += number
    return [
        TrackRecord(Address(name), *counted.get(name, (0, 0)), *truth.get(name, (0, 0, 0, 0)))
        for name in sorted({*counted, *truth})
    ]


def _on_planted(connection: Connection, *which: sa.ColumnElement[bool]) -> dict[str, list[int]]:
    """Returns what TrackRecord says of planted files, in the order of _ON_PLANTED, by validator."""
    honest = _planted.kind == HONEST
    accepts = _opinions.reason == int(Reason.NONE)
    query = (
        sa.select(
            _opinions.validator,
            _number(honest),
            _number(sa.and_(honest, _rejecting())),
            _number(~honest),
            _number(sa.and_(~honest, accepts)),
        )
        .select_from(schema.planted)  # the outer join has SQLite read these first: they are few
        .outerjoin(schema.opinions, _opinions.submission_digest == _planted.submission_digest)
        .where(*which)
        .group_by(_opinions.validator)
    )
    return {row[0]: [int(n) for n in row[1:]] for row in connection.execute(query) if row[0]}


def _number(condition: sa.ColumnElement[bool]) -> sa.ColumnElement[int]:
    return sa.func.coalesce(sa.func.sum(sa.case((condition, 1), else_=0)), 0)
