"""A whole orchestrator in one process: keys, a clock that tests move, signed requests."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pools
from fastapi.testclient import TestClient
from httpx import Response
from pools import deployment as deployment

from prime_core.checkpoint import FileEntry, Manifest, SignedManifest
from prime_core.encoding import sha256
from prime_core.ids import ZERO_DIGEST, Digest
from prime_core.messages import LeaseAnswer, SessionRequest
from prime_core.node import Hardware, SessionGrant
from prime_core.rollout import SignedSubmission, Submission
from prime_core.run import LengthBudgets, RunDefinition, SpeedClasses
from prime_core.signing import Domain, LocalSigner, Strict
from prime_core.task import SignedLease
from prime_core.transport.signatures import SessionKey, sign_headers
from prime_core.version import HEADER, SPOKEN
from prime_orchestrator.api.backend import Backend
from prime_orchestrator.manager import uploads
from prime_orchestrator.store import chain, nodes, policies

AUDIENCE = "http://testserver"
VERSIONED = {HEADER: str(SPOKEN[-1])}
START = 1_800_000_000.0


class Clock:
    """Time that only tests move."""

    def __init__(self) -> None:
        self.time = START

    def __call__(self) -> float:
        return self.time

    def advance(self, seconds: float) -> None:
        self.time += seconds


def sweep(backend: Backend) -> int:
    """Runs one sweep of uploads; returns how many it deleted."""
    return uploads.sweep(backend.store, backend.objects, backend.now)


def signer(number: int) -> LocalSigner:
    """The test key of a number."""
    return LocalSigner(bytes([number]) * 32)


def run_definition(**changes: Any) -> RunDefinition:
    """A small run: 2 groups of 2 samples a lease, 4 groups a batch."""
    values: dict[str, Any] = {
        "max_staleness": 2,
        "budgets": LengthBudgets(
            targets=(2, 6), by_class={"1": (2,), "2": (2, 6)}, penalty_micro=0
        ),
        "speed": SpeedClasses(ratios_micro=(500_000,), challenge_size=16, challenge_rounds=2),
        "lease_seconds": 60,
        "heartbeat_seconds": 5,
        "death_seconds": 20,
    }
    return pools.run_definition(**(values | changes))


@dataclass
class Session:
    """One account's open session."""

    account: LocalSigner
    key: SessionKey = field(default_factory=SessionKey.generate)


@dataclass
class World:
    """The orchestrator under test and everybody around it."""

    backend: Backend
    clock: Clock
    http: TestClient
    manager: LocalSigner
    trainer: LocalSigner
    nonces: Iterator[int] = field(default_factory=itertools.count)

    def domain(self, contract: str) -> Domain:
        return self.backend.context.deployment.domain(contract)  # type: ignore[arg-type]

    def grant(self, session: Session, scope: str = "node", **changes: Any) -> SessionRequest:
        values = {
            "account": session.account.address,
            "session_key": session.key.key_id,
            "orchestrator": AUDIENCE,
            "scope": scope,
            "issued_at": int(self.clock()),
            "expiry": int(self.clock()) + 3600,
        }
        grant = SessionGrant(**(values | changes))
        signature = session.account.sign(grant, self.domain("registry"))
        return SessionRequest(grant=grant, signature=signature)

    def login(self, account: LocalSigner, scope: str = "node") -> Session:
        session = Session(account)
        answer = self.post("/v1/sessions", self.grant(session, scope))
        assert answer.status_code == 200, answer.text
        return session

    def post(
        self, path: str, body: Strict | bytes, session: Session | None = None, **headers: str
    ) -> Response:
        raw = body if isinstance(body, bytes) else body.model_dump_json().encode()
        return self.send("POST", path, raw, session, **headers)

    def send(
        self,
        method: str,
        path: str,
        raw: bytes = b"",
        session: Session | None = None,
        **headers: str,
    ) -> Response:
        signed = self.signature(method, path, raw, session) if session else {}
        return self.http.request(method, path, content=raw, headers=signed | headers)

    def signature(self, method: str, path: str, raw: bytes, session: Session) -> dict[str, str]:
        nonce = f"nonce-{next(self.nonces):012d}"
        signed = sign_headers(
            session.key, method, AUDIENCE + path, raw, now=self.clock(), nonce=nonce
        )
        return VERSIONED | signed

    def member(self, number: int, speed_class: int = 1) -> Session:
        """A node that is an active member, with a session."""
        account = signer(number)
        with self.backend.store.begin() as connection:
            nodes.admit(
                connection,
                account.address,
                speed_class=speed_class,
                hardware=Hardware(cpu_model="x", cpu_count=1, memory_mb=1, disk_mb=1, gpus=()),
                runtime="process",
                now=self.clock(),
            )
            nodes.set_status(connection, account.address, "active", last_heartbeat=self.clock())
        return self.login(account)

    def on_chain(self, event: str, **args: Any) -> None:
        """The chain shows an event in a block of its own, as the indexer stores it."""
        with self.backend.store.begin() as connection:
            block = 1000 + next(self.nonces)
            chain.add_event(
                connection, block_hash=sha256(str(block).encode()), log_index=0, block=block,
                block_time=1, tx_hash=sha256(b"tx"), name=event, args=args,
            )  # fmt: skip

    def newcomer(self, number: int, provider: LocalSigner | None = None) -> Session:
        """A node whose provider has done its part on chain, with a session."""
        node, owner = signer(number), provider or signer(100 + number)
        self.on_chain("NodeAdded", provider=owner.address, node=node.address)
        stake = self.backend.context.run.stake_per_seat
        self.on_chain("Deposited", provider=owner.address, amount=stake)
        return self.login(node)

    def manifest(
        self, version: int, content: bytes = b"w", *, step: int | None = None
    ) -> SignedManifest:
        """The trainer's signed manifest of a made-up policy."""
        name = sha256(content + str(version).encode())
        entry = FileEntry(name="model.safetensors", size=1, digest=name, chunks=(name,))
        manifest = Manifest(
            pool=self.backend.context.pool,
            version=version,
            step=version if step is None else step,
            chunk_size=1 << 16,
            files=(entry,),
            result_digest=ZERO_DIGEST,
        )
        return manifest.signed(self.trainer, self.domain("pools"))

    def publish(self, up_to: int) -> None:
        """Publishes every policy up to a version, past the API."""
        with self.backend.store.begin() as connection:
            latest = policies.latest_version(connection)
            for version in range(0 if latest is None else latest + 1, up_to + 1):
                policies.add(connection, self.manifest(version), now=self.clock())

    def lease(self, session: Session, policy_version: int = 0) -> SignedLease:
        raw = self.post("/v1/leases", b'{"policy_version":%d}' % policy_version, session).content
        answer = LeaseAnswer.model_validate_json(raw)
        assert answer.lease is not None, raw
        return answer.lease

    def lease_digest(self, lease: SignedLease) -> Digest:
        return lease.lease.digest(self.domain("work"))

    def upload(self, session: Session, lease: SignedLease, data: bytes) -> Response:
        """Announces and uploads a file; the PUT's answer."""
        digest = self.lease_digest(lease)
        body = b'{"sha256":"%s","size":%d}' % (sha256(data).encode(), len(data))
        answer = self.post(f"/v1/leases/{digest}/upload", body, session)
        assert answer.status_code == 200, answer.text
        target = answer.json()
        assert not target["exists"]
        return self.http.put(target["url"], content=data, headers=target["headers"])

    def claim(
        self, account: LocalSigner, lease: SignedLease, data: bytes, **changes: Any
    ) -> SignedSubmission:
        """A signed submission of `data` for a lease."""
        values: dict[str, Any] = {
            "pool": lease.lease.pool,
            "lease_digest": self.lease_digest(lease),
            "node": account.address,
            "step": lease.lease.step,
            "policy_digest": lease.lease.policy_digest,
            "sha256": sha256(data),
            "size": len(data),
            "rows": self.backend.context.run.rows_per_lease,
            "valid_until": int(self.clock()) + 600,
        }
        submission = Submission(**(values | changes))
        return SignedSubmission(
            submission=submission,
            node=account.address,
            signature=account.sign(submission, self.domain("work")),
        )

    def hand_in(self, session: Session, data: bytes = b"file", version: int = 0) -> Digest:
        """Lease, upload and submit; the submission's digest."""
        lease = self.lease(session, version)
        assert self.upload(session, lease, data).status_code == 204
        signed = self.claim(session.account, lease, data)
        answer = self.post("/v1/submissions", signed)
        assert answer.status_code == 200, answer.text
        return Digest(answer.json()["receipt"]["submission_digest"])


MakeWorld = Callable[..., World]
