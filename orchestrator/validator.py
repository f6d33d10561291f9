"""The validator: claims submitted files, judges them, and sees its slashes through.

    judge_some   claim jobs → policy → file → verify → opinion, verdict    (abstain on our trouble)
    chain_tick   its own lane: `propose` once the root is confirmed, `execute` after the window
    prepare      secrets of the epoch to come are committed to, those over are revealed

Verification decides nothing by failing: an exception, a missing policy or a lost file is an
abstention, and another validator takes the job, or this one later. A claim is kept alive while the
judging lasts; if the process dies, it runs out, and a job that did so three times is set aside.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from orchestrator import first_opinion, judging, uploads
from orchestrator.claims import Claims, Patience
from orchestrator.context import PoolContext
from orchestrator.draws import Draw, DrawSecrets
from orchestrator.history import draw_count
from orchestrator.judging import Judgement
from orchestrator.opinions import needed
from orchestrator.outbox import run_outbox_tick
from orchestrator.policy_store import PolicyStore
from orchestrator.slashing import queue_executions, requeue_proposals
from orchestrator.store import jobs, leases, opinions, row_marks, submissions
from orchestrator.store.engine import Store
from orchestrator.store.leases import LeaseRow
from orchestrator.store.opinions import OpinionRow
from orchestrator.store.submissions import SubmissionRow
from protocol.chain.contracts import Contracts
from protocol.chain.sender import Sender
from protocol.core import encoding
from protocol.core.errors import FatalError, NotFoundError, UnavailableError, UntrustedError
from protocol.core.ids import ZERO_DIGEST, Digest
from protocol.core.rollout import MAX_FILE_BYTES, SignedSubmission
from protocol.core.signing import Signer
from protocol.core.task import SignedLease
from protocol.core.verdict import Evidence, Outcome, Reason
from protocol.environments.base import Environment
from protocol.proofs.thresholds import Calibration, shipped
from protocol.storage.base import ObjectStore
from protocol.verification.audit_compare import compare_slash
from protocol.verification.engines import EngineProvider
from protocol.verification.packing import Packing
from protocol.verification.verify import Finding, verify_file

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Job:
    row: SubmissionRow
    signed: SignedSubmission
    lease: LeaseRow
    signed_lease: SignedLease
    accepted_before: int
    """Accepted files of the same node so far."""
    opinions: tuple[OpinionRow, ...] = ()
    """What other validators said of it."""

    @property
    def outcomes(self) -> list[Outcome]:
        return [opinion.outcome for opinion in self.opinions]


class _AbstainError(Exception):
    """Ends the judging of one file; never leaves this module."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Validator:
    """One validator process. `worker` names this process among those that share its key."""

    def __init__(
        self,
        store: Store,
        objects: ObjectStore,
        context: PoolContext,
        signer: Signer,
        engines: EngineProvider,
        environment: Environment,
        policies: PolicyStore,
        draws: DrawSecrets,
        *,
        worker: str,
        version: str,
        now: Callable[[], float],
        calibration: Calibration | None = None,
        patience: Patience | None = None,
    ) -> None:
        self._store = store
        self._objects = objects
        self._context = context
        self._signer = signer
        self._engines = engines
        self._environment = environment
        self._policies = policies
        self._draws = draws
        self._worker = worker
        self._version = version
        self._now = now
        self._calibration = calibration
        self._patience = patience or Patience()
        self._claims = Claims(
            store, worker, signer.address, seconds=self._patience.claim_seconds,
            judge_seconds=self._patience.judge_seconds, now=now,
            lone_seconds=min(self._patience.lone_seconds, context.run.validity_seconds / 4),
        )  # fmt: skip
        self._owed: list[Digest] = []

    def judge_next(self) -> Digest | None:
        """Claims and judges one file; returns its submission, or None if there is nothing to do.

        Raises UnavailableError if the database or the object store cannot be used now. A job that
        was being judged is given back, which counts neither as a death nor as an abstention.
        """
        judged = self.judge_some(1)
        return judged[0] if judged else None

    def judge_some(self, most: int) -> list[Digest]:
        """The same for up to `most` files of one policy, whose rows share prefills.

        A file during whose judging somebody died is judged alone: it must not take others along.
        """
        self._return_owed()
        if not self._claims.waiting():
            return []
        claimed = self._claims.take(most)
        try:
            self._judge_together(claimed)
        except UnavailableError:
            self._return_owed()
            raise
        return claimed

    def _judge_together(self, claimed: Sequence[Digest]) -> None:
        if len(claimed) == 1:
            self._judge_claimed(claimed[0], self._engines)
            return
        packing = Packing(self._engines, len(claimed))

        def judge(digest: Digest) -> None:
            try:
                self._judge_claimed(digest, packing.engines())
            finally:
                packing.ended()

        with ThreadPoolExecutor(max(1, len(claimed)), "judging") as pool:
            ended = [pool.submit(judge, digest) for digest in claimed]
        for one in ended:
            one.result()

    def _judge_claimed(self, digest: Digest, engines: EngineProvider) -> None:
        with self._claims.keep(digest):
            try:
                self._judge(digest, engines)
            except _AbstainError as error:
                self._abstain(digest, error.reason, str(error))
            except UnavailableError:
                self._owed.append(digest)  # given back once nobody else is judging
                raise

    def _return_owed(self) -> None:
        """Gives back the jobs that an outage took from us: at once, or when the database is back.

        Raises UnavailableError while it is away.
        """
        while self._owed:
            with self._store.begin() as connection:
                jobs.give_back(
                    connection,
                    self._owed[0],
                    self._worker,
                    not_before=self._now() + self._patience.retry_seconds,
                    max_abstentions=None,
                )
            self._owed.pop(0)

    def _judge(self, digest: Digest, engines: EngineProvider) -> None:
        job = self._load(digest)
        own = draw = self._draw(job)
        accusation = None
        if named := next((o for o in job.opinions if o.evidence is not None), None):
            accusation = first_opinion.evidence_of(
                named, job.row, job.signed, job.signed_lease, self._context, self._objects,
                (self._calibration or shipped()).digest(), now=self._now(),
            )  # fmt: skip
        if accusation is not None:  # does what another found hold here, in the very same rows?
            draw = replace(own, secret=accusation.draw_secret)
        rows = len(accusation.rows_drawn) if accusation else 0
        finding = self._verify(job, draw, engines, rows)
        if accusation is not None and finding.outcome is Outcome.REJECTED:
            said = compare_slash(accusation, finding, ())
            if said.result != "match":  # a lie, but not as stated: nobody vouches for that
                log.warning("submission %s, the first opinion's evidence: %s", digest, said.detail)
                accusation, draw = None, own  # every row: what was just seen is not to be lost
                finding = self._verify(job, own, engines, self._context.run.rows_per_lease)
        if finding.outcome is Outcome.ABSTAINED:
            raise _AbstainError(finding.reason, finding.detail)
        evidence = None
        reason = finding.reason
        if finding.outcome is Outcome.REJECTED:
            stated = accusation or self._evidence(job, finding, draw)
            reason = Reason(stated.reason)
            evidence = encoding.canonical_json(stated.model_dump(mode="json"))
        table = None
        if finding.outcome is Outcome.ACCEPTED:
            row = job.row
            table = finding.verdict_table(digest, row.sha256, row.policy_version, row.step)
        judgement = Judgement(
            reason,
            int(finding.units),
            table,
            evidence,
            finding.setup,
            finding.shares(),
            finding.statistics.get("compute_share"),
            None if finding.repeated is None else len(finding.repeated),
            finding.marks,
            finding.whole,
        )
        published = judging.publish_verdict(
            self._objects,
            self._context,
            self._signer,
            digest,
            judgement,
            judged_at=int(self._now()),
        )
        log.info("submission %s: %s: %s", digest, finding.reason.name, finding.detail)
        written = judging.record_verdict(
            self._store,
            self._context,
            digest,
            published,
            worker=self._worker,
            now=self._now(),
            needed=needed(finding.outcome, job.outcomes, own.validators, own.secret),
        )
        if not written:
            log.warning("the claim on %s was lost; its verdict is dropped", digest)

    def _load(self, digest: Digest) -> _Job:
        """The submission and its lease, with their signatures checked anew: evidence names both."""
        with self._store.read() as connection:
            row = submissions.get(connection, digest)
            lease = leases.get(connection, row.lease_digest) if row is not None else None
            before = submissions.accepted_of(connection, row.node) if row is not None else 0
            said = tuple(opinions.of(connection, digest))
        if row is None or lease is None:
            raise FatalError(f"a job names submission {digest}, which the store does not hold")
        signed, signed_lease = row.signed(), lease.signed()
        domain = self._context.domain
        claim, promise = signed.submission, signed_lease.lease
        try:
            holds = (
                claim.digest(domain(claim)) == digest
                and promise.digest(domain(promise)) == claim.lease_digest
                and claim.recover(domain(claim), signed.signature) == signed.node == promise.node
                and promise.recover(domain(promise), signed_lease.signature)
                == self._context.manager
            )
        except UntrustedError as error:
            raise _AbstainError(Reason.VALIDATOR_CRASHED, f"the store: {error}") from error
        if not holds:
            raise _AbstainError(
                Reason.VALIDATOR_CRASHED, "lease and submission in the store do not belong together"
            )
        return _Job(row, signed, lease, signed_lease, before, said)

    def _draw(self, job: _Job) -> Draw:
        """The secret that the lease names; a file whose lease names none of ours is another's."""
        try:
            return self._draws.draw(job.signed_lease, job.row.digest)
        except (UntrustedError, NotFoundError) as error:
            raise _AbstainError(Reason.VALIDATOR_CRASHED, str(error)) from error

    def _verify(self, job: _Job, draw: Draw, engines: EngineProvider, rows: int) -> Finding:
        """Judges the file; `rows` is how many to replay where evidence says so."""
        claim, promise = job.signed.submission, job.signed_lease.lease
        received_at = job.row.receipt_answer().receipt.received_at
        if received_at > min(promise.deadline, claim.valid_until):
            return Finding(Reason.LATE, f"received at {received_at}, due by {promise.deadline}")
        try:
            data = uploads.read(self._objects, promise.deadline, claim.sha256, MAX_FILE_BYTES)
        except (NotFoundError, UnavailableError, UntrustedError) as error:
            raise _AbstainError(Reason.OUT_OF_RESOURCES, f"our store lost it: {error}") from error
        try:
            self._policies.ensure(job.signed_lease.policy_version, promise.policy_digest)
        except (UnavailableError, UntrustedError) as error:
            raise _AbstainError(Reason.POLICY_MISSING, str(error)) from error
        try:
            return verify_file(
                data,
                job.signed_lease,
                job.row.lease_digest,
                self._context.run,
                self._environment,
                engines,
                draw_secret=draw.secret,
                submission_digest=job.row.digest,
                submission=claim,
                calibration=self._calibration,
                draw_count=rows or draw_count(self._context.run, job.accepted_before, draw.secret),
                seen=None if rows else partial(self._seen, job.row.digest),
            )
        except MemoryError as error:
            raise _AbstainError(Reason.OUT_OF_RESOURCES, f"out of memory: {error}") from error
        except Exception as error:
            # Whatever went wrong in there is our trouble, never the node's: it is logged in full,
            # the job goes to somebody else, and a job that nobody can judge is set aside.
            log.exception("judging %s failed", job.row.digest)
            raise _AbstainError(
                Reason.VALIDATOR_CRASHED, f"{type(error).__name__}: {error}"
            ) from error

    def _seen(self, digest: Digest, marks: Mapping[str, bool]) -> frozenset[str]:
        with self._store.read() as connection:
            return row_marks.seen(connection, marks, but=digest)

    def _evidence(self, job: _Job, finding: Finding, draw: Draw) -> Evidence:
        statistics = finding.decimal_statistics() | {
            "draw_epoch": str(draw.epoch),
            "draw_commitment": draw.commitment,
        }
        return Evidence(
            chain_id=self._context.deployment.chain_id,
            submission=job.signed,
            lease=job.signed_lease,
            reason=int(finding.reason),
            detail=finding.detail[:2048],
            run_digest=self._context.run.digest(),
            validator=self._signer.address,
            validator_version=self._version,
            draw_secret=draw.secret,
            rows_drawn=finding.rows_drawn,
            statistics=statistics,
            thresholds=finding.decimal_thresholds(),
            calibration=(
                (self._calibration or shipped()).digest() if finding.thresholds else ZERO_DIGEST
            ),
            row_statistics=finding.decimal_row_statistics(),
            chance=finding.decimal_chance(),
        )

    def _abstain(self, digest: Digest, reason: Reason, detail: str) -> None:
        judging.record_abstention(
            self._store,
            digest,
            reason,
            detail,
            worker=self._worker,
            now=self._now(),
            retry_seconds=self._patience.retry_seconds,
            max_abstentions=self._patience.max_abstentions,
        )


def run_validator_chain_tick(
    store: Store,
    context: PoolContext,
    contracts: Contracts,
    sender: Sender,
    now: Callable[[], float],
) -> int:
    """One round of the validator's lane; returns how many intents are not finished."""
    queue_executions(store, sender.address, now)
    requeue_proposals(store, sender.address, now)
    return run_outbox_tick(store, context, contracts, sender, now)
