"""Judges claimed files: forms opinions, seals them first, and submits them when they are due.

    claim ─► check signatures ─► draw ─► file, policy ─► verify ─► opinion ─► seal ─► submit
                     └ our fault: abstain         └ outage: later

A failure of the verifier decides nothing: an exception, a missing policy or a lost file never
becomes an opinion. The validator abstains from what it cannot judge, and the file goes to another;
an outage only delays it. Claims are extended during judging. If the process dies, they expire, and
the file returns a few times before it goes to another validator.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial

from prime_broadcast.pool import Policies
from prime_core import encoding, memory, tracing
from prime_core.errors import (
    ConflictError,
    FatalError,
    MalformedError,
    NotFoundError,
    PolicyError,
    PrimeError,
    UnavailableError,
    UntrustedError,
)
from prime_core.ids import ZERO_DIGEST, Digest
from prime_core.logs import fields
from prime_core.rollout import Receipt
from prime_core.signing import Signer
from prime_core.task import Lease, real_pool
from prime_core.validator_messages import Job
from prime_core.verdict import (
    Evidence,
    Law,
    Opinion,
    Outcome,
    Reason,
    SignedOpinion,
    reason_digest,
)
from prime_validator.api import ValidatorApi
from prime_validator.draws import Draw, Draws
from prime_validator.folder import Folder, Sealed
from prime_validator.pool import PoolOnChain, Runs
from prime_verify.case import Case
from prime_verify.engines import EngineProvider
from prime_verify.finding import Finding
from prime_verify.packing import Packing
from prime_verify.proofs.thresholds import Calibration, shipped
from prime_verify.provers import Provers
from prime_verify.verify import verify_file

log = logging.getLogger(__name__)

KEEP_SECONDS = 10.0
"""Interval at which claims are extended while their files are judged …"""
JUDGE_SECONDS = 900.0
"""… and the longest time for which this is done."""
LATER_SECONDS = 15
HANDED_AT_ONCE = 16
"""Opinions that are submitted at once when they are due, so that they share requests."""


class _AbstainError(Exception):
    """This validator cannot judge the file."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class _LaterError(_AbstainError):
    """This validator cannot judge the file now."""


@dataclass(frozen=True)
class JudgingSetup:
    """What an opinion is formed with: engines that replay rows, the runs and policies of leases,
    the draws of rows, this program's version, which is part of the law, and the limits (None: the
    shipped ones). `hold` keeps the bytes that an opinion accuses with, before it is signed.
    `provers`: see Case."""

    engines: EngineProvider
    runs: Runs
    policies: Policies
    draws: Draws
    version: str
    calibration: Calibration | None = None
    hold: Callable[[bytes], None] = lambda data: None
    provers: Provers | None = None


@dataclass(frozen=True)
class Sessions:
    """A validator's sessions: `keeping` extends claims while `judging` is busy."""

    judging: ValidatorApi
    keeping: ValidatorApi


class Validator:
    """One validator process."""

    def __init__(
        self,
        sessions: Sessions,
        folder: Folder,
        pool: PoolOnChain,
        signer: Signer,
        setup: JudgingSetup,
        *,
        now: Callable[[], float],
    ) -> None:
        self._api = sessions.judging
        self._keeping = sessions.keeping
        self._folder = folder
        self._pool = pool
        self._signer = signer
        self._engines = setup.engines
        self._runs = setup.runs
        self._policies = setup.policies
        self._draws = setup.draws
        self._version = setup.version
        self._calibration = setup.calibration
        self._now = now
        self._hold = setup.hold
        self._provers = setup.provers
        self._delayed: set[Digest] = set()
        """Files whose opinion could not be handed in, which is logged once."""
        self._failure: FatalError | None = None
        self._short: set[Digest] = set()
        """Files for which memory was short once."""

    def judge_some(self, most: int = 1) -> list[Digest]:
        """Submits the opinions that are due, then claims and judges up to `most` files of one
        policy, whose rows share prefills; returns them.

        Raises UnavailableError if the orchestrator does not answer; sealed opinions are kept, and
        one that cannot be handed in holds up no other file. Raises MalformedError if it gives more
        files than asked for, or one twice. Raises FatalError, after it abstained, if this process
        can judge nothing more, as after a card failed.
        """
        answer = self._api.claim(most)
        self._hand_in_together([Digest(digest) for digest in answer.reveal])
        names = [Digest(job.submission_digest) for job in answer.jobs]
        if len(names) > most or len(set(names)) < len(names):
            raise MalformedError(
                f"the orchestrator gave {len(names)} files, or one twice; asked for: {most} at most"
            )
        with self._kept(names):
            self._judge_together(answer.jobs)
        if self._failure is not None:
            raise self._failure
        return names

    def present(self) -> AbstractContextManager[None]:
        """While the block runs, the orchestrator counts this validator as live, although it claims
        nothing: its files stay with it, and leases go on to name it."""
        return self._kept([ZERO_DIGEST])  # the request takes one name at least

    def hand_in(self, digest: Digest) -> None:
        """Uploads the objects of a sealed opinion and submits the opinion."""
        sealed = self._folder.sealed(digest)
        if sealed is None:
            log.error("the sealed opinion on %s is not in this folder", digest)
            return
        try:
            if sealed.evidence is not None:
                self._api.upload(digest, sealed.evidence)
            self._api.opinion(sealed.signed, sealed.table)
        except (ConflictError, PolicyError, UntrustedError, MalformedError) as error:
            log.error("the opinion on %s is refused: %s", digest, error)
            return
        except (UnavailableError, NotFoundError) as error:  # the next claim names it again
            if digest not in self._delayed:  # it may be tried each second
                self._delayed.add(digest)
                log.warning("the opinion on %s cannot be handed in now: %s", digest, error)
            return
        self._delayed.discard(digest)
        self._folder.mark_given(digest)

    def _hand_in_together(self, digests: Sequence[Digest]) -> None:
        if not digests:
            return
        with ThreadPoolExecutor(min(len(digests), HANDED_AT_ONCE), "handing-in") as pool:
            ended = [pool.submit(self.hand_in, digest) for digest in digests]
        for one in ended:
            one.result()

    def _judge_together(self, jobs: Sequence[Job]) -> None:
        if len(jobs) <= 1:
            for job in jobs:
                self._judge_claimed(job, self._engines)
            return
        packing = Packing(self._engines, len(jobs))

        def judge(job: Job) -> None:
            try:
                self._judge_claimed(job, packing.engines())
            finally:
                packing.ended()

        with ThreadPoolExecutor(len(jobs), "judging") as pool:
            ended = [pool.submit(judge, job) for job in jobs]
        for one in ended:
            one.result()

    def _judge_claimed(self, job: Job, engines: EngineProvider) -> None:
        digest = Digest(job.submission_digest)
        try:
            self._judge_once(job, digest, engines)
        except ConflictError as error:  # it took longer than a claim lasts without contact
            log.warning("the claim on %s was lost: %s", digest, error)

    def _judge_once(self, job: Job, digest: Digest, engines: EngineProvider) -> None:
        """Raises ConflictError if another has the file by now."""
        try:
            sealed = self._judge(job, engines)
        except _LaterError as error:
            log.warning("%s waits: %s", digest, error)
            self._api.delay(digest, error.reason, str(error), LATER_SECONDS)
            return
        except _AbstainError as error:
            log.warning("abstains from %s: %s: %s", digest, error.reason.name, error)
            self._api.abstain(digest, error.reason, str(error))
            return
        earlier = self._folder.sealed(digest)
        try:
            self._folder.keep_opinion(sealed)
        except UnavailableError as error:  # the disk is full: others may have the file
            self._api.delay(digest, Reason.OUT_OF_RESOURCES, str(error), LATER_SECONDS)
            raise
        try:
            due = self._api.seal(digest, sealed.signed.seal())
        except ConflictError:  # another process of this key may have sealed the earlier one
            if earlier is not None:
                self._folder.keep_opinion(earlier)
            raise
        if due:
            self.hand_in(digest)

    def _judge(self, job: Job, engines: EngineProvider) -> Sealed:
        self._check(job)
        try:
            draw = self._draws.draw(job)
        except (UntrustedError, MalformedError) as error:
            raise _AbstainError(Reason.VALIDATOR_CRASHED, str(error)) from error
        except (UnavailableError, NotFoundError) as error:
            raise _LaterError(Reason.OUT_OF_RESOURCES, str(error)) from error
        began = time.time()
        finding = self._verify(job, draw, engines)
        tracing.record(
            Digest(job.submission.submission.lease_digest), "judge", began, time.time(),
            reason=finding.reason.name,
        )  # fmt: skip
        promise = job.lease.lease
        about = fields(
            kind="opinion", status=finding.outcome.name.lower(), reason=finding.reason.name,
            submission=job.submission_digest, lease=job.submission.submission.lease_digest,
            node=promise.node, step=promise.step, policy=job.lease.policy_version,
        )  # fmt: skip
        log.info("submission %s: %s: %s", job.submission_digest, finding.reason.name,
                 finding.detail, extra=about)  # fmt: skip
        if finding.outcome is Outcome.ABSTAINED:
            later = finding.reason is Reason.POLICY_MISSING or self._first_shortage(job, finding)
            raise (_LaterError if later else _AbstainError)(finding.reason, finding.detail)
        return self._opinion(job, draw, finding)

    def _first_shortage(self, job: Job, finding: Finding) -> bool:
        """Whether memory is short for the first time with this file: it is then tried again, and no
        abstention is counted for what other programs of this machine took for a moment."""
        short, digest = finding.reason is Reason.OUT_OF_RESOURCES, Digest(job.submission_digest)
        if not short or digest in self._short:
            self._short.discard(digest)
            return False
        self._short.add(digest)
        memory.release()
        return True

    def _check(self, job: Job) -> None:
        """Checks the job's pool and signatures, because evidence will include them."""
        domain, claim, promise = self._pool.domain, job.submission.submission, job.lease.lease
        receipt = job.receipt.receipt
        try:
            holds = (
                claim.digest(domain(claim)) == job.submission_digest
                and receipt.submission_digest == job.submission_digest
                and promise.digest(domain(promise)) == claim.lease_digest
                and claim.recover(domain(claim), job.submission.signature)
                == job.submission.node
                == promise.node
                and promise.recover(domain(promise), job.lease.signature) == self._pool.manager
                and receipt.recover(domain(Receipt), job.receipt.signature) == self._pool.manager
                and claim.pool == promise.pool
                and real_pool(promise.pool) == self._pool.number
            )
        except UntrustedError as error:
            raise _AbstainError(Reason.VALIDATOR_CRASHED, f"the job: {error}") from error
        if not holds:
            raise _AbstainError(
                Reason.VALIDATOR_CRASHED, "submission, lease and receipt do not belong together"
            )

    def _verify(self, job: Job, draw: Draw, engines: EngineProvider) -> Finding:
        claim, promise = job.submission.submission, job.lease.lease
        digest, received_at = Digest(job.submission_digest), job.receipt.receipt.received_at
        if received_at > min(promise.deadline, claim.valid_until):
            return Finding(Reason.LATE, f"received at {received_at}, due by {promise.deadline}")
        try:
            data = self._api.file(job)
        except (NotFoundError, UnavailableError, UntrustedError, MalformedError) as error:
            raise _LaterError(
                Reason.OUT_OF_RESOURCES, f"the file cannot be fetched: {error}"
            ) from error
        try:
            self._policies.ensure(job.lease.policy_version, Digest(promise.policy_digest))
        except (UnavailableError, MalformedError, PolicyError) as error:
            raise _LaterError(Reason.POLICY_MISSING, str(error)) from error
        except UntrustedError as error:
            raise _AbstainError(Reason.POLICY_MISSING, str(error)) from error
        try:
            run = self._runs.of_lease(promise)
            finding = verify_file(
                Case(
                    data,
                    job.lease,
                    Digest(claim.lease_digest),
                    run,
                    self._runs.environment(run),
                    engines,
                    draw_secret=draw.secret,
                    submission_digest=digest,
                    submission=claim,
                    calibration=self._calibration,
                    draw_count=job.rows,
                    seen=partial(self._seen, digest),
                    on_any_card=True,
                    provers=self._provers,
                    known_class=self._api.exact_class,
                )
            )
            if finding.outcome is Outcome.REJECTED:
                self._keep_for_strangers(promise, data)
            return finding
        except UnavailableError as error:
            raise _LaterError(Reason.OUT_OF_RESOURCES, str(error)) from error
        except MemoryError as error:
            return Finding(Reason.OUT_OF_RESOURCES, f"out of memory: {error}")
        except FatalError as error:  # such as of a card that failed
            self._failure = error
            raise _AbstainError(Reason.VALIDATOR_CRASHED, str(error)) from error
        except Exception as error:
            # A defect of ours is never the node's fault: log it in full, and let another
            # validator judge the file.
            log.exception("judging %s failed", digest)
            raise _AbstainError(
                Reason.VALIDATOR_CRASHED, f"{type(error).__name__}: {error}"
            ) from error

    def _keep_for_strangers(self, promise: Lease, *data: bytes) -> None:
        """Holds what an opinion accuses with. Shadow work costs its node no stake, and anyone can
        hand it in: it would fill the mirror."""
        if not promise.shadow:
            for one in data:
                self._hold(one)

    def _seen(self, digest: Digest, marks: Mapping[str, bool]) -> frozenset[str]:
        return self._api.rows_seen(digest, marks)

    # -- opinions and evidence -----------------------------------------------------------------

    @property
    def _calibrated_by(self) -> Digest:
        return (self._calibration or shipped()).digest()

    def _opinion(self, job: Job, draw: Draw, finding: Finding) -> Sealed:
        claim, promise = job.submission.submission, job.lease.lease
        digest = Digest(job.submission_digest)
        table = finding.verdict_table(
            digest, Digest(claim.sha256), job.lease.policy_version, promise.step, draw.secret
        ).canonical()
        evidence = None
        if finding.outcome is Outcome.REJECTED:
            stated = self._evidence(job, draw, finding)
            evidence = encoding.canonical_json(stated.model_dump(mode="json"))
            self._keep_for_strangers(promise, table, evidence)
        law = Law(
            lease=claim.lease_digest,
            run=promise.run_digest,
            verification_class=self._calibrated_by,
            verifier=encoding.keccak256(self._version.encode()),
            draws=draw.listed,
        )
        opinion = Opinion(
            pool=promise.pool,
            submission=digest,
            law=law.struct_hash(),
            outcome=int(finding.outcome),
            reason=reason_digest(finding.reason),
            table=encoding.sha256(table),
            evidence=ZERO_DIGEST if evidence is None else encoding.sha256(evidence),
            judged_at=int(self._now()),
        )
        signed = SignedOpinion(
            opinion=opinion,
            law=law,
            validator=self._signer.address,
            signature=self._signer.sign(opinion, self._pool.domain(opinion)),
        )
        return Sealed(signed, table, evidence)

    def _evidence(self, job: Job, draw: Draw, finding: Finding) -> Evidence:
        statistics = finding.decimal_statistics() | {
            "draw_epoch": str(draw.epoch),
            "draw_commitment": draw.commitment,
        }
        return Evidence(
            chain_id=self._pool.deployment.chain_id,
            submission=job.submission,
            lease=job.lease,
            reason=int(finding.reason),
            detail=finding.detail[:2048],
            run_digest=job.lease.lease.run_digest,
            validator=self._signer.address,
            validator_version=self._version,
            draw_secret=draw.secret,
            rows_drawn=finding.rows_drawn,
            statistics=statistics,
            thresholds=finding.decimal_thresholds(),
            calibration=self._calibrated_by if finding.thresholds else ZERO_DIGEST,
            row_statistics=finding.decimal_row_statistics(),
            chance=finding.decimal_chance(),
        )

    # -- keeping claims ------------------------------------------------------------------------

    @contextmanager
    def _kept(self, digests: Sequence[Digest]) -> Iterator[None]:
        """Extends the claims while the block runs, for at most JUDGE_SECONDS."""
        if not digests:
            yield
            return
        stop = threading.Event()
        keeper = threading.Thread(target=self._keep, args=(digests, stop), daemon=True)
        keeper.start()
        try:
            yield
        finally:
            stop.set()
            keeper.join()

    def _keep(self, digests: Sequence[Digest], stop: threading.Event) -> None:
        left = int(JUDGE_SECONDS / KEEP_SECONDS)
        while left > 0 and not stop.wait(KEEP_SECONDS):
            left -= 1
            try:
                self._keeping.keep(digests)
            except PrimeError as error:
                log.warning("claims were not kept: %s", error)
