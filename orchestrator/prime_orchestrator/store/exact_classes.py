"""Exact classes: which validators and nodes announced them, and what files of exact leases showed.

    classes         facts and fingerprint of each class that a validator announced
    class_members   validator or node → its class with one policy
    class_records   class key and node → judged files of exact leases
    class_rows      class key, node and validator → rows that were equal bit for bit
    class_suspects  class key and calibration of a suspect class (manager/suspicion.py)

A node can only announce a class that a validator announced before, so nodes add no classes.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy import Connection

from prime_core.ids import Address, Digest
from prime_engine.exact import NumericClass
from prime_orchestrator.store import schema
from prime_orchestrator.store.rows import insert_new, one_of, record, records, upsert

_classes = schema.classes.c
_members = schema.class_members.c
_records = schema.class_records.c
_rows = schema.class_rows.c
_suspects = schema.class_suspects.c


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
    """A node's judged files of exact leases in one class. `mismatched` files had a mismatch,
    `differed` of them nothing else against them. Unix seconds: `judged_at` of the newest file,
    `differed_at` of the newest that differed since the class was last suspect; None: none."""

    key: Digest
    node: Address
    files: int
    mismatched: int
    differed: int
    judged_at: float
    differed_at: float | None


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


def forget(connection: Connection, oldest: int) -> frozenset[Digest]:
    """Forgets what all accounts announced for versions before `oldest`, for example of validators
    that were dismissed. Returns the classes."""
    gone = _members.policy_version < oldest
    left = connection.execute(sa.select(_members.digest).where(gone).distinct()).scalars().all()
    connection.execute(sa.delete(schema.class_members).where(gone))
    return frozenset(Digest(one) for one in left)


def drop_unused(connection: Connection, digests: Collection[Digest]) -> None:
    """Deletes the given classes that no account announces and no judged file is counted for. The
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
    connection: Connection, digests: Collection[Digest], among: Collection[Address]
) -> dict[Digest, frozenset[Address]]:
    """Returns those of the accounts `among` that announced each of these classes."""
    found: dict[Digest, set[Address]] = {digest: set() for digest in digests}
    query = sa.select(_members.digest, _members.account).where(
        _members.digest.in_(list(digests)), _members.account.in_(list(among))
    )
    for digest, account in connection.execute(query):
        found[Digest(digest)].add(Address(account))
    return {digest: frozenset(accounts) for digest, accounts in found.items()}


# ── judged files ──


def judged(
    connection: Connection,
    key: Digest,
    node: Address,
    *,
    validator: Address,
    rows: int,
    longest: int,
    mismatched: bool,
    explained: bool,
    again: bool = False,
    now: float,
) -> None:
    """Adds a judged file of an exact lease. The caller holds the lock on the node's row.

    `validator` compared `rows` rows, the longest of `longest` tokens. They are counted if the file
    has no mismatch. `explained`: other evidence accompanies the mismatch. `again`: the file was
    accepted and counted before; only a mismatch is added.
    """
    query = sa.select(schema.class_records).where(_records.key == key, _records.node == node)
    before = record(RecordRow, connection.execute(query).mappings().first())
    old = before or RecordRow(key, node, 0, 0, 0, 0.0, None)
    differed = mismatched and not explained
    values = {
        "key": key,
        "node": node,
        "files": max(1, old.files + (not again)),
        "mismatched": old.mismatched + mismatched,
        "differed": old.differed + differed,
        "judged_at": now,
        "differed_at": now if differed else old.differed_at,
    }
    upsert(connection, schema.class_records, values)
    if mismatched or again:
        return
    own = sa.and_(_rows.key == key, _rows.node == node, _rows.validator == validator)
    counted = connection.execute(sa.select(_rows.rows, _rows.longest).where(own)).first()
    total, most = (0, 0) if counted is None else counted
    values = {"key": key, "node": node, "validator": validator, "rows": total + rows,
              "longest": max(most, longest)}  # fmt: skip
    upsert(connection, schema.class_rows, values)


def records_of(connection: Connection, nodes: Collection[Address]) -> list[RecordRow]:
    """Returns the records of these nodes."""
    query = sa.select(schema.class_records).where(one_of(connection, _records.node, nodes))
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
    """What is known of a class. `differing`: providers with a file that differed, and had nothing
    else against it. Of the other providers: `rows` that were equal, the `longest` of them in
    tokens, and `providers` with enough of them, each as few as remain if any one validator's
    comparisons are left out."""

    key: Digest
    files: int
    mismatched: int
    differing: int
    rows: int
    longest: int
    providers: int


def sums(connection: Connection, least: int) -> list[SumRow]:
    """Returns what is known of each class, by key. A provider has enough equal rows with `least`
    of them."""
    known = sa.select(schema.nodes.c.address, schema.nodes.c.provider).where(
        schema.nodes.c.address.in_(sa.select(_records.node)),
        schema.nodes.c.provider.is_not(None),
    )
    owners = {str(node): str(provider) for node, provider in connection.execute(known)}
    query = sa.select(schema.class_records).order_by(_records.key)
    by_key: dict[Digest, list[RecordRow]] = {}
    for row in records(RecordRow, connection.execute(query).mappings().all()):
        by_key.setdefault(row.key, []).append(row)
    compared: dict[Digest, list[tuple[str, str, int, int]]] = {}
    for key, node, author, number, longest in connection.execute(sa.select(schema.class_rows)):
        if node in owners:
            found = (owners[node], str(author), int(number), int(longest))
            compared.setdefault(Digest(key), []).append(found)
    return [_sum(key, own, owners, compared.get(key, []), least) for key, own in by_key.items()]


def _sum(
    key: Digest,
    own: Sequence[RecordRow],
    owners: Mapping[str, str],
    compared: Sequence[tuple[str, str, int, int]],
    least: int,
) -> SumRow:
    """`compared`: (provider, validator, equal rows, the longest in tokens)."""
    differing = {owners[row.node] for row in own if row.differed and row.node in owners}
    equal = [one for one in compared if one[0] not in differing]
    left = []  # (rows, longest, providers) without each validator
    for absent in {one[1] for one in equal}:
        rest = [one for one in equal if one[1] != absent]
        of_each: dict[str, int] = {}
        for provider, _, number, _ in rest:
            of_each[provider] = of_each.get(provider, 0) + number
        left.append((
            sum(of_each.values()),
            max((one[3] for one in rest), default=0),
            sum(number >= least for number in of_each.values()),
        ))  # fmt: skip
    rows, longest, providers = (min(values) for values in zip(*left, strict=True)) if left else (
        0, 0, 0
    )  # fmt: skip
    return SumRow(
        key, sum(row.files for row in own), sum(row.mismatched for row in own), len(differing),
        rows, longest, providers,
    )  # fmt: skip


def facts_of(connection: Connection, key: Digest) -> str:
    """Returns the facts of a class with judged files, as JSON."""
    query = sa.select(_classes.facts).where(_classes.key == key).limit(1)
    return str(connection.execute(query).scalar_one())


# ── suspicion ──


def providers_since(connection: Connection, key: Digest, since: float) -> tuple[int, int]:
    """Returns how many providers had files of the class judged at `since` (Unix seconds) or
    later, and how many of them had a file that differed."""
    owner = schema.nodes.c.provider
    query = (
        sa.select(
            sa.func.count(sa.distinct(owner)),
            sa.func.count(sa.distinct(sa.case((_records.differed_at >= since, owner)))),
        )
        .select_from(
            schema.class_records.join(schema.nodes, schema.nodes.c.address == _records.node)
        )
        .where(_records.key == key, _records.judged_at >= since)
    )
    judged_of, differing = connection.execute(query).one()
    return int(judged_of), int(differing)


def suspect(connection: Connection, key: Digest, calibration: Digest, *, now: float) -> None:
    """Makes a class suspect until the run has another calibration. Differences count from now on
    again."""
    values = {"key": key, "calibration": calibration, "at": now}
    insert_new(connection, schema.class_suspects, values)
    connection.execute(
        sa.update(schema.class_records).where(_records.key == key).values(differed_at=None)
    )


def suspects(connection: Connection, calibration: Digest) -> frozenset[Digest]:
    """Returns the keys of the classes that are suspect under a calibration."""
    query = sa.select(_suspects.key).where(_suspects.calibration == calibration)
    return frozenset(Digest(key) for key in connection.execute(query).scalars())


def without_suspects(
    connection: Connection, digests: Collection[Digest], calibration: Digest
) -> frozenset[Digest]:
    """Returns the given classes that are not suspect under a calibration."""
    query = sa.select(_classes.digest).where(
        _classes.digest.in_(list(digests)),
        _classes.key.in_(sa.select(_suspects.key).where(_suspects.calibration == calibration)),
    )
    return frozenset(digests) - {Digest(one) for one in connection.execute(query).scalars()}
