"""Checks that the rows a validator replayed follow from the secrets that were committed to.

Auditors use this on slashes and acceptances, and the manager on acceptances. See prime_core.draws
for the objects.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from prime_core.deployment import Deployment
from prime_core.draws import (
    DrawList,
    DrawReveal,
    SignedDrawCommitment,
    file_secret,
    reveal_at,
    rows_secret,
)
from prime_core.errors import NotFoundError, UntrustedError
from prime_core.ids import Address, Digest
from prime_core.run import RunDefinition
from prime_core.seeds import drawn_rows
from prime_core.task import SignedLease, real_pool
from prime_core.verdict import VerdictTable

REVEAL_PATIENCE = 600.0
"""Seconds after its due time from which an unpublished secret counts as withheld."""

Fetch = Callable[[Digest], bytes]
"""Returns the bytes of a published object. Raises NotFoundError, UnavailableError."""


@dataclass(frozen=True)
class StatedDraw:
    """A draw as a validator states it: the file's lease, and the secret that selected the rows.
    `commitment`: the validator's, if it states that too. `table`: of an acceptance, with the rows
    that it replayed."""

    lease: SignedLease
    validator: Address
    secret: Digest
    commitment: str | None = None
    table: VerdictTable | None = None


def check_draw(
    drawn: StatedDraw,
    leaf: Digest,
    deployment: Deployment,
    run: RunDefinition,
    fetch: Fetch,
    *,
    manager: Address,
    now: float,
) -> tuple[str, ...]:
    """Checks that a validator drew its rows with the two secrets that the lease's salt commits to.

    Returns a note if the secrets are not due yet. Raises UntrustedError if other secrets were used,
    or the table names other rows than the secret draws; NotFoundError if a secret is overdue.

    lease's salt ─opens to─► DrawList ─► the validator's signed commitment ─► its reveal
                                      ─► the manager's second commitment   ─► its reveal
              rows_secret(file_secret(one, leaf), file_secret(other, leaf)) = draw_secret?

    `leaf` is the submission's digest. `fetch` checks what it returns against the digest. `manager`
    is the pool's; `now` is in Unix seconds.
    """
    table = drawn.table
    if table is not None:
        due_rows = drawn_rows(drawn.secret, leaf, len(table.rows), len(table.rows_drawn))
        if list(table.rows_drawn) != due_rows:
            raise UntrustedError("the table names other rows than its secret draws")
    signed, second = _commitments(drawn, deployment, fetch)
    epoch = signed.commitment.epoch
    due = reveal_at(epoch, epoch_seconds=run.epoch_seconds, lease_seconds=run.lease_seconds)
    secrets = []
    for author, commitment in (
        (drawn.validator, signed.commitment.commitment),
        (manager, second),
    ):
        try:
            raw = fetch(commitment)
        except NotFoundError:
            if now > due + REVEAL_PATIENCE:
                raise NotFoundError(
                    f"the secret of the draw (epoch {epoch}) was due and is not published: "
                    "so whether the rows were drawn by it is unknown"
                ) from None
            return (
                f"the secret of the draw (epoch {epoch}) is not shown before {due} (Unix time)",
            )
        try:
            reveal = DrawReveal.model_validate_json(raw)
        except ValueError as error:
            raise UntrustedError("what the draw's commitment names is not a secret") from error
        shown = (reveal.pool, reveal.validator, reveal.epoch)
        if shown != (real_pool(drawn.lease.lease.pool), author, epoch):
            raise UntrustedError("the revealed secret is of another pool, validator or epoch")
        secrets.append(file_secret(reveal.secret, leaf))
    if rows_secret(*secrets) != drawn.secret:
        raise UntrustedError("the rows were not drawn by the secrets that were committed to")
    return ()


def _commitments(
    drawn: StatedDraw, deployment: Deployment, fetch: Fetch
) -> tuple[SignedDrawCommitment, Digest]:
    """Returns the validator's commitment and the manager's, from the list that the lease's salt
    commits to.

    The node signed the lease's digest with its file, so the commitment is older than the file.
    Raises UntrustedError if there is no valid one.
    """
    lease = drawn.lease
    if lease.opening is None or not lease.opens():
        raise UntrustedError("the lease's salt commits to no draws")
    try:
        listed = DrawList.model_validate_json(fetch(lease.opening.draws))
    except ValueError as error:
        raise UntrustedError("the lease's list of draw commitments does not parse") from error
    pool = real_pool(lease.lease.pool)
    signed = listed.of(drawn.validator)
    if signed is None or listed.pool != pool:
        raise UntrustedError(f"the lease names no draw of {drawn.validator}")
    statement = signed.commitment
    signer = statement.recover(deployment.domain_of(statement), signed.signature)
    if signer != drawn.validator or statement.pool != pool:
        raise UntrustedError("the draw's commitment is not signed by the validator for this pool")
    if drawn.commitment not in (None, statement.commitment):
        raise UntrustedError("the evidence names another draw than its lease")
    return signed, listed.second
