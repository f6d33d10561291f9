"""The evidence that another validator states for its rejection, read by one who is to try it."""

from __future__ import annotations

import logging
from functools import partial

from orchestrator.context import PoolContext, read_object
from orchestrator.store.opinions import OpinionRow
from orchestrator.store.submissions import SubmissionRow
from protocol.core.errors import MalformedError, NotFoundError, UntrustedError
from protocol.core.ids import Digest
from protocol.core.rollout import SignedSubmission
from protocol.core.task import SignedLease
from protocol.core.verdict import Evidence
from protocol.storage.base import ObjectStore
from protocol.verification.audit_compare import check_stated
from protocol.verification.draw_audit import check_draw

log = logging.getLogger(__name__)


def evidence_of(
    opinion: OpinionRow,
    row: SubmissionRow,
    submission: SignedSubmission,
    lease: SignedLease,
    context: PoolContext,
    objects: ObjectStore,
    calibration: Digest,
    *,
    now: float,
) -> Evidence | None:
    """The evidence behind a rejection; None if what is stated is none on this file that an audit
    would look at (audit.py): then whoever asks looks for itself. `calibration` is the one that is
    used here, `now` in Unix seconds."""
    if opinion.evidence is None:
        return None
    try:
        evidence = Evidence.model_validate_json(read_object(objects, opinion.evidence))
        check_stated(
            evidence,
            calibration,
            submission=submission,
            lease=lease,
            validator=opinion.validator,
            chain_id=context.deployment.chain_id,
            run_digest=context.run.digest(),
        )
        if not row.shadow:  # whose lease is for a pool that no draw is signed for
            fetch = partial(read_object, objects)
            check_draw(evidence, row.digest, context.deployment, context.run, fetch, now=now)
    except (MalformedError, NotFoundError, UntrustedError, ValueError) as error:
        log.warning("submission %s: no evidence rejects it: %s", row.digest, error)
        return None
    return evidence
