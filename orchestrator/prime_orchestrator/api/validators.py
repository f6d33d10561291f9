"""The API for validators: files to judge, storage for their objects, and opinions.

    claim      files are assigned to live validators in an order drawn from the manager's second
               secret; the answer lists the caller's files and the opinions it must submit now
    seal       the hash of an opinion; once every needed opinion is sealed, each is due
    opinion    checks signature, appointment, seal and form, then stores it; nothing else happens
    release    ends a claim without an opinion: abstained (for good), or later (an outage)

The manager's loop turns opinions into verdicts (judging.py). Validators do not choose files: they
cannot request a specific one, and after abstaining never get it again. They do not learn how many
others judge a file before their own opinion is sealed.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from prime_core import encoding
from prime_core.draws import DrawList, DrawReveal, file_secret, lot
from prime_core.errors import (
    ConflictError,
    FatalError,
    MalformedError,
    NotFoundError,
    PolicyError,
    PrimeError,
    UnavailableError,
    UntrustedError,
)
from prime_core.ids import ZERO_DIGEST, Address, Digest
from prime_core.logs import fields
from prime_core.messages import UploadAnswer
from prime_core.storage.base import digest_key, put_object
from prime_core.task import SignedLease
from prime_core.validator_messages import (
    MAX_JOBS,
    ClaimAnswer,
    ClaimRequest,
    CommitAnswer,
    CommitRequest,
    GivenOpinion,
    Job,
    KeepRequest,
    ObjectRequest,
    OpinionList,
    ReleaseRequest,
    RowsAnswer,
    RowsRequest,
    SealAnswer,
    SealRequest,
)
from prime_core.verdict import PROOF_PASS, Opinion, Outcome, Reason, SignedOpinion
from prime_orchestrator.api.backend import Backend
from prime_orchestrator.manager import draws, history, revisions, uploads
from prime_orchestrator.manager.judging import check_law, no_one_left
from prime_orchestrator.store import (
    Connection,
    archive,
    chain,
    exact_classes,
    jobs,
    leases,
    lock,
    meta,
    opinions,
    row_marks,
    submissions,
)
from prime_orchestrator.store.jobs import AssignmentRow, JobRow
from prime_orchestrator.store.opinions import OpinionRow
from prime_orchestrator.store.submissions import SubmissionRow

log = logging.getLogger(__name__)

CLAIM_SECONDS = 30.0
"""How long a claim remains valid without news from its validator."""
LIVE_SECONDS = 45.0
"""A validator counts as live, and is assigned files, if it asked for work within this time."""
SEEN_SECONDS = 5.0
"""How often polls of an idle validator are recorded."""
PATIENCE_SECONDS = 900.0
"""Time a live validator has to claim a file, to judge it, or to submit the opinion it sealed."""
RETRY_MS = 300
LOST_SECONDS = 60.0
"""How long a file that is missing from the object store is postponed."""
MAX_UNASSIGNED = 4096
"""Most files that are known to have no validator."""
ROOM = 8
"""Most files assigned to a validator at once."""
MAX_ATTEMPTS = 3
"""Claims on one file that may time out before its validator counts as having abstained."""
MAX_DELAYS = 20
"""Claims on one file that may be postponed before its validator counts as having abstained."""
AGAIN_ONE_IN = 16
"""One file in this many is judged by a second validator regardless of the first opinion."""
OUTSIDE_ONE_IN = 4
"""One file of an exact lease in this many goes to any validator, so that no node and no few
validators choose one another by announcing a class."""
SINGLE_SECONDS = 3600.0
"""After this long without another validator's opinion, one decides where two were needed."""
MAX_OBJECT_BYTES = 32 << 20
UPLOAD_SECONDS = 600
MAX_REVEALS = 64
MAX_CLOCK_SKEW = 300


def require_appointed(backend: Backend, connection: Connection, account: Address) -> None:
    """Raises PolicyError unless the account is a validator of the pool on chain, UnavailableError
    while the chain is not read far enough to know."""
    if account not in chain.appointed(connection, backend.context.pool):
        if meta.get(connection, meta.CHAIN_READ) is None:
            raise UnavailableError(
                f"the orchestrator has not read from the chain yet whether {account} is appointed "
                "as a validator"
            )
        raise _not_appointed(backend, account)


def _not_appointed(backend: Backend, account: Address) -> PolicyError:
    return PolicyError(
        f"{account} is not appointed as a validator; the manager types: orchestrator pool "
        f"set-validator {account} --pool {backend.context.pool}"
    )


# ── draws ────────────────────────────────────────────────────────────────────────────────────────


def commit(backend: Backend, account: Address, request: CommitRequest) -> CommitAnswer:
    """Stores commitments to draw secrets (draws.commit). The answer names the secrets that the
    caller owes."""
    now = backend.now()
    with backend.store.begin() as connection:
        require_appointed(backend, connection, account)
        draws.commit(connection, backend.context, account, request.commitments, now)
        missing = draws.missing(connection, backend.context, account, now)
    return CommitAnswer(missing=tuple(missing))


def reveal_draw(backend: Backend, account: Address, shown: DrawReveal) -> None:
    """Publishes an epoch's secret (draws.reveal). A dismissed validator may still do this."""
    with backend.store.begin() as connection:
        draws.reveal(connection, backend.objects, backend.context, account, shown, backend.now())


# ── assignment and claims ────────────────────────────────────────────────────────────────────────


@dataclass
class Unassigned:
    """Files for which no validator of `able` was found, with their jobs as they were then. `since`:
    when the first of them was looked at, in Unix seconds."""

    able: frozenset[Address] = frozenset()
    jobs: dict[Digest, JobRow] = field(default_factory=dict)
    since: float = 0.0

    def among(self, able: Collection[Address], now: float) -> Mapping[Digest, JobRow]:
        """Returns these jobs, or none if other validators are able now. Also none after
        SEEN_SECONDS, because time and new appointments may have changed what happens to them."""
        fresh = 0 <= now - self.since < SEEN_SECONDS
        return self.jobs if fresh and self.able == able else {}


def claim_all(
    backend: Backend,
    asked: Sequence[tuple[Address, ClaimRequest]],
    unassigned: Unassigned | None = None,
) -> list[ClaimAnswer | PrimeError]:
    """Returns each caller's next files and the opinions that it must submit now, all with the same
    few transactions. An entry is a PolicyError if its account is not appointed.

    `unassigned` is kept from call to call: a file in it whose job is still the same is looked at
    again after SEEN_SECONDS, so that other looks write nothing because of it.
    """
    unassigned = unassigned or Unassigned()
    now = backend.now()
    with backend.store.read() as connection:
        appointed = chain.appointed(connection, backend.context.pool)
        callers = {account for account, _ in asked} & appointed
        able = callers | (jobs.live(connection, now - LIVE_SECONDS) & appointed)
        seen = jobs.seen_since(connection, callers, now - SEEN_SECONDS) == callers
        passed = unassigned.among(able, now) if seen else {}
        but = backend.draws.without() | passed.keys()
        lacking = jobs.short(connection, _reach(callers), able, but)
        short = [
            job.submission_digest for job in lacking if passed.get(job.submission_digest) != job
        ]
        quiet = not short and seen and not jobs.waits_for(connection, callers, now)
        reveal = jobs.to_reveal(connection, callers, MAX_REVEALS)
        unread = _unread(connection, backend, short)
    wishes = [
        jobs.Wish(account, request.worker, request.most)
        for account, request in asked
        if account in callers
    ]
    found = iter(
        [[]] * len(wishes)
        if quiet
        else _claim(backend, wishes, short, unread, appointed, able, now, unassigned)
    )
    answers: list[ClaimAnswer | PrimeError] = []
    for account, _ in asked:
        if account not in callers:
            answers.append(_not_appointed(backend, account))
            continue
        given, due = tuple(next(found)), tuple(reveal.get(account, ()))
        wait = 0 if given or due else RETRY_MS
        answers.append(ClaimAnswer(jobs=given, reveal=due, retry_after_ms=wait, together=MAX_JOBS))
    return answers


def _reach(callers: Collection[Address]) -> int:
    """Returns how many open files to search for work for these callers (jobs.short)."""
    return ROOM * (3 + len(callers))


def _unread(
    connection: Connection, backend: Backend, digests: Sequence[Digest]
) -> dict[Digest, SignedLease]:
    """Returns the leases of the given files whose draw list this process has not read."""
    known = backend.draws.known(digests)
    new = [digest for digest in digests if digest not in known]
    if not new:
        return {}
    found = leases.of_files(connection, new)
    if lacking := sorted(set(new) - found.keys()):
        raise FatalError(f"the store lacks submission {lacking[0]} or its lease")
    return found


def _claim(
    backend: Backend,
    wishes: Sequence[jobs.Wish],
    short: Sequence[Digest],
    unread: Mapping[Digest, SignedLease],
    appointed: Collection[Address],
    able: Collection[Address],
    now: float,
    unassigned: Unassigned,
) -> list[list[Job]]:
    """Assigns the files `short` to those `able`, claims some for each wish and returns them. The
    object store is asked while nothing is locked; `unread`: leases whose draw lists `assign_files`
    needs. A list that cannot be read holds up only the files whose leases name it."""
    backend.draws.of_files(backend.objects, unread)
    callers = {wish.validator for wish in wishes}
    with backend.store.begin() as connection:
        lock(connection, "assignments")
        jobs.note_validators(connection, callers, now)
        ended = end_overdue(connection, now)
        names = list(dict.fromkeys([*short, *ended]))
        left = assign_files(connection, backend, now, names, appointed, able)
        taken = jobs.take(connection, wishes, now=now, until=now + CLAIM_SECONDS)
    known = unassigned.among(able, now) if len(unassigned.jobs) <= MAX_UNASSIGNED else {}
    others = {name: job for name, job in known.items() if name not in names}
    if not others:
        unassigned.since = now
    unassigned.able, unassigned.jobs = frozenset(able), others | left
    try:
        found = _jobs(backend, sorted({name for some in taken for name in some}), now)
    except UnavailableError:
        _postpone(backend, wishes, taken, now)
        raise
    lost = [[name for name in some if name not in found] for some in taken]
    _postpone(backend, wishes, lost, now)
    return [[found[name] for name in some if name in found] for some in taken]


def _postpone(
    backend: Backend, wishes: Sequence[jobs.Wish], lost: Sequence[Sequence[Digest]], now: float
) -> None:
    """Gives back what was claimed at `now` for each wish and cannot be judged yet."""
    if not any(lost):
        return
    with backend.store.begin() as connection:
        for wish, names in zip(wishes, lost, strict=True):
            jobs.postpone(
                connection, names, wish.validator, claimed_at=now, until=now + LOST_SECONDS
            )


def end_overdue(connection: Connection, now: float) -> list[Digest]:
    """Ends assignments whose validator is silent or has held them too long; returns their files."""
    ended = []
    overdue = jobs.overdue(connection, now)
    live = jobs.live(connection, now - LIVE_SECONDS) if overdue else set()
    for row in overdue:
        if row.status == "claimed" and row.attempts + 1 >= MAX_ATTEMPTS:
            log.error("%s fell silent %d times over %s", row.validator, MAX_ATTEMPTS,
                      row.submission_digest)  # fmt: skip
            _end(connection, row, "abstained", now)
            ended.append(row.submission_digest)
        elif row.status == "sealed" and not _is_due_since(connection, row, now - PATIENCE_SECONDS):
            continue
        elif row.validator not in live or now - row.at > PATIENCE_SECONDS:
            if row.status == "sealed":
                log.error("%s sealed an opinion on %s and did not hand it in", row.validator,
                          row.submission_digest)  # fmt: skip
            _end(connection, row, "missed", now)
            ended.append(row.submission_digest)
    return ended


def _is_due_since(connection: Connection, row: AssignmentRow, since: float) -> bool:
    """Whether a sealed opinion could have been submitted since `since`."""
    if not _all_sealed(connection, row.submission_digest):
        return False
    return all(part.at <= since for part in jobs.assignments(connection, row.submission_digest))


def _end(connection: Connection, row: AssignmentRow, status: str, now: float) -> None:
    jobs.end_assignment(connection, row.submission_digest, row.validator, status, now=now)


def assign_files(
    connection: Connection,
    backend: Backend,
    now: float,
    names: Sequence[Digest],
    appointed: Collection[Address],
    able: Collection[Address],
) -> dict[Digest, JobRow]:
    """Assigns the given files that lack a validator to those `able`, the live ones of the
    `appointed`, that their leases name, in the drawn order, as long as any of them has room. A file
    whose draw list this process has not read waits for the next claim.

    Returns the jobs of files for which none of `able` was found although each had room.
    """
    found_now = jobs.those(connection, names)
    short = [job for name in names if (job := found_now.get(name)) is not None and job.short]
    if not short:
        return {}
    lists = backend.draws.known([job.submission_digest for job in short])
    load = jobs.load_of(connection)
    known = jobs.assignments_among(connection, [job.submission_digest for job in short])
    named = {one.numeric for one in lists.values() if one.numeric is not None}
    asked = {*able, *(part.validator for parts in known.values() for part in parts)}
    provers = exact_classes.members(connection, named, asked) if named else {}
    first: list[JobRow] = []
    left: dict[Digest, JobRow] = {}
    given: list[tuple[Digest, Address]] = []
    for job in short:
        if all(load.get(one, 0) >= ROOM for one in able):
            break
        digest = job.submission_digest
        found = lists.get(digest)
        if found is None:
            continue
        listed = found.listed
        secret, needed = backend.draws.secret(connection, listed.second), job.needed
        if needed is None:
            needed = first_needed(listed, secret, digest)
            job = replace(job, needed=needed)
            first.append(job)
        parts = {one.validator: one for one in known.get(digest, ())}
        members = frozenset[Address]() if found.numeric is None else provers[found.numeric]
        accused = found.numeric is not None and _accused(connection, digest, parts)
        chosen = _chosen(digest, needed, listed, secret, parts, able, members, load, accused)
        no_new = all(one in parts for one in chosen)
        if no_new and _active(parts) < needed:
            if not chosen and accused and no_one_left(listed, parts.values(), appointed):
                jobs.change(connection, digest, status="full", needed=_active(parts))
                continue
            if _settle_short(connection, digest, listed, parts, now):
                continue
        if not chosen:
            left[digest] = job
        for validator in chosen:
            load[validator] = load.get(validator, 0) + 1
        given += [(digest, validator) for validator in chosen]
    jobs.set_needed(connection, first)
    jobs.assign(connection, given, now=now)
    return left if all(load.get(one, 0) < ROOM for one in able) else {}


def _accused(
    connection: Connection, digest: Digest, parts: Mapping[Address, AssignmentRow]
) -> bool:
    """Whether an opinion on a file states a mismatch of its proof passes."""
    if not any(part.status == "given" for part in parts.values()):
        return False
    return any(one.reason in PROOF_PASS for one in opinions.of(connection, digest))


def first_needed(listed: DrawList, second: Digest, submission: Digest) -> int:
    """Returns how many opinions a file needs at first: two for a share of files, drawn from the
    manager's second secret, if the lease names at least two validators; else one."""
    if len(listed.commitments) < 2:
        return 1
    return 2 if lot("again", second, submission) % AGAIN_ONE_IN == 0 else 1


def _chosen(
    digest: Digest,
    needed: int,
    listed: DrawList,
    secret: Digest,
    parts: Mapping[Address, AssignmentRow],
    able: Collection[Address],
    members: Collection[Address],
    load: Mapping[Address, int],
    accused: bool,
) -> list[Address]:
    """Returns the validators that fill the open places of one job; `parts` are its existing
    assignments. `members` are of the exact class of its lease (none: it names none); they are
    preferred

        by `accused` files     whose mismatch others cannot see
        by the first place     of all other files but a drawn share

    and others by further places, so that the members of a class are not one another's only check.
    Validators that are not preferred judge a file if no preferred one is live and has room, so that
    the file does not delay others.
    """
    left = [
        signed.validator
        for signed in listed.commitments
        if signed.validator in able and load.get(signed.validator, 0) < ROOM
        and (signed.validator not in parts or parts[signed.validator].status == "missed")
    ]  # fmt: skip
    inside = lot("outside", secret, digest) % OUTSIDE_ONE_IN != 0
    member_judges = any(
        one in members and part.status in jobs.ACTIVE for one, part in parts.items()
    )
    chosen: list[Address] = []
    for _ in range(min(len(left), needed - _active(parts))):
        wanted: Collection[Address] = members
        if not accused and (member_judges or any(one in members for one in chosen)):
            wanted = {one for one in left if one not in members}
        elif not accused and not inside:
            wanted = left
        best = min(
            (one for one in left if one not in chosen),
            key=lambda one: (
                one in parts,  # validators that missed it before come last
                one not in wanted,
                lot("assign", secret, digest, one.encode()),
            ),
        )
        chosen.append(best)
    return chosen


def _active(parts: Mapping[Address, AssignmentRow]) -> int:
    return sum(part.status in jobs.ACTIVE for part in parts.values())


def _settle_short(
    connection: Connection,
    digest: Digest,
    listed: DrawList,
    parts: Mapping[Address, AssignmentRow],
    now: float,
) -> bool:
    """Ends the wait of a file for which no validator is left. Returns whether it did.

    A file from which all validators abstained is set aside. After SINGLE_SECONDS, a single sealed
    opinion decides. So do opinions that all accept the file, even if they do not count together.
    """
    active = _active(parts)
    if active == 0 and all(
        one.validator in parts and parts[one.validator].status == "abstained"
        for one in listed.commitments
    ):
        log.error("every validator abstained from %s: it is set aside", digest)
        jobs.change(connection, digest, status="quarantined")
        return True
    sealed = [part.at for part in parts.values() if part.status == "sealed"]
    given = [part.at for part in parts.values() if part.status == "given"]
    if sealed and not given and len(sealed) == active and now - min(sealed) >= SINGLE_SECONDS:
        log.warning("no second validator took %s: one opinion decides", digest)
        jobs.change(connection, digest, needed=active)
        return True
    if (
        given
        and len(given) == active
        and now - max(given) >= SINGLE_SECONDS
        and all(one.outcome is Outcome.ACCEPTED for one in opinions.of(connection, digest))
    ):
        log.warning("no further validator took %s: one acceptance decides", digest)
        jobs.change(connection, digest, status="full", needed=1)
        return True
    return False


def _jobs(backend: Backend, digests: Sequence[Digest], now: float) -> dict[Digest, Job]:
    """Returns claimed files as validators get them, without those of which an object is missing or
    whose draw list cannot be read."""
    found: dict[Digest, Job] = {}
    if not digests:
        return found
    with backend.store.read() as connection:
        rows, known = submissions.those(connection, digests), jobs.those(connection, digests)
        promises = leases.those(connection, [row.lease_digest for row in rows.values()])
        runs = revisions.history(connection, backend.context)
        makers = {row.node for row in rows.values()}
        accepted = submissions.accepted_among(connection, makers)
        suspects = backend.drifting.among(connection, makers, now)
        suspects |= history.mismatching(connection, makers)
        signed = {digest: promises[rows[digest].lease_digest].signed() for digest in digests}
        drawn = backend.draws.of_files(backend.objects, signed)
        for digest in drawn:
            row, lease, listed = rows[digest], signed[digest], drawn[digest].listed
            try:
                deadline = lease.lease.deadline
                key = uploads.ask(deadline, row.sha256, lambda key: _present(backend, key))
            except NotFoundError as error:
                log.error("submission %s cannot be judged: %s", digest, error)
                continue
            secret = backend.draws.secret(connection, listed.second)
            second, run = file_secret(secret, digest), runs.of_lease(lease.lease)
            whole = known[digest].whole or row.node in suspects
            before = accepted.get(row.node, 0)
            found[digest] = Job(
                submission_digest=digest,
                submission=row.signed(),
                lease=lease,
                receipt=row.receipt_answer(),
                file=backend.objects.signed_get(key, int(now) + UPLOAD_SECONDS),
                second=second,
                rows=run.rows_per_lease if whole else history.draw_count(run, before, second),
                until=int(now + CLAIM_SECONDS),
            )
    return found


def _present(backend: Backend, key: str) -> str:
    backend.objects.size(key)  # raises NotFoundError
    return key


def keep(backend: Backend, account: Address, request: KeepRequest) -> None:
    """Extends claims that were made in the last PATIENCE_SECONDS, while their files are judged.
    Raises PolicyError if the account is not appointed: one that was dismissed holds no files."""
    now = backend.now()
    with backend.store.begin() as connection:
        require_appointed(backend, connection, account)
        jobs.note_validators(connection, [account], now)
        jobs.keep(
            connection,
            account,
            request.worker,
            request.submissions,
            claimed_since=now - PATIENCE_SECONDS,
            until=now + CLAIM_SECONDS,
        )


def release(backend: Backend, account: Address, request: ReleaseRequest) -> None:
    """Ends a claim without an opinion. Raises ConflictError if the caller has no claim,
    MalformedError if the reason is a judgement."""
    try:
        reason = Reason(request.reason)
    except ValueError as error:
        raise MalformedError("there is no such reason") from error
    if reason.outcome is not Outcome.ABSTAINED:
        raise MalformedError(f"{reason.name} is a judgement, not an abstention")
    now, digest = backend.now(), request.submission
    with backend.store.begin() as connection:
        row = _claimed(connection, digest, account, request.worker)
        log.warning(
            "%s: %s %s: %s: %s", account,
            "abstained from" if request.kind == "abstain" else "delays",
            digest, reason.name, request.detail,
        )  # fmt: skip
        if request.kind == "abstain" or row.delays + 1 >= MAX_DELAYS:
            jobs.end_assignment(connection, digest, account, "abstained", now=now)
        else:
            jobs.set_assignment(
                connection, digest, account, status="assigned", worker=None,
                not_before=now + request.seconds, until=now + request.seconds,
                delays=row.delays + 1, at=now,
            )  # fmt: skip


def rows_seen_all(
    backend: Backend, asked: Sequence[tuple[Address, RowsRequest]]
) -> list[RowsAnswer | PrimeError]:
    """Returns which rows of files that their callers judge also occur in other files, in one
    transaction. An entry is a ConflictError if its caller has no claim on the file."""
    found: list[RowsAnswer | PrimeError] = []
    files = {Digest(request.submission): request.marks for _, request in asked}
    with backend.store.read() as connection:
        work = jobs.assignments_among(connection, files)
        seen = row_marks.seen_by(connection, files)
        for account, request in asked:
            digest = Digest(request.submission)
            try:
                _check_claimed(_part(work, digest, account), digest, None)
                marks = seen[digest]
                if request.marks != files[digest]:  # another validator asks of the same file
                    marks = row_marks.seen(connection, request.marks, but=digest)
                found.append(RowsAnswer(marks=tuple(sorted(marks))))
            except PrimeError as error:
                found.append(error)
    return found


def _claimed(
    connection: Connection, digest: Digest, account: Address, worker: str | None
) -> AssignmentRow:
    return _check_claimed(jobs.assignment(connection, digest, account), digest, worker)


def _check_claimed(row: AssignmentRow | None, digest: Digest, worker: str | None) -> AssignmentRow:
    if row is None or row.status != "claimed" or worker not in (None, row.worker):
        raise ConflictError(f"the caller has no claim on {digest}")
    return row


def _part(
    work: Mapping[Digest, Sequence[AssignmentRow]], digest: Digest, account: Address
) -> AssignmentRow | None:
    return next((row for row in work.get(digest, ()) if row.validator == account), None)


# ── opinions ─────────────────────────────────────────────────────────────────────────────────────


def seal_all(
    backend: Backend, asked: Sequence[tuple[Address, SealRequest]]
) -> list[SealAnswer | PrimeError]:
    """Stores the hashes of opinions, in one transaction; an answer says whether the opinion is due.
    An entry is a ConflictError if its caller has no claim on the file or sealed another opinion."""
    now = backend.now()
    faults: list[PrimeError | None] = []
    changed: list[AssignmentRow] = []
    with backend.store.begin() as connection:
        appointed = chain.appointed(connection, backend.context.pool)
        known, work = _lock_jobs(connection, {request.submission for _, request in asked})
        for account, request in asked:
            digest = Digest(request.submission)
            row = _part(work, digest, account)
            try:
                if account not in appointed:
                    raise _not_appointed(backend, account)
                if row is None or row.status not in jobs.SEALED or row.seal != request.seal:
                    row = _check_claimed(row, digest, request.worker)
                    sealed = replace(
                        row, status="sealed", seal=request.seal, until=now + PATIENCE_SECONDS,
                        at=now,
                    )  # fmt: skip
                    work[digest][work[digest].index(row)] = sealed
                    changed.append(sealed)
                faults.append(None)
            except PrimeError as error:
                faults.append(error)
        jobs.set_assignments(connection, changed)
    return [
        fault or SealAnswer(reveal=_sealed(known.get(digest), work.get(digest, ())))
        for (_, request), fault in zip(asked, faults, strict=True)
        for digest in (Digest(request.submission),)
    ]


def _lock_jobs(
    connection: Connection, digests: Collection[Digest]
) -> tuple[dict[Digest, JobRow], dict[Digest, list[AssignmentRow]]]:
    """Locks jobs; returns them and their assignments."""
    if len(digests) > 1:
        lock(connection, "assignments")  # before rows of several jobs
    return jobs.lock_rows(connection, digests), jobs.assignments_among(connection, digests)


def _sealed(job: JobRow | None, parts: Sequence[AssignmentRow]) -> bool:
    """Whether every opinion that a file needs is sealed."""
    sealed = sum(part.status in jobs.SEALED for part in parts)
    return job is not None and job.needed is not None and sealed >= job.needed


def _all_sealed(connection: Connection, digest: Digest) -> bool:
    return _sealed(jobs.get(connection, digest), jobs.assignments(connection, digest))


def room_for(backend: Backend, account: Address, request: ObjectRequest) -> UploadAnswer:
    """Returns a signed URL for a table or evidence of a file on which the caller sealed an opinion.

    Raises PolicyError if it is too large, ConflictError if nothing is sealed.
    """
    if request.size > MAX_OBJECT_BYTES:
        raise PolicyError(f"an object has at most {MAX_OBJECT_BYTES} bytes")
    with backend.store.read() as connection:
        row = jobs.assignment(connection, request.submission, account)
    if row is None or row.status not in jobs.SEALED:
        raise ConflictError(f"the caller has sealed no opinion on {request.submission}")
    key, expiry = digest_key(request.sha256), int(backend.now()) + UPLOAD_SECONDS
    if backend.objects.exists(key):
        return UploadAnswer(url="", headers={}, expiry=expiry, exists=True)
    target = backend.objects.signed_put(key, request.size, request.sha256, expiry)
    return UploadAnswer(url=target.url, headers=target.headers, expiry=target.expires_at)


@dataclass(frozen=True)
class Given:
    """A sealed opinion that its author submits; `table`: the bytes of the table that it names, if
    they come with it."""

    account: Address
    signed: SignedOpinion
    table: bytes | None = None


def given(account: Address, entry: GivenOpinion) -> Given:
    """Returns an entry of a TogetherRequest as `give_all` takes it."""
    return Given(account, entry.signed, None if entry.table is None else entry.table.encode())


def give_all(backend: Backend, asked: Sequence[Given]) -> list[bool | PrimeError]:
    """Stores sealed opinions that are due, in one transaction. Repeating it is harmless. Tables are
    stored, and objects looked up, before anything is locked, and only of opinions that are due.

    An entry is True, or its error: UntrustedError or MalformedError if the signature or form is
    invalid, PolicyError if its author is not appointed, NotFoundError if there is no such
    submission or object, ConflictError if it was not sealed, is not due yet, or is for another
    file, pool or law.
    """
    now = backend.now()
    answers: list[bool | PrimeError | None] = [_forged(backend, one) for one in asked]
    digests = {Digest(one.signed.opinion.submission) for one in asked}
    with backend.store.read() as connection:
        appointed = chain.appointed(connection, backend.context.pool)
        rows = submissions.those(connection, digests)
        promises = leases.those(connection, [row.lease_digest for row in rows.values()])
        known = jobs.those(connection, digests)
        work = jobs.assignments_among(connection, digests)
    for at, one in enumerate(asked):
        if answers[at] is not None:
            continue
        try:
            if one.account not in appointed:
                raise _not_appointed(backend, one.account)
            row = rows.get(Digest(one.signed.opinion.submission))
            if row is None:
                raise NotFoundError("there is no submission of that digest")
            promise = promises.get(row.lease_digest)
            if promise is None:
                raise FatalError(f"a submission names lease {row.lease_digest}, which is not here")
            check_law(one.signed, row, promise.signed())
            if _due_part(one, known, work).status == "given":
                answers[at] = True
                continue
            said = one.signed.opinion
            if not row.received_at - MAX_CLOCK_SKEW <= said.judged_at <= now + MAX_CLOCK_SKEW:
                raise MalformedError("the opinion's time is wrong: check the machine's clock")
            _check_objects(backend, one)
        except PrimeError as error:
            answers[at] = error
    left = [at for at, answer in enumerate(answers) if answer is None]
    for at, fault in zip(left, _write(backend, [asked[at] for at in left], now), strict=True):
        answers[at] = fault or True
        if fault is None:
            _log_opinion(asked[at].signed, rows[Digest(asked[at].signed.opinion.submission)])
    return [True if answer is None else answer for answer in answers]


def _log_opinion(signed: SignedOpinion, row: SubmissionRow) -> None:
    about = fields(
        kind="opinion", status=signed.outcome.name.lower(), reason=signed.reason.name,
        validator=signed.validator, **row.about(),
    )  # fmt: skip
    log.info("%s on submission %s: %s", signed.validator, row.digest, signed.reason.name,
             extra=about)  # fmt: skip


def _forged(backend: Backend, one: Given) -> PrimeError | None:
    try:
        one.signed.check(backend.context.domain(Opinion))
    except PrimeError as error:
        return error
    if one.signed.validator != one.account:
        return UntrustedError("the opinion is another validator's")
    return None


def _due_part(
    one: Given,
    known: Mapping[Digest, JobRow],
    work: Mapping[Digest, Sequence[AssignmentRow]],
) -> AssignmentRow:
    """Returns the author's assignment. Raises ConflictError unless the opinion is sealed and due,
    or given."""
    digest = Digest(one.signed.opinion.submission)
    part = _part(work, digest, one.account)
    if part is None or part.status not in jobs.SEALED or part.seal != one.signed.seal():
        raise ConflictError("the opinion is not the one that the caller sealed for this file")
    if part.status != "given" and not _sealed(known.get(digest), work[digest]):
        raise ConflictError("other opinions on the file are not sealed yet")
    return part


def _check_objects(backend: Backend, one: Given) -> None:
    """Stores the table that came with an opinion. Raises MalformedError if it is not the one that
    the opinion names, NotFoundError if an object is missing."""
    said = one.signed.opinion
    names = {said.table, said.evidence} - {ZERO_DIGEST}
    if one.table is not None:
        if encoding.sha256(one.table) != said.table:
            raise MalformedError("the table that came with the opinion is not the one it names")
        put_object(backend.objects, one.table)
        names -= {said.table}
    for name in names:
        if not backend.objects.exists(digest_key(Digest(name))):
            raise NotFoundError(f"the opinion names object {name}, which was not uploaded")


def _write(backend: Backend, given: Sequence[Given], now: float) -> list[PrimeError | None]:
    """Writes opinions whose objects are stored. An entry is a ConflictError if the opinion is not
    due any more."""
    if not given:
        return []
    faults: list[PrimeError | None] = []
    added: list[OpinionRow] = []
    changed: list[AssignmentRow] = []
    with backend.store.begin() as connection:
        digests = {Digest(one.signed.opinion.submission) for one in given}
        known, work = _lock_jobs(connection, digests)
        for one in given:
            try:
                part = _due_part(one, known, work)
            except ConflictError as error:
                faults.append(error)
                continue
            faults.append(None)
            if part.status == "given":
                continue
            digest, signed = part.submission_digest, one.signed
            body = signed.model_dump_json()
            added.append(OpinionRow(digest, one.account, int(signed.reason), body, now))
            changed.append(replace(part, status="given", at=now))
            work[digest][work[digest].index(part)] = changed[-1]
        opinions.add_all(connection, added)
        jobs.set_assignments(connection, changed)
        said = opinions.numbers(connection, {row.submission_digest for row in added})
        jobs.set_full(
            connection,
            [digest for digest, number in said.items() if number >= (known[digest].needed or 1)],
        )
    return faults


def opinions_on(backend: Backend, digest: Digest) -> OpinionList:
    """Returns the opinions on a submission. The list is empty before its verdict, so that
    validators who are still judging do not see the others' opinions. Raises NotFoundError."""
    with backend.store.read() as connection:
        row = submissions.get(connection, digest)
        kept = archive.find(connection, backend.objects, digest) if row is None else None
        if row is not None:
            found = opinions.of(connection, digest) if row.verdict is not None else []
        elif kept is not None:
            row = kept.submission
            found = list(kept.opinions) if row.verdict is not None else []
        else:
            raise NotFoundError("there is no submission of that digest")
    return OpinionList(
        submission_digest=digest,
        status=row.status,
        opinions=tuple(opinion.signed() for opinion in found),
    )
