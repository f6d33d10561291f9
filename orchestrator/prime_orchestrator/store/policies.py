"""Published policies and the relays that serve them."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from prime_core.checkpoint import SignedManifest
from prime_core.ids import Address, Digest
from prime_orchestrator.store import schema
from prime_orchestrator.store.rows import (
    built_once,
    insert_all_new,
    insert_new,
    one_of_bound,
    record,
    records,
)

_policies = schema.policies.c
_relays = schema.relays.c
_arrivals = schema.arrivals.c
_LATEST = sa.select(sa.func.max(_policies.version))
_FACTS = sa.select(
    sa.select(sa.func.max(_policies.version)).scalar_subquery(),
    sa.select(schema.runs.c.body)
    .order_by(schema.runs.c.from_step.desc())
    .limit(1)
    .scalar_subquery(),
    sa.exists().where(schema.chain_events.c.name == "PoolEnded"),
    sa.exists().where(schema.evaluations.c.ended_at.is_(None)),
)


@dataclass(frozen=True)
class PolicyRow:
    """One row of `policies`; `body` is JSON of SignedManifest."""

    version: int
    digest: Digest
    step: int
    body: str
    published_at: float

    def signed(self) -> SignedManifest:
        """Returns the manifest as the trainer signed it."""
        return SignedManifest.model_validate_json(self.body)


@dataclass(frozen=True)
class RelayRow:
    """A relay and the versions it reports."""

    url: str
    account: Address
    versions: tuple[int, ...]
    last_seen: float


def add(connection: Connection, signed: SignedManifest, *, now: float) -> None:
    """Writes a new policy. Raises IntegrityError if its version has one."""
    manifest = signed.manifest
    connection.execute(
        sa.insert(schema.policies).values(
            version=manifest.version,
            digest=manifest.digest(),
            step=manifest.step,
            body=signed.model_dump_json(),
            published_at=now,
        )
    )


def get(connection: Connection, version: int) -> PolicyRow | None:
    """Returns the policy of a version, or None."""
    query = sa.select(schema.policies).where(_policies.version == version)
    return record(PolicyRow, connection.execute(query).mappings().first())


def latest_version(connection: Connection) -> int | None:
    """Returns the newest version, or None before the first."""
    highest = connection.execute(_LATEST).scalar()
    return None if highest is None else int(highest)


def newest(connection: Connection, limit: int) -> list[PolicyRow]:
    """Returns the newest policies, newest first."""
    query = sa.select(schema.policies).order_by(_policies.version.desc()).limit(limit)
    return records(PolicyRow, connection.execute(query).mappings().all())


def newest_name(connection: Connection) -> tuple[int, Digest] | None:
    """Returns version and digest of the newest policy, or None before the first."""
    query = sa.select(_policies.version, _policies.digest).order_by(_policies.version.desc())
    found = connection.execute(query.limit(1)).first()
    return None if found is None else (int(found[0]), Digest(found[1]))


def newest_times(connection: Connection, limit: int) -> list[tuple[int, float]]:
    """Returns (version, time of publication in Unix seconds) of the newest policies, newest
    first."""
    query = sa.select(_policies.version, _policies.published_at)
    rows = connection.execute(query.order_by(_policies.version.desc()).limit(limit))
    return [(int(version), float(at)) for version, at in rows]


def newest_versions(connection: Connection, limit: int) -> list[int]:
    """Returns the newest versions, newest first."""
    query = sa.select(_policies.version).order_by(_policies.version.desc()).limit(limit)
    return [int(version) for version in connection.execute(query).scalars()]


def see_relay(
    connection: Connection, url: str, account: Address, versions: tuple[int, ...], *, now: float
) -> None:
    """Records an announced relay and its versions."""
    known = {"versions": json.dumps(list(versions)), "last_seen": now}
    values = {"url": url, "account": account, "first_seen": now, **known}
    if not insert_new(connection, schema.relays, values):
        connection.execute(sa.update(schema.relays).where(_relays.url == url).values(known))


def relays(
    connection: Connection, *, since: float, own: Collection[Address] = (), limit: int = 64
) -> list[RelayRow]:
    """Returns relays announced from `since` on: those of the pool's `own` accounts first, then the
    first of each other account, the second of each, and so on, oldest known first. So no account
    can crowd out the trainer's origin, and a few cannot fill the list."""
    bound = {"since": since, "own": list(own), "most": limit}
    return [
        RelayRow(row.url, Address(row.account), tuple(json.loads(row.versions)), row.last_seen)
        for row in connection.execute(_newest_relays(connection), bound)
    ]


@built_once
def _newest_relays(postgresql: bool) -> sa.Select[Any]:
    place = sa.func.row_number().over(
        partition_by=_relays.account, order_by=(_relays.first_seen, _relays.url)
    )
    others = sa.case((one_of_bound(postgresql, _relays.account, "own"), 0), else_=place)
    return (
        sa.select(schema.relays)
        .where(_relays.last_seen >= sa.bindparam("since"))
        .order_by(others, _relays.first_seen, _relays.url)
        .limit(sa.bindparam("most"))
    )


def relay_owner(connection: Connection, url: str) -> Address | None:
    """Returns the account that announced the relay at `url`, or None."""
    owner = connection.execute(sa.select(_relays.account).where(_relays.url == url)).scalar()
    return None if owner is None else Address(owner)


def relay_count(connection: Connection, account: Address) -> int:
    """Returns the number of relays that an account announced."""
    query = sa.select(sa.func.count()).where(_relays.account == account)
    return connection.execute(query).scalar_one()


def forget_relays(connection: Connection, before: float) -> None:
    """Deletes relays not announced since `before`."""
    connection.execute(sa.delete(schema.relays).where(_relays.last_seen < before))


def note_arrivals(
    connection: Connection, said: Sequence[tuple[Address, int]], *, now: float
) -> None:
    """Records (node, version) pairs: the node has this version. Only the first time counts."""
    rows = [{"version": version, "node": node, "at": now} for node, version in said]
    insert_all_new(connection, schema.arrivals, rows)


def arrivals_of(connection: Connection, version: int) -> list[float]:
    """Returns the arrival times of a version (Unix seconds), ascending, one per node."""
    query = sa.select(_arrivals.at).where(_arrivals.version == version).order_by(_arrivals.at)
    return [float(at) for at in connection.execute(query).scalars()]


def forget_arrivals(connection: Connection, before: int) -> None:
    """Deletes arrivals of versions below `before`."""
    connection.execute(sa.delete(schema.arrivals).where(_arrivals.version < before))


@dataclass(frozen=True)
class PoolFacts:
    """What the answer to each heartbeat says of the pool.

    `latest_version`: None before the first policy; `newest_run`: the bytes of the newest
    revision, None without one; `maybe_ended`: whether the store has the end of any pool;
    `evaluates`: whether an evaluation goes on.
    """

    latest_version: int | None
    newest_run: bytes | None
    maybe_ended: bool
    evaluates: bool


def pool_facts(connection: Connection) -> PoolFacts:
    """Returns the facts as they are now, by one statement."""
    return PoolFacts(*connection.execute(_FACTS).one())
