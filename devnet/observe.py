"""What a run did, gathered from outside: the chain by RPC, the orchestrator by its public
pages and signed URLs, the trainer's metrics, the nodes' own folders. Nothing the demo counted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from devnet import findings
from devnet.findings import (
    Arrival,
    AuditReplay,
    Evaluation,
    Finding,
    NodeFacts,
    Payment,
    TrainedBatch,
    TrainedFile,
)
from devnet.network import BIN, Network
from devnet.plan import HELDOUT
from devnet.walk import evaluate
from prime_broadcast.manifest import MANIFEST_NAME, Trust, read_signed, verify_folder
from prime_chain import events
from prime_chain.contracts import Contracts
from prime_chain.events import Event
from prime_chain.history import read_events
from prime_core import encoding
from prime_core.batch import SignedBatch
from prime_core.checkpoint import Manifest, SignedManifest
from prime_core.errors import PolicyError, PrimeError, UntrustedError
from prime_core.ids import ZERO_DIGEST, Address, Digest
from prime_core.messages import LeaseAnswer, LeaseRequest, NodeInfo, SubmissionInfo
from prime_core.rollout import SignedSubmission
from prime_core.signing import Domain
from prime_core.transport.client import OrchestratorClient
from prime_core.transport.problems import NotFoundError

T = TypeVar("T", bound=Event)
STAKES = ("Deposited", "UnbondStarted", "Rebonded", "SlashHeld", "SlashReleased", "Slashed")


@dataclass(frozen=True)
class ChainFacts:
    """The pool's events, and those of all accounts' stakes, in order."""

    events: tuple[Event, ...]

    @classmethod
    def read(cls, network: Network) -> ChainFacts:
        """From the network's chain. Raises UnavailableError if it does not answer."""
        work = network.contracts().work
        return cls(
            tuple(read_events(work.client, work.deployment, pool=network.pool, names=STAKES))
        )

    def of(self, kind: type[T]) -> list[T]:
        return [event for event in self.events if isinstance(event, kind)]


@dataclass
class Observation:
    """All that the findings judge."""

    chain: ChainFacts
    evaluations: list[Evaluation] = field(default_factory=list)
    nodes: list[NodeFacts] = field(default_factory=list)
    payments: list[Payment] = field(default_factory=list)
    roots_match: bool = False
    replays: list[AuditReplay] = field(default_factory=list)
    batches: list[TrainedBatch] = field(default_factory=list)
    files: list[TrainedFile] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)
    published: list[int] = field(default_factory=list)


def observe(network: Network) -> Observation:
    """Asks everyone. Takes about a minute, most of it in evaluations and replays."""
    contracts = network.contracts()
    seen = Observation(ChainFacts.read(network))
    seen.published = sorted(
        e.version for e in seen.chain.of(events.PolicyPublished) if e.pool == network.pool
    )
    seen.evaluations = _evaluations(network, contracts)
    with network.client() as client:
        seen.batches, seen.files = trained(network, client, seen.chain)
        seen.nodes = [
            node_facts(network, contracts, client, seen.chain, node.name)
            for node in network.plan.nodes
        ]
    seen.payments, seen.roots_match = _payments(network, seen.chain)
    seen.replays = _replays(network, seen)
    seen.arrivals = _arrivals(network, contracts)
    return seen


# -- learned --------------------------------------------------------------------------------------


def _evaluations(network: Network, contracts: Contracts) -> list[Evaluation]:
    """Evaluates the first and the last two policies that the walk fetched, once more."""
    folder = network.root / "evaluations"
    versions = sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())
    chosen = versions[:1] + [v for v in versions[-2:] if v != versions[0]]
    return [
        Evaluation(
            version,
            evaluate(network, folder / str(version)),
            HELDOUT,
            on_chain(network, contracts, folder / str(version)),
        )
        for version in chosen
    ]


def on_chain(network: Network, contracts: Contracts, folder: Path) -> bool:
    """Whether every byte of `folder` is the policy that the trainer signed and the chain holds."""
    domain = network.deployment().domain("pools")
    trust = Trust(network.accounts["trainer"].address, domain, network.pool)
    try:
        manifest = trust.check(read_signed(folder / MANIFEST_NAME))
        verify_folder(folder, manifest)
    except (UntrustedError, PrimeError):
        return False
    return contracts.pools.policy_digest(network.pool, manifest.version) == manifest.digest()


# -- fresh ----------------------------------------------------------------------------------------


def trained(
    network: Network, client: OrchestratorClient, chain: ChainFacts
) -> tuple[list[TrainedBatch], list[TrainedFile]]:
    metrics = (network.root / "trainer" / "metrics.jsonl").read_text().splitlines()
    manager, domain = network.accounts["manager"].address, network.deployment().domain("work")
    roots = _RootsOnChain(client, chain, network)
    batches, files = [], []
    for line in map(json.loads, metrics):
        step = int(line["step"])
        signed = client.get(f"/v1/batches/{step}/manifest", SignedBatch)
        manifest = signed.manifest
        by_manager = manifest.statement().recover(domain, signed.signature) == manager
        batches.append(
            TrainedBatch(step, str(line["batch"]), manifest.digest(), by_manager, manifest.rows)
        )
        files += [
            TrainedFile(
                step,
                file.sha256,
                tuple(file.groups),
                file.policy_version,
                roots.hold(file.submission_digest, file.sha256),
            )
            for file in manifest.files
        ]
    return batches, files


class _RootsOnChain:
    """Proves submissions to be leaves of roots that the chain holds, from the published lists."""

    def __init__(self, client: OrchestratorClient, chain: ChainFacts, network: Network) -> None:
        leaves = published_leaves(client, chain, network.deployment().domain("work"))
        self._known: dict[str, str] = {
            digest: leaf.submission.sha256 for digest, leaf in leaves.items()
        }

    def hold(self, submission: str, sha256: str) -> bool:
        return self._known.get(submission) == sha256


def published_leaves(
    client: OrchestratorClient, chain: ChainFacts, domain: Domain
) -> dict[Digest, SignedSubmission]:
    """Every submission under a root that the chain holds, by its digest."""
    known: dict[Digest, SignedSubmission] = {}
    for event in chain.of(events.RootPosted):
        if event.leaves_object == ZERO_DIGEST:
            continue  # a node posted its own leaf: there is no list
        raw = client.get_object(event.leaves_object)
        leaves = [
            SignedSubmission.model_validate_json(json.dumps(item))
            for item in encoding.parse_canonical_json(raw)
        ]
        digests = [leaf.submission.digest(domain) for leaf in leaves]
        if encoding.merkle_root(digests) != event.root or len(digests) != event.count:
            continue  # a list that is not the root's proves nothing
        known.update(zip(digests, leaves, strict=True))
    return known


# -- liars_slashed --------------------------------------------------------------------------------


def node_facts(
    network: Network,
    contracts: Contracts,
    client: OrchestratorClient,
    chain: ChainFacts,
    name: str,
) -> NodeFacts:
    """One node from outside; if it was slashed, a lease is asked for with its key."""
    address = network.accounts[name].address
    plan = next(node for node in network.plan.nodes if node.name == name)
    slashes = [e for e in chain.of(events.SlashExecuted) if e.node == address]
    joined = [e for e in chain.of(events.NodeJoined) if e.node == address]
    provider = joined[-1].provider if joined else address
    rejected = {e.leaf for e in chain.of(events.LeafRejected)}
    own_slashes = [e for e in chain.of(events.SlashProposed) if e.node == address]
    deposits = sum(e.amount for e in chain.of(events.Deposited) if e.provider == provider)
    return NodeFacts(
        name=name,
        address=address,
        liar=plan.liar is not None,
        slash_transactions=tuple(e.tx_hash for e in slashes),
        slashed=sum(e.amount for e in slashes),
        ejected_on_chain=any(e.node == address for e in chain.of(events.NodeEjected)),
        lease_refused=_lease_refused(network, name) if slashes else None,
        leases_after_slash=_leases_after(client, address, slashes[0].block_time) if slashes else 0,
        stake_deposited=deposits,
        stake_active=contracts.vault.active(provider),
        rejected_leaves=len(rejected & {e.leaf for e in own_slashes}),
        ends=plan.ends or "",
        units=_units(client, address),
    )


def _units(client: OrchestratorClient, node: Address) -> int:
    return client.get(f"/v1/nodes/{node}", NodeInfo).units


def _lease_refused(network: Network, name: str) -> bool:
    """Asks for a lease with the node's own key, as its agent would."""
    with OrchestratorClient(network.url, network.accounts[name].open(), "node") as client:
        version = client.pool().latest_version or 0
        try:
            answer = client.post("/v1/leases", LeaseRequest(policy_version=version), LeaseAnswer)
        except PolicyError:
            return True
        return answer.lease is None


def _leases_after(client: OrchestratorClient, node: Address, time: int) -> int:
    raw = client.send("GET", f"/v1/nodes/{node}/leases", signed=False)
    return sum(lease["created_at"] > time for lease in json.loads(raw))


# -- paid -----------------------------------------------------------------------------------------


def rebuilt(network: Network, chain: ChainFacts) -> tuple[dict[Address, int], bool]:
    """What `orchestrator rewards rebuild` gives each account in all (wei) by the newest root, and
    whether that is the root on chain. It rebuilds all earlier ones, too."""
    posted = [e for e in chain.of(events.RewardRootPosted) if e.pool == network.pool]
    if not posted:
        return {}, False
    newest = posted[-1]
    said = json.loads(
        network.supervisor.run(
            "rebuild",
            [
                *(str(BIN / "orchestrator"), "rewards", "rebuild", "--json"),
                *("--epoch", str(newest.epoch), "--pool", str(network.pool)),
                *("--orchestrator", network.url, "--rpc", network.anvil.url),
                *("--deployment", str(network.deployment_file)),
            ],
            codes=(0, 1),  # 1: the roots differ
        )
    )
    match = bool(said["match"]) and said["root"] == newest.root
    return {entry["node"]: int(entry["cumulative"]) for entry in said["entries"]}, match


def claimed(chain: ChainFacts) -> Counter[Address]:
    """What each account claimed on chain, in wei."""
    amounts: Counter[Address] = Counter()
    for claim in chain.of(events.Claimed):
        amounts[claim.node] += claim.amount
    return amounts


def _payments(network: Network, chain: ChainFacts) -> tuple[list[Payment], bool]:
    due, match = rebuilt(network, chain)
    got = claimed(chain)
    addresses = {node.name: network.accounts[node.name].address for node in network.plan.nodes}
    return [
        Payment(node.name, got[addresses[node.name]], due.get(addresses[node.name], 0), node.paid)
        for node in network.plan.nodes
    ], match


# -- replayed -------------------------------------------------------------------------------------


def _replays(network: Network, seen: Observation) -> list[AuditReplay]:
    """`prime-node audit replay` of every executed slash, and of one accepted file."""
    asked = [(event.tx_hash, "match") for event in seen.chain.of(events.SlashExecuted)]
    with network.client() as client:
        accepted = _one_accepted(client)
    if accepted is not None:
        asked.append((accepted, "accepted"))
    said = audit(network, [subject for subject, _ in asked]) if asked else []
    return [
        AuditReplay(subject, expected, said[i] if i < len(said) else "no answer")
        for i, (subject, expected) in enumerate(asked)
    ]


def audit(
    network: Network, subjects: Sequence[str], program: Path = BIN / "prime-node"
) -> list[str]:
    """What `audit replay` of `program` says of each subject."""
    said = network.supervisor.run(
        "audit",
        [
            *(str(program), "audit", "replay", *subjects, "--json"),
            *("--orchestrator", network.url, "--rpc", network.anvil.url),
            *("--deployment", str(network.deployment_file), "--pool", str(network.pool)),
            *("--data", str(network.root / "auditor")),
        ],
        codes=(0, 65, 69),  # mismatch, cannot tell
    )
    answers = [said] if len(subjects) == 1 else said.splitlines()
    return [str(json.loads(answer)["result"]) for answer in answers]


def _one_accepted(client: OrchestratorClient) -> Digest | None:
    """The submission of the newest sealed batch's first file."""
    for step in range(client.pool(refresh=True).latest_version or 0, -1, -1):
        try:
            signed = client.get(f"/v1/batches/{step}/manifest", SignedBatch)
        except NotFoundError:
            continue
        digest = signed.manifest.files[0].submission_digest
        info = client.get(f"/v1/submissions/{digest}", SubmissionInfo)
        if info.status == "accepted":
            return digest
    return None


# -- delivered ------------------------------------------------------------------------------------


def _arrivals(network: Network, contracts: Contracts) -> list[Arrival]:
    """From each honest node's own journal, held against the chain; folders that are still there
    are read again, every byte."""
    arrivals = []
    manifests = _Manifests(network, contracts)
    for node in network.plan.nodes:
        if not node.paid:
            continue
        data = network.root / "nodes" / node.name
        for line in (data / "policies.jsonl").read_text().splitlines():
            record = json.loads(line)
            version = int(record["version"])
            manifest = manifests.on_chain(version)
            folder = data / "policies" / str(version)
            whole = on_chain(network, contracts, folder) if folder.exists() else True
            arrivals.append(
                Arrival(
                    node.name,
                    version,
                    as_delta=record["route"] == "delta",
                    signed=manifest is not None and record["digest"] == manifest.digest(),
                    identical=whole
                    and manifest is not None
                    and record["result_digest"] == manifest.result_digest,
                )
            )
    return arrivals


class _Manifests:
    """Manifests as published, believed only if the trainer signed them and the chain names them."""

    def __init__(self, network: Network, contracts: Contracts) -> None:
        self._network = network
        self._contracts = contracts
        self._trust = Trust(
            network.accounts["trainer"].address,
            network.deployment().domain("pools"),
            network.pool,
        )
        self._known: dict[int, Manifest | None] = {}

    def on_chain(self, version: int) -> Manifest | None:
        """The manifest of a version, or None if the chain holds no such policy."""
        if version not in self._known:
            with self._network.client() as client:
                signed = client.get(f"/v1/policies/{version}", SignedManifest)
            manifest = self._trust.check(signed)
            held = self._contracts.pools.policy_digest(self._network.pool, version)
            self._known[version] = manifest if held == manifest.digest() else None
        return self._known[version]


def check(network: Network) -> tuple[list[Finding], Observation]:
    """Observes and judges; also writes `findings.json` next to the run."""
    seen = observe(network)
    judged = judge(network, seen)
    (network.root / "findings.json").write_text(as_json(judged))
    return judged, seen


def judge(network: Network, seen: Observation) -> list[Finding]:
    """The six, in the order of the README."""
    honest = [node.name for node in network.plan.nodes if node.paid]
    slashes = sum(len(node.slash_transactions) for node in seen.nodes)
    return [
        findings.learned(seen.evaluations, asked=not network.plan.fixed_steps),
        findings.liars_slashed(seen.nodes),
        findings.paid(seen.payments, seen.roots_match),
        findings.replayed(seen.replays, slashes),
        findings.fresh(seen.batches, seen.files, seen.published),
        findings.delivered(seen.arrivals, honest, seen.published),
    ]


def as_json(judged: list[Finding]) -> str:
    rows = [
        {"name": f.name, "ok": f.ok, "because": f.because, "details": dict(f.details)}
        for f in judged
    ]
    return json.dumps({"ok": all(f.ok for f in judged), "findings": rows}, indent=2, default=str)


def print_findings(judged: list[Finding], json_output: bool) -> None:
    """A table, or one JSON object."""
    if json_output:
        print(as_json(judged))
        return
    table = Table(title="Six findings, each derived from outside", show_lines=True)
    table.add_column("finding")
    table.add_column("holds")
    table.add_column("because", overflow="fold")
    for finding in judged:
        mark = "[green]yes[/]" if finding.ok else "[bold red]NO[/]"
        table.add_row(finding.name, mark, finding.because)
    Console().print(table)
