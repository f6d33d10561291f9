"""The orchestrator's routes as the agent calls them: one typed method per route.

Use each instance in one thread only (its client holds one HTTP session).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from prime_core.checkpoint import SignedManifest
from prime_core.errors import MalformedError, UntrustedError
from prime_core.gateway import Gateway, GatewayAnswer, GatewayRequest
from prime_core.ids import Address, Digest
from prime_core.messages import (
    AdmissionAnswer,
    AdmissionRequest,
    CardsAnswer,
    CardsCommitment,
    CardsDraw,
    CardsEcho,
    CardsRequest,
    ChallengeAnswer,
    ClassAnswer,
    ClassRequest,
    Heartbeat,
    HeartbeatAnswer,
    LeaseAnswer,
    LeaseInfo,
    LeaseRequest,
    MemoryAnswer,
    MemoryCommitment,
    MemoryDraw,
    MemoryProved,
    NodeInfo,
    PolicyList,
    ReceiptAnswer,
    RunList,
    SignedMemory,
    SignedPassport,
    UploadAnswer,
    UploadRequest,
)
from prime_core.rollout import SignedSubmission
from prime_core.run import RunDefinition
from prime_core.signing import Signer
from prime_core.task import shadow_pool
from prime_core.transport.client import Empty, OrchestratorClient, run_bytes

MAX_CLOCK_SKEW = 300
"""Seconds by which a receipt's time may lie ahead of this machine's clock."""
_LEASE_LIST = TypeAdapter(tuple[LeaseInfo, ...])


class NodeApi:
    """A node's requests to its orchestrator. Raises the same errors as OrchestratorClient."""

    def __init__(
        self,
        base_url: str,
        signer: Signer | None,
        *,
        timeout: float = 30.0,
        shadow: bool = False,
        allow_private: bool = False,
        now: Callable[[], float] = time.time,
        manager: Address | None = None,
    ) -> None:
        """`manager`: the pool's, which signs leases and receipts; None takes the orchestrator's
        word for it."""
        self.shadow = shadow
        self.manager = manager
        self._now = now
        self.client = OrchestratorClient(
            base_url, signer, "node", timeout=timeout, allow_private=allow_private
        )
        self._open = partial(
            NodeApi, base_url, signer,
            timeout=timeout, shadow=shadow, allow_private=allow_private, now=now,
        )  # fmt: skip

    def another(self) -> NodeApi:
        """Opens another connection of the same node, for another thread."""
        return self._open(manager=self.manager)

    def close(self) -> None:
        self.client.close()

    def run(self, expected: Digest | None = None) -> RunDefinition:
        """Returns a run definition. Raises UntrustedError unless its digest is the expected one (by
        default the one that the orchestrator names for the pool)."""
        return RunDefinition.parse(
            run_bytes(self.client, expected or self.client.pool().run_digest)
        )

    def runs(self) -> RunList:
        """Returns the pool's first definition and its revisions."""
        return self.client.get("/v1/runs", RunList)

    def challenge(self, request: AdmissionRequest) -> ChallengeAnswer:
        return self.client.post("/v1/admission/challenge", request, ChallengeAnswer)

    def solution(self, challenge_id: str, products: bytes) -> AdmissionAnswer:
        return self.client.post(f"/v1/admission/solution/{challenge_id}", products, AdmissionAnswer)

    def begin_cards(self, request: CardsRequest) -> CardsAnswer:
        return self.client.post("/v1/admission/cards", request, CardsAnswer)

    def announce_filled(self, proof: str, echo: CardsEcho) -> MemoryAnswer:
        return self.client.post(f"/v1/admission/cards/{proof}/filled", echo, MemoryAnswer)

    def commit_memory(self, proof: str, commitment: MemoryCommitment) -> MemoryDraw:
        return self.client.post(f"/v1/admission/cards/{proof}/memory", commitment, MemoryDraw)

    def open_blocks(self, proof: str, opening: bytes) -> MemoryProved:
        return self.client.post(f"/v1/admission/cards/{proof}/blocks", opening, MemoryProved)

    def echo_cards(self, proof: str, echo: CardsEcho) -> CardsAnswer:
        return self.client.post(f"/v1/admission/cards/{proof}/echo", echo, CardsAnswer)

    def commit_cards(self, proof: str, commitment: CardsCommitment) -> CardsDraw:
        return self.client.post(f"/v1/admission/cards/{proof}/commitment", commitment, CardsDraw)

    def open_cards(self, proof: str, opening: bytes) -> AdmissionAnswer:
        return self.client.post(f"/v1/admission/cards/{proof}/opening", opening, AdmissionAnswer)

    def passport(self, node: Address) -> SignedPassport:
        """Returns a node's hardware passport, unchecked. Raises NotFoundError if there is none."""
        return self.client.get(f"/v1/nodes/{node}/passport", SignedPassport)

    def proved_memory(self, node: Address) -> SignedMemory:
        """Returns what a node proved of its cards' memory, unchecked. Raises NotFoundError if
        nothing, or if the orchestrator does not know such proofs."""
        return self.client.get(f"/v1/nodes/{node}/memory", SignedMemory)

    def heartbeat(self, body: Heartbeat) -> HeartbeatAnswer:
        return self.client.post("/v1/heartbeat", body, HeartbeatAnswer)

    def node(self, address: Address) -> NodeInfo:
        """Returns one node. Raises NotFoundError if it was never admitted."""
        return self.client.get(f"/v1/nodes/{address}", NodeInfo)

    def leases(self, node: Address) -> tuple[LeaseInfo, ...]:
        """Returns the newest leases of one node."""
        path = f"/v1/nodes/{node}/leases"
        try:
            return _LEASE_LIST.validate_json(self.client.request("GET", path, b"", signed=False))
        except ValidationError as error:
            raise MalformedError(f"the answer of {path} is no such list: {error}") from error

    def policy(self, version: int) -> SignedManifest:
        """Returns one policy's manifest. Raises NotFoundError if it was not published."""
        return self.client.get(f"/v1/policies/{version}", SignedManifest)

    def policies(self) -> PolicyList:
        """Returns the newest policies' manifests: megabytes in a pool of a large model."""
        return self.client.get("/v1/policies", PolicyList)

    def lease(
        self,
        policy_version: int,
        runs: Iterable[Digest] = (),
        *,
        evaluates: bool = False,
        holds: Iterable[Digest] = (),
    ) -> LeaseAnswer:
        """Returns an open lease of this node outside `holds` or a new one of one of `runs` (empty:
        any run), which may be of an evaluation if `evaluates`, after checking the manager's
        signature and the addressee. Orchestrators that give one lease at a time refuse `holds`.
        Raises UntrustedError if they are wrong,
        if a shadow node gets a lease that could be paid or slashed, or if another node gets one
        that could not."""
        answer = self.client.post(
            "/v1/leases/evaluation" if evaluates else "/v1/leases",
            LeaseRequest(policy_version=policy_version, runs=tuple(runs), holds=tuple(holds)),
            LeaseAnswer,
        )
        if answer.lease is not None:
            pool, lease = self.client.pool(), answer.lease.lease
            manager = lease.recover(self.client.domain("work"), answer.lease.signature)
            mine = self.client.signer.address if self.client.signer else None
            number = shadow_pool(pool.pool) if self.shadow else pool.pool
            expected = self.manager or pool.manager
            if manager != expected or lease.node != mine or lease.pool != number:
                raise UntrustedError("the lease is not the pool manager's for this node")
        return answer

    def exact_class(self, request: ClassRequest) -> ClassAnswer:
        """Asks whether an exact class is wanted, or announces it."""
        return self.client.post("/v1/classes", request, ClassAnswer)

    def abandon(self, lease_digest: Digest) -> None:
        self.client.post(f"/v1/leases/{lease_digest}/abandon", b"{}", Empty)

    def call(self, gateway: Gateway, request: GatewayRequest) -> GatewayAnswer:
        """Sends a call to the run's gateway; thread-safe. The answer's signature is not checked."""
        return self.client.post_to(f"{gateway.url.rstrip('/')}/v1/call", request, GatewayAnswer)

    def upload_target(self, lease_digest: Digest, body: UploadRequest) -> UploadAnswer:
        return self.client.post(f"/v1/leases/{lease_digest}/upload", body, UploadAnswer)

    def upload(self, target: UploadAnswer, file: Path) -> None:
        self.client.upload(target, file)

    def submit(self, body: SignedSubmission) -> ReceiptAnswer:
        """Submits the signed submission; the receipt is checked against the manager's key.

        Its time must not lie ahead: without a root, the node may post its own leaf only an epoch
        after it.
        """
        answer = self.client.post("/v1/submissions", body, ReceiptAnswer, signed=False)
        domain, pool = self.client.domain("work"), self.client.pool()
        if answer.receipt.submission_digest != body.submission.digest(
            domain
        ) or answer.receipt.recover(domain, answer.signature) != (self.manager or pool.manager):
            raise UntrustedError("the receipt is not the pool manager's for this submission")
        ahead = answer.receipt.received_at - self._now()
        if ahead > MAX_CLOCK_SKEW:
            raise UntrustedError(
                f"the receipt's time is {ahead:.0f} s ahead; check this machine's clock"
            )
        return answer
