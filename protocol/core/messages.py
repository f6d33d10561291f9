"""HTTP bodies, shared by client and server. JSON in, JSON out; errors are RFC 9457 problems.

| method and path | who | body → answer |
|---|---|---|
| GET  /v1/pool | anyone | → PoolInfo |
| GET  /v1/run | anyone | → canonical RunDefinition bytes |
| POST /v1/sessions | grant's account | SessionRequest → SessionAnswer |
| POST /v1/sessions/revoke | the account | RevokeRequest → {} |
| POST /v1/admission/challenge | node* | AdmissionRequest → Challenge |
| POST /v1/admission/solution/{id} | node* | raw int64 little-endian products → AdmissionAnswer |
| POST /v1/heartbeat | node* | Heartbeat → HeartbeatAnswer |
| POST /v1/leases | node* | LeaseRequest → LeaseAnswer |
| GET  /v1/leases/{digest} | anyone | → SignedLease, once a file was handed in for it |
| POST /v1/leases/{digest}/abandon | node* | {} → {} |
| POST /v1/leases/{digest}/upload | node* | UploadRequest → UploadAnswer |
| PUT/GET /v1/store/{key} | holder of a signed URL | bytes |
| POST /v1/submissions | anyone carrying it | SignedSubmission → ReceiptAnswer |
| GET  /v1/submissions/{digest} | anyone | → SubmissionInfo |
| GET  /v1/draws | anyone | → list[DrawInfo], latest epoch first, at most 256 |
| GET  /v1/objects/{digest} | anyone | → 307 to a signed URL (verdicts, evidence, tables, roots) |
| GET  /v1/policies | anyone | → PolicyList |
| GET  /v1/policies/{version} | anyone | → SignedManifest, however old |
| POST /v1/policies | trainer* | SignedManifest → {} (queues publishPolicy) |
| GET  /v1/relays | anyone | → list[RelayInfo] ; POST by relay* RelayInfo → {} |
| GET  /v1/batches/{step} | trainer* | → BatchAnswer, or 404 problem until it is sealed |
| GET  /v1/batches/{step}/manifest | anyone | → SignedBatch |
| GET  /v1/nodes | anyone | → list[NodeInfo] |
| GET  /v1/nodes/{node}/leases | anyone | → list[LeaseInfo], newest last, at most 1,000 |
| GET  /v1/rewards/{node} | anyone | → RewardInfo |
| GET  /v1/status | anyone | → Status (what the dashboard and the live table draw) |
| GET  /v1/events | anyone | → server-sent events, each a Status |
| GET  /healthz /metrics /docs / | anyone | health, Prometheus, OpenAPI, dashboard |

* signed by a session (RFC 9421 + RFC 9530): see protocol/transport.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from protocol.core.batch import SignedBatch
from protocol.core.checkpoint import SignedManifest
from protocol.core.draws import SignedDrawCommitment
from protocol.core.node import Hardware, Invite, NodeStatus, SessionGrant, SessionRevocation
from protocol.core.rollout import Receipt
from protocol.core.signing import AddressField, DigestField, SignatureField, Strict
from protocol.core.task import LeaseStatus, SignedLease

Count = Annotated[int, Field(ge=0, lt=2**53)]
"""A number that fits every database and every reader of JSON."""


class ContractAddresses(Strict):
    """Where the deployment lives."""

    token: AddressField
    registry: AddressField
    vault: AddressField
    pools: AddressField
    work: AddressField
    rewards: AddressField
    slasher: AddressField


class PoolInfo(Strict):
    chain_id: int
    contracts: ContractAddresses
    pool: int
    manager: AddressField
    trainer: AddressField
    run_digest: DigestField
    name: str
    orchestrator: str
    """The audience that session grants must name."""
    latest_version: int | None
    stake_per_class: str
    """Wei as decimal text."""


class SessionRequest(Strict):
    grant: SessionGrant
    signature: SignatureField


class SessionAnswer(Strict):
    key_id: str
    """The session key's digest text; goes into the signatures' `keyid`."""
    expiry: int
    server_time: int


class RevokeRequest(Strict):
    revocation: SessionRevocation
    signature: SignatureField


class AdmissionRequest(Strict):
    """`shadow`: work for verdicts alone, without a seat; see protocol.md."""

    hardware: Hardware
    task_runtime: Literal["docker", "process"]
    shadow: bool = False


class Challenge(Strict):
    """Multiply `rounds` pairs of size×size int matrices drawn from `seed` (protocol/proofs/
    hardware.py). Time runs from the answer's sending to the solution's arrival."""

    id: str = Field(max_length=64)
    seed: DigestField
    size: int
    rounds: int
    deadline: int


class AdmissionAnswer(Strict):
    """`invite` with the manager's signature; neither for a shadow node, which gets no seat."""

    speed_class: int
    mmacs_per_second: int
    invite: Invite | None = None
    signature: SignatureField | None = None


class Heartbeat(Strict):
    """`policy_version` the newest verified on disk; `leases` the open ones being worked on;
    `heard_at` the `server_time` of the last answer that was taken in (0: none); `lied` the relays
    that sent it bytes which do not hash, since the last heartbeat that got through."""

    policy_version: Count | None
    leases: tuple[DigestField, ...] = Field(default=(), max_length=64)
    tokens_per_second: Count = 0
    runtime: Literal["docker", "process"] = "process"
    version: str = Field(default="", max_length=64)
    heard_at: Count = 0
    lied: tuple[Annotated[str, Field(max_length=512)], ...] = Field(default=(), max_length=16)


class FileEnding(Strict):
    """A file that was not accepted. `detail` says in a sentence why, and what to do."""

    submission_digest: DigestField
    lease_digest: DigestField
    status: Literal["rejected", "void"]
    reason: int
    detail: str = Field(max_length=512)
    judged_at: int


Directive = Literal["join", "work", "wait", "stop"]


class HeartbeatAnswer(Strict):
    """What to do next. join: membership not yet seen · work: ask for leases · wait: quarantined or
    paused · stop: ejected or the pool has ended; the agent exits and says why (`reason`)."""

    directive: Directive
    reason: str
    status: NodeStatus
    latest_version: Count | None
    relays: tuple[str, ...]
    server_time: Count
    endings: tuple[FileEnding, ...] = Field(default=(), max_length=16)
    """The node's files that ended rejected or void since `heard_at`, the newest; may repeat."""


class LeaseRequest(Strict):
    """`policy_version` is the newest the worker can load."""

    policy_version: Count


class LeaseAnswer(Strict):
    """Either a lease or how many milliseconds to wait."""

    lease: SignedLease | None
    retry_after_ms: int = 0
    reason: str = ""


class UploadRequest(Strict):
    sha256: DigestField
    size: int = Field(ge=1)


class UploadAnswer(Strict):
    """PUT the bytes to `url` with exactly these headers before `expiry`. `exists`: already here."""

    url: str
    headers: dict[str, str]
    expiry: int
    exists: bool = False


class ReceiptAnswer(Strict):
    receipt: Receipt
    signature: SignatureField


class SubmissionInfo(Strict):
    """`detail` says in a sentence what `reason` means and what to do; empty until it is judged."""

    submission_digest: DigestField
    node: AddressField
    lease_digest: DigestField
    step: int
    sha256: DigestField
    status: LeaseStatus
    reason: int
    units: int
    root: DigestField | None
    """The confirmed work root that holds this leaf."""
    verdict: DigestField | None
    evidence: DigestField | None
    detail: str = ""
    compute_share: float | None = None
    """What verifying it computed, as a share of what making it did; None: nothing was replayed."""


class DrawInfo(Strict):
    """A validator's commitment to an epoch's draw. `revealed`: the object it names is there."""

    signed: SignedDrawCommitment
    revealed: bool


MAX_LISTED = 64
"""Manifests that a list may name: each costs its reader a signature check, about a millisecond."""


class PolicyList(Strict):
    """Newest first, the newest alone; the origin keeps all that are still liable."""

    policies: tuple[SignedManifest, ...] = Field(max_length=MAX_LISTED)


class RelayInfo(Strict):
    url: str = Field(max_length=512)
    versions: tuple[int, ...] = ()


class BatchAnswer(Strict):
    """A sealed batch and a signed URL for each file and verdict table, by SHA-256."""

    batch: SignedBatch
    urls: dict[str, str]


class NodeInfo(Strict):
    """Counts are of the node's files; a shadow node's of its shadow files, which earn no units."""

    node: AddressField
    provider: AddressField | None
    status: NodeStatus
    speed_class: int
    last_heartbeat: int
    policy_version: int | None
    accepted: int
    rejected: int
    void: int
    units: int


class LeaseInfo(Strict):
    """One lease as anyone may see it; times in Unix seconds."""

    digest: DigestField
    step: int
    index: int
    policy_version: int
    status: LeaseStatus
    created_at: int
    deadline: int


class RewardInfo(Strict):
    """The newest posted reward root's entry of one node. Amounts in wei as decimal text."""

    node: AddressField
    epoch: int | None
    cumulative: str
    proof: tuple[DigestField, ...]
    claimable_at: int | None
    pending_units: int
    forfeited: str


class ValidatorInfo(Strict):
    """How often a validator was right, as far as that is known: of planted files, whose truth the
    manager knows, `accused` honest ones rejected and `missed` lies accepted; `overruled` opinions
    that two others contradicted."""

    validator: AddressField
    opinions: int
    overruled: int
    honest: int
    accused: int
    lying: int
    missed: int


class PolicyReach(Strict):
    """How a policy spread: of `nodes` that work now, when each was first heard to have it."""

    version: int
    published_at: int
    nodes: int
    after_ms: tuple[int, ...]
    """Milliseconds from publication to the heartbeat that named it, ascending, one a node."""


class Status(Strict):
    """One picture of the pool, for tables and pages."""

    pool: int
    name: str
    time: int
    step: int
    latest_version: int | None
    published: tuple[int, ...]
    nodes: tuple[NodeInfo, ...]
    files: dict[str, int]
    """Count of submissions by status, all time."""
    shadow_files: dict[str, int] = Field(default_factory=dict)
    """The same of shadow nodes' files, which are judged and nothing else."""
    batches: tuple[dict[str, int | str], ...]
    """Newest last, at most 200: step, rows, mean_reward_micro, staleness_max, sealed_at."""
    transactions: tuple[dict[str, int | str], ...]
    """Newest last, at most 20: kind, hash, status, at."""
    slashes: tuple[dict[str, int | str], ...]
    reach: tuple[PolicyReach, ...] = ()
    """The newest policies, oldest first, at most 8."""
    chain_reachable: bool
    validators: tuple[ValidatorInfo, ...] = ()
    compute_share: float | None = None
    """What verifying files cost, as a share of making them: the mean over judged files."""
