"""A validator's draw secrets: generated and committed to in advance, used for files, revealed
later.

    prepare   commits to the secrets of this and coming epochs; reveals those no lease needs
    draw      derives one file's draw secret from the secret of the epoch that its lease names
              and the manager's part, which comes with the job

An epoch's secret never leaves the folder before it is due; see prime_core.draws.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from prime_core import ids
from prime_core.draws import (
    DrawCommitment,
    DrawList,
    DrawReveal,
    SignedDrawCommitment,
    file_secret,
    reveal_at,
    rows_secret,
)
from prime_core.errors import ConflictError, NotFoundError, PolicyError, UntrustedError
from prime_core.ids import Digest
from prime_core.signing import Signer
from prime_core.validator_messages import Job
from prime_validator.api import ValidatorApi
from prime_validator.folder import Folder
from prime_validator.pool import PoolOnChain

log = logging.getLogger(__name__)

EPOCHS_AHEAD = 8


@dataclass(frozen=True)
class Draw:
    """The secret that draws one file's rows, and the validator's commitment it is based on."""

    secret: Digest
    epoch: int
    commitment: Digest
    listed: Digest
    """Digest of the DrawList that the lease names."""


class Draws:
    """`random(n)` returns n unpredictable bytes, `now` Unix seconds."""

    def __init__(
        self,
        folder: Folder,
        api: ValidatorApi,
        pool: PoolOnChain,
        signer: Signer,
        *,
        random: Callable[[int], bytes],
        now: Callable[[], float],
    ) -> None:
        self._folder = folder
        self._api = api
        self._pool = pool
        self._signer = signer
        self._random = random
        self._now = now
        self._lists: dict[Digest, DrawList] = {}

    def prepare(self) -> None:
        """Reveals secrets that are due, then commits to those that are not committed yet. Repeats
        earlier commitments with new ones, and reveals what the orchestrator then names as missing,
        because one that was restored from a backup has lost some of them. Raises PolicyError if
        none is taken, as after a dismissal."""
        run, now = self._pool.run, self._now()
        self._reveal_due()
        epoch = int(now) // run.epoch_seconds
        secrets = [
            self._folder.keep_secret(number, ids.digest(self._random(32)))
            for number in range(epoch, epoch + EPOCHS_AHEAD)
        ]
        if not all(one.committed for one in secrets):
            try:
                missing = self._api.commit([self._signed(one.epoch, one.secret) for one in secrets])
            except ConflictError as error:
                raise PolicyError(
                    f"this folder does not hold the secrets that its key committed to: {error}"
                ) from error
            for number in missing:
                self._reveal_again(number)
            self._folder.mark_committed([one.epoch for one in secrets])

    def _reveal_again(self, epoch: int) -> None:
        """Reveals the secret of an epoch that the orchestrator names as missing, if it is due by
        this machine's clock: before that, no one may learn it."""
        kept = self._folder.secret(epoch)
        if kept is None or not kept.committed:
            log.error(
                "the orchestrator asks for the draw secret of epoch %d, which is not in this "
                "folder: new leases leave this validator out if it accepted files of that epoch",
                epoch,
            )
        elif self._due(epoch) > self._now():
            log.error("the orchestrator asks for the secret of epoch %d before it is due", epoch)
        else:
            try:
                self._api.reveal(self._reveal(epoch, kept.secret))
            except (NotFoundError, PolicyError, UntrustedError) as error:
                log.error("the secret of epoch %d is not published: %s", epoch, error)

    def _due(self, epoch: int) -> int:
        """Returns when the secret of an epoch may be revealed (Unix seconds)."""
        run = self._pool.run
        return reveal_at(epoch, epoch_seconds=run.epoch_seconds, lease_seconds=run.lease_seconds)

    def _reveal_due(self) -> None:
        now = self._now()
        for one in self._folder.unrevealed():
            if self._due(one.epoch) > now:
                continue
            try:
                self._api.reveal(self._reveal(one.epoch, one.secret))
            except NotFoundError as error:
                if not error.problem:  # of a proxy
                    raise
                log.error("the secret of epoch %d is not published: %s", one.epoch, error)
            self._folder.mark_revealed(one.epoch)

    def draw(self, job: Job) -> Draw:
        """Returns the draw for a job's file.

        Raises UntrustedError or MalformedError if its lease names no commitment to a secret in this
        folder; UnavailableError or NotFoundError if the list cannot be fetched.
        """
        lease = job.lease
        if lease.opening is None or not lease.opens():
            raise UntrustedError("the lease's salt commits to no draws")
        name = Digest(lease.opening.draws)
        if name not in self._lists:
            self._lists = {name: self._api.draw_list(name)}
        mine = self._lists[name].of(self._signer.address)
        if mine is None:
            raise UntrustedError(f"the lease names no draw commitment of {self._signer.address}")
        epoch = mine.commitment.epoch
        kept = self._folder.secret(epoch)
        commitment = Digest(mine.commitment.commitment)
        if kept is None or self._reveal(epoch, kept.secret).digest() != commitment:
            raise UntrustedError(f"the secret behind the lease's commitment of {epoch} is not here")
        own = file_secret(kept.secret, job.submission_digest)
        return Draw(rows_secret(own, job.second), epoch, commitment, name)

    def _reveal(self, epoch: int, secret: Digest) -> DrawReveal:
        return DrawReveal(
            pool=self._pool.number, validator=self._signer.address, epoch=epoch, secret=secret
        )

    def _signed(self, epoch: int, secret: Digest) -> SignedDrawCommitment:
        statement = DrawCommitment(
            pool=self._pool.number, epoch=epoch, commitment=self._reveal(epoch, secret).digest()
        )
        return SignedDrawCommitment(
            commitment=statement,
            validator=self._signer.address,
            signature=self._signer.sign(statement, self._pool.domain(statement)),
        )
