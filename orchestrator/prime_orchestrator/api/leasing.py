"""Issues leases: collects the scheduler's inputs, decides, signs, stores and answers.

A node holds one open lease at a time, and asking again returns the same one. An expired lease goes
on its node's record (manager/standing.py). Its groups are issued again, with fresh noise, to a node
of another provider, so dropping a lease does not change what is trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from sqlalchemy import Connection

from prime_broadcast.peers import place_of
from prime_core import seeds
from prime_core.draws import SaltOpening
from prime_core.errors import ConflictError, FatalError, NotFoundError, PolicyError
from prime_core.ids import Address, Digest
from prime_core.lifecycle import LeaseState, step_lease
from prime_core.messages import LeaseAnswer, LeaseRequest, UploadAnswer, UploadRequest
from prime_core.proof_form import PROOF_TOPK, PROOF_WINDOW, SKETCH_DIMENSIONS
from prime_core.rollout import MAX_FILE_BYTES, MAX_PROMPT_TOKENS
from prime_core.run import RunDefinition
from prime_core.task import SHADOW_POOLS, Lease, SignedLease, shadow_pool
from prime_orchestrator.api import scheduler, shadow
from prime_orchestrator.api.backend import Backend
from prime_orchestrator.api.connections import is_bounded
from prime_orchestrator.api.pauses import pause_of
from prime_orchestrator.api.scheduler import Asker, Grant, Rules, Supply, Wait
from prime_orchestrator.manager import members, revisions, speed, standing, targets, uploads
from prime_orchestrator.manager.funding import funding
from prime_orchestrator.store import (
    batches,
    groups,
    leases,
    lock,
    nodes,
    policies,
    shadows,
    submissions,
)
from prime_orchestrator.store.leases import LeaseRow
from prime_orchestrator.store.nodes import NodeRow

WAIT_MS = 500
"""How long a node waits before it asks again."""
NO_VALIDATOR = "no validator has committed to this epoch's draw: no validator could judge the file"
RECENT_GROUPS = 256
"""Number of latest groups from which the informative share is computed."""
TRIES = 4
"""Leases issued for the same groups before they are dropped."""
MAX_UPLOADS = 4
"""Distinct files that may be announced for one lease (a worker may crash and start over)."""


def rules_of(backend: Backend) -> Rules:
    """Returns the scheduler's part of the run definition."""
    run = backend.context.run
    return Rules(run.groups_per_batch, run.groups_per_lease, run.max_staleness, run.surplus_groups)


def supply_of(connection: Connection, backend: Backend) -> Supply:
    """Returns the pool as the scheduler sees it.

    Leases older than half their duration do not count as under way, so that another node can
    replace a straggler.
    """
    run, now = backend.context.run, backend.now()
    step = batches.next_step(connection)
    newcomers, established = leases.newcomers(connection, now, standing.PROVEN)
    return Supply(
        next_step=step,
        latest_version=policies.latest_version(connection),
        free=tuple(groups.free_counts(connection, oldest_version=step - run.max_staleness)),
        under_way=tuple(
            leases.under_way(connection, now=now, younger_than=now - run.lease_seconds / 2)
        ),
        informative=groups.informative_share(connection, RECENT_GROUPS),
        newcomers=newcomers,
        established=established,
    )


def lease(
    backend: Backend, account: Address, request: LeaseRequest, address: str = ""
) -> LeaseAnswer:
    """Returns the node's open lease, a new one, or how long to wait.

    `address` is the caller's network address; empty: not limited by address. Raises PolicyError if
    the account is not a member of the pool.
    """
    with backend.store.begin() as connection:
        lock(connection, "leases")
        now = backend.now()  # after the lock: the deadline must not outlive the draw's secret
        node = nodes.get(connection, account)
        if node is None or node.status in ("left", "ejected"):
            status = "not admitted" if node is None else node.status
            raise PolicyError(f"the node is {status} and gets no lease")
        if node.status == "shadow":
            return shadow_lease(connection, backend, node, request, address, now)
        if node.status != "active":
            return LeaseAnswer(
                lease=None, retry_after_ms=4 * WAIT_MS, reason=f"the node is {node.status}"
            )
        if held := _held(connection, account, now, shadow=False):
            return held
        own = nodes.of_owner(connection, node)
        if waiting := _rest(connection, node, own, now):
            return waiting
        if waiting := _uncovered(connection, backend, own, now):
            return waiting
        if (money := funding(connection)) and (why := money.objection()):
            return LeaseAnswer(lease=None, retry_after_ms=10 * WAIT_MS, reason=why)
        if pause := pause_of(connection, account, now, backend.context.run.lease_seconds):
            wait = int(1000 * pause.retry_after(now)) + 1
            return LeaseAnswer(lease=None, retry_after_ms=wait, reason=pause.sentence(now))
        if not backend.planted.may_lease(connection, account, now):
            return LeaseAnswer(lease=None, retry_after_ms=WAIT_MS, reason=scheduler.ENOUGH)
        asker = Asker(node.status, request.policy_version, standing.proven(own))
        choice = scheduler.decide(asker, supply_of(connection, backend), rules_of(backend))
        return _answer(connection, backend, node, choice, request, backend.context.pool, now)


def shadow_lease(
    connection: Connection,
    backend: Backend,
    node: NodeRow,
    request: LeaseRequest,
    address: str,
    now: float,
) -> LeaseAnswer:
    """Like `lease`, for a node without a seat: a lease of the shadow pool, within
    `shadow.decide` and the address's share."""
    if held := _held(connection, node.address, now, shadow=True):
        return held
    if waiting := _rest(connection, node, (), now):
        return waiting
    choice = shadow.decide(
        request.policy_version, shadow.load_of(connection, now), rules_of(backend)
    )
    place = place_of(address) if is_bounded(address) else ""
    if (
        isinstance(choice, Grant)
        and place
        and not shadows.take(connection, place, now, most=shadow.AN_HOUR_EACH, within=shadow.HOUR)
    ):
        choice = Wait(f"{shadow.AN_HOUR_EACH} shadow leases went to this address within the hour")
    pool = shadow_pool(backend.context.pool)
    return _answer(connection, backend, node, choice, request, pool, now)


def _held(
    connection: Connection, account: Address, now: float, *, shadow: bool
) -> LeaseAnswer | None:
    for row in leases.open_of(connection, account):
        if row.deadline < now:  # the next tick ends and records it
            return LeaseAnswer(
                lease=None, retry_after_ms=4 * WAIT_MS, reason="its last lease has just expired"
            )
        if row.shadow == shadow:
            return LeaseAnswer(lease=row.signed())
    return None


def _rest(
    connection: Connection, node: NodeRow, own: Sequence[NodeRow], now: float
) -> LeaseAnswer | None:
    """Returns the answer to a node that gets no lease because some expired; None if it may get one.
    `own`: the nodes of its provider."""
    if node.rests_until > now:
        left = node.rests_until - now
        return LeaseAnswer(
            lease=None,
            retry_after_ms=int(1000 * min(60.0, left)) + 1,
            reason=f"its last {node.misses} leases expired without a file: the next is given in "
            f"{left:.0f} s",
        )
    if own and leases.held_by(connection, [n.address for n in own], now) >= standing.slots(
        own, now
    ):
        return LeaseAnswer(
            lease=None,
            retry_after_ms=4 * WAIT_MS,
            reason="leases of this provider's nodes expired, so it holds fewer at once for a while",
        )
    return None


def _uncovered(
    connection: Connection, backend: Backend, own: Sequence[NodeRow], now: float
) -> LeaseAnswer | None:
    """The answer to a node whose provider's stake covers no further lease; None if it does."""
    run = revisions.current(connection, backend.context)
    slots = members.covered_slots(connection, run, own)
    if slots is None or leases.held_by(connection, [n.address for n in own], now) < slots:
        return None
    return LeaseAnswer(
        lease=None,
        retry_after_ms=4 * WAIT_MS,
        reason="the work of this provider's nodes that may still be rejected is all that its stake "
        "covers: wait for verdicts and the end of their validity, or add stake: prime-node stake "
        "add AMOUNT",
    )


def _answer(
    connection: Connection,
    backend: Backend,
    node: NodeRow,
    choice: Grant | Wait,
    request: LeaseRequest,
    pool: int,
    now: float,
) -> LeaseAnswer:
    if isinstance(choice, Wait):
        return LeaseAnswer(lease=None, retry_after_ms=WAIT_MS, reason=choice.reason)
    if reason := revisions.waits_for(connection, choice.step):
        return LeaseAnswer(lease=None, retry_after_ms=4 * WAIT_MS, reason=reason)
    run = revisions.history(connection, backend.context).at(choice.step)
    if request.runs and run.digest() not in request.runs:
        return LeaseAnswer(
            lease=None,
            retry_after_ms=4 * WAIT_MS,
            reason=f"leases are of run {run.digest()}, which the node has not taken on",
            run_digest=run.digest(),
        )
    draws = backend.draws.current(connection, backend.objects, backend.context, now)
    if draws is None:
        return LeaseAnswer(lease=None, retry_after_ms=4 * WAIT_MS, reason=NO_VALIDATOR)
    again = None if pool >= SHADOW_POOLS else _expired(connection, node, run, now)
    signed = _make(connection, backend, node, choice, run, pool, draws, again, now)
    tries = 0
    if again is not None:
        leases.mark_issued_again(connection, again.digest)
        tries = again.tries + 1
    leases.add(connection, backend.digest(signed.lease), signed, now=now, tries=tries)
    return LeaseAnswer(lease=signed)


def _expired(
    connection: Connection, node: NodeRow, run: RunDefinition, now: float
) -> LeaseRow | None:
    """Returns the oldest expired lease of another provider whose groups this node makes again. For
    one lease duration, targets that its class does not prefer are left to other nodes."""
    own = [one.address for one in nodes.of_owner(connection, node)]
    preferred = run.budgets.preferred(node.speed_class)
    since = now - TRIES * run.lease_seconds
    for row in leases.to_issue_again(connection, own, since=since, tries=TRIES):
        late = row.deadline + run.lease_seconds < now
        if row.signed().lease.run_digest == run.digest() and (late or row.target in preferred):
            return row
    return None


def _make(
    connection: Connection,
    backend: Backend,
    node: NodeRow,
    choice: Grant,
    run: RunDefinition,
    pool: int,
    draws: Digest,
    again: LeaseRow | None,
    now: float,
) -> SignedLease:
    policy = policies.get(connection, choice.policy_version)
    if policy is None:
        raise FatalError(f"policy {choice.policy_version} is missing from the store")
    speed_class = speed.refresh(connection, run, node)
    counts = targets.counts_of(connection, run, now=now, shadow=pool >= SHADOW_POOLS)
    problems = None
    if again is None:
        latest = reversed(leases.newest_of(connection, node.address, 2))
        failed = [row.target for row in takewhile(_came_to_nothing, latest)]
        target = scheduler.pick_target(speed_class, counts, run.budgets, failed)
    else:
        target = again.target
        opened = again.signed().opening
        problems = (opened and opened.problems) or seeds.lease_seed(again.digest)
    opening = SaltOpening(random=backend.salt(), draws=draws, problems=problems)
    statement = Lease(
        pool=pool,
        step=choice.step,
        node=node.address,
        index=leases.next_index(connection, choice.step),
        policy_digest=policy.digest,
        run_digest=run.digest(),
        target=target,
        salt=opening.salt(),
        deadline=int(now) + run.lease_seconds,
    )
    return SignedLease(
        lease=statement,
        signature=backend.sign(statement),
        policy_version=choice.policy_version,
        opening=opening,
    )


def _came_to_nothing(row: LeaseRow) -> bool:
    return row.status not in ("submitted", "accepted") and not row.excused


def handed_in(backend: Backend, digest: Digest) -> SignedLease:
    """Returns a lease for which a file was submitted. Raises NotFoundError for any other."""
    with backend.store.read() as connection:
        row = leases.get(connection, digest)
    if row is None or row.status in ("open", "expired"):
        raise NotFoundError("no file was handed in for a lease of that digest")
    return row.signed()


def abandon(backend: Backend, account: Address, digest: Digest) -> None:
    """Acknowledges that the node stopped working on a lease. It stays open and is returned to the
    same node.

    Raises NotFoundError, PolicyError (another node's), ConflictError (no longer open).
    """
    with backend.store.read() as connection:
        row = _own(leases.get(connection, digest), account)
    if row.status != "open":
        raise ConflictError(f"the lease is {row.status}")


def upload(
    backend: Backend, account: Address, digest: Digest, request: UploadRequest
) -> UploadAnswer:
    """Returns a signed URL for the file of a lease, valid until the lease's deadline.

    Raises NotFoundError, PolicyError (another node's, too large, too many files), ConflictError (no
    longer open).
    """
    most = largest_file(backend.context.run)
    if request.size > most:
        raise PolicyError(f"a rollout file of this run has at most {most} bytes")
    with backend.store.begin() as connection:
        row = _own(leases.lock_row(connection, digest), account)
        submitted = submissions.of_lease(connection, digest)
        if submitted is not None and submitted.sha256 == request.sha256:
            return UploadAnswer(url="", headers={}, expiry=row.deadline, exists=True)
        open_state = LeaseState(row.status, row.deadline)
        if step_lease(open_state, "submitted", backend.now())[0].status != "submitted":
            ended = "past its deadline" if row.status == "open" else row.status
            raise ConflictError(f"the lease is {ended} and takes no file")
        first = row.upload_sha256 != request.sha256
        if first:
            if row.uploads >= MAX_UPLOADS:
                raise PolicyError(f"{MAX_UPLOADS} files were announced for this lease already")
            leases.announce_upload(connection, digest, sha256=request.sha256, size=request.size)
    there = None if first else uploads.size_of(backend.objects, row.deadline, request.sha256)
    if there == request.size:
        return UploadAnswer(url="", headers={}, expiry=row.deadline, exists=True)
    key = uploads.staged_key(row.deadline, request.sha256)
    target = backend.objects.signed_put(key, request.size, request.sha256, row.deadline)
    return UploadAnswer(url=target.url, headers=target.headers, expiry=target.expires_at)


def largest_file(run: RunDefinition) -> int:
    """Returns an upper bound in bytes on the run's files, however well they compress; one lease may
    store no more. Includes two spare bytes per token and 4 KiB per row for levels and names."""
    windows = -(-run.max_output_tokens // PROOF_WINDOW)
    proofs = windows * (2 + 2 + 2 * PROOF_TOPK + 2 * SKETCH_DIMENSIONS)
    row = (4 + 2) * MAX_PROMPT_TOKENS + (4 + 4 + 2) * run.max_output_tokens + proofs + 4096
    return min(MAX_FILE_BYTES, run.rows_per_lease * row + (64 << 10))


def _own(row: LeaseRow | None, account: Address) -> LeaseRow:
    if row is None:
        raise NotFoundError("there is no such lease")
    if row.node != account:
        raise PolicyError("the lease is another node's")
    return row
