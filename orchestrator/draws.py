"""A validator's epoch secrets: drawn and committed to ahead, revealed once their epoch is over.

See protocol.core.draws for what the objects are and why each file has a secret of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import sqlalchemy as sa

from orchestrator.context import PoolContext
from orchestrator.store import schema
from orchestrator.store.engine import Store
from orchestrator.store.rows import insert_new
from protocol.core import ids
from protocol.core.draws import DrawCommitment, DrawReveal, SignedDrawCommitment, file_secret
from protocol.core.ids import Address, Digest
from protocol.core.signing import Signer
from protocol.storage.base import ObjectStore, put_object

_table = schema.draw_secrets


@dataclass(frozen=True)
class Draw:
    """The secret under which one file is judged, and the commitment it can be checked against."""

    secret: Digest
    epoch: int
    commitment: Digest


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
        self._prepared = -1

    @property
    def validator(self) -> Address:
        return self._signer.address

    def epoch(self) -> int:
        """The present epoch by this validator's clock."""
        return int(self._now()) // self._context.run.epoch_seconds

    def prepare(self) -> None:
        """Commits to this epoch and the next, and reveals what is over. Cheap within an epoch."""
        epoch = self.epoch()
        if epoch == self._prepared:
            return
        for number in (epoch, epoch + 1):
            self._commit(self._reveal_of(number))
        with self._store.read() as connection:
            over = connection.execute(
                sa.select(_table.c.epoch).where(
                    _table.c.validator == self.validator,
                    _table.c.epoch < epoch,
                    _table.c.epoch >= self._prepared - 1,
                )
            ).scalars()
            ended = [int(number) for number in over]
        for number in ended:
            put_object(self._objects, self._reveal_of(number).canonical())
        self._prepared = epoch

    def draw(self, submission: Digest) -> Draw:
        """The secret of one file, under the present epoch's."""
        self.prepare()
        reveal = self._reveal_of(self.epoch())
        return Draw(file_secret(reveal.secret, submission), reveal.epoch, reveal.digest())

    def _reveal_of(self, epoch: int) -> DrawReveal:
        """The epoch's secret, drawn and written down if there was none."""
        fresh = ids.digest(self._random(32))
        with self._store.begin() as connection:
            insert_new(
                connection,
                _table,
                {"validator": self.validator, "epoch": epoch, "secret": fresh},
            )
            kept = connection.execute(
                sa.select(_table.c.secret).where(
                    _table.c.validator == self.validator, _table.c.epoch == epoch
                )
            ).scalar_one()
        return DrawReveal(
            pool=self._context.pool, validator=self.validator, epoch=epoch, secret=Digest(kept)
        )

    def _commit(self, reveal: DrawReveal) -> None:
        commitment = DrawCommitment(
            pool=reveal.pool, epoch=reveal.epoch, commitment=reveal.digest()
        )
        signed = SignedDrawCommitment(
            commitment=commitment,
            validator=self.validator,
            signature=self._signer.sign(commitment, self._context.domain(commitment)),
        )
        put_object(self._objects, signed.canonical())
