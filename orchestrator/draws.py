"""Draw secrets: committed to before a lease, used for its file, revealed once no lease needs them.

    validator     prepare   draws and signs this epoch's secret and those to come; reveals old ones
    orchestrator  current   the DrawList that a new lease's salt commits to
    validator     draw      the secret of one file: of the epoch that its lease names, no other

See protocol.core.draws for what the objects are and why each file has a secret of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import sqlalchemy as sa
from sqlalchemy import Connection

from orchestrator.context import PoolContext, read_object
from orchestrator.store import schema
from orchestrator.store.engine import Store
from orchestrator.store.rows import insert_new
from protocol.core import ids
from protocol.core.draws import (
    MAX_VALIDATORS,
    DrawCommitment,
    DrawList,
    DrawReveal,
    SignedDrawCommitment,
    file_secret,
    reveal_at,
)
from protocol.core.errors import UntrustedError
from protocol.core.ids import Address, Digest
from protocol.core.messages import DrawInfo
from protocol.core.run import RunDefinition
from protocol.core.signing import Signer
from protocol.core.task import SignedLease
from protocol.storage.base import ObjectStore, put_object

EPOCHS_AHEAD = 8
"""A validator may be away for so many epochs before leases wait for it."""
LISTED = 256

_table = schema.draw_secrets


@dataclass(frozen=True)
class Draw:
    """The secret under which one file is judged, and the commitment it can be checked against.
    `validators`: how many the file's lease names."""

    secret: Digest
    epoch: int
    commitment: Digest
    validators: int = 1


class DrawSecrets:
    """One validator's secrets. `random(n)` gives n unpredictable bytes, `now` Unix seconds."""

    def __init__(
        self,
        store: Store,
        objects: ObjectStore,
        context: PoolContext,
        signer: Signer,
        *,
        random: Callable[[int], bytes],
        now: Callable[[], float],
    ) -> None:
        self._store = store
        self._objects = objects
        self._context = context
        self._signer = signer
        self._random = random
        self._now = now

    @property
    def validator(self) -> Address:
        return self._signer.address

    def prepare(self) -> None:
        """Commits to this epoch and those ahead, and reveals what no lease needs any more."""
        now, run = self._now(), self._context.run
        epoch = epoch_at(run, now)
        with self._store.read() as connection:
            rows = connection.execute(
                sa.select(_table.c.epoch, _table.c.secret, _table.c.revealed).where(
                    _table.c.validator == self.validator,
                    sa.or_(_table.c.epoch >= epoch, _table.c.revealed.is_(False)),
                )
            ).all()
        known = {int(row.epoch) for row in rows}
        for number in range(epoch, epoch + EPOCHS_AHEAD):
            if number not in known:
                self._commit(number)
        for row in rows:
            due = reveal_at(
                row.epoch, epoch_seconds=run.epoch_seconds, lease_seconds=run.lease_seconds
            )
            if not row.revealed and due <= now:
                self._show(int(row.epoch), Digest(row.secret))

    def draw(self, lease: SignedLease, submission: Digest) -> Draw:
        """The secret of the file that was handed in for `lease`.

        Raises UntrustedError if the lease names no commitment of this validator's: it has to leave
        the file to another. UnavailableError, NotFoundError if the lease's list cannot be read.
        """
        if lease.opening is None or not lease.opens():
            raise UntrustedError("the lease's salt commits to no draws")
        try:
            listed = DrawList.model_validate_json(read_object(self._objects, lease.opening.draws))
        except ValueError as error:
            raise UntrustedError("the lease's list of draw commitments does not parse") from error
        mine = listed.of(self.validator)
        if mine is None:
            raise UntrustedError(f"the lease names no draw commitment of {self.validator}")
        epoch = mine.commitment.epoch
        with self._store.read() as connection:
            secret = connection.execute(
                sa.select(_table.c.secret).where(
                    _table.c.validator == self.validator, _table.c.epoch == epoch
                )
            ).scalar()
        if secret is None or self._reveal(epoch, Digest(secret)).digest() != (
            mine.commitment.commitment
        ):
            raise UntrustedError(f"the secret behind the lease's commitment of {epoch} is not here")
        return Draw(
            file_secret(Digest(secret), submission),
            epoch,
            mine.commitment.commitment,
            len(listed.commitments),
        )

    def _reveal(self, epoch: int, secret: Digest) -> DrawReveal:
        return DrawReveal(
            pool=self._context.pool, validator=self.validator, epoch=epoch, secret=secret
        )

    def _commit(self, epoch: int) -> None:
        """Draws and signs an epoch's secret, unless a process of the same key was first."""
        secret = ids.digest(self._random(32))
        statement = DrawCommitment(
            pool=self._context.pool, epoch=epoch, commitment=self._reveal(epoch, secret).digest()
        )
        signed = SignedDrawCommitment(
            commitment=statement,
            validator=self.validator,
            signature=self._signer.sign(statement, self._context.domain(statement)),
        )
        with self._store.begin() as connection:
            insert_new(
                connection,
                _table,
                {
                    "validator": self.validator,
                    "epoch": epoch,
                    "secret": secret,
                    "body": signed.model_dump_json(),
                    "revealed": False,
                },
            )

    def _show(self, epoch: int, secret: Digest) -> None:
        put_object(self._objects, self._reveal(epoch, secret).canonical())
        with self._store.begin() as connection:
            connection.execute(
                sa.update(_table)
                .where(_table.c.validator == self.validator, _table.c.epoch == epoch)
                .values(revealed=True)
            )


@dataclass
class DrawBoard:
    """The orchestrator's side: which list a lease names now. Remembers what it has published."""

    _published: set[Digest] = field(default_factory=set)

    def current(
        self, connection: Connection, objects: ObjectStore, context: PoolContext, now: float
    ) -> Digest | None:
        """The digest of the present epoch's list, an object; None if no validator has committed.

        Only commitments of the present epoch are named: older ones may be about to be revealed.
        """
        rows = connection.execute(
            sa.select(_table.c.body)
            .where(_table.c.epoch == epoch_at(context.run, now))
            .order_by(_table.c.validator)
            .limit(MAX_VALIDATORS)
        ).scalars()
        # Sorted here: a database may order letters by language, and addresses mix their cases.
        commitments = tuple(
            sorted(
                (SignedDrawCommitment.model_validate_json(body) for body in rows),
                key=lambda signed: signed.validator,
            )
        )
        if not commitments:
            return None
        listed = DrawList(pool=context.pool, commitments=commitments)
        if listed.digest() not in self._published:
            self._published = {put_object(objects, listed.canonical())}
        return listed.digest()


def epoch_at(run: RunDefinition, now: float) -> int:
    """The epoch of a moment (Unix seconds)."""
    return int(now) // run.epoch_seconds


def listing(connection: Connection) -> list[DrawInfo]:
    """The newest commitments, latest epoch first, and whether their secrets are shown."""
    rows = connection.execute(
        sa.select(_table.c.body, _table.c.revealed)
        .order_by(_table.c.epoch.desc(), _table.c.validator)
        .limit(LISTED)
    )
    return [
        DrawInfo(
            signed=SignedDrawCommitment.model_validate_json(row.body), revealed=bool(row.revealed)
        )
        for row in rows
    ]
