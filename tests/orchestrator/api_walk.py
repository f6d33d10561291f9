"""One valid request to each operation of the API, in an order in which each succeeds. It leaves a
sealed batch and files in every state: leased, handed in, claimed, sealed, accepted, rejected, void,
set aside, under review."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from httpx import Response
from judges import Bench, bench, commitment, judge_of
from orchestrator_world import AUDIENCE, Session, World, signer

from prime_core.draws import DrawReveal, reveal_at
from prime_core.encoding import sha256
from prime_core.ids import ZERO_DIGEST, Digest
from prime_core.messages import (
    AdmissionRequest,
    CardsAnswer,
    CardsCommitment,
    CardsDraw,
    CardsEcho,
    CardsRequest,
    ChallengeAnswer,
    ClassRequest,
    LeaseAnswer,
    MemoryAnswer,
    MemoryCommitment,
    MemoryDraw,
    MemoryProved,
    RevisionRequest,
    RevokeRequest,
)
from prime_core.node import Gpu, Hardware, SessionRevocation
from prime_core.run import Cards
from prime_core.signing import Strict
from prime_core.storage.base import digest_key
from prime_core.task import SignedLease
from prime_core.validator_messages import (
    ClaimAnswer,
    ClaimRequest,
    ClassList,
    CommitRequest,
    ExactClass,
    GivenOpinion,
    Job,
    KeepRequest,
    ObjectRequest,
    ReleaseRequest,
    RowsRequest,
    SealRequest,
    TogetherRequest,
)
from prime_core.verdict import Reason, VerdictRow
from prime_engine.exact import NumericClass
from prime_orchestrator.api.validators import CLAIM_SECONDS
from prime_orchestrator.manager import reviews
from prime_orchestrator.manager.batches import seal_ready_batches
from prime_orchestrator.manager.draws import EPOCHS_AHEAD, epoch_at
from prime_orchestrator.store import row_marks
from prime_verify.proofs import hardware
from prime_verify.proofs.cards import Cell, Prover, Work
from prime_verify.proofs.memory import Block, Fill, MemoryProver

VALIDATOR = signer(202)
WORKER = "walk"
MACHINE = Hardware(cpu_model="x", cpu_count=2, memory_mb=100, disk_mb=100, gpus=())


CARDS = Cards(kinds=("cpu",), counts=(1, 2), least_share_micro=500_000, work_ms=1)


@dataclass(frozen=True)
class Call:
    """A request that succeeded, and its answer. `operation`: method and path as in the OpenAPI
    document."""

    operation: str
    path: str
    body: bytes
    session: Session | None
    answer: Response


@dataclass
class Walk:
    """`calls` in the order in which they were made."""

    world: World
    judge: Bench
    validator: Session
    calls: list[Call] = field(default_factory=list)
    digests: list[Digest] = field(default_factory=list)
    """Of leases and submissions in every state, and of objects."""

    def send(
        self,
        operation: str,
        body: Strict | bytes = b"",
        session: Session | None = None,
        query: str = "",
        **parts: str,
    ) -> Response:
        """Makes the call; it must succeed."""
        method, _, template = operation.partition(" ")
        raw = body if isinstance(body, bytes) else body.model_dump_json().encode()
        path = template.format(**parts) + query
        answer = self.world.send(method, path, raw, session)
        assert answer.status_code < 400, (operation, answer.text)
        self.calls.append(Call(operation, path, raw, session, answer))
        return answer

    def lease(self, node: Session) -> SignedLease:
        wish = b'{"policy_version":0}'
        raw = self.send("POST /v1/leases", wish, node).content
        found = LeaseAnswer.model_validate_json(raw).lease
        assert found is not None, raw
        self.digests.append(self.world.lease_digest(found))
        return found

    def hand_in(self, node: Session) -> Digest:
        lease = self.lease(node)
        data = b"file of " + node.account.address.encode()
        name = self.world.lease_digest(lease)
        wish = b'{"sha256":"%s","size":%d}' % (sha256(data).encode(), len(data))
        target = self.send("POST /v1/leases/{digest}/upload", wish, node, digest=name).json()
        self._store("PUT", target["url"], data)
        signed = self.world.claim(node.account, lease, data)
        answer = self.send("POST /v1/submissions", signed)
        digest = Digest(answer.json()["receipt"]["submission_digest"])
        self.digests.append(digest)
        self.world.clock.advance(0.01)  # files are judged in the order of their arrival
        return digest

    def _store(self, method: str, url: str, data: bytes = b"") -> Response:
        parts = urlsplit(url)
        key = parts.path.removeprefix("/v1/store/")
        return self.send(f"{method} /v1/store/{{key}}", data, query=f"?{parts.query}", key=key)

    def claim(self) -> Job:
        wish = ClaimRequest(worker=WORKER, most=1)
        raw = self.send("POST /v1/validators/claims", wish, self.validator).content
        (job,) = ClaimAnswer.model_validate_json(raw).jobs
        return job

    def seal(self, job: Job, reason: Reason = Reason.NONE) -> bytes:
        """Seals an opinion; the opinion."""
        rows = [
            VerdictRow(problem_id=f"p{n // 2}", group=n // 2, sample=n % 2,
                       reward_micro=n % 2 * 1_000_000, prompt_tokens=3, output_tokens=5)
            for n in range(4)
        ]  # fmt: skip
        signed = self.judge.opinion(job, reason, rows if reason is Reason.NONE else ())
        self.digests.append(Digest(signed.opinion.table))
        wish = SealRequest(worker=WORKER, submission=job.submission_digest, seal=signed.seal())
        self.send("POST /v1/validators/seals", wish, self.validator)
        return signed.model_dump_json().encode()

    def give(self, job: Job, reason: Reason = Reason.NONE) -> None:
        self.send("POST /v1/validators/opinions", self.seal(job, reason), self.validator)
        judge_of(self.world.backend).tick()

    def draws(self) -> None:
        """The secret of a past epoch is shown, and a future one committed to."""
        run, clock = self.world.backend.context.run, self.world.clock
        first = epoch_at(run, clock())
        due = reveal_at(first, epoch_seconds=run.epoch_seconds, lease_seconds=run.lease_seconds)
        clock.advance(due - clock())
        self.validator = self.world.login(VALIDATOR, "validator")
        reveal = DrawReveal(pool=1, validator=VALIDATOR.address, epoch=first, secret=ZERO_DIGEST)
        self.send("POST /v1/validators/reveals", reveal, self.validator)
        later = commitment(self.world.backend.context.deployment, VALIDATOR, first + EPOCHS_AHEAD)
        self.send(
            "POST /v1/validators/commitments", CommitRequest(commitments=(later,)), self.validator
        )

    def sessions(self) -> None:
        """A session opens and ends; a machine is measured, lives, and drops a lease."""
        world = self.world
        gone = Session(signer(20))
        self.send("POST /v1/sessions", world.grant(gone))
        end = SessionRevocation(
            account=gone.account.address, orchestrator=AUDIENCE,
            revoked_before=int(world.clock()) + 1,
        )  # fmt: skip
        signature = gone.account.sign(end, world.domain("registry"))
        self.send("POST /v1/sessions/revoke", RevokeRequest(revocation=end, signature=signature))
        newcomer = world.newcomer(21)
        wish = AdmissionRequest(hardware=MACHINE, task_runtime="process")
        raw = self.send("POST /v1/admission/challenge", wish, newcomer).content
        challenge = ChallengeAnswer.model_validate_json(raw).challenge
        assert challenge is not None
        products = hardware.solve(challenge.seed, challenge.size, challenge.rounds)
        self.send(
            "POST /v1/admission/solution/{challenge_id}", hardware.encode_solution(products),
            newcomer, challenge_id=challenge.id,
        )  # fmt: skip
        node = world.member(22)
        self.send("POST /v1/heartbeat", b'{"policy_version":0}', node)
        name = world.lease_digest(self.lease(node))
        self.send("POST /v1/leases/{digest}/abandon", b"", node, digest=name)
        self.lease(world.member(23))

    def cards(self) -> None:
        """A node proves its cards, under a revision that asks for it."""
        world = self.world
        asked = world.backend.context.run.model_copy(update={"cards": CARDS})
        revision = RevisionRequest(run=asked.raw().decode(), from_step=3000)
        self.send("POST /v1/revisions", revision, world.login(world.manager, "manager"))
        self._prove_cards(world.newcomer(24))

    def memory(self) -> None:
        """A node proves its cards' memory first. It comes after `cards`."""
        self._prove_cards(newcomer := self.world.newcomer(26), memory=True)
        self.send("GET /v1/nodes/{node}/memory", node=newcomer.account.address)

    def _prove_cards(self, newcomer: Session, *, memory: bool = False) -> None:
        wish = CardsRequest(
            hardware=MACHINE, task_runtime="process", cards=(Gpu(model="CPU", memory_mb=100),)
        )
        raw = self.send("POST /v1/admission/cards", wish, newcomer).content
        answer = begun = CardsAnswer.model_validate_json(raw)
        assert begun.work is not None
        work = Work(**begun.work.model_dump(exclude={"operands"}))
        prover = Prover(begun.work.operands, work, ["numpy"])
        here = "POST /v1/admission/cards/{challenge_id}"
        if memory:
            assert begun.memory is not None
            filled = MemoryAnswer(token=begun.token)
            holder = MemoryProver(begun.work.operands, Fill(**begun.memory.model_dump()), ["numpy"])
            while filled.vectors is None:
                assert filled.token is not None
                echo = CardsEcho(token=filled.token)
                raw = self.send(f"{here}/filled", echo, newcomer, challenge_id=begun.id).content
                filled = MemoryAnswer.model_validate_json(raw)
            read = MemoryCommitment(root=holder.commit(filled.vectors), fill_ms=1, device_ms=1)
            raw = self.send(f"{here}/memory", read, newcomer, challenge_id=begun.id).content
            blocks = MemoryDraw.model_validate_json(raw).blocks
            shown = holder.open([Block(*block) for block in blocks])
            raw = self.send(f"{here}/blocks", shown, newcomer, challenge_id=begun.id).content
            token = MemoryProved.model_validate_json(raw).token
            answer = begun.model_copy(update={"token": token})
        while answer.order is None:
            assert answer.token is not None
            echo = CardsEcho(token=answer.token)
            raw = self.send(f"{here}/echo", echo, newcomer, challenge_id=begun.id).content
            answer = CardsAnswer.model_validate_json(raw)
        commitment = CardsCommitment(root=prover.commit(answer.order), device_ms=1)
        raw = self.send(f"{here}/commitment", commitment, newcomer, challenge_id=begun.id).content
        cells = CardsDraw.model_validate_json(raw).cells
        opening = prover.open([Cell(*cell) for cell in cells])
        self.send(f"{here}/opening", opening, newcomer, challenge_id=begun.id)
        self.send("GET /v1/nodes/{node}/passport", node=newcomer.account.address)

    def classes(self) -> None:
        """A validator and a node announce the same exact class."""
        policy = self.world.manifest(1).manifest.digest()
        one = ExactClass(facts={"engine": "plain/1"}, fingerprint=sha256(b"fingerprint"))
        announced = ClassList(policy_version=1, policy_digest=policy, classes=(one,))
        self.send("POST /v1/validators/classes", announced, self.validator)
        wish = ClaimRequest(worker=WORKER, most=1)
        self.send("POST /v1/validators/claims", wish, self.validator)  # it is live
        node = self.world.member(25)
        for fingerprint in (None, one.fingerprint):
            asked = ClassRequest(
                policy_version=1, policy_digest=policy, facts=one.facts, fingerprint=fingerprint
            )
            assert self.send("POST /v1/classes", asked, node).json() == {"wanted": True}
        digest = NumericClass(one.facts, Digest(one.fingerprint)).digest()
        self.digests.append(digest)
        self.send("GET /v1/classes/{digest}", digest=digest)

    def together(self) -> None:
        """A file's rows, seal and opinion, each in a request for several files."""
        self.world.clock.advance(CLAIM_SECONDS + 1)  # earlier claims end
        validator = self.world.login(VALIDATOR, "validator")
        wish = ClaimRequest(worker=WORKER, most=1)
        raw = self.send("POST /v1/validators/claims", wish, validator).content
        (job,) = ClaimAnswer.model_validate_json(raw).jobs
        signed = self.judge.opinion(job, Reason.MALFORMED)
        table = self.world.backend.objects.get(digest_key(signed.opinion.table), 1 << 20)
        marks = RowsRequest(submission=job.submission_digest, marks={"ab" * 16: True})
        seal = SealRequest(worker=WORKER, submission=job.submission_digest, seal=signed.seal())
        given = GivenOpinion(signed=signed, table=table.decode())
        for entries in (
            TogetherRequest(rows=(marks,)),
            TogetherRequest(seals=(seal,)),
            TogetherRequest(rows=(marks,), opinions=(given,)),
        ):
            self.send("POST /v1/validators/together", entries, validator)

    def evaluation(self) -> None:
        """A node asks where it may get an evaluation lease; its open lease is returned."""
        node = self.world.member(25)
        self.lease(node)
        self.send("POST /v1/leases/evaluation", b'{"policy_version":0}', node)

    def files(self) -> None:
        """Files end in every way; two accepted ones make a batch."""
        backend, node = self.world.backend, self.validator
        owners = [self.world.member(number) for number in range(30, 37)]
        names = [self.hand_in(owner) for owner in owners]
        self.send("GET /v1/leases/{digest}", digest=self.digests[-2])
        for reason in (Reason.NONE, Reason.NONE, Reason.MALFORMED, Reason.WRONG_ACTIVATIONS):
            self.give(self.claim(), reason)
        aside = ReleaseRequest(
            worker=WORKER, submission=self.claim().submission_digest, kind="abstain",
            reason=int(Reason.VALIDATOR_CRASHED), detail="",
        )  # fmt: skip
        self.send("POST /v1/validators/release", aside, node)
        sealed = self.claim()
        self.seal(sealed)
        size, table = 5, sha256(b"table")
        wish = ObjectRequest(submission=sealed.submission_digest, sha256=table, size=size)
        self.send("POST /v1/validators/objects", wish, node)
        held = self.claim().submission_digest
        keep = KeepRequest(worker=WORKER, submissions=(held,))
        self.send("POST /v1/validators/keep", keep, node)
        marks = {"ab" * 16: True}
        self.send("POST /v1/validators/rows", RowsRequest(submission=held, marks=marks), node)
        sealing = (backend.store, backend.objects, backend.manager, backend.context, backend.now)
        assert seal_ready_batches(*sealing) == [0]
        with backend.store.begin() as connection:
            row_marks.remember(connection, names[1], marks, now=backend.now())
            reviews.send_back(connection, backend.context, names[0], marks)
        for operation in ("GET /v1/submissions/{digest}", "GET /v1/submissions/{digest}/opinions"):
            self.send(operation, digest=names[0])

    def trainer(self) -> None:
        """A batch is fetched, a policy published, the run revised."""
        world = self.world
        trainer = world.login(world.trainer, "trainer")
        urls = self.send("GET /v1/batches/{step}", b"", trainer, step="0").json()["urls"]
        name = min(urls)
        self._store("GET", urls[name])
        self.send("GET /v1/objects/{digest}", digest=name)
        names = f"?names=objects/{name},objects/{ZERO_DIGEST}"
        self.send("GET /v1/copies", query=names)
        self.digests.append(Digest(name))
        self.send("GET /v1/batches/{step}/manifest", step="0")
        self.send("POST /v1/policies", world.manifest(1), trainer)
        self.send("GET /v1/policies/{version}", version="1")
        relay = b'{"url":"http://relay:9000","versions":[0]}'
        self.send("POST /v1/relays", relay, world.login(signer(5), "relay"))
        later = world.backend.context.run.model_copy(update={"price_per_unit": 20})
        revision = RevisionRequest(run=later.raw().decode(), from_step=1000)
        self.send("POST /v1/revisions", revision, world.login(world.manager, "manager"))
        self.send("GET /v1/runs/{digest}", digest=later.digest())

    def watchers(self) -> None:
        """What anyone may read."""
        node = signer(30).address
        world, tx_hash = self.world, sha256(b"tx")
        world.on_chain("RunRevised", pool=1, run_digest=ZERO_DIGEST, from_step=2000)
        for path in ("pool", "run", "runs", "policies", "relays", "draws", "nodes", "status"):
            self.send(f"GET /v1/{path}")
        self.send("GET /healthz")
        self.send("GET /readyz")
        self.send("GET /metrics")
        self.send("GET /v1/submissions", query=f"?node={node}")
        for path in ("nodes/{node}", "nodes/{node}/leases", "rewards/{node}"):
            self.send(f"GET /v1/{path}", node=node)
        self.send("GET /v1/validators/{validator}", validator=VALIDATOR.address)
        self.send("GET /v1/transactions/{tx_hash}", tx_hash=tx_hash)
        self.digests.append(tx_hash)


@contextmanager
def walked(world: World, folder: Path) -> Iterator[Walk]:
    """The walk, done but for `Walk.cards`."""
    judge = bench(world.backend, VALIDATOR, folder, seed=None)
    try:
        walk = Walk(world, judge, world.login(VALIDATOR, "validator"))
        walk.draws()
        judge.draws.prepare()
        walk.sessions()
        walk.files()
        walk.trainer()
        walk.watchers()
        yield walk
    finally:
        judge.close()
