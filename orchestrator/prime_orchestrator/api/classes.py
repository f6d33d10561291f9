"""Exact classes at the API: validators and nodes announce theirs; leases may then name one.

    validator  announces the classes in which it repeats proof passes of a policy
    node       asks whether a class with its facts is wanted; if so measures its fingerprint and
               announces the class
    lease      names the node's class while enough live validators have announced the same
               (`held_by_enough`)

Nothing announced is believed: a file of an exact lease is compared bit for bit.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from prime_core.errors import ConflictError, NotFoundError, PolicyError
from prime_core.ids import ZERO_DIGEST, Address, Digest
from prime_core.messages import ClassAnswer, ClassInfo, ClassRequest
from prime_core.validator_messages import ClassList
from prime_engine.exact import NumericClass
from prime_orchestrator.api.backend import Backend
from prime_orchestrator.api.validators import LIVE_SECONDS, require_appointed
from prime_orchestrator.manager import revisions, standing
from prime_orchestrator.store import (
    Connection,
    chain,
    exact_classes,
    jobs,
    leases,
    lock,
    nodes,
    on_commit,
    policies,
)

log = logging.getLogger(__name__)

OPINIONS = 2
"""Validators of the class that a lease needs, because a rejection needs as many opinions. One, if
the pool has only one validator."""
TAKEN_BACK_SECONDS = 24 * 3600.0
KEPT_VERSIONS = 1024
"""A validator's announcements for this many policies before the announced one are kept, for files
that are still to be judged."""


def announce(backend: Backend, account: Address, request: ClassRequest) -> ClassAnswer:
    """Answers whether a node's class is wanted; with a fingerprint, stores it if it is.

    Raises PolicyError if the account is not an active node, ConflictError or NotFoundError if the
    pool has another policy of that version, or none.
    """
    version, now = request.policy_version, backend.now()
    numeric = NumericClass(request.facts, Digest(request.fingerprint or ZERO_DIGEST))
    with backend.store.read() as connection:
        node = nodes.get(connection, account)
        if node is None or node.status != "active":
            raise PolicyError("only an active node announces its exact class")
        _check_policy(connection, version, Digest(request.policy_digest))
        appointed = chain.appointed(connection, backend.context.pool)
        known = [numeric.digest()]
        if request.fingerprint is None:
            known = exact_classes.of_policy(connection, version, numeric.key)
        calibration = Digest(revisions.current(connection, backend.context).calibration)
        sound = exact_classes.without_suspects(connection, known, calibration)
        wanted = bool(held_by_enough(connection, sound, appointed, now))
        before = exact_classes.of_accounts(connection, [account]).get((account, version))
        held = leases.open_among(connection, [account])
    if held:
        _take_back(backend, account, numeric, version, now)
    # A question comes from a worker that starts: what an earlier one announced may be wrong now.
    mine = known if wanted and request.fingerprint is not None else []
    if mine != ([] if before is None else [before]):
        oldest = version - backend.context.run.max_staleness
        with backend.store.begin() as connection:
            exact_classes.join(connection, account, version, mine, now=now, oldest=oldest)
    return ClassAnswer(wanted=wanted)


def _take_back(
    backend: Backend, account: Address, numeric: NumericClass, version: int, now: float
) -> None:
    """Ends a node's open leases of a class that its new worker cannot have: one of other facts, or
    of another fingerprint with policy `version` if `numeric` has one. They leave no record, and
    their groups go to other providers. At most once in TAKEN_BACK_SECONDS: a node could otherwise
    choose among leases by changing what it announces."""
    with backend.store.begin() as connection:
        again = leases.excused_since(connection, account, now - TAKEN_BACK_SECONDS)
        for row in leases.lock_open(connection, account):
            name = row.signed().numeric_class()
            found = None if name is None else exact_classes.get(connection, name)
            if found is None or row.upload_sha256 is not None:
                continue  # or its file is made, and on its way
            measured = numeric.fingerprint != ZERO_DIGEST and found.policy_version == version
            if found.key == numeric.key and not (measured and name != numeric.digest()):
                continue
            if again:
                return
            standing.expire(connection, row, backend.context.run.lease_seconds, excused=True)
            on_commit(
                connection, log.info, "the worker of %s left the class of lease %s",
                account, row.digest,
            )  # fmt: skip


def announce_all(backend: Backend, account: Address, request: ClassList) -> None:
    """Stores the classes in which a validator repeats proof passes of a policy.

    Raises PolicyError if the account is not appointed, ConflictError or NotFoundError if the pool
    has another policy of that version, or none.
    """
    version = request.policy_version
    with backend.store.begin() as connection:
        require_appointed(backend, connection, account)
        _check_policy(connection, version, Digest(request.policy_digest))
        lock(connection, "classes")
        digests = [
            exact_classes.add(connection, NumericClass(one.facts, one.fingerprint), version)
            for one in request.classes
        ]
        oldest = version - KEPT_VERSIONS
        left = exact_classes.join(
            connection, account, version, digests, now=backend.now(), oldest=oldest
        )
        left |= exact_classes.forget(connection, oldest)
        exact_classes.drop_unused(connection, left)


def info(backend: Backend, digest: Digest) -> ClassInfo:
    """Returns a class that a validator announced. Raises NotFoundError for any other."""
    with backend.store.read() as connection:
        row = exact_classes.get(connection, digest)
    if row is None:
        raise NotFoundError("no validator of this pool announced an exact class of that digest")
    numeric = row.numeric()
    return ClassInfo(
        digest=row.digest, facts=dict(numeric.facts), fingerprint=row.fingerprint,
        policy_version=row.policy_version,
    )  # fmt: skip


def held_by_enough(
    connection: Connection, digests: Collection[Digest], named: Collection[Address], now: float
) -> frozenset[Digest]:
    """Returns the given classes that enough live validators announced. Only validators in `named`
    count: they may judge a file."""
    if not digests or not named:
        return frozenset()
    live = jobs.live(connection, now - LIVE_SECONDS) & {*named}
    least = min(OPINIONS, len(named))
    found = exact_classes.members(connection, digests, live)
    return frozenset(one for one in digests if len(found[one]) >= least)


def _check_policy(connection: Connection, version: int, digest: Digest) -> None:
    row = policies.get(connection, version)
    if row is None:
        raise NotFoundError(f"policy {version} is not published")
    if row.digest != digest:
        raise ConflictError(f"policy {version} of this pool is {row.digest}, not {digest}")
