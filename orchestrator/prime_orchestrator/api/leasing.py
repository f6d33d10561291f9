"""Issues leases: collects the scheduler's inputs, decides, signs, stores and answers.

A node holds one open lease at a time, or several if it is fast enough (standing.Slots). Asking
again returns the oldest one that the node does not say it works on. An expired lease goes on its
node's record (manager/standing.py). Its groups are issued again, with fresh noise, to a node of
another provider, so dropping a lease does not change what is trained on.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from prime_broadcast.peers import site_of
from prime_core import seeds, tracing
from prime_core.draws import SaltOpening
from prime_core.errors import ConflictError, NotFoundError, PolicyError, PrimeError
from prime_core.ids import Address, Digest
from prime_core.lifecycle import LeaseState, step_lease
from prime_core.logs import fields
from prime_core.messages import LeaseAnswer, LeaseRequest, UploadAnswer, UploadRequest
from prime_core.proof_form import PROOF_TOPK, PROOF_WINDOW, SKETCH_DIMENSIONS
from prime_core.rollout import EXACT_BYTES, MAX_FILE_BYTES, MAX_PROMPT_TOKENS
from prime_core.run import RunDefinition
from prime_core.task import SHADOW_POOLS, Lease, LeaseOutcome, SignedLease, shadow_pool
from prime_orchestrator import scheduler
from prime_orchestrator.api import shadow
from prime_orchestrator.api.backend import Backend
from prime_orchestrator.api.connections import is_bounded
from prime_orchestrator.api.idle import WAIT_MS, wait_ms
from prime_orchestrator.api.pool_view import TRIES, PoolView
from prime_orchestrator.manager import remeasuring, speed, standing, uncalibrated, uploads
from prime_orchestrator.manager.standing import VOID_FILES, pause_of
from prime_orchestrator.scheduler import Asker, Grant, SchedulingRules, Wait
from prime_orchestrator.store import archive, leases, lock, on_commit, shadows, submissions
from prime_orchestrator.store.leases import LeaseRow
from prime_orchestrator.store.nodes import NodeRow
from prime_orchestrator.store.submissions import SubmissionRow

log = logging.getLogger(__name__)

NO_VALIDATOR = (
    "no validator could judge the file: none has committed to this epoch's draw, or none of those "
    "that have has published its older secrets"
)
MAX_UPLOADS = 4
"""Distinct files that may be announced for one lease (a worker may crash and start over)."""


@dataclass(frozen=True)
class Ask:
    """A node's request for a lease. `address` is the caller's network address; empty: not limited
    by address. `evaluates`: it may be an evaluation lease."""

    account: Address
    request: LeaseRequest
    address: str = ""
    evaluates: bool = False


def rules_of(backend: Backend) -> SchedulingRules:
    """Returns the scheduler's part of the run definition."""
    run = backend.context.run
    return SchedulingRules(
        run.groups_per_batch, run.groups_per_lease, run.max_staleness, run.surplus_groups
    )


def lease(
    backend: Backend, account: Address, request: LeaseRequest, address: str = ""
) -> LeaseAnswer:
    """Returns the node's open lease, a new one, or how long to wait.

    Raises PolicyError if the account is not a member of the pool.
    """
    (found,) = lease_all(backend, [Ask(account, request, address)])
    if isinstance(found, PolicyError):
        raise found
    return found


def lease_all(backend: Backend, asked: Sequence[Ask]) -> list[LeaseAnswer | PolicyError]:
    """Answers requests in order, like `lease`, in one transaction that reads the pool once. An
    entry is a PolicyError if its account is not a member of the pool.

    Reading the quota of cards without limits takes long in a large pool. Where it is due, the
    transaction ends, the quota is read without a lock, and the requests are answered again.
    """
    try:
        return _lease_all(backend, asked, reads_quota=False)
    except uncalibrated.QuotaDueError as due:
        with backend.store.read() as connection:
            backend.quota.of(connection, backend.objects, due.run, backend.now(), due.asks)
    return _lease_all(backend, asked, reads_quota=True)


def _lease_all(
    backend: Backend, asked: Sequence[Ask], *, reads_quota: bool
) -> list[LeaseAnswer | PolicyError]:
    with backend.store.begin() as connection:
        lock(connection, "leases")
        now = backend.now()  # after the lock: the deadline must not outlive the draw's secret
        accounts = {ask.account for ask in asked}
        view = PoolView(connection, backend, now, accounts, reads_quota=reads_quota)
        answers = [_lease(view, ask) for ask in asked]
        view.write()
    return answers


def _lease(view: PoolView, ask: Ask) -> LeaseAnswer | PolicyError:
    node = view.nodes.get(ask.account)
    if node is None or node.status in ("left", "ejected"):
        status = "not admitted" if node is None else node.status
        return PolicyError(f"the node is {status} and gets no lease")
    if node.status == "shadow":
        return _shadow_lease(view, node, ask)
    if node.status != "active":
        return LeaseAnswer(
            lease=None, retry_after_ms=4 * WAIT_MS, reason=f"the node is {node.status}"
        )
    if held := _held(view, node, ask, most=view.slots.of(node)):
        return held
    if waiting := _unproven(view, node) or _rest(view, node) or _over_quota(view, node):
        return waiting
    backend, now = view.backend, view.now
    if (money := view.money) and (why := money.objection()):
        return LeaseAnswer(lease=None, retry_after_ms=10 * WAIT_MS, reason=why)
    if view.ended(node, "void") >= VOID_FILES and (
        pause := pause_of(view.connection, node.address, now, backend.context.run.lease_seconds)
    ):
        wait = int(1000 * pause.retry_after(now)) + 1
        return LeaseAnswer(lease=None, retry_after_ms=wait, reason=pause.sentence(now))
    if node.address in backend.planted.accounts:
        view.write()  # it counts the leases of the last hour
        if not backend.planted.may_lease(view.connection, node.address, now):
            return _refused(view, scheduler.ENOUGH)
    asker = Asker(node.status, ask.request.policy_version, standing.proven(view.own(node)))
    choice = _choice(view, node, asker)
    choice = _evaluation(view, asker, ask, choice) or choice
    if isinstance(choice, Grant) and (waiting := _uncovered(view, node)):
        return waiting
    return _answer(view, node, choice, ask.request, backend.context.pool)


def _choice(view: PoolView, node: NodeRow, asker: Asker) -> Grant | Wait:
    """Returns what the node gets, if its provider's stake covers it. What takes time with many
    nodes or files is read last, so that refusals stay cheap in a pool of any size."""
    rules, supply = rules_of(view.backend), view.supply
    choice = scheduler.decide(asker, supply, rules)
    if choice == Wait(scheduler.NEWCOMERS) and not view.any_proven:
        asker = replace(asker, proven=True)
        choice = scheduler.decide(asker, supply, rules)
    if view.open.get(node.address) and isinstance(choice, Grant):
        choice = scheduler.decide(asker, supply.reserved(view.idle_lately), rules)
        if isinstance(choice, Grant):
            choice = scheduler.decide(asker, supply.reserved(view.idle), rules)
    return choice


def _evaluation(view: PoolView, asker: Asker, ask: Ask, choice: Grant | Wait) -> Grant | None:
    """Returns an evaluation lease for the node instead of `choice`; None if it gets none."""
    if (
        not (ask.evaluates and asker.proven)
        or ask.account in view.backend.planted.accounts
        or view.blocks is None
    ):
        return None
    idle = isinstance(choice, Wait) and choice.reason == scheduler.ENOUGH
    if isinstance(choice, Wait) and not idle:
        return None
    return view.blocks.next(ask.request.policy_version, idle=idle)


def _shadow_lease(view: PoolView, node: NodeRow, ask: Ask) -> LeaseAnswer:
    """Like `lease`, for a node without a seat: a lease of the shadow pool, within
    `shadow.decide` and the address's share."""
    view.write()  # the shares count the leases of the last hour
    connection, backend, now = view.connection, view.backend, view.now
    if held := _held(view, node, ask, most=1):
        return held
    if waiting := _resting(node, now):
        return waiting
    choice = shadow.decide(
        ask.request.policy_version, shadow.load_of(connection, now), rules_of(backend)
    )
    site = site_of(ask.address) if is_bounded(ask.address) else ""
    if (
        isinstance(choice, Grant)
        and site
        and not shadows.take(connection, site, now, most=shadow.AN_HOUR_EACH, within=shadow.HOUR)
    ):
        choice = Wait(f"{shadow.AN_HOUR_EACH} shadow leases went to this network within the hour")
    return _answer(view, node, choice, ask.request, shadow_pool(backend.context.pool))


def _held(view: PoolView, node: NodeRow, ask: Ask, *, most: int) -> LeaseAnswer | None:
    """Returns the answer to a node that has an open lease which it does not work on, or `most` open
    leases; None if it may get one."""
    opened = view.open.get(node.address, [])
    mine = [row for row in opened if row.shadow == (node.status == "shadow")]
    for row in mine:
        if row.digest not in ask.request.holds and row.deadline >= view.now:
            return LeaseAnswer(lease=row.signed())
    if any(row.deadline < view.now for row in opened):  # the next tick ends and records it
        reason = "its last lease has just expired"
    elif len(mine) >= most:
        reason = f"it works on {len(mine)} open leases, and may hold {most} at once"
    else:
        return None
    return LeaseAnswer(lease=None, retry_after_ms=4 * WAIT_MS, reason=reason)


def _resting(node: NodeRow, now: float) -> LeaseAnswer | None:
    """Returns the answer to a node whose own last leases expired; None if it may get one."""
    if node.rests_until <= now:
        return None
    left = node.rests_until - now
    return LeaseAnswer(
        lease=None,
        retry_after_ms=int(1000 * min(60.0, left)) + 1,
        reason=f"leases of this node expired without a file: the next is given in {left:.0f} s",
    )


def _rest(view: PoolView, node: NodeRow) -> LeaseAnswer | None:
    """Returns the answer to a node that gets no lease because its own expired, or others of its
    provider; None if it may get one."""
    if waiting := _resting(node, view.now):
        return waiting
    if view.held(node) >= view.slots.of_provider(view.own(node), view.now):
        return LeaseAnswer(
            lease=None,
            retry_after_ms=4 * WAIT_MS,
            reason="leases of this provider's nodes expired, so it holds fewer at once for a while",
        )
    return None


def _unproven(view: PoolView, node: NodeRow) -> LeaseAnswer | None:
    """Returns the answer to a node whose cards are measured again, or did not pass; None if it may
    get a lease."""
    why = remeasuring.why_no_lease(view.proofs.get(node.address))
    return LeaseAnswer(lease=None, retry_after_ms=4 * WAIT_MS, reason=why) if why else None


def _over_quota(view: PoolView, node: NodeRow) -> LeaseAnswer | None:
    """The answer to a node whose card has no limits and which has no place in the quota of such
    nodes; None if it may get a lease."""
    quota = view.quota(node)
    if node.address not in quota.cards:
        return None
    why = quota.troubles.get(node.address)
    if why is None:
        own = [one.address for one in view.own(node)]
        bad = uncalibrated.failing(view.connection, own)  # its newest files count at once
        why = None if bad is None else uncalibrated.why_failing(bad)
    return LeaseAnswer(lease=None, retry_after_ms=10 * WAIT_MS, reason=why) if why else None


def _uncovered(view: PoolView, node: NodeRow) -> LeaseAnswer | None:
    """The answer to a node whose provider's stake covers no further lease; None if it does."""
    if view.coverage is None or view.held(node) < view.coverage.slots(view.run, view.own(node)):
        return None
    return LeaseAnswer(
        lease=None,
        retry_after_ms=4 * WAIT_MS,
        reason="the work of this provider's nodes that may still be rejected is all that its stake "
        "covers: wait for verdicts and the end of their validity, or add stake: prime-node stake "
        "add AMOUNT",
    )


def _refused(view: PoolView, reason: str) -> LeaseAnswer:
    """The answer where no node like this one gets a lease."""
    wait = wait_ms(view.idle_lately)
    return LeaseAnswer(lease=None, retry_after_ms=wait, reason=reason)


def _answer(
    view: PoolView, node: NodeRow, choice: Grant | Wait, request: LeaseRequest, pool: int
) -> LeaseAnswer:
    if isinstance(choice, Wait):
        if choice.reason in (scheduler.ENOUGH, scheduler.NEWCOMERS):
            return _refused(view, choice.reason)
        return LeaseAnswer(lease=None, retry_after_ms=WAIT_MS, reason=choice.reason)
    if reason := view.waits_for(choice.step):
        return LeaseAnswer(lease=None, retry_after_ms=4 * WAIT_MS, reason=reason)
    run = view.history.at(choice.step)
    if request.runs and run.digest() not in request.runs:
        return LeaseAnswer(
            lease=None,
            retry_after_ms=4 * WAIT_MS,
            reason=f"leases are of run {run.digest()}, which the node has not taken on",
            run_digest=run.digest(),
        )
    if view.draws is None:
        return LeaseAnswer(lease=None, retry_after_ms=4 * WAIT_MS, reason=NO_VALIDATOR)
    evaluates = choice.heldout is not None
    again = None if evaluates or pool >= SHADOW_POOLS else _expired(view, node, run)
    signed = _make(view, node, choice, run, pool, view.draws, again)
    if again is not None:
        leases.mark_issued_again(view.connection, again.digest)
    digest = view.backend.digest(signed.lease)
    tries = 0 if again is None else again.tries + 1
    evaluation = view.blocks.evaluation.id if evaluates and view.blocks else None
    row = leases.new_row(digest, signed, now=view.now, tries=tries, evaluation=evaluation)
    view.grant(row, node)
    on_commit(
        view.connection, tracing.record_lease, digest, view.now,
        node=node.address, step=signed.lease.step,
    )  # fmt: skip
    about = fields(
        kind="lease", status="given", lease=digest, node=node.address, step=row.step,
        policy=row.policy_version,
    )  # fmt: skip
    on_commit(
        view.connection, log.info, "lease %s of step %d is given to %s",
        digest, row.step, node.address, extra=about,
    )  # fmt: skip
    return LeaseAnswer(lease=signed)


def _expired(view: PoolView, node: NodeRow, run: RunDefinition) -> LeaseRow | None:
    """Returns the oldest expired lease of another provider whose groups this node makes again. For
    one lease duration, targets that its class does not prefer are left to other nodes."""
    if not view.any_expired:
        return None
    own = [one.address for one in view.own(node)]
    preferred = run.budgets.preferred(node.speed_class)
    since = view.now - TRIES * run.lease_seconds
    for row in leases.to_issue_again(view.connection, own, since=since, tries=TRIES):
        late = row.deadline + run.lease_seconds < view.now
        if row.signed().lease.run_digest == run.digest() and (late or row.target in preferred):
            return row
    return None


def _make(
    view: PoolView,
    node: NodeRow,
    choice: Grant,
    run: RunDefinition,
    pool: int,
    draws: Digest,
    again: LeaseRow | None,
) -> SignedLease:
    policy = view.policy(choice.policy_version)
    speed_class = speed.refresh(
        view.connection,
        run,
        node,
        view.backend.medians,
        solved=view.solved.get(node.address, ()),
        now=view.now,
        accepted=view.ended(node, "accepted"),
    )
    problems = None
    if choice.heldout is not None and view.blocks is not None:
        target = view.blocks.target(choice.heldout)
    elif again is None:
        failed: list[int] = []
        if node.address in view.with_failures:
            latest = reversed(leases.newest_of(view.connection, node.address, 2, ended=True))
            failed = [row.target for row, _ in takewhile(_came_to_nothing, latest)]
        counts = view.counts(run, shadow=pool >= SHADOW_POOLS)
        target = scheduler.pick_target(speed_class, counts, run.budgets, failed)
    else:
        target = again.target
        opened = again.signed().opening
        problems = (opened and opened.problems) or seeds.lease_seed(again.digest)
    opening = SaltOpening(
        random=view.backend.salt(),
        draws=draws,
        problems=problems,
        heldout=choice.heldout,
        numeric_class=None
        if pool >= SHADOW_POOLS
        else view.exact_class(node, choice.policy_version),
    )
    statement = Lease(
        pool=pool,
        step=choice.step,
        node=node.address,
        index=view.next_index(choice.step),
        policy_digest=policy.digest,
        run_digest=run.digest(),
        target=target,
        salt=opening.salt(),
        deadline=int(view.now) + run.lease_seconds,
    )
    return SignedLease(
        lease=statement,
        signature=view.backend.sign(statement),
        policy_version=choice.policy_version,
        opening=opening,
    )


def _came_to_nothing(given: tuple[LeaseRow, LeaseOutcome]) -> bool:
    row, outcome = given
    return outcome not in ("submitted", "accepted") and not row.excused


def handed_in(backend: Backend, digest: Digest) -> SignedLease:
    """Returns a lease for which a file was submitted. Raises NotFoundError for any other."""
    with backend.store.read() as connection:
        row = leases.get(connection, digest)
        if row is None and (kept := archive.of_lease(connection, backend.objects, digest)):
            row = kept.lease
    if row is None or row.status != "submitted":
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


@dataclass(frozen=True)
class UploadAsk:
    """A node's request for a place to upload the file of a lease."""

    account: Address
    digest: Digest
    request: UploadRequest


@dataclass(frozen=True)
class Announced:
    """A lease whose file is announced; `first`: it was not before."""

    row: LeaseRow
    first: bool


def upload_all(
    backend: Backend, asked: Sequence[UploadAsk]
) -> list[Announced | UploadAnswer | PrimeError]:
    """Announces the files of requests in order, in one transaction that asks nothing of the object
    store; `place` makes the answers to those that were announced before. An entry is NotFoundError,
    PolicyError (another node's lease, too large, too many files) or ConflictError (no longer
    open)."""
    digests = {ask.digest for ask in asked}
    announced: dict[Digest, LeaseRow] = {}
    found: list[Announced | UploadAnswer | PrimeError] = []
    with backend.store.begin() as connection:
        rows = leases.lock_rows(connection, digests)
        submitted = submissions.of_leases(connection, digests)
        for ask in asked:
            try:
                row = _own(rows.get(ask.digest), ask.account)
                one = _announced(backend, row, submitted.get(ask.digest), ask.request)
            except PrimeError as error:
                found.append(error)
                continue
            found.append(one)
            if isinstance(one, Announced) and one.first:
                rows[ask.digest] = announced[ask.digest] = one.row
        leases.announce_uploads(connection, list(announced.values()))
    for at, (ask, new) in enumerate(zip(asked, found, strict=True)):
        if isinstance(new, Announced) and new.first:
            try:
                found[at] = place(backend, ask.request, new)
            except PrimeError as error:
                found[at] = error
    return found


def _announced(
    backend: Backend, row: LeaseRow, submitted: SubmissionRow | None, request: UploadRequest
) -> Announced | UploadAnswer:
    """Returns the lease's row with the file announced, or the answer if the file was submitted."""
    most = largest_file(backend.context.run)
    if request.size > most:
        raise PolicyError(f"a rollout file of this run has at most {most} bytes")
    if submitted is not None and submitted.sha256 == request.sha256:
        return UploadAnswer(url="", headers={}, expiry=row.deadline, exists=True)
    open_state = LeaseState(row.status, row.deadline)
    if step_lease(open_state, "submitted", backend.now()).status != "submitted":
        ended = "past its deadline" if row.status == "open" else row.status
        raise ConflictError(f"the lease is {ended} and takes no file")
    if row.upload_sha256 == request.sha256:
        return Announced(row, first=False)
    if row.uploads >= MAX_UPLOADS:
        raise PolicyError(f"{MAX_UPLOADS} files were announced for this lease already")
    announced = replace(
        row, upload_sha256=request.sha256, upload_size=request.size, uploads=row.uploads + 1
    )
    return Announced(announced, first=True)


def place(
    backend: Backend, request: UploadRequest, found: Announced | UploadAnswer
) -> UploadAnswer:
    """Returns the answer to a request whose file `upload_all` announced. For a file announced
    before, it asks the object store whether it is there."""
    if isinstance(found, UploadAnswer):
        return found
    row = found.row
    there = None if found.first else uploads.size_of(backend.objects, row.deadline, request.sha256)
    if there == request.size:
        return UploadAnswer(url="", headers={}, expiry=row.deadline, exists=True)
    key = uploads.staged_key(row.deadline, request.sha256)
    target = backend.objects.signed_put(key, request.size, request.sha256, row.deadline)
    return UploadAnswer(url=target.url, headers=target.headers, expiry=target.expires_at)


def largest_file(run: RunDefinition) -> int:
    """Returns an upper bound in bytes on the run's files, however well they compress; one lease may
    store no more. Includes two spare bytes per token and 4 KiB per row for levels and names."""
    windows = -(-run.max_output_tokens // PROOF_WINDOW)
    proofs = windows * (2 + 2 + 2 * PROOF_TOPK + 2 * SKETCH_DIMENSIONS + EXACT_BYTES)
    row = (4 + 2) * MAX_PROMPT_TOKENS + (4 + 4 + 2) * run.max_output_tokens + proofs + 4096
    return min(MAX_FILE_BYTES, run.rows_per_lease * row + (64 << 10))


def _own(row: LeaseRow | None, account: Address) -> LeaseRow:
    if row is None:
        raise NotFoundError("there is no such lease")
    if row.node != account:
        raise PolicyError("the lease is another node's")
    return row
