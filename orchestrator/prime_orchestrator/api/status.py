"""Public views of the orchestrator: status, nodes, a node's rewards, a submission."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from typing import Generic, Literal, TypeVar

from prime_chain.networks import NETWORKS
from prime_core.batch import BatchManifest
from prime_core.encoding import MerkleTree
from prime_core.errors import ConflictError, NotFoundError
from prime_core.ids import Address, Digest
from prime_core.messages import (
    MAX_EVALUATIONS,
    NODES_PAGE,
    SUBMISSIONS_PAGE,
    ChainEvent,
    ContractAddresses,
    LeaseInfo,
    NodeInfo,
    PoolInfo,
    RewardInfo,
    Status,
    SubmissionInfo,
    TransactionInfo,
    ValidatorInfo,
)
from prime_core.run import RunDefinition
from prime_core.settlement import parse_settlement
from prime_core.storage.base import ObjectStore, digest_key
from prime_core.task import LeaseOutcome
from prime_core.verdict import Reason
from prime_orchestrator.api import reach
from prime_orchestrator.api.backend import Backend
from prime_orchestrator.api.kept import KeptFor
from prime_orchestrator.context import read_object
from prime_orchestrator.manager import revisions, targets
from prime_orchestrator.manager.funding import funding
from prime_orchestrator.store import (
    Connection,
    archive,
    batches,
    chain,
    evaluations,
    intents,
    leases,
    measurements,
    meta,
    nodes,
    opinions,
    passports,
    policies,
    rewards,
    roots,
    slashes,
    submissions,
)
from prime_orchestrator.store.batches import BatchSummary
from prime_orchestrator.store.leases import LeaseRow
from prime_orchestrator.store.nodes import NodeRow
from prime_orchestrator.store.policies import PolicyRow
from prime_orchestrator.store.submissions import SubmissionRow, Wanted

T = TypeVar("T")
CHAIN_SILENT_SECONDS = 30
PAUSES_SEEN, STALLED_PAUSES = 10, 3
"""A pool is stalled after STALLED_PAUSES times the longest of the last PAUSES_SEEN pauses between
batches, and at the earliest after a lease's duration."""
_EXPLORERS = {network.chain_id: network.explorer for network in NETWORKS}
LEASES_SHOWN = 1000
MAX_BATCHES, MAX_TRANSACTIONS, MAX_SLASHES, MAX_VERSIONS, MAX_NODES = 200, 20, 50, 200, 500


@dataclass(frozen=True)
class Part(Generic[T]):
    """A part of a list; `following` is the query for the next one, "" at the end."""

    items: list[T]
    following: str


def pool_info(backend: Backend, host: str) -> PoolInfo:
    """Returns the pool's public facts, with the URL of ours that `host` (a Host header) asked
    for."""
    context = backend.context
    with backend.store.read() as connection:
        latest = policies.latest_version(connection)
    return PoolInfo(
        chain_id=context.deployment.chain_id,
        contracts=ContractAddresses.model_validate(context.deployment.contracts),
        pool=context.pool,
        manager=context.manager,
        trainer=backend.trainer,
        run_digest=context.run.digest(),
        name=context.run.name,
        orchestrator=backend.name_for(host) or backend.audience,
        latest_version=latest,
        stake_per_seat=str(context.run.stake_per_seat),
    )


def status(backend: Backend) -> Status:
    """Returns one consistent view of the pool."""
    context, now = backend.context, backend.now()
    with backend.store.browse() as connection:
        seen = meta.get(connection, meta.CHAIN_SEEN_AT)
        published = policies.newest(connection, 1)
        versions = sorted(policies.newest_versions(connection, MAX_VERSIONS))
        sealed = batches.latest(connection, MAX_BATCHES)
        trained_below = batches.trained_below(connection)
        run = revisions.current(connection, context)
        money = funding(connection)
        activity, since = _activity(
            chain.pool_ended(connection, context.pool), sealed, published, run, now
        )
        return Status(
            pool=context.pool,
            name=context.run.name,
            time=int(now),
            step=batches.next_step(connection),
            latest_version=versions[-1] if versions else None,
            published=tuple(versions),
            nodes=tuple(_infos(backend, connection, nodes.latest(connection, MAX_NODES))),
            files=submissions.counts(connection),
            expired_unjudged=submissions.expired_unjudged(connection),
            shadow_files=submissions.counts(connection, shadow=True),
            batches=tuple(_batch(row, trained_below) for row in sealed),
            transactions=tuple(_transactions(connection)),
            slashes=tuple(_slashes(connection)),
            reach=tuple(reach.picture(connection)),
            validators=tuple(
                ValidatorInfo(**vars(record)) for record in opinions.track_records(connection)
            ),
            compute_share=submissions.mean_compute_share(connection),
            targets=targets.shares_of(connection, run, now),
            evaluations=tuple(
                backend.evaluations.of(connection, row, now)
                for row in reversed(evaluations.newest(connection, MAX_EVALUATIONS))
            ),
            activity=activity,
            activity_since=since,
            owed=None if money is None else str(money.owed),
            money=None if money is None else str(money.money),
            explorer=_EXPLORERS.get(context.deployment.chain_id, ""),
            chain_reachable=seen is not None and now - float(seen) < CHAIN_SILENT_SECONDS,
        )


def _activity(
    ended_at: int | None,
    sealed: Sequence[BatchSummary],
    newest: Sequence[PolicyRow],
    run: RunDefinition,
    now: float,
) -> tuple[Literal["running", "stalled", "ended"], int | None]:
    """Returns what Status.activity and activity_since say. `sealed` are batches, oldest first,
    `newest` is the newest policy if there is one; times in Unix seconds."""
    if ended_at is not None:
        return "ended", ended_at
    if not newest:
        return "running", None
    times = [row.sealed_at for row in sealed[-PAUSES_SEEN - 1 :]]
    last = max([newest[0].published_at, *times[-1:]])
    longest = max((later - earlier for earlier, later in pairwise(times)), default=0.0)
    stalled = now - last > max(run.lease_seconds, STALLED_PAUSES * longest)
    return "stalled" if stalled else "running", int(last)


def transaction_info(backend: Backend, tx_hash: Digest, latest: Status) -> TransactionInfo:
    """Returns what is known of a transaction; `latest` lists those sent last. Raises NotFoundError
    if it is none of these and caused no event of the pool."""
    with backend.store.browse() as connection:
        found = chain.events_of(connection, tx_hash)
    sent: dict[str, str | int] = next(
        (one for one in latest.transactions if one["hash"] == tx_hash), {}
    )
    if not found and not sent:
        raise NotFoundError("the pool knows no transaction of that hash")
    return TransactionInfo(
        hash=tx_hash,
        kind=str(sent["kind"]) if sent else None,
        status=str(sent["status"]) if sent else None,
        events=tuple(
            ChainEvent(name=row.name, block=row.block, at=row.block_time, args=row.arguments())
            for row in found
        ),
    )


def validator_info(validator: Address, latest: Status) -> ValidatorInfo:
    """Returns a validator's record out of `latest`. Raises NotFoundError if it has none."""
    found = next((one for one in latest.validators if one.validator == validator), None)
    if found is None:
        raise NotFoundError(f"{validator} gave no opinion in this pool")
    return found


class NodeList:
    """Every node as it was when this was made, by address."""

    def __init__(self, backend: Backend) -> None:
        with backend.store.browse() as connection:
            found = _infos(backend, connection, nodes.by_address(connection), everyone=True)
        self._addresses = [one.node for one in found]
        self._providers = [one.provider for one in found]
        self._json = [one.model_dump_json() for one in found]

    def page(self, after: str, provider: Address | None) -> str:
        """Returns a page of the nodes (of one provider if given), starting after `after`: the JSON
        of a list of NodeInfo."""
        chosen: Iterable[int] = range(bisect_right(self._addresses, after), len(self._json))
        if provider is not None:
            chosen = (at for at in chosen if self._providers[at] == provider)
        return f"[{','.join(self._json[at] for at in islice(chosen, NODES_PAGE))}]"


def node_info(backend: Backend, node: Address) -> NodeInfo:
    """Returns one node. Raises NotFoundError if it was never admitted."""
    with backend.store.read() as connection:
        row = nodes.get(connection, node)
        if row is None:
            raise NotFoundError(f"no node {node} was admitted here")
        return _infos(backend, connection, [row])[0]


def lease_list(backend: Backend, node: Address, before: Digest | None) -> Part[LeaseInfo]:
    """Returns a part of the node's leases, newest last, those given before `before` if it is given,
    without archived ones, which follow the last part. They are public. Raises NotFoundError if
    `before` is not a lease of this node."""
    with backend.store.read() as connection:
        last = None if before is None else leases.get(connection, before)
        if before is not None and last is None:
            file = archive.of_lease(connection, backend.objects, before)
            last = None if file is None else file.lease
        if before is not None and (last is None or last.node != node):
            raise NotFoundError(f"node {node} has no lease {before}, or it is archived")
        rows = leases.newest_of(connection, node, LEASES_SHOWN, before=last)
        if len(rows) == LEASES_SHOWN:
            return Part(_lease_infos(rows), f"before={rows[0][0].digest}")
        return Part(_lease_infos(rows), _archived(archive.newest_page(connection, of_leases=True)))


def archived_leases(backend: Backend, node: Address, newest: int) -> Part[LeaseInfo]:
    """Like `archived_list`, for leases, newest last."""
    with backend.store.read() as connection:
        rows, page = archive.leases_of_node(connection, backend.objects, node, newest)
    return Part(_lease_infos(rows), _archived(page))


def _lease_infos(rows: Sequence[tuple[LeaseRow, LeaseOutcome]]) -> list[LeaseInfo]:
    return [
        LeaseInfo(
            digest=row.digest,
            step=row.step,
            index=row.lease_index,
            policy_version=row.policy_version,
            status=outcome,
            created_at=int(row.created_at),
            deadline=row.deadline,
            target=row.target,
        )
        for row, outcome in rows
    ]


def require_files(backend: Backend, manifest: BatchManifest) -> None:
    """Raises ConflictError if a file of the batch was removed from the archive."""
    files = {Digest(file.submission_digest): file for file in manifest.files}
    with backend.store.read() as connection:
        marked = archive.marked_among(connection, [*files])
    for name, days in marked.items():
        if not backend.objects.exists(digest_key(files[name].sha256)):
            raise ConflictError(
                f"a file of batch {manifest.step} is gone: {archive.why_gone(days)}; start the "
                "trainer from its checkpoint"
            )


def _infos(
    backend: Backend, connection: Connection, rows: Sequence[NodeRow], *, everyone: bool = False
) -> list[NodeInfo]:
    """Returns the public view of `rows`; `everyone` says that they are all nodes."""
    addresses = None if everyone else [row.address for row in rows]
    counts = submissions.counts_by_node(connection, addresses)
    unpaid = submissions.counts_by_node(connection, addresses, shadow=True)
    cards = passports.named(connection, addresses)
    troubles = measurements.troubles(connection, addresses)
    run = revisions.current(connection, backend.context)
    quota = backend.quota.of(connection, backend.objects, run, backend.now())
    found = []
    for node in rows:
        count = (unpaid if node.status == "shadow" else counts).get(node.address, {})
        proved = cards.get(node.address, passports.CardsRow())
        found.append(
            NodeInfo(
                node=node.address,
                provider=node.provider,
                status=node.status,
                speed_class=node.speed_class,
                last_heartbeat=int(node.last_heartbeat),
                policy_version=node.policy_version,
                accepted=count.get("accepted", 0),
                rejected=count.get("rejected", 0),
                void=count.get("void", 0),
                expired_unjudged=count.get("expired_unjudged", 0),
                units=0 if node.status == "shadow" else count.get("units", 0),
                cards=proved.cards,
                cards_measured_at=proved.measured_at,
                cards_trouble=troubles.get(node.address, ""),
                claimed_memory_mb=proved.claimed_memory_mb,
                proved_memory_mb=proved.proved_memory_mb,
                uncalibrated_card=quota.cards.get(node.address, ""),
                uncalibrated_trouble=quota.troubles.get(node.address, ""),
            )
        )
    return found


def _batch(row: BatchSummary, trained_below: int) -> dict[str, int | str]:
    return {
        "step": row.step,
        "rows": row.rows,
        "mean_reward_micro": row.mean_reward_micro,
        "staleness_max": row.staleness_max,
        "sealed_at": int(row.sealed_at),
        "state": "trained" if row.step < trained_below else "sealed",
    }


def _transactions(connection: Connection) -> list[dict[str, int | str]]:
    return [
        {
            "kind": row.kind,
            "hash": row.tx_hash or "",
            "status": row.status,
            "at": int(row.updated_at),
        }
        for row in intents.latest_sent(connection, MAX_TRANSACTIONS)
    ]


def _slashes(connection: Connection) -> list[dict[str, int | str]]:
    return [
        {
            "submission": row.submission_digest,
            "node": row.node,
            "reason": Reason(row.reason).name.lower(),
            "amount": row.amount,
            "status": row.status,
            "evidence": row.evidence,
            "transaction": row.execute_tx or row.propose_tx or "",
            "at": int(row.created_at),
        }
        for row in reversed(slashes.newest(connection, MAX_SLASHES))
    ]


def submission_info(backend: Backend, digest: Digest) -> SubmissionInfo:
    """Returns the state of a submission. Raises NotFoundError."""
    with backend.store.read() as connection:
        row = archive.submission(connection, backend.objects, digest)
        if row is None:
            raise NotFoundError("there is no submission of that digest")
        (info,) = _submission_infos(connection, [row])
    return info


def submission_list(backend: Backend, node: Address, before: Digest | None) -> Part[SubmissionInfo]:
    """Returns a part of the node's submissions, newest first, those older than `before` if it is
    given, without archived ones, which follow the last part. Raises NotFoundError if `before` is
    not a submission of this node."""
    with backend.store.browse() as connection:
        last = None
        if before is not None:
            last = archive.submission(connection, backend.objects, before)
        if before is not None and (last is None or last.node != node):
            raise NotFoundError(f"node {node} has no submission {before}")
        wanted = Wanted(node=node)
        rows = submissions.newest(connection, wanted, SUBMISSIONS_PAGE, before=last)
        if len(rows) == SUBMISSIONS_PAGE:
            following = f"before={rows[-1].digest}"
        else:
            following = _archived(archive.newest_page(connection))
        return Part(_submission_infos(connection, rows), following)


def archived_list(backend: Backend, node: Address, newest: int) -> Part[SubmissionInfo]:
    """Returns the node's submissions in one page of the archive, the newest with a number up to
    `newest`. Often there are none, although older pages have some."""
    with backend.store.browse() as connection:
        rows, page = archive.of_node(connection, backend.objects, node, newest)
        return Part(_submission_infos(connection, rows), _archived(page))


def _archived(page: int | None) -> str:
    return "" if page is None else f"archived={page}"


def _submission_infos(
    connection: Connection, rows: Sequence[SubmissionRow]
) -> list[SubmissionInfo]:
    """Returns the public state of `rows`, in their order."""
    named = {row.root_id for row in rows if row.root_id is not None}
    found = roots.confirmed_among(connection, named)
    return [_submission_info(row, found.get(row.root_id) if row.root_id else None) for row in rows]


def _submission_info(row: SubmissionRow, root: Digest | None) -> SubmissionInfo:
    return SubmissionInfo(
        submission_digest=row.digest,
        node=row.node,
        lease_digest=row.lease_digest,
        step=row.step,
        sha256=row.sha256,
        status=row.status,
        reason=row.reason,
        units=row.units,
        root=root,
        verdict=row.verdict,
        evidence=row.evidence,
        compute_share=row.compute_share,
        receipt=row.receipt_answer(),
        detail="" if row.status in ("open", "submitted") else Reason(row.reason).sentence,
    )


@dataclass(frozen=True)
class RewardProofs:
    """The entries of one settlement: node → (number, cumulative wei), and the tree over them."""

    epoch: int
    entries: dict[Address, tuple[int, int]]
    tree: MerkleTree

    @classmethod
    def read(cls, name: Digest, objects: ObjectStore) -> RewardProofs:
        """Reads the settlement `name`."""
        settlement = parse_settlement(read_object(objects, name))
        entries = {
            Address(one.node): (number, int(one.cumulative))
            for number, one in enumerate(settlement.entries)
        }
        return cls(settlement.epoch, entries, MerkleTree(settlement.leaves()))

    def proof(self, node: Address) -> tuple[int, list[Digest]]:
        """Returns a node's cumulative wei and its Merkle proof; (0, []) if it has no entry."""
        found = self.entries.get(node)
        if found is None:
            return 0, []
        number, cumulative = found
        return cumulative, self.tree.proof(number)


def reward_info(
    backend: Backend, proofs: KeptFor[Digest, RewardProofs], node: Address
) -> RewardInfo:
    """Returns the node's entry in the newest reward root on chain, with its proof, and pending
    credits. `proofs` keeps those of the newest root, since each node asks several times an epoch.
    Raises NotFoundError or UnavailableError if the root's object cannot be read."""
    with backend.store.read() as connection:
        root = rewards.newest_root(connection, confirmed=True)
    kept = None
    if root is not None:
        read = partial(RewardProofs.read, root.object, backend.objects)
        kept = proofs.get(root.object, read)
    with backend.store.read() as connection:
        pending = rewards.pending_units(connection, node, -1 if kept is None else kept.epoch)
        lost = rewards.credits_of(connection, node, ("forfeited",))
    cumulative, proof = (0, []) if kept is None else kept.proof(node)
    return RewardInfo(
        node=node,
        epoch=None if kept is None else kept.epoch,
        cumulative=str(cumulative),
        proof=tuple(proof),
        claimable_at=root.claimable_at if root is not None else None,
        pending_units=pending,
        forfeited=str(sum(int(credit.amount) for credit in lost)),
    )
