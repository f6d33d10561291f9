"""Exact classes: which validators and nodes announced them, and what files of exact leases showed.

    classes        facts and fingerprint of each class that a validator announced
    class_members  validator or node → its class with one policy
    class_records  class key and node → judged files of exact leases

A node can only announce a class that a validator announced before, so nodes add no classes.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy import Connection

from prime_core.ids import Address, Digest
from prime_engine.exact import NumericClass
from prime_orchestrator.store import schema
from prime_orchestrator.store.rows import insert_new, record, records, upsert

_classes = schema.classes.c
_members = schema.class_members.c
_records = schema.class_records.c


@dataclass(frozen=True)
class ClassRow:
    """A class that a validator announced for a policy. `facts` is JSON."""

    digest: Digest
    key: Digest
    facts: str
    fingerprint: Digest
    policy_version: int

    def numeric(self) -> NumericClass:
        """Returns its facts and fingerprint."""
        return NumericClass(json.loads(self.facts), self.fingerprint)


@dataclass(frozen=True)
class RecordRow:
    """A node's judged files of exact leases in one class. `rows` were equal bit for bit since the
    class's last unexplained mismatch; `longest`: most tokens after the prompt in one of them."""

    key: Digest
    node: Address
    files: int
    mismatched: int
    rows: int
    longest: int


# ── announcements ──


def add(connection: Connection, numeric: NumericClass, version: int) -> Digest:
    """Writes a class that a validator announced; returns its digest."""
    digest = numeric.digest()
    facts = json.dumps(dict(numeric.facts), sort_keys=True)
    values = {"digest": digest, "key": numeric.key, "facts": facts,
              "fingerprint": numeric.fingerprint, "policy_version": version}  # fmt: skip
    insert_new(connection, schema.classes, values)
    return digest


def get(connection: Connection, digest: Digest) -> ClassRow | None:
    """Returns a class, or None."""
    query = sa.select(schema.classes).where(_classes.digest == digest)
    return record(ClassRow, connection.execute(query).mappings().first())


def of_policy(connection: Connection, version: int, key: Digest) -> list[Digest]:
    """Returns the classes with these facts that are announced for a policy."""
    announced = sa.select(_members.digest).where(_members.policy_version == version)
    query = sa.select(_classes.digest).where(_classes.key == key, _classes.digest.in_(announced))
    return [Digest(one) for one in connection.execute(query).scalars()]


def join(
    connection: Connection,
    account: Address,
    version: int,
    digests: Collection[Digest],
    *,
    now: float,
    oldest: int,
) -> frozenset[Digest]:
    """Makes `digests` the account's classes with a policy, in place of those before. Forgets what
    it announced for versions before `oldest`. Returns what it forgot or took the place of."""
    mine = _members.account == account
    gone = sa.or_(_members.policy_version == version, _members.policy_version < oldest)
    left = connection.execute(sa.select(_members.digest).where(mine, gone)).scalars().all()
    connection.execute(sa.delete(schema.class_members).where(mine, gone))
    for digest in digests:
        values = {"account": account, "policy_version": version, "digest": digest, "at": now}
        upsert(connection, schema.class_members, values)
    return frozenset(Digest(one) for one in left)


def drop_unused(connection: Connection, digests: Collection[Digest]) -> None:
    """Deletes those of the classes that no account announces and no judged file is counted for. The
    caller holds the lock "classes"."""
    connection.execute(
        sa.delete(schema.classes).where(
            _classes.digest.in_(list(digests)),
            _classes.digest.not_in(sa.select(_members.digest)),
            _classes.key.not_in(sa.select(_records.key)),
        )
    )


def of_accounts(
    connection: Connection, accounts: Collection[Address]
) -> dict[tuple[Address, int], Digest]:
    """Returns the class of each node and policy version, for these nodes."""
    query = sa.select(_members.account, _members.policy_version, _members.digest).where(
        _members.account.in_(list(accounts))
    )
    return {
        (Address(account), int(version)): Digest(digest)
        for account, version, digest in connection.execute(query)
    }


def members(
    connection: Connection, digests: Collection[Digest]
) -> dict[Digest, frozenset[Address]]:
    """Returns the accounts that announced each of these classes."""
    found: dict[Digest, set[Address]] = {digest: set() for digest in digests}
    query = sa.select(_members.digest, _members.account).where(_members.digest.in_(list(digests)))
    for digest, account in connection.execute(query):
        found[Digest(digest)].add(Address(account))
    return {digest: frozenset(accounts) for digest, accounts in found.items()}


# ── judged files ──


def judged(
    connection: Connection,
    key: Digest,
    node: Address,
    *,
    rows: int,
    longest: int,
    mismatched: bool,
    explained: bool,
) -> None:
    """Adds a judged file of an exact lease. The caller holds the lock on the node's row.

    An unexplained mismatch (one that no other evidence accompanies) starts the class's count of
    equal rows again, for all nodes.
    """
    query = sa.select(schema.class_records).where(_records.key == key, _records.node == node)
    before = record(RecordRow, connection.execute(query).mappings().first())
    old = before or RecordRow(key, node, 0, 0, 0, 0)
    equal = 0 if mismatched else rows
    values = {
        "key": key,
        "node": node,
        "files": old.files + 1,
        "mismatched": old.mismatched + mismatched,
        "rows": old.rows + equal,
        "longest": max(old.longest, longest if equal else 0),
    }
    upsert(connection, schema.class_records, values)
    if mismatched and not explained:
        connection.execute(
            sa.update(schema.class_records).where(_records.key == key).values(rows=0, longest=0)
        )


def records_of(connection: Connection, nodes: Collection[Address]) -> list[RecordRow]:
    """Returns the records of these nodes."""
    query = sa.select(schema.class_records).where(_records.node.in_(list(nodes)))
    return records(RecordRow, connection.execute(query).mappings().all())


def totals(connection: Connection, key: Digest) -> tuple[int, int]:
    """Returns (judged files, files with a mismatch) of all nodes in a class."""
    query = sa.select(sa.func.sum(_records.files), sa.func.sum(_records.mismatched)).where(
        _records.key == key
    )
    files, mismatched = connection.execute(query).one()
    return int(files or 0), int(mismatched or 0)


@dataclass(frozen=True)
class SumRow:
    """All nodes' records of a class. `providers`: owners of nodes with equal rows since the last
    unexplained mismatch."""

    key: Digest
    files: int
    mismatched: int
    rows: int
    longest: int
    providers: int


def sums(connection: Connection) -> list[SumRow]:
    """Returns the sums of every class, by key."""
    total = sa.func.sum
    owner = sa.case((_records.rows > 0, schema.nodes.c.provider))
    query = (
        sa.select(
            _records.key,
            total(_records.files),
            total(_records.mismatched),
            total(_records.rows),
            sa.func.max(_records.longest),
            sa.func.count(sa.distinct(owner)),
        )
        .select_from(
            schema.class_records.join(schema.nodes, schema.nodes.c.address == _records.node)
        )
        .group_by(_records.key)
        .order_by(_records.key)
    )
    return [
        SumRow(Digest(key), *(int(value) for value in values))
        for key, *values in connection.execute(query)
    ]


def facts_of(connection: Connection, key: Digest) -> str:
    """Returns the facts of a class with judged files, as JSON."""
    query = sa.select(_classes.facts).where(_classes.key == key).limit(1)
    return str(connection.execute(query).scalar_one())
