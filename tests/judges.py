"""Validators for tests: appointed in the store, committed to their draws, over the real API."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient

from prime_broadcast.folder import PolicyFolder
from prime_broadcast.manifest import Trust
from prime_broadcast.pool import Policies
from prime_core import encoding
from prime_core.checkpoint import PolicyStatement
from prime_core.clock import Clock
from prime_core.deployment import Deployment
from prime_core.draws import DrawCommitment, DrawReveal, SignedDrawCommitment
from prime_core.errors import PrimeError
from prime_core.ids import ZERO_DIGEST, Address, Digest
from prime_core.signing import LocalSigner
from prime_core.storage.base import put_object
from prime_core.transport.client import OrchestratorClient
from prime_core.validator_messages import ClaimRequest, Job, SealRequest
from prime_core.verdict import (
    Evidence,
    Law,
    Opinion,
    Outcome,
    Reason,
    SignedOpinion,
    VerdictRow,
    VerdictTable,
    reason_digest,
)
from prime_orchestrator.api import validators
from prime_orchestrator.api.app import create_app
from prime_orchestrator.api.backend import Backend
from prime_orchestrator.context import PoolContext
from prime_orchestrator.manager import draws
from prime_orchestrator.manager.draws import EPOCHS_AHEAD, epoch_at
from prime_orchestrator.manager.judging import Judge
from prime_orchestrator.store import chain, meta, runs
from prime_orchestrator.store.engine import Store
from prime_validator.api import ValidatorApi
from prime_validator.draws import Draws
from prime_validator.folder import Folder
from prime_validator.judging import JudgingSetup, Sessions, Validator
from prime_validator.pool import PoolOnChain, Runs
from prime_verify.engines import EngineProvider
from prime_verify.proofs.thresholds import Calibration, shipped
from prime_verify.provers import Provers

_blocks = itertools.count(500_000)


def only(answers: Sequence[Any]) -> Any:
    """The answer to a single entry of those that are served together, or its error, raised."""
    (found,) = answers
    if isinstance(found, PrimeError):
        raise found
    return found


def appoint(store: Store, pool: int, validator: Address, on: bool = True, *, at: int = 1) -> None:
    """The chain, which is read to its end, shows that the manager appoints (or dismisses) a
    validator, in a block of time `at`."""
    block = next(_blocks)
    name = encoding.sha256(f"appoint {block}".encode())
    with store.begin() as connection:
        chain.add_event(
            connection, block_hash=name, log_index=0, block=block, block_time=at, tx_hash=name,
            name="ValidatorSet", args={"pool": pool, "validator": validator, "on": on},
        )  # fmt: skip
        meta.put_once(connection, meta.CHAIN_READ, "1")


def commit_draws(
    store: Store, context: PoolContext, signer: LocalSigner, now: Callable[[], float]
) -> None:
    """A validator is appointed and has committed to this epoch and the next ones: no lease is
    given before."""
    appoint(store, context.pool, signer.address)
    epoch = epoch_at(context.run, now())
    with store.begin() as connection:
        signed = [
            commitment(context.deployment, signer, number, pool=context.pool)
            for number in range(epoch, epoch + EPOCHS_AHEAD)
        ]
        draws.commit(connection, context, signer.address, signed, now())


def commitment(
    deployment: Deployment,
    signer: LocalSigner,
    epoch: int,
    secret: Digest = ZERO_DIGEST,
    *,
    pool: int = 1,
    name: Digest | None = None,
) -> SignedDrawCommitment:
    """A validator's signed commitment to an epoch's secret, or to the object `name`."""
    reveal = DrawReveal(pool=pool, validator=signer.address, epoch=epoch, secret=secret)
    statement = DrawCommitment(pool=pool, epoch=epoch, commitment=name or reveal.digest())
    signature = signer.sign(statement, deployment.domain_of(statement))
    return SignedDrawCommitment(commitment=statement, validator=signer.address, signature=signature)


def pool_of(backend: Backend) -> PoolOnChain:
    """The backend's pool as a validator finds it on chain."""
    context = backend.context
    return PoolOnChain(
        context.deployment, context.pool, context.manager, backend.trainer, context.run
    )


def revisions_of(backend: Backend) -> list[tuple[int, Digest]]:
    """What the chain would name."""
    with backend.store.read() as connection:
        return [(row.from_step, row.digest) for row in runs.every(connection) if row.final]


@dataclass
class Bench:
    """One validator of a backend, with its own folder, in this process."""

    backend: Backend
    signer: LocalSigner
    folder: Folder
    draws: Draws
    api: ValidatorApi
    http: TestClient
    validator: Validator | None = None
    judged: list[Digest] = field(default_factory=list)

    def judge_next(self) -> Digest | None:
        """Judges one file by the program's own code; the manager then decides what it can."""
        found = self.judge_some(1)
        return found[0] if found else None

    def judge_some(self, most: int) -> list[Digest]:
        """The same for up to `most` files."""
        assert self.validator is not None
        try:
            found = self.validator.judge_some(most)
        finally:
            judge_of(self.backend).tick()
        self.judged += found
        return found

    def claim(self) -> Job | None:
        """Claims the next file that is assigned to this validator."""
        request = ClaimRequest(worker="kit", most=1)
        jobs = only(validators.claim_all(self.backend, [(self.signer.address, request)])).jobs
        return jobs[0] if jobs else None

    def opinion(
        self,
        job: Job,
        reason: Reason = Reason.NONE,
        rows: Sequence[VerdictRow] = (),
        version: str = "test",
        **fields: Any,
    ) -> SignedOpinion:
        """A signed opinion of the right form on a claimed file, its objects published. `version` is
        the verifier's; `fields`: more fields of its table."""
        backend, run = self.backend, self.backend.context.run
        claim, promise = job.submission.submission, job.lease.lease
        draw = self.draws.draw(job)
        drawn = range(run.least_drawn(run.rows_per_lease) if reason is Reason.NONE else 0)
        table = VerdictTable(
            submission_digest=job.submission_digest,
            sha256=claim.sha256,
            policy_version=job.lease.policy_version,
            step=promise.step,
            rows=tuple(rows),
            **{"draw_secret": draw.secret, "rows_drawn": tuple(drawn), **fields},
        )
        evidence = ZERO_DIGEST
        if reason.outcome is Outcome.REJECTED:
            stated = Evidence(
                chain_id=backend.context.deployment.chain_id,
                submission=job.submission,
                lease=job.lease,
                reason=int(reason),
                detail="made by a test",
                run_digest=run.digest(),
                validator=self.signer.address,
                validator_version="test",
                draw_secret=draw.secret,
                rows_drawn=(0,),
                statistics={"draw_commitment": draw.commitment},
                thresholds={},
            )
            evidence = put_object(
                backend.objects, encoding.canonical_json(stated.model_dump(mode="json"))
            )
        named = run.calibration
        law = Law(
            lease=claim.lease_digest,
            run=promise.run_digest,
            verification_class=named if named != ZERO_DIGEST else shipped().digest(),
            verifier=encoding.keccak256(version.encode()),
            draws=draw.listed,
        )
        return self.sign(
            Opinion(
                pool=promise.pool,
                submission=job.submission_digest,
                law=law.struct_hash(),
                outcome=int(reason.outcome),
                reason=reason_digest(reason),
                table=put_object(backend.objects, table.canonical()),
                evidence=evidence,
                judged_at=int(backend.now()),
            ),
            law,
        )

    def sign(self, opinion: Opinion, law: Law) -> SignedOpinion:
        """The opinion under this validator's name."""
        return SignedOpinion(
            opinion=opinion,
            law=law,
            validator=self.signer.address,
            signature=self.signer.sign(opinion, self.backend.context.domain(opinion)),
        )

    def seal(self, signed: SignedOpinion) -> bool:
        """Seals an opinion; whether it is due."""
        request = SealRequest(
            worker="kit", submission=signed.opinion.submission, seal=signed.seal()
        )
        return only(validators.seal_all(self.backend, [(self.signer.address, request)])).reveal

    def give(self, signed: SignedOpinion) -> None:
        """Hands in an opinion that was sealed."""
        only(validators.give_all(self.backend, [validators.Given(self.signer.address, signed)]))

    def say(
        self,
        job: Job,
        reason: Reason = Reason.NONE,
        rows: Sequence[VerdictRow] = (),
        **fields: Any,
    ) -> SignedOpinion:
        """Seals an opinion and hands it in at once."""
        signed = self.opinion(job, reason, rows, **fields)
        assert self.seal(signed), "it is due"
        self.give(signed)
        return signed

    def close(self) -> None:
        self.folder.close()
        self.http.close()


def judge_of(backend: Backend, quorum: int = 2) -> Judge:
    """The manager's side of a backend."""
    return Judge(
        backend.store, backend.objects, backend.context, backend.draws, backend.now, lambda: quorum
    )


def bench(backend: Backend, signer: LocalSigner, folder: Path, seed: int | None = 1) -> Bench:
    """A validator that is appointed and has committed to its draws; it judges once `arm` gave it
    engines. Without a seed its secrets are those of `commit_draws`."""
    appoint(backend.store, backend.context.pool, signer.address)
    app = create_app(backend, hold_seconds=0)  # no file arrives while it waits in this thread
    http = TestClient(app, base_url=backend.audience)
    http.follow_redirects = False
    client = OrchestratorClient(
        backend.audience, signer, "validator", clock=Clock(now=backend.now, sleep=lambda _: None)
    )
    client._http.close()
    client._http = http
    kept = Folder(folder / signer.address)
    api = ValidatorApi(client, f"worker of {signer.address}")
    secrets = Draws(
        kept,
        api,
        pool_of(backend),
        signer,
        random=bytes if seed is None else random.Random(seed).randbytes,
        now=backend.now,
    )
    secrets.prepare()
    return Bench(backend, signer, kept, secrets, api, http)


def arm(
    made: Bench,
    policies: Path,
    engines: EngineProvider,
    calibration: Calibration | None = None,
    provers: Provers | None = None,
) -> Bench:
    """Lets a validator judge for real, by the policies in a folder."""
    backend = made.backend
    context = backend.context
    trust = Trust(backend.trainer, context.domain(PolicyStatement), context.pool)
    made.validator = Validator(
        Sessions(made.api, made.api),
        made.folder,
        pool_of(backend),
        made.signer,
        JudgingSetup(
            engines,
            Runs(pool_of(backend), made.api, lambda: revisions_of(backend)),
            Policies(PolicyFolder(policies, trust), made.api),
            made.draws,
            "test",
            calibration,
            provers=provers,
        ),
        now=backend.now,
    )
    return made
