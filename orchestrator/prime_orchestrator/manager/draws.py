"""The orchestrator's side of draws: validators' commitments and the manager's second secret.

    validator      commits to the secrets of this and coming epochs; reveals old ones
    orchestrator   names the epoch's commitments and its own, in a DrawList, in each lease's salt
    manager        sends each file's second secret with the job; reveals the epoch's at its end, and
                   compares acceptances with what the revealed secrets draw

See prime_core.draws for the objects and for why there are two secrets.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from math import inf

from prime_core import ids
from prime_core.draw_checks import StatedDraw, check_draw
from prime_core.draws import (
    MAX_VALIDATORS,
    REVEAL_MARGIN_SECONDS,
    DrawCommitment,
    DrawList,
    DrawReveal,
    SignedDrawCommitment,
    reveal_at,
)
from prime_core.errors import (
    ConflictError,
    MalformedError,
    NotFoundError,
    PolicyError,
    UnavailableError,
    UntrustedError,
)
from prime_core.ids import Address, Digest
from prime_core.run import RunDefinition
from prime_core.storage.base import ObjectStore, put_object
from prime_core.task import SignedLease
from prime_core.verdict import MAX_TABLE_BYTES, VerdictTable
from prime_orchestrator.context import PoolContext, read_object
from prime_orchestrator.store import Connection, chain, leases, opinions
from prime_orchestrator.store import draws as store_draws
from prime_orchestrator.store.engine import Store

log = logging.getLogger(__name__)

EPOCHS_AHEAD = 8
"""How many epochs ahead a validator may commit. One that is offline is named in leases for as long,
unless it owes the secret of an epoch in which it accepted files (`withheld`)."""
LISTED = 256
"""Most lists in the cache."""
GRACE_EPOCHS = 2
"""How many epochs after its due time, and after this process began to give leases, a secret may
still be published."""
MISSING = 64
"""Most secrets that a validator is asked for at once."""
WITHHELD_SECONDS = 10.0
"""How long an answer of `withheld` is used for new leases."""
COMPARED = 32
"""Most acceptances that are compared with one secret."""
FILES_LISTED = 4096
"""Most files whose list is in the cache."""


def epoch_at(run: RunDefinition, now: float) -> int:
    """Returns the epoch at `now` (Unix seconds)."""
    return int(now) // run.epoch_seconds


def commit(
    connection: Connection,
    context: PoolContext,
    author: Address,
    commitments: Sequence[SignedDrawCommitment],
    now: float,
) -> None:
    """Stores a validator's commitments. Repeating one is harmless.

    Raises UntrustedError if one is not the author's for this pool, PolicyError if its epoch is past
    or too far ahead, ConflictError if the author has committed to another secret for it.
    """
    epoch = epoch_at(context.run, now)
    for signed in commitments:
        statement = signed.commitment
        if (
            signed.validator != author
            or statement.pool != context.pool
            or statement.recover(context.domain(DrawCommitment), signed.signature) != author
        ):
            raise UntrustedError("the commitment is not the caller's for this pool")
        if not epoch <= statement.epoch <= epoch + EPOCHS_AHEAD:
            raise PolicyError(
                f"commitments are taken for epochs {epoch} to {epoch + EPOCHS_AHEAD}: check the "
                "machine's clock"
            )
        if not store_draws.add(connection, signed):
            known = store_draws.get(connection, author, statement.epoch)
            if known is None or known.commitment != statement:
                raise ConflictError(
                    f"the caller has committed to another secret for epoch {statement.epoch}: only "
                    "one data folder may be used with a key"
                )


def reveal(
    connection: Connection,
    objects: ObjectStore,
    context: PoolContext,
    author: Address,
    shown: DrawReveal,
    now: float,
) -> None:
    """Publishes a validator's secret for an epoch.

    Raises UntrustedError if it does not match the author's commitment, NotFoundError if there is no
    commitment, PolicyError if a lease may still need the secret.
    """
    known = store_draws.get(connection, author, shown.epoch)
    if known is None:
        raise NotFoundError(f"the caller committed to no secret for epoch {shown.epoch}")
    if shown.validator != author or shown.digest() != known.commitment.commitment:
        raise UntrustedError("the secret is not what the caller committed to")
    if now < _due(context.run, shown.epoch):
        raise PolicyError(f"leases may still need the secret of epoch {shown.epoch}")
    put_object(objects, shown.canonical())
    store_draws.set_revealed(connection, author, shown.epoch)


def _due(run: RunDefinition, epoch: int) -> int:
    return reveal_at(epoch, epoch_seconds=run.epoch_seconds, lease_seconds=run.lease_seconds)


def missing(connection: Connection, context: PoolContext, author: Address, now: float) -> list[int]:
    """Returns the oldest epochs of which a validator has not published a secret that is due, at
    most MISSING."""
    found = store_draws.hidden(connection, _due_before(context.run, now), of=author)
    return [epoch for _, epoch, _ in found[:MISSING]]


def withheld(connection: Connection, context: PoolContext, now: float) -> dict[Address, int]:
    """Returns the appointed validators that accepted files of an epoch and have not published its
    secret within GRACE_EPOCHS of its due time, each with the newest such epoch. Epochs that were
    over before the validator's latest appointment do not count: one that has lost its secrets can
    be appointed again."""
    run = context.run
    late = store_draws.hidden(connection, _due_before(run, now) - GRACE_EPOCHS)
    since = chain.appointed_at(connection, context.pool) if late else {}
    return {
        validator: epoch
        for validator, epoch, accepted in late
        if accepted and validator in since
        if (epoch + 1) * run.epoch_seconds > since[validator][1]
    }


def _due_before(run: RunDefinition, now: float) -> int:
    """Returns the first epoch whose secret is not due at `now` (`reveal_at`)."""
    return epoch_at(run, now - run.lease_seconds - REVEAL_MARGIN_SECONDS)


def reveal_second(
    store: Store, objects: ObjectStore, context: PoolContext, now: Callable[[], float]
) -> list[int]:
    """Publishes the manager's secrets that no lease needs any longer; returns their epochs."""
    with store.read() as connection:
        waiting = store_draws.unrevealed_seconds(connection)
    due = [(epoch, secret) for epoch, secret in waiting if _due(context.run, epoch) <= now()]
    for epoch, secret in due:
        put_object(objects, _managers(context, epoch, secret).canonical())
        with store.begin() as connection:
            store_draws.set_second_revealed(connection, epoch)
    return [epoch for epoch, _ in due]


def _managers(context: PoolContext, epoch: int, secret: Digest) -> DrawReveal:
    return DrawReveal(pool=context.pool, validator=context.manager, epoch=epoch, secret=secret)


def compare_acceptances(
    store: Store, objects: ObjectStore, context: PoolContext, now: Callable[[], float]
) -> Address | None:
    """Compares up to COMPARED acceptances with the rows that one newly published secret draws.
    A mismatch is recorded and ends the validator's appointment (appointments.py). Returns the
    validator if there is one.

    Files whose objects are missing or do not parse are left out. Raises UnavailableError if objects
    cannot be read now; then nothing is recorded.
    """
    with store.read() as connection:
        waiting = store_draws.uncompared(connection, 1)
        if not waiting:
            return None
        author, epoch = Address(waiting[0].validator), waiting[0].commitment.epoch
        start, length = epoch * context.run.epoch_seconds, context.run.epoch_seconds
        said = opinions.acceptances(connection, author, start, start + length, COMPARED)
        promises = leases.those(connection, [lease for _, lease in said])
    fetch = cache(partial(read_object, objects))
    mismatch = ""
    for one, lease in said:
        try:
            raw = read_object(objects, Digest(one.opinion.table), MAX_TABLE_BYTES)
            table = VerdictTable.model_validate_json(raw)
            signed, secret = promises[lease].signed(), Digest(table.draw_secret)
            check_draw(
                StatedDraw(signed, author, secret, table=table), Digest(one.opinion.submission),
                context.deployment, context.run, fetch, manager=context.manager, now=now(),
            )  # fmt: skip
        except (NotFoundError, MalformedError, ValueError) as error:
            log.warning("cannot compare an acceptance of %s with its draw: %s", author, error)
        except UntrustedError as error:
            mismatch = f"file {one.opinion.submission}: {error}"
            log.error("%s contradicts its draw of epoch %d: %s", author, epoch, mismatch)
            break
    with store.begin() as connection:
        store_draws.set_compared(connection, author, epoch, mismatch)
    return author if mismatch else None


@dataclass(frozen=True)
class FileDraws:
    """What a file's lease says of its judging: the list of draws, and the exact class, if any."""

    listed: DrawList
    numeric: Digest | None


@dataclass
class DrawBoard:
    """Provides the draw list that new leases name, and reads the lists of existing leases. Caches
    what it has read."""

    random: Callable[[int], bytes]
    _published: set[Digest] = field(default_factory=set)
    _read: dict[Digest, DrawList] = field(default_factory=dict)
    _secrets: dict[Digest, Digest] = field(default_factory=dict)
    _of_files: dict[Digest, FileDraws] = field(default_factory=dict)
    _unreadable: set[Digest] = field(default_factory=set)
    _without: set[Digest] = field(default_factory=set)
    _withheld: dict[Address, int] = field(default_factory=dict)
    _withheld_at: float = -inf
    _since: float = inf

    def current(
        self, connection: Connection, objects: ObjectStore, context: PoolContext, now: float
    ) -> Digest | None:
        """Returns the digest of the current epoch's list, stored as an object; None if no appointed
        validator has committed. `connection` must be a write transaction.

        Only commitments for the current epoch are included: older secrets may be about to be
        revealed. Validators that withhold an old secret (`withheld`) are left out, so they are
        assigned no file of a new lease.
        """
        epoch = epoch_at(context.run, now)
        found = store_draws.of_epoch(connection, epoch, MAX_VALIDATORS)
        # Sort here: addresses are mixed-case, and database collations differ.
        able = chain.appointed(connection, context.pool) - self._hiding(connection, context, now)
        commitments = tuple(
            sorted(
                (signed for signed in found if signed.validator in able),
                key=lambda signed: signed.validator,
            )
        )
        if not commitments:
            return None
        second = self._second(connection, context, epoch)
        listed = DrawList(pool=context.pool, second=second, commitments=commitments)
        if listed.digest() not in self._published:
            self._published = {put_object(objects, listed.canonical())}
        return listed.digest()

    def listed(self, objects: ObjectStore, lease: SignedLease) -> DrawList:
        """Returns the list that a lease's salt commits to. Raises MalformedError if there is none,
        UnavailableError if it cannot be read."""
        return self.named(objects, _list_of(lease))

    def named(self, objects: ObjectStore, name: Digest) -> DrawList:
        """Returns the list with this digest. Raises UnavailableError if its object is missing or
        damaged, or cannot be read now, and logs this once."""
        listed = self._read.get(name)
        if listed is not None:
            return listed
        try:
            listed = DrawList.model_validate_json(read_object(objects, name))
        except (NotFoundError, UnavailableError) as error:
            if name not in self._unreadable:
                log.error(
                    "draw list %s cannot be read; files whose leases name it wait: %s", name, error
                )
            self._unreadable.add(name)
            raise UnavailableError(f"draw list {name} cannot be read: {error}") from error
        if name in self._unreadable:
            self._unreadable.discard(name)
            self._without.clear()
        if len(self._read) > LISTED:
            self._read.clear()
        self._read[name] = listed
        return listed

    def of_files(
        self, objects: ObjectStore, promises: Mapping[Digest, SignedLease]
    ) -> dict[Digest, FileDraws]:
        """Returns what the leases of submissions say; `known` has it from now on. Leaves out those
        whose list cannot be read; `without` has them. Raises MalformedError if the salt of one
        commits to no draws."""
        lists: dict[Digest, DrawList | None] = {}
        found: dict[Digest, FileDraws] = {}
        for submission, lease in promises.items():
            name = _list_of(lease)
            if name not in lists:
                try:
                    lists[name] = self.named(objects, name)
                except UnavailableError:  # `named` has logged it
                    lists[name] = None
            listed = lists[name]
            if listed is None:
                self._without.add(submission)
            else:
                found[submission] = FileDraws(listed, lease.numeric_class())
        if len(self._of_files) > FILES_LISTED:
            self._of_files.clear()
        if len(self._without) > FILES_LISTED:
            self._without.clear()
        self._of_files |= found
        return found

    def known(self, submissions: Iterable[Digest]) -> dict[Digest, FileDraws]:
        """Returns the cached results of `of_files` for those submissions that have one."""
        found = {submission: self._of_files.get(submission) for submission in submissions}
        return {submission: one for submission, one in found.items() if one is not None}

    def without(self) -> frozenset[Digest]:
        """Returns submissions that `of_files` recently left out."""
        return frozenset(self._without)

    def secret(self, connection: Connection, second: Digest) -> Digest:
        """Returns the manager's secret for a list's `second`. Raises FatalError if it is lost."""
        found = self._secrets.get(second)
        if found is None:
            if len(self._secrets) > LISTED:
                self._secrets.clear()
            found = store_draws.second_secret(connection, second)
            self._secrets[second] = found
        return found

    def _hiding(self, connection: Connection, context: PoolContext, now: float) -> set[Address]:
        """Returns the validators of `withheld`, at most WITHHELD_SECONDS old; logs new ones. None
        for GRACE_EPOCHS from the first call: after an outage, or in a store that was restored from
        a backup, all validators may have to publish secrets (`missing`)."""
        self._since = min(self._since, now)
        if now < self._since + GRACE_EPOCHS * context.run.epoch_seconds:
            return set()
        if not 0 <= now - self._withheld_at < WITHHELD_SECONDS:
            found = withheld(connection, context, now)
            for validator, epoch in found.items():
                if self._withheld.get(validator) != epoch:
                    log.error(
                        "%s has not published its draw secret of epoch %d: new leases leave it out "
                        "until it does", validator, epoch,
                    )  # fmt: skip
            self._withheld, self._withheld_at = found, now
        return set(self._withheld)

    def _second(self, connection: Connection, context: PoolContext, epoch: int) -> Digest:
        """Returns the manager's commitment for an epoch. Its secret is generated on first use."""
        secret = ids.digest(self.random(32))
        commitment = _managers(context, epoch, secret).digest()
        return store_draws.second(connection, epoch, secret, commitment)


def _list_of(lease: SignedLease) -> Digest:
    if lease.opening is None:
        raise MalformedError("the lease's salt commits to no draws")
    return lease.opening.draws
