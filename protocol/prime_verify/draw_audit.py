"""Checks that a validator drew its replayed rows with the committed secrets (core/draws.py).

evidence.lease.salt ─opens to─► DrawList ─► the validator's signed commitment ─► its reveal
                                         ─► the manager's second commitment   ─► its reveal
                 rows_secret(file_secret(one, leaf), file_secret(other, leaf)) = draw_secret?
"""

from __future__ import annotations

from collections.abc import Callable

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
from prime_core.verdict import Evidence

REVEAL_PATIENCE = 600.0
"""Seconds after its due time from which an unpublished secret counts as withheld."""

Fetch = Callable[[Digest], bytes]


def check_draw(
    evidence: Evidence,
    leaf: Digest,
    deployment: Deployment,
    run: RunDefinition,
    fetch: Fetch,
    *,
    manager: Address,
    now: float,
) -> tuple[str, ...]:
    """Raises UntrustedError if the rows were not drawn with the two secrets that the lease's salt
    commits to, NotFoundError if one is overdue and withheld. Returns a note while they are not due.

    `leaf` is the submission's digest. `fetch` returns the bytes of an object, checked against its
    digest, or raises NotFoundError. `manager` is the pool's; `now` is in Unix seconds.
    """
    signed, second = _commitments(evidence, deployment, fetch)
    epoch = signed.commitment.epoch
    due = reveal_at(epoch, epoch_seconds=run.epoch_seconds, lease_seconds=run.lease_seconds)
    secrets = []
    for author, commitment in (
        (evidence.validator, signed.commitment.commitment),
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
            raise UntrustedError("what the draw's commitment names is no secret") from error
        shown = (reveal.pool, reveal.validator, reveal.epoch)
        if shown != (evidence.lease.lease.pool, author, epoch):
            raise UntrustedError("the revealed secret is of another pool, validator or epoch")
        secrets.append(file_secret(reveal.secret, leaf))
    if rows_secret(*secrets) != evidence.draw_secret:
        raise UntrustedError("the rows were not drawn by the secrets that were committed to")
    return ()


def _commitments(
    evidence: Evidence, deployment: Deployment, fetch: Fetch
) -> tuple[SignedDrawCommitment, Digest]:
    """Returns the validator's commitment and the manager's, from the list that the lease's salt
    commits to.

    The node signed the lease's digest with its file, so the commitment is older than the file.
    Raises UntrustedError if there is no valid one.
    """
    lease = evidence.lease
    if lease.opening is None or not lease.opens():
        raise UntrustedError("the lease's salt commits to no draws")
    try:
        listed = DrawList.model_validate_json(fetch(lease.opening.draws))
    except ValueError as error:
        raise UntrustedError("the lease's list of draw commitments does not parse") from error
    pool = lease.lease.pool
    signed = listed.of(evidence.validator)
    if signed is None or listed.pool != pool:
        raise UntrustedError(f"the lease names no draw of {evidence.validator}")
    statement = signed.commitment
    signer = statement.recover(deployment.domain_of(statement), signed.signature)
    if signer != evidence.validator or statement.pool != pool:
        raise UntrustedError("the draw's commitment is not signed by the validator for this pool")
    if evidence.statistics.get("draw_commitment", statement.commitment) != statement.commitment:
        raise UntrustedError("the evidence names another draw than its lease")
    return signed, listed.second
