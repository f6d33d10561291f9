"""HTTP bodies, shared by client and server. All are JSON; errors are RFC 9457 problems.

| method and path | caller | body → answer |
|---|---|---|
| GET  /v1/pool | anyone | → PoolInfo |
| GET  /v1/run | anyone | → the bytes of the pool's first run definition |
| GET  /v1/runs | anyone | → RunList |
| GET  /v1/runs/{digest} | anyone | → the bytes of one definition |
| POST /v1/revisions | manager* | RevisionRequest → RunRevision (queues Pools.revise) |
| POST /v1/sessions | grant's account | SessionRequest → SessionAnswer |
| POST /v1/sessions/revoke | the account | RevokeRequest → {} |
| POST /v1/admission/challenge | node* | AdmissionRequest → ChallengeAnswer |
| POST /v1/admission/solution/{id} | node* | raw int64 little-endian products → AdmissionAnswer |
| POST /v1/admission/cards | node* | CardsRequest → CardsAnswer (a run with `cards`) |
| POST /v1/admission/cards/{id}/filled | node* | CardsEcho → MemoryAnswer |
| POST /v1/admission/cards/{id}/memory | node* | MemoryCommitment → MemoryDraw |
| POST /v1/admission/cards/{id}/blocks | node* | marks of the drawn blocks → MemoryProved |
| POST /v1/admission/cards/{id}/echo | node* | CardsEcho → CardsAnswer |
| POST /v1/admission/cards/{id}/commitment | node* | CardsCommitment → CardsDraw |
| POST /v1/admission/cards/{id}/opening | node* | bytes of the drawn rows → AdmissionAnswer |
| POST /v1/heartbeat | node* | Heartbeat → HeartbeatAnswer |
| POST /v1/classes | node* | ClassRequest → ClassAnswer |
| GET  /v1/classes/{digest} | anyone | → ClassInfo |
| POST /v1/leases | node* | LeaseRequest → LeaseAnswer |
| GET  /v1/leases/{digest} | anyone | → SignedLease, once a file was submitted for it |
| POST /v1/leases/{digest}/abandon | node* | {} → {} |
| POST /v1/leases/{digest}/upload | node* | UploadRequest → UploadAnswer |
| PUT/GET /v1/store/{key} | holder of a signed URL | bytes |
| POST /v1/submissions | anyone who has it | SignedSubmission → ReceiptAnswer |
| GET  /v1/submissions?node=&before=&archived= | anyone | → list[SubmissionInfo], by pages |
| GET  /v1/submissions/{digest} | anyone | → SubmissionInfo |
| GET  /v1/draws | anyone | → list[DrawInfo], latest epoch first, at most 256 |
| GET  /v1/objects/{digest} | anyone | → 307 to a signed URL (verdicts, evidence, tables, roots) |
| GET  /v1/policies | anyone | → PolicyList |
| GET  /v1/policies/{version} | anyone | → SignedManifest, however old |
| POST /v1/policies | trainer* | SignedManifest → {} (queues publishPolicy) |
| GET  /v1/relays | anyone | → list[RelayInfo] |
| POST /v1/relays | relay* | RelayAnnouncement → {} |
| GET  /v1/batches/{step} | trainer* | → BatchAnswer of the first batch from there on, or 404 |
| GET  /v1/batches/{step}/manifest | anyone | → SignedBatch |
| GET  /v1/nodes?after=&provider= | anyone | → list[NodeInfo] by address, NODES_PAGE at most |
| GET  /v1/nodes/{node} | anyone | → NodeInfo |
| GET  /v1/nodes/{node}/passport | anyone | → SignedPassport |
| GET  /v1/nodes/{node}/memory | anyone | → SignedMemory |
| GET  /v1/nodes/{node}/leases?before=&archived= | anyone | → list[LeaseInfo], by pages |
| GET  /v1/rewards/{node} | anyone | → RewardInfo |
| GET  /v1/validators/{validator} | anyone | → ValidatorInfo |
| GET  /v1/transactions/{tx_hash} | anyone | → TransactionInfo |
| GET  /v1/status | anyone | → Status (data of the dashboard and the live table) |
| GET  /v1/events | anyone | → server-sent events, each a Status |
| GET  /healthz /readyz /metrics /docs / | anyone | health, Prometheus, OpenAPI, dashboard |

* signed with a session key (RFC 9421 + RFC 9530): see prime_core/transport.

Requests and answers carry `Prime-Protocol` (prime_core/version.py). Answers (`Answer`) ignore
unknown fields, requests (`Strict`) reject them, and signed statements must match exactly.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from prime_core.batch import SignedBatch
from prime_core.checkpoint import SignedManifest
from prime_core.draws import SignedDrawCommitment
from prime_core.node import (
    Gpu,
    Hardware,
    HardwarePassport,
    Invite,
    MemoryPassport,
    NodeStatus,
    SessionGrant,
    SessionRevocation,
)
from prime_core.rollout import Receipt
from prime_core.signing import AddressField, Answer, DigestField, SignatureField, Strict
from prime_core.task import LeaseOutcome, SignedLease, SubmissionStatus

Count = Annotated[int, Field(ge=0, lt=2**53)]
"""A count that fits a 64-bit database column and is exact in JSON (below 2^53)."""


class ContractAddresses(Answer):
    """Addresses of the deployment's contracts."""

    token: AddressField
    registry: AddressField
    vault: AddressField
    pools: AddressField
    work: AddressField
    rewards: AddressField
    slasher: AddressField
    court: AddressField


class PoolInfo(Answer):
    chain_id: Count
    contracts: ContractAddresses
    pool: Count
    manager: AddressField
    trainer: AddressField
    run_digest: DigestField
    name: str
    orchestrator: str
    """The audience that session grants must name."""
    latest_version: int | None
    stake_per_seat: str
    """In wei, as decimal text."""


class RunRevision(Answer):
    """A revision of the pool's run. It applies to leases of steps from `from_step` on, once it is
    `final` on chain."""

    run_digest: DigestField
    from_step: Count
    final: bool


class RunList(Answer):
    """The pool's first run definition and its revisions, ordered by step."""

    first: DigestField
    revisions: tuple[RunRevision, ...]


class RevisionRequest(Strict):
    """`run` is the text of the revision's file. Its digest is taken over its UTF-8 bytes."""

    run: str = Field(max_length=1 << 20)
    from_step: Count


class SessionRequest(Strict):
    grant: SessionGrant
    signature: SignatureField


class SessionAnswer(Answer):
    key_id: str
    """Digest of the session key, as text; used as the signatures' `keyid`."""
    expiry: int
    server_time: int


class RevokeRequest(Strict):
    revocation: SessionRevocation
    signature: SignatureField


class AdmissionRequest(Strict):
    """`shadow` requests work for verdicts only, without a seat; see protocol.md."""

    hardware: Hardware
    task_runtime: Literal["docker", "process"]
    shadow: bool = False


class Challenge(Answer):
    """Hardware challenge: multiply `rounds` pairs of size×size int matrices drawn from `seed`
    (prime_verify/proofs/hardware.py). Time is measured from sending the answer until the solution
    arrives."""

    id: str = Field(max_length=64)
    seed: DigestField
    size: int
    rounds: int
    deadline: int


class ChallengeAnswer(Answer):
    """Either a challenge or how many milliseconds to wait before asking again."""

    challenge: Challenge | None
    retry_after_ms: int = 0
    reason: str = ""


class CardsRequest(AdmissionRequest):
    """Requests a proof of `cards` (prime_verify/proofs/cards.py), all of one model."""

    cards: tuple[Gpu, ...] = Field(min_length=1, max_length=64)


class CardsWork(Answer):
    """Sizes of a proof of cards, and the seed of its operands."""

    operands: DigestField
    rows: int
    inner: int
    columns: int
    cards: int
    rounds: int


class MemoryWork(Answer):
    """Sizes of a proof of memory (prime_verify/proofs/memory.py). Its seed is that of `work`."""

    blocks: int
    width: int
    columns: int
    cards: int
    rounds: int


class CardsAnswer(Answer):
    """`work` comes first, with a `token`: the node prepares its cards and sends the token back,
    and so each further one. These echoes measure the connection's round trip. In place of the last
    token comes the seed `order`, and the time starts. Without `work` and `id`, the node waits for
    its turn. With `memory`, a node that knows it first proves its cards' memory."""

    id: str = Field(default="", max_length=64)
    work: CardsWork | None = None
    memory: MemoryWork | None = None
    token: DigestField | None = None
    order: DigestField | None = None
    deadline: int = 0
    retry_after_ms: int = 0
    reason: str = ""


class CardsEcho(Strict):
    token: DigestField


class CardsCommitment(Strict):
    """`device_ms` is the node's own timer; it is recorded and not believed."""

    root: DigestField
    device_ms: int = Field(ge=0, lt=2**31)


class CardsDraw(Answer):
    """The cells to open, each as (card, round, row)."""

    cells: tuple[Annotated[tuple[int, ...], Field(min_length=3, max_length=3)], ...] = Field(
        max_length=256
    )


class MemoryAnswer(Answer):
    """As in CardsAnswer: each `token` comes back, the first one once the cards are filled. In place
    of the last comes `vectors`, the seed of what the blocks are multiplied with, and the time
    starts."""

    token: DigestField | None = None
    vectors: DigestField | None = None


class MemoryCommitment(Strict):
    """`fill_ms` and `device_ms`, for making and reading the blocks, are the node's own timer; they
    are logged and not believed."""

    root: DigestField
    fill_ms: int = Field(ge=0, lt=2**31)
    device_ms: int = Field(ge=0, lt=2**31)


class MemoryDraw(Answer):
    """The blocks to open, each as (card, number)."""

    blocks: tuple[Annotated[tuple[int, ...], Field(min_length=2, max_length=2)], ...] = Field(
        max_length=1024
    )


class MemoryProved(Answer):
    """The proof of memory passed, with so many MiB a card; the proof of cards goes on with
    `token`."""

    token: DigestField
    proved_memory_mb: int


class SignedMemory(Strict):
    """What a node's proof of memory found, signed by the pool's manager."""

    memory: MemoryPassport
    signature: SignatureField


class SignedPassport(Strict):
    """A node's hardware passport, signed by the pool's manager."""

    passport: HardwarePassport
    signature: SignatureField


class AdmissionAnswer(Answer):
    """`invite` and the manager's `signature`. Both are None for a shadow node, which gets no seat,
    and for a node that already has its invite."""

    mmacs_per_second: int
    invite: Invite | None = None
    signature: SignatureField | None = None


class Heartbeat(Strict):
    """`policy_version` is the newest policy verified on disk, `leases` the open leases in progress,
    `heard_at` the `server_time` of the last answer processed (0 if none). `lied` lists the relays
    that sent bytes with a wrong hash since the last heartbeat that succeeded."""

    policy_version: Count | None
    leases: tuple[DigestField, ...] = Field(default=(), max_length=64)
    tokens_per_second: int = Field(default=0, ge=0, lt=2**31)
    """Stored in a 32-bit column."""
    runtime: Literal["docker", "process"] = "process"
    version: str = Field(default="", max_length=64)
    heard_at: Count = 0
    lied: tuple[Annotated[str, Field(max_length=512)], ...] = Field(default=(), max_length=16)
    instance: str = Field(default="", pattern=r"^([0-9a-f]{32})?$")
    """Random id of the agent's data folder. Two ids with one key are two machines."""
    proves: bool = Field(default=False, exclude_if=lambda proves: not proves)
    """The node knows `HeartbeatAnswer.prove_cards_by`. Sent while the latest answer names a time,
    so that nodes that do not know it lose nothing."""


class FileEnding(Answer):
    """A file that was not accepted. `detail` says in one sentence why, and what to do."""

    submission_digest: DigestField
    lease_digest: DigestField
    status: Literal["rejected", "void"]
    reason: int
    detail: str = Field(max_length=512)
    judged_at: Count


Directive = Literal["join", "work", "wait", "stop"]


class HeartbeatAnswer(Answer):
    """What to do next. join: membership not yet visible on chain · work: ask for leases · wait:
    quarantined or paused · stop: ejected or the pool has ended; the agent exits and reports
    `reason`."""

    directive: Directive
    reason: str
    status: NodeStatus
    latest_version: Count | None
    relays: tuple[str, ...]
    server_time: Count
    endings: tuple[FileEnding, ...] = Field(default=(), max_length=16)
    """The node's newest files that were rejected or voided since `heard_at`; entries may repeat."""
    measure: bool = False
    """Asks for one more hardware challenge alongside the work, because the node's speed is not
    known well enough."""
    run_digest: DigestField | None = None
    """The newest run definition, announced or in force, so that the node can prepare for it."""
    another_machine: bool = False
    """Another agent works with this key: this one must stop (`directive`, `reason`)."""
    evaluates: bool = False
    """An evaluation of a policy goes on: a node that knows evaluation leases (SaltOpening.heldout)
    asks at /v1/leases/evaluation, where it may get one."""
    lease_slots: int = Field(default=1, ge=1)
    """How many leases the node may hold open at once (LeaseRequest.holds)."""
    prove_cards_by: Count | None = None
    """Unix time by which the node proves its cards again, as at admission. It says that it knows
    (`Heartbeat.proves`) and delivers its open leases first. It gets no other until then."""


MOST_SLOTS = 16
"""Maximum number of leases that a node names in a request."""


class LeaseRequest(Strict):
    """`policy_version` is the newest policy the worker can load. `runs` are the digests of the runs
    the node accepts work for (empty: any). A node that declines a revision omits it. `holds` are
    the open leases that the node works on or delivers: another one that is open is returned first.
    A node sends it once a heartbeat's answer allowed more than one (`lease_slots`)."""

    policy_version: Count
    runs: tuple[DigestField, ...] = Field(default=(), max_length=64)
    holds: tuple[DigestField, ...] = Field(
        default=(), max_length=MOST_SLOTS, exclude_if=lambda leases: not leases
    )


class LeaseAnswer(Answer):
    """Either a lease or how many milliseconds to wait. `run_digest` is set if the node would have
    got a lease of a run that it does not accept, and names that run."""

    lease: SignedLease | None
    retry_after_ms: int = 0
    reason: str = ""
    run_digest: DigestField | None = None


ClassFacts = Annotated[
    dict[
        Annotated[str, Field(min_length=1, max_length=64)],
        Annotated[str, Field(max_length=256)],
    ],
    Field(min_length=1, max_length=32),
]
"""What a machine's bits depend on, as names and values (prime_engine.exact)."""


class ClassRequest(Strict):
    """A node's exact class (prime_engine.exact) with one policy. Without `fingerprint` it asks
    whether such a class is wanted, so that a machine which no validator equals measures nothing."""

    policy_version: Count
    policy_digest: DigestField
    facts: ClassFacts
    fingerprint: DigestField | None = None


class ClassAnswer(Answer):
    """Whether enough live validators announced a class of these facts for this policy, or, with a
    fingerprint, exactly this class: the node's next leases of the policy may then name it."""

    wanted: bool


class ClassInfo(Answer):
    """An exact class that a validator announced for a policy: what hardware and software it takes
    to repeat a proof pass. `digest` follows from `facts` and `fingerprint`."""

    digest: DigestField
    facts: ClassFacts
    fingerprint: DigestField
    policy_version: int


class UploadRequest(Strict):
    sha256: DigestField
    size: int = Field(ge=1)


class UploadAnswer(Answer):
    """PUT the bytes to `url` with exactly these headers before `expiry`. `exists`: the file is
    already stored."""

    url: str
    headers: dict[str, str]
    expiry: int
    exists: bool = False


class ReceiptAnswer(Answer):
    receipt: Receipt
    signature: SignatureField


class SubmissionInfo(Answer):
    """`detail` says in one sentence what `reason` means and what to do; empty until the file is
    judged."""

    submission_digest: DigestField
    node: AddressField
    lease_digest: DigestField
    step: int
    sha256: DigestField
    status: SubmissionStatus
    reason: int
    units: int
    root: DigestField | None
    """The confirmed work root that contains this leaf."""
    verdict: DigestField | None
    evidence: DigestField | None
    detail: str = ""
    compute_share: float | None = None
    """Compute spent on verifying the file divided by compute spent on making it; None if nothing
    was replayed."""
    receipt: ReceiptAnswer | None = None
    """What the manager signed when the file arrived. None from an older orchestrator."""


class DrawInfo(Answer):
    """A validator's commitment to an epoch's draw. `revealed`: the object it commits to is
    available."""

    signed: SignedDrawCommitment
    revealed: bool


MAX_LISTED = 64
"""Maximum number of manifests in a list. Each costs its reader a signature check of about a
millisecond."""


class PolicyList(Answer):
    """Newest first, and only the newest. The origin keeps all policies that are still liable."""

    policies: tuple[SignedManifest, ...] = Field(max_length=MAX_LISTED)


class RelayAnnouncement(Strict):
    """A relay's announcement: its base URL and the policy versions that it holds completely."""

    url: str = Field(max_length=512)
    versions: tuple[int, ...] = ()


class RelayInfo(Answer):
    """A relay that announced itself recently. `own`: whether one of the pool's own accounts
    announced it, for example the trainer its origin or bucket."""

    url: str = Field(max_length=512)
    versions: tuple[int, ...] = ()
    own: bool = False


class BatchAnswer(Answer):
    """A sealed batch, and a signed URL for each file and verdict table, keyed by SHA-256."""

    batch: SignedBatch
    urls: dict[str, str]


NODES_PAGE = 1000
"""Page size of /v1/nodes. After a full page, request `?after=` with its last address."""

SUBMISSIONS_PAGE = 256
"""Page size of /v1/submissions. After a full page, request `?before=` with its last digest."""


class NodeInfo(Answer):
    """Counts refer to the node's files. A shadow node's counts are of its shadow files, which earn
    no units."""

    node: AddressField
    provider: AddressField | None
    status: NodeStatus
    speed_class: int
    last_heartbeat: int
    policy_version: int | None
    accepted: int
    rejected: int
    void: int
    expired_unjudged: int = 0
    """Of `void`, those that ended through the pool's fault (`verdict.POOLS_FAULT`)."""
    units: int
    cards: str = ""
    """What its hardware passport names, such as "8 x h200"; empty without one."""
    cards_measured_at: int = 0
    """When the cards of the passport were measured, in Unix seconds; 0 without one."""
    claimed_memory_mb: int = 0
    """Memory of each card in MiB, as the node claims it; 0 without a passport."""
    proved_memory_mb: int = 0
    """What of it a proof filled and read; 0 if it is only claimed."""
    cards_trouble: str = ""
    """Why the node gets no lease since its cards were measured again; empty if they passed."""
    uncalibrated_card: str = ""
    """The active node's card, if the run's calibration has no limits for it; empty otherwise."""
    uncalibrated_trouble: str = ""
    """Why such a node has no place in the quota and gets no lease; empty if it has one."""


class LeaseInfo(Answer):
    """Public view of a lease; times in Unix seconds."""

    digest: DigestField
    step: int
    index: int
    policy_version: int
    status: LeaseOutcome
    created_at: int
    deadline: int
    target: int


class RewardInfo(Answer):
    """One node's entry in the newest posted reward root. Amounts in wei, as decimal text."""

    node: AddressField
    epoch: Count | None
    cumulative: str = Field(pattern=r"^(0|[1-9][0-9]*)$", max_length=77)
    proof: tuple[DigestField, ...]
    claimable_at: int | None
    pending_units: int
    forfeited: str = Field(pattern=r"^(0|[1-9][0-9]*)$", max_length=77)


class ValidatorInfo(Answer):
    """A validator's known accuracy. For planted files, whose truth the manager knows: `accused`
    counts honest files it rejected, `missed` counts attacks it accepted. `overruled` counts
    opinions that two other validators contradicted."""

    validator: AddressField
    opinions: int
    overruled: int
    honest: int
    accused: int
    lying: int
    missed: int


class ChainEvent(Answer):
    """An event of the pool's contracts, as the orchestrator read it; `at` in Unix seconds."""

    name: str
    block: int
    at: int
    args: dict[str, object]


class TransactionInfo(Answer):
    """What the orchestrator knows of a transaction. `kind` and `status` are set if it sent it."""

    hash: DigestField
    kind: str | None
    status: str | None
    events: tuple[ChainEvent, ...]


class PolicyReach(Answer):
    """How a policy spread: of the `nodes` working now, how many reported having it (`arrived`), and
    when."""

    version: int
    published_at: int
    nodes: int
    after_ms: tuple[int, ...]
    """Milliseconds from publication to the heartbeat that reported it, ascending, one per node, or
    evenly spread over many nodes."""

    arrived: int = 0


class TargetShare(Answer):
    """Recent counts for one target length (the window is defined in
    prime_orchestrator/manager/targets.py)."""

    target: int
    asked: int
    """Leases issued."""
    accepted: int
    """Leases among those whose files were accepted."""
    trained: int
    """Groups in the latest trained batches."""
    starving: bool
    """Whether its share of accepted leases, or of the groups in batches, is below half of the run's
    minimum share."""
    expired: int = 0
    """Leases among those issued that expired without a file, through their nodes' fault."""
    expiring: bool = False
    """Whether its leases expire more than twice as often as those of the other targets."""
    sealed: int = 0
    """Groups in sealed batches that are not trained yet."""


MAX_EVALUATIONS = 20


class EvaluationInfo(Answer):
    """An evaluation of a policy on held-out problems by the pool's nodes, with its results so far.
    Times in Unix seconds."""

    id: int
    policy_version: int
    problems: int
    """How many it asks."""
    answered: int
    """Problems with an accepted file."""
    rows: int
    """Accepted answers to them."""
    reward: float | None
    """Mean over the answered problems of their answers' mean reward; None without one."""
    interval: float | None
    """Half of its 95 % interval over problems; None with fewer than two."""
    started_at: int
    ended_at: int | None
    """None: it goes on."""


class Status(Answer):
    """A snapshot of the pool, for tables and pages."""

    pool: int
    name: str
    time: int
    step: int
    latest_version: int | None
    published: tuple[int, ...]
    nodes: tuple[NodeInfo, ...]
    files: dict[str, int]
    """Number of submissions by status, all time."""
    expired_unjudged: int = 0
    """Of the void files, those that ended through the pool's fault (`verdict.POOLS_FAULT`)."""
    shadow_files: dict[str, int] = Field(default_factory=dict)
    """The same for shadow nodes' files, which are only judged."""
    batches: tuple[dict[str, int | str], ...]
    """Newest last, at most 200: step, rows, mean_reward_micro, staleness_max, sealed_at, and state:
    "trained" once a policy with a version above its step is published, before that "sealed"."""
    transactions: tuple[dict[str, int | str], ...]
    """Newest last, at most 20: kind, hash, status, at."""
    slashes: tuple[dict[str, int | str], ...]
    reach: tuple[PolicyReach, ...] = ()
    """The newest policies, oldest first, at most 8."""
    chain_reachable: bool
    validators: tuple[ValidatorInfo, ...] = ()
    compute_share: float | None = None
    """Compute spent on verifying files divided by compute spent on making them; mean over judged
    files."""
    targets: tuple[TargetShare, ...] = ()
    """All target lengths of the run, ascending."""
    evaluations: tuple[EvaluationInfo, ...] = ()
    """Evaluations on held-out problems, oldest first, at most MAX_EVALUATIONS: those that go on,
    and the newest others."""
    activity: Literal["running", "stalled", "ended"] = "running"
    """Stalled: no batch was sealed and no policy published for a lease duration, and for three
    times the longest pause between recent batches. Ended: the pool ended on chain."""
    activity_since: int | None = None
    """When it ended, or when the last batch or policy came; None before the first policy."""
    owed: str | None = None
    """What the pool owes for files that no reward root settles, in wei; None if not known."""
    money: str | None = None
    """Its bond and free funds, in wei. While `owed` is more, it gives no lease."""
    explorer: str = ""
    """URL of the chain's block explorer, without a slash at its end; empty if there is none."""
