"""Combines the opinions on a file into the manager's verdict, and applies its consequences.

    accepted  submission, credit, groups for batches, marks of its rows, job done
    rejected  submission, node quarantined, slash, job done
              (void if it only differs from its proof passes and its class is suspect)
    void      submission, job done

Three cases differ:

    no agreement yet      one more opinion is requested, and the file is replayed whole
    shadow lease          any verdict writes submission, marks and job, nothing else
    file under review     see reviews.py

How many opinions must agree (`enough`):

    rejected        the pool's quorum, at least two (a slash takes stake), or all validators that
                    the lease names if they are fewer
    contradicted    two
    accepted        two for a share of files, drawn before any judgement; else one
    void            one: anyone can verify it from the bytes; but two for what only a repetition
                    shows: a mismatch of a proof pass, or rows of a conversation, in which the
                    environment's replies are computed again

Opinions count together only under the same law. If the lease names only one validator, it decides
alone. Statistics decide a file (`by_statistics`) if one validator states a mismatch, all others
accept the file but could not repeat the proof pass, and no validator is left. An acceptance that
needs a second opinion stands alone if no other validator comes within validators.SINGLE_SECONDS. A
rejection, or a void that takes two, never stands alone: it waits until the file's validity ends.
Then the file is void, unpaid and unpunished; a rejection is counted in `prime_rejections_lapsed`.

Only the process that runs the manager's loops calls this. It checks every opinion again, because
another process may have accepted it. The verdict is an object, written before anything is locked.
Everything else is one transaction, which plain files share: no opinion has a fault or disputes the
file, no other file has any of its rows, and it is not under review. Every other file has its own
transaction. A file that is left out of a transaction, or lost by a crash, is decided later.
"""

from __future__ import annotations

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from prime_core import tracing
from prime_core.draws import DrawList
from prime_core.errors import (
    ConflictError,
    FatalError,
    MalformedError,
    NotFoundError,
    UnavailableError,
    UntrustedError,
)
from prime_core.ids import ZERO_DIGEST, Address, Digest
from prime_core.logs import fields
from prime_core.opinions import check_stated
from prime_core.revisions import RunHistory
from prime_core.rollout import MAX_PROMPT_TOKENS, MAX_ROWS
from prime_core.run import RunDefinition
from prime_core.settlement import judged_fact
from prime_core.storage.base import ObjectStore, put_object
from prime_core.task import SignedLease, SubmissionStatus
from prime_core.verdict import (
    MAX_REWARD_MICRO,
    MAX_TABLE_BYTES,
    PROOF_PASS,
    Evidence,
    Opinion,
    Outcome,
    Reason,
    SignedOpinion,
    Verdict,
    VerdictTable,
)
from prime_orchestrator.context import PoolContext, read_object
from prime_orchestrator.manager import (
    draws,
    history,
    reviews,
    revisions,
    slashing,
    standing,
    suspicion,
)
from prime_orchestrator.manager.draws import DrawBoard
from prime_orchestrator.manager.endings import void
from prime_orchestrator.manager.members import apply_node_event
from prime_orchestrator.manager.settlement import refresh_credits
from prime_orchestrator.store import (
    Connection,
    chain,
    drift,
    evaluations,
    exact_classes,
    groups,
    jobs,
    leases,
    nodes,
    opinions,
    rewards,
    row_marks,
    submissions,
)
from prime_orchestrator.store import draws as store_draws
from prime_orchestrator.store.engine import Store, lock, on_commit
from prime_orchestrator.store.groups import GroupRow
from prime_orchestrator.store.intents import queue_intent
from prime_orchestrator.store.jobs import AssignmentRow, JobRow
from prime_orchestrator.store.leases import LeaseRow
from prime_orchestrator.store.opinions import OpinionRow
from prime_orchestrator.store.rewards import CreditRow
from prime_orchestrator.store.submissions import SubmissionRow
from prime_verify.proofs.thresholds import shipped_digest

log = logging.getLogger(__name__)

AT_ONCE = 64
"""Maximum number of new files decided in one tick."""
AGAIN_SECONDS = 10.0
"""Delay before a file is retried if one of its objects could not be read."""
AGAIN_AT_ONCE = 16
"""Maximum number of files retried in one tick."""
GIVEN_UP_SECONDS = 3600.0
"""Settling stops waiting for a file that has been unreadable for this long."""
TABLES_AT_ONCE = 32 << 20
"""Bytes of verdict tables that are read before their files are decided."""
REPLAYED_VOIDS = frozenset({Reason.UNPROVEN_MISMATCH, Reason.UNCALIBRATED})
"""Voids that rest on a replay, which no one can check in the file's bytes: they take two opinions.
"""
MAX_NAME = 512
"""Longest name of a setup or statistic in a table, in characters."""
MOST_SHARE = 1000.0
"""Largest share of a limit that counts for drift. Limits on whole files are not applied to files of
few rows, so a share may exceed 1."""
_MARK = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Judgement:
    """One opinion with its table, checked for form."""

    signed: SignedOpinion
    table: VerdictTable
    table_size: int = 0

    @property
    def outcome(self) -> Outcome:
        return self.signed.outcome

    @property
    def reason(self) -> Reason:
        return self.signed.reason

    @property
    def validator(self) -> Address:
        return Address(self.signed.validator)

    @property
    def evidence(self) -> Digest | None:
        named = Digest(self.signed.opinion.evidence)
        return None if named == ZERO_DIGEST else named

    @property
    def whole(self) -> bool:
        """Whether every row of an accepted file was replayed."""
        return 0 < len(self.table.rows) == len(self.table.rows_drawn)

    @property
    def partly_seen(self) -> bool:
        """Whether only some rows were replayed, because no other file had any of them at the
        time."""
        return self.table.repeated_rows is not None and not self.whole

    def shares(self) -> dict[str, float]:
        """Returns the file's statistics as shares of their limits, without those that no accepted
        file has: sums over files must stay numbers."""
        found = {name: float(value) for name, value in self.table.shares.items()}
        return {name: share for name, share in found.items() if 0 <= share <= MOST_SHARE}

    @property
    def exact_rows(self) -> int:
        """Rows whose proof pass was compared bit for bit, as the opinion's author says; 0 if it
        says more than it drew."""
        found = float(self.table.statistics.get("exact_rows", "0"))
        return int(found) if 0 <= found <= len(self.table.rows_drawn) else 0

    @property
    def mismatches(self) -> bool:
        """Whether any of them differed in digests or log-probabilities."""
        found = self.table.statistics
        names = ("exact_mismatches", "exact_logprobs")
        return any(float(found.get(name, "0")) > 0 for name in names)

    @property
    def compute_share(self) -> float | None:
        """Compute spent on the replay as a share of the compute spent on making the file, which is
        replayed at most twice; None if the opinion states no such number."""
        found = float(self.table.statistics.get("compute_share", "nan"))
        return found if 0 <= found <= 2 else None


def enough(
    outcome: Outcome,
    said: Sequence[Outcome],
    named: int,
    needed: int,
    reason: Reason = Reason.NONE,
    *,
    quorum: int,
    conversation: bool = False,
) -> bool:
    """Whether enough opinions agree to make `outcome` the verdict.

    Args: `said` are the outcomes of all opinions on the file, `named` the number of validators that
    its lease names, `needed` the number of opinions that it needed at first, `reason` that of the
    outcome. `quorum` is the pool's: the chain takes no proposal with fewer rejections. A lease that
    names fewer validators can lead to a rejection, but not to a slash. `conversation`: whether the
    run has conversations, so that WRONG_ROWS may be about a reply that was not repeated.
    """
    agree = sum(one is outcome for one in said)
    contradicted = agree < len(said)
    repeated = reason in REPLAYED_VOIDS or (conversation and reason is Reason.WRONG_ROWS)
    if named < 2 and not contradicted:
        wanted = 1
    elif outcome is Outcome.REJECTED:
        wanted = max(2, min(quorum, named))
    elif contradicted or repeated:
        wanted = 2
    else:
        wanted = min(2, needed) if outcome is Outcome.ACCEPTED else 1
    return agree >= wanted


def chosen_of(
    found: Sequence[Judgement], named: int, needed: int, quorum: int, *, conversation: bool
) -> Judgement | None:
    """Returns the first opinion whose outcome enough opinions share under one law; None if another
    opinion is needed. Arguments as of `enough`."""
    for one in found:
        law = one.signed.opinion.law
        counted = [
            other.outcome
            for other in found
            if other.outcome is not one.outcome or other.signed.opinion.law == law
        ]
        if enough(
            one.outcome, counted, named, needed, one.reason,
            quorum=quorum, conversation=conversation,
        ):  # fmt: skip
            return one
    return None


def by_statistics(found: Sequence[Judgement]) -> Judgement | None:
    """Returns the acceptance that decides the file if exactly one opinion states a mismatch, and
    all others accept the file without having repeated its proof passes; else None. So the mismatch
    of one machine neither voids nor rejects a file."""
    apart = [one for one in found if one.reason in PROOF_PASS and one.mismatches]
    rest = [one for one in found if one.outcome is Outcome.ACCEPTED and not one.exact_rows]
    return rest[0] if len(apart) == 1 and rest and len(rest) == len(found) - 1 else None


@dataclass(frozen=True)
class Due:
    """A file whose opinions are complete: `given` as stored, `found` those that count, `faults` why
    others do not. `named`: how many validators its lease names; `quorum`: how many must reject it;
    `conversation`: whether its run has conversations; `last`: whether it is of an exact lease and
    none of them is left to judge it; `epoch`: of its lease's draws."""

    row: SubmissionRow
    job: JobRow
    given: Sequence[OpinionRow]
    found: Sequence[Judgement]
    faults: Mapping[Address, str]
    named: int
    quorum: int
    conversation: bool
    last: bool
    epoch: int

    @cached_property
    def chosen(self) -> Judgement | None:
        """The opinion that decides the file, if enough agree, or no other can be had."""
        agreed = chosen_of(
            self.found, self.named, self.job.needed or 1, self.quorum,
            conversation=self.conversation,
        )  # fmt: skip
        return by_statistics(self.found) if agreed is None and self.last else agreed

    @property
    def drawn(self) -> set[tuple[Address, int]]:
        """The validators that accept the file, with the epoch of their draws."""
        return {(Address(one.signed.validator), self.epoch) for one in self.found
                if one.outcome is Outcome.ACCEPTED}  # fmt: skip

    @property
    def review(self) -> bool:
        """Whether the file was accepted before, and no opinion disputes that now."""
        return self.row.status == "accepted" and self._accepted

    @property
    def _accepted(self) -> bool:
        return all(one.outcome is Outcome.ACCEPTED for one in self.found)

    @property
    def plain(self) -> bool:
        """Whether nothing but other files' rows can stand against accepting it."""
        return (
            self.row.status == "submitted"
            and self.chosen is not None
            and self._accepted
            and not self.faults
        )


@dataclass(frozen=True)
class Stored:
    """A verdict whose object is stored under `name`, and the opinion that decides it."""

    name: Digest
    verdict: Verdict
    chosen: Judgement
    found: Sequence[Judgement]

    def applied(self, row: SubmissionRow) -> SubmissionRow:
        """Returns a submission's row with this verdict."""
        chosen, counted = self.chosen, [one.table.repeated_rows for one in self.found]
        fact = judged_fact(self.name, self.verdict, chosen.table.units, chosen.table.prompt_units)
        return replace(
            row,
            status=_STATUS[chosen.outcome],
            reason=int(chosen.reason),
            units=fact.units,
            prompt_units=fact.prompt_units,
            verdict=self.name,
            verdict_table=fact.table if chosen.outcome is Outcome.ACCEPTED else None,
            evidence=chosen.evidence,
            validator=chosen.validator,
            compute_share=chosen.compute_share,
            repeated_rows=max(
                (number for number in counted if number is not None), default=row.repeated_rows
            ),
            judged_at=float(fact.judged_at),
        )


def _once(ask: Callable[[], int]) -> Callable[[], int]:
    """Returns a function that asks at its first call, and later repeats that answer or error."""
    found: list[int | UnavailableError] = []

    def answer() -> int:
        if not found:
            try:
                found.append(ask())
            except UnavailableError as error:
                found.append(error)
        (one,) = found
        if isinstance(one, UnavailableError):
            raise one
        return one

    return answer


@dataclass(frozen=True)
class _Later:
    """An unreadable file: when it first failed (`since`) and when to retry it (`at`)."""

    since: float
    at: float


@dataclass(frozen=True)
class Judge:
    """Decides verdicts. `now` returns Unix seconds, `quorum` the pool's, or raises UnavailableError
    while it is not known. `_later`: unreadable files, the next one to retry first. `_drawn`: the
    validators and epochs of acceptances that are noted (store.draws.note_accepted)."""

    store: Store
    objects: ObjectStore
    context: PoolContext
    board: DrawBoard
    now: Callable[[], float]
    quorum: Callable[[], int]
    _later: dict[Digest, _Later] = field(default_factory=dict, init=False)
    _drawn: set[tuple[Address, int]] = field(default_factory=set, init=False)

    def tick(self) -> list[Digest]:
        """Decides the files whose opinions are complete; returns those that got a verdict. A file
        that cannot be read is tried again after AGAIN_SECONDS and delays no other. Raises
        UnavailableError if there is such a file and no other is decided."""
        with self.store.read() as connection:
            waiting = self._next(connection)
            if not waiting:
                return []
            known = jobs.those(connection, waiting)
            rows = submissions.those(connection, waiting)
            promises = leases.those(connection, [row.lease_digest for row in rows.values()])
            said = opinions.of_those(connection, waiting)
            exact = [one.digest for one in rows.values() if _of_class(one, promises)]
            work = jobs.assignments_among(connection, exact) if exact else {}
            appointed = chain.appointed(connection, self.context.pool) if exact else frozenset()
            runs = revisions.history(connection, self.context)
        decided: list[Digest] = []
        due: list[Due] = []
        unread: UnavailableError | None = None
        quorum = _once(self.quorum)
        size = 0
        for digest in waiting:
            row = rows.get(digest)
            lease = promises.get(row.lease_digest) if row is not None else None
            if row is None or lease is None:
                raise FatalError(f"a job names submission {digest}, which the store does not hold")
            before = self._later.pop(digest, None)
            try:
                given = said.get(digest, [])
                one = self._due(row, known[digest], lease.signed(), given, runs, quorum)
                if digest in work:
                    listed = self.board.listed(self.objects, lease.signed())
                    one = replace(one, last=no_one_left(listed, work[digest], appointed))
            except UnavailableError as error:
                if before is None:
                    log.warning("submission %s waits for its verdict: %s", digest, error)
                now = self.now()
                since = now if before is None else before.since
                self._later[digest] = _Later(since, now + AGAIN_SECONDS)
                unread = error
                continue
            due.append(one)
            size += sum(one.table_size for one in due[-1].found)
            if size >= TABLES_AT_ONCE:
                decided += self._decide_all(due, runs)
                due, size = [], 0
        decided += self._decide_all(due, runs)
        if unread is not None and not decided:
            raise unread
        return decided

    def given_up(self) -> list[Digest]:
        """Returns the files that have been unreadable for GIVEN_UP_SECONDS."""
        known, until = list(self._later.items()), self.now() - GIVEN_UP_SECONDS
        return [digest for digest, one in known if one.since <= until]

    def _next(self, connection: Connection) -> list[Digest]:
        """Returns the oldest new files whose opinions are complete, then the files due for a
        retry."""
        limit = AT_ONCE + len(self._later)
        full = jobs.full(connection, limit)
        there, now = set(full), self.now()
        if len(full) < limit:  # no other job is full
            for digest in self._later.keys() - there:
                del self._later[digest]
        again = [digest for digest, one in self._later.items() if one.at <= now and digest in there]
        new = [digest for digest in full if digest not in self._later]
        return new[:AT_ONCE] + again[:AGAIN_AT_ONCE]

    def _due(
        self,
        row: SubmissionRow,
        job: JobRow,
        promise: SignedLease,
        given: Sequence[OpinionRow],
        runs: RunHistory,
        quorum: Callable[[], int],
    ) -> Due:
        """Reads and checks the opinions on a file. `quorum` is asked if one rejects it."""
        run = runs.of_lease(promise.lease)
        found: list[Judgement] = []
        faults: dict[Address, str] = {}
        for opinion in given:
            try:
                found.append(self._checked(opinion.signed(), row, promise, run))
            except (MalformedError, UntrustedError, NotFoundError, ConflictError) as error:
                faults[opinion.validator] = str(error)
        named = len(self.board.listed(self.objects, promise).commitments)
        rejected = any(one.outcome is Outcome.REJECTED for one in found)
        needed = quorum() if rejected else 1
        return Due(
            row, job, given, found, faults, named, needed,
            conversation=run.conversation is not None, last=False,
            epoch=draws.epoch_at(run, promise.lease.deadline - run.lease_seconds),
        )  # fmt: skip

    def _decide_all(self, due: Sequence[Due], runs: RunHistory) -> list[Digest]:
        """Decides files; returns those that got a verdict."""
        verdicts = {one.row.digest: self._verdict(one) for one in due}
        plain = [
            (one, verdict)
            for one in due
            if one.plain and (verdict := verdicts[one.row.digest]) is not None
        ]
        decided = self._accept(plain, runs) if len(plain) > 1 else []
        for one in due:
            digest = one.row.digest
            if digest not in decided and self._decide(one, verdicts[digest]):
                decided.append(digest)
        return decided

    def _verdict(self, one: Due) -> Stored | None:
        """Stores the verdict that a file gets unless something changes. Returns None if the file
        needs another opinion or keeps its verdict."""
        if one.chosen is None or one.faults or one.review:
            return None
        return self.stored(one.chosen, one.found)

    def stored(self, chosen: Judgement, found: Sequence[Judgement]) -> Stored:
        """Stores the object of a verdict, without the opinions that have its outcome under other
        laws: they do not count with it."""
        law = chosen.signed.opinion.law
        counted = [
            one for one in found
            if one.outcome is not chosen.outcome or one.signed.opinion.law == law
        ]  # fmt: skip
        signed = tuple(one.signed for one in counted)
        verdict = Verdict(outcome=int(chosen.outcome), opinions=signed)
        return Stored(put_object(self.objects, verdict.canonical()), verdict, chosen, counted)

    def _accept(self, plain: Sequence[tuple[Due, Stored]], runs: RunHistory) -> list[Digest]:
        """Accepts plain files in one transaction; returns those that it accepted. It leaves out
        files that changed, whose rows are locked, or that share rows with other files."""
        with self.store.begin() as connection:
            lock(connection, "row_marks")  # each acceptance sees the previous one's rows
            digests = [one.row.digest for one, _ in plain]
            held = jobs.lock_free(connection, digests)
            given = opinions.of_those(connection, digests)
            appointed = chain.appointed(connection, self.context.pool)
            rows = submissions.lock_free(connection, digests)
            same = {
                one.row.digest: (one, verdict)
                for one, verdict in plain
                if held.get(one.row.digest) == one.job
                and rows.get(one.row.digest) == one.row
                and given.get(one.row.digest) == one.given
                and all(said.validator in appointed for said in one.found)
            }
            marks = {digest: verdict.chosen.table.marks for digest, (_, verdict) in same.items()}
            fresh = row_marks.unshared(connection, marks)
            # `tallies` are written by node and kind of file, as `shadows.forget` writes them
            accepted = sorted(
                (same[digest] for digest in same if digest in fresh),
                key=lambda pair: (pair[0].row.node, pair[0].row.shadow),
            )
            now = self.now()
            nodes.lock_rows(connection, {one.row.node for one, _ in accepted})
            row_marks.remember_all(
                connection, {digest: marks[digest] for digest in marks if digest in fresh}, now=now
            )
            submissions.set_verdicts(
                connection, [verdict.applied(one.row) for one, verdict in accepted]
            )
            jobs.finish(connection, fresh)
            for one, verdict in accepted:
                _note_class(connection, one.row, verdict, now)
            drawn = set[tuple[Address, int]]().union(*(one.drawn for one, _ in accepted))
            store_draws.note_accepted(connection, drawn - self._drawn)
            paid = [(one.row, verdict.chosen) for one, verdict in accepted if not one.row.shadow]
            standing.kept(connection, [row.node for row, _ in paid])
            _credit(connection, runs, paid, now)
            for one, verdict in accepted:
                on_commit(connection, _log, one.row, verdict, now)
        self._drawn.update(drawn)
        return [one.row.digest for one, _ in accepted]

    def _decide(self, one: Due, verdict: Stored | None) -> bool:
        """Decides one file. Returns False if it needs another opinion, has more by now, or already
        has a verdict."""
        digest, found, faults = one.row.digest, one.found, dict(one.faults)
        whole = [said.table.marks for said in found if said.whole]
        with self.store.begin() as connection:
            if whole:
                lock(connection, "assignments")  # before rows of several jobs
            lock(connection, "row_marks")  # each acceptance sees the previous one's rows
            if whole:  # reviews.send_back may reopen them
                sharing = {
                    other
                    for marks in whole
                    for other in row_marks.holders(connection, marks, but=digest)
                }
                jobs.lock_rows(connection, sharing)
            job, row = jobs.lock_row(connection, digest), submissions.get(connection, digest)
            if job != one.job or row is None or row.status != one.row.status:
                return False  # the next tick decides
            if opinions.of(connection, digest) != list(one.given):
                return False  # a new opinion arrived; the next tick decides
            appointed = chain.appointed(connection, self.context.pool)
            for said in found:
                if said.validator not in appointed:
                    faults[said.validator] = "its author is not appointed"
            if faults:
                _drop(connection, digest, faults, self.now())
                return False
            if row.status == "accepted":
                again = self._reviewed(connection, row, found)
                if again is None:
                    store_draws.note_accepted(connection, one.drawn)
                    jobs.change(connection, digest, status="done")
                    return False
                row = again
            if verdict is None and one.last:
                log.error(
                    "submission %s is set aside: too few validators agree and none is left", digest
                )
                jobs.change(connection, digest, status="quarantined")
                return False
            if verdict is None:
                log.info("submission %s: one more opinion is asked for", digest)
                jobs.change(connection, digest, status="open", needed=len(found) + 1, whole=True)
                return False
            recorded = self.record(connection, row, verdict)
            if recorded:
                store_draws.note_accepted(connection, one.drawn)
            return recorded

    def _reviewed(
        self, connection: Connection, row: SubmissionRow, found: Sequence[Judgement]
    ) -> SubmissionRow | None:
        """Applies the review of an accepted file. Returns None if its acceptance stands. If any
        opinion disputes it, withdraws the verdict and returns the file, to be judged like any
        other."""
        if all(one.outcome is Outcome.ACCEPTED for one in found):
            reviews.uphold(connection, row, max(one.table.repeated_rows or 0 for one in found))
            return None
        if not reviews.withdraw(connection, self.context, row):
            return None
        return submissions.get(connection, row.digest)

    def _checked(
        self, signed: SignedOpinion, row: SubmissionRow, lease: SignedLease, run: RunDefinition
    ) -> Judgement:
        """Checks everything about an opinion that needs no replay, and returns it with its table.

        Raises MalformedError, UntrustedError, NotFoundError or ConflictError if it does not count.
        """
        signed.check(self.context.domain(Opinion))
        check_law(signed, row, lease)
        due = run.calibration if run.calibration != ZERO_DIGEST else shipped_digest()
        if signed.law.verification_class != due:
            raise ConflictError("the opinion rests on another calibration than the run's")
        try:
            raw = read_object(self.objects, Digest(signed.opinion.table), MAX_TABLE_BYTES)
            size = len(raw)
            table = VerdictTable.model_validate_json(raw)
        except ValueError as error:
            raise MalformedError("the opinion's table does not parse") from error
        check_table(table, signed.outcome, row, run)
        if signed.outcome is Outcome.REJECTED:
            try:
                raw = read_object(self.objects, Digest(signed.opinion.evidence))
                evidence = Evidence.model_validate_json(raw)
                check_stated(
                    evidence, Digest(due), submission=row.signed(), lease=lease,
                    validator=Address(signed.validator),
                    chain_id=self.context.deployment.chain_id, run_digest=run.digest(),
                )  # fmt: skip
            except ValueError as error:
                raise MalformedError("the opinion's evidence does not parse") from error
            if evidence.reason != signed.reason:
                raise UntrustedError("the evidence states another reason than the opinion")
        return Judgement(signed, table, size)

    def record(self, connection: Connection, row: SubmissionRow, verdict: Stored) -> bool:
        """Writes the verdict and applies its consequences.

        Returns False if the file already has a verdict, or if another file has included some of its
        rows in the meantime; it is then judged again. If this file was replayed whole, accepted
        files that share rows with it are sent back for review (reviews.py). The caller holds the
        lock "row_marks", and the jobs of this file and of those.
        """
        chosen, found = verdict.chosen, verdict.found
        digest, outcome, now = row.digest, chosen.outcome, self.now()
        differs = chosen.reason in suspicion.ONLY_DIFFERS
        if (
            outcome is Outcome.ACCEPTED
            and chosen.partly_seen
            and row_marks.seen(connection, chosen.table.marks, but=digest)
        ):
            log.info("submission %s: another file has its rows: it is judged again", digest)
            opinions.forget(connection, digest)
            jobs.change(connection, digest, status="open")
            jobs.start_over(connection, digest)
            return False
        jobs.change(connection, digest, status="done")
        locked = submissions.lock_row(connection, digest)
        if locked is None or locked.status != "submitted":
            log.warning("submission %s has a verdict; this one is dropped", digest)
            return False
        nodes.lock_row(connection, row.node)  # serializes verdicts on one node
        if differs and self._class_at_fault(connection, row, verdict):
            void(connection, digest, Reason.UNAVAILABLE, now)
            on_commit(
                connection, log.warning,
                "submission %s is void: its proof passes differ in a suspect class", digest,
            )  # fmt: skip
            return True
        submissions.set_verdicts(connection, [verdict.applied(locked)])
        whole = next((one for one in found if one.whole and one.outcome is outcome), None)
        if whole is not None:
            reviews.send_back(connection, self.context, digest, whole.table.marks)
        if outcome is Outcome.ACCEPTED:
            row_marks.remember(connection, digest, chosen.table.marks, now=now)
        if not differs:
            _note_class(connection, row, verdict, now)
        if not row.shadow:
            standing.judged(connection, Address(row.node), outcome, chosen.reason)
        if row.shadow:
            pass  # nothing follows from its verdict
        elif outcome is Outcome.ACCEPTED:
            runs = revisions.history(connection, self.context)
            _credit(connection, runs, [(row, chosen)], now)
        elif outcome is Outcome.REJECTED:
            _punish(connection, self.context, row, chosen, now)
        on_commit(connection, _log, row, verdict, now)
        return True

    def _class_at_fault(self, connection: Connection, row: SubmissionRow, verdict: Stored) -> bool:
        """Counts a file with only a mismatch against it. Returns whether its class is suspect."""
        now = self.now()
        key = _note_class(connection, row, verdict, now)
        lease = leases.get(connection, row.lease_digest)
        if key is None or lease is None:
            return False
        run = revisions.history(connection, self.context).of_lease(lease.signed().lease)
        return suspicion.is_suspect(connection, key, Digest(run.calibration), now)


def _of_class(row: SubmissionRow, promises: Mapping[Digest, LeaseRow]) -> bool:
    """Whether the file's lease names an exact class."""
    lease = promises.get(row.lease_digest)
    return lease is not None and lease.signed().numeric_class() is not None


def no_one_left(
    listed: DrawList, parts: Iterable[AssignmentRow], appointed: Collection[Address]
) -> bool:
    """Whether every appointed validator that a lease names gave an opinion or abstained."""
    done = {part.validator for part in parts if part.status in ("given", "abstained")}
    return all(one.validator in done for one in listed.commitments if one.validator in appointed)


def check_law(signed: SignedOpinion, row: SubmissionRow, lease: SignedLease) -> None:
    """Raises ConflictError unless the opinion is on this submission in this pool, and under its
    lease, run and draws."""
    said, law = signed.opinion, signed.law
    due = (row.digest, lease.lease.pool, row.lease_digest, lease.lease.run_digest)
    stated = (said.submission, said.pool, law.lease, law.run)
    if stated != due or lease.opening is None or law.draws != lease.opening.draws:
        raise ConflictError("the opinion is on another file, pool, lease, run or draw")


def check_table(
    table: VerdictTable, outcome: Outcome, row: SubmissionRow, run: RunDefinition
) -> None:
    """Raises MalformedError unless the table belongs to this file and contains what its outcome
    requires."""
    named = (table.submission_digest, table.sha256, table.policy_version, table.step)
    if named != (row.digest, row.sha256, row.policy_version, row.step):
        raise MalformedError("the table is of another file")
    drawn = table.rows_drawn
    if len(set(drawn)) < len(drawn) or any(not 0 <= n < MAX_ROWS for n in drawn):
        raise MalformedError("the table names rows twice, or rows that no file has")
    if any(len(values) != len(drawn) for values in table.row_statistics.values()):
        raise MalformedError("the table has not one value for each row that was replayed")
    of_rows = (number for values in table.row_statistics.values() for number in values)
    for number in (*table.shares.values(), *table.statistics.values(), *of_rows):
        try:
            float(number)
        except ValueError as error:
            raise MalformedError(f"{number[:20]!r} is not a number") from error
    if any(len(name) > MAX_NAME or not name.isprintable() for name in (table.setup, *table.shares)):
        raise MalformedError(f"a name in the table is not printable or over {MAX_NAME} characters")
    if len(table.marks) > MAX_ROWS or not all(map(_MARK.fullmatch, table.marks)):
        raise MalformedError(f"the table has a malformed row mark, or more than {MAX_ROWS} marks")
    if table.repeated_rows is not None and not 0 <= table.repeated_rows <= MAX_ROWS:
        raise MalformedError("the table counts more repeated rows than a file has")
    if outcome is not Outcome.ACCEPTED:
        if table.rows:
            raise MalformedError("only an accepting opinion counts rows")
        return
    if not run.detailed_tables and any(one.limited or one.parts for one in table.rows):
        raise MalformedError("the table has fields that only runs with detailed_tables have")
    if len(table.rows) != run.rows_per_lease:
        raise MalformedError(f"a file of this run has {run.rows_per_lease} rows")
    for place, one in enumerate(table.rows):
        if (one.group, one.sample) != divmod(place, run.samples_per_group):
            raise MalformedError(f"row {place} of the table is not in its place")
        if one.problem_id != table.rows[place - one.sample].problem_id:
            raise MalformedError(f"row {place} of the table has another problem than its group")
        if (
            one.prompt_tokens > MAX_PROMPT_TOKENS
            or one.output_tokens + one.observation_tokens > run.max_output_tokens
        ):
            raise MalformedError("the table counts more tokens than a row may have")
        if abs(one.reward_micro) > MAX_REWARD_MICRO:
            raise MalformedError(f"row {place} of the table has a reward that is out of range")
    if len(drawn) < run.least_drawn(len(table.rows)):
        raise MalformedError("the opinion accepts with fewer rows replayed than the run asks for")


def _drop(
    connection: Connection, digest: Digest, faults: Mapping[Address, str], now: float
) -> None:
    """Removes opinions that do not count. Their authors do not get the file again."""
    for validator, fault in sorted(faults.items()):
        log.error("the opinion of %s on %s does not count: %s", validator, digest, fault)
        opinions.drop(connection, digest, validator)
        jobs.end_assignment(connection, digest, validator, "abstained", now=now)
    jobs.change(connection, digest, status="open")


_STATUS: dict[Outcome, SubmissionStatus] = {
    Outcome.ACCEPTED: "accepted",
    Outcome.REJECTED: "rejected",
    Outcome.VOID: "void",
}


def _note_class(
    connection: Connection, row: SubmissionRow, verdict: Stored, now: float
) -> Digest | None:
    """Counts the file for its lease's exact class, if validators of the class repeated its proof
    passes; returns the class's key then. The opinion that compared the most rows counts; one that
    accepts a file and states a mismatch does not."""
    outcome, reason, found = verdict.chosen.outcome, verdict.chosen.reason, verdict.found
    if not any(one.exact_rows for one in found):
        return None
    lease = leases.get(connection, row.lease_digest)
    name = None if lease is None else lease.signed().numeric_class()
    numeric = None if name is None else exact_classes.get(connection, name)
    if numeric is None:
        return None
    authors = [one.validator for one in found]
    able = exact_classes.members(connection, [numeric.digest], authors)[numeric.digest]
    agreed = [
        one for one in found
        if one.outcome is outcome and one.exact_rows and one.validator in able
        and not (outcome is Outcome.ACCEPTED and one.mismatches)
    ]  # fmt: skip
    if not agreed:
        return None
    most = max(agreed, key=lambda one: one.exact_rows)
    drawn = {*most.table.rows_drawn}
    lengths = [
        one.output_tokens + one.observation_tokens  # as the run bounds them, after any prompt
        for number, one in enumerate(most.table.rows)
        if number in drawn
    ]
    exact_classes.judged(
        connection,
        numeric.key,
        Address(row.node),
        validator=most.validator,
        rows=most.exact_rows,
        longest=max(lengths, default=0),
        mismatched=any(one.mismatches for one in agreed),
        explained=reason not in suspicion.ONLY_DIFFERS,
        again=row.repeated_rows is not None,  # its acceptance was withdrawn
        now=now,
    )
    return numeric.key


def _log(row: SubmissionRow, verdict: Stored, now: float) -> None:
    if row.shadow:
        log.info("shadow submission: nothing follows from its verdict")
    chosen, opinions = verdict.chosen, len(verdict.found)
    status, reason = _STATUS[chosen.outcome], chosen.reason.name
    log.info(
        "submission %s of %s: %s (%s), %d units by %d opinions",
        *(row.digest, row.node, status, reason, chosen.table.units, opinions),
        extra=fields(kind="verdict", status=status, reason=reason, **row.about()),
    )
    tracing.record(Digest(row.lease_digest), "verdict", row.received_at, now, reason=reason)


def _credit(
    connection: Connection,
    runs: RunHistory,
    accepted: Sequence[tuple[SubmissionRow, Judgement]],
    now: float,
) -> None:
    """Writes credits, drift and free groups of accepted files. The rows of their nodes are
    locked."""
    earned, sums = [], []
    for row, judgement in accepted:
        run, table = runs.at(row.step), judgement.table
        sums.append((row.node, table.setup, history.kind_of(run, table), judgement.shares()))
        earned.append(
            CreditRow(
                submission_digest=row.digest,
                node=row.node,
                units=table.units,
                amount=str(run.worth(table.units, table.prompt_units)),
                earned_at=row.receipt_answer().receipt.received_at,
            )
        )
    rewards.add_credits(connection, earned)
    for node in sorted(rewards.withheld_among(connection, {row.node for row, _ in accepted})):
        refresh_credits(connection, node)
    drift.add_files(connection, sums)
    held_out = evaluations.held_out(connection, [row.lease_digest for row, _ in accepted])
    found = []
    for row, one in accepted:
        step = groups.HELD_OUT if row.lease_digest in held_out else None
        found += group_rows(one.table, row, now, step)
    groups.add(connection, found)


def group_rows(
    table: VerdictTable, row: SubmissionRow, now: float, batch_step: int | None = None
) -> list[GroupRow]:
    """Returns the groups of an accepted file, from its verdict table. Rows that could not be graded
    have no reward; those that a limit ended are not compared with the others."""
    by_group: dict[int, list[int]] = defaultdict(list)
    compared: dict[int, set[int]] = defaultdict(set)
    rows: Counter[int] = Counter()
    for entry in table.rows:
        rewards = by_group[entry.group]
        if not entry.ungraded:
            rewards.append(entry.reward_micro)
            if not entry.limited:
                compared[entry.group].add(entry.reward_micro)
        rows[entry.group] += 1
    return [
        GroupRow(
            submission_digest=row.digest,
            group_no=group,
            policy_version=row.policy_version,
            rows=rows[group],
            informative=len(compared[group]) > 1,
            reward_micro_sum=sum(values),
            accepted_at=now,
            batch_step=batch_step,
            ungraded=rows[group] - len(values),
        )
        for group, values in sorted(by_group.items())
    ]


def _punish(
    connection: Connection,
    context: PoolContext,
    row: SubmissionRow,
    judgement: Judgement,
    now: float,
) -> None:
    node = Address(row.node)
    apply_node_event(connection, context, node, "rejected", now)
    order = slashing.decide(judgement.reason, context.run)
    if order is not None:
        slashing.queue_slash(
            connection,
            submission=row.digest,
            node=node,
            validator=judgement.validator,
            evidence=Digest(judgement.signed.opinion.evidence),
            order=order,
            now=now,
        )
    else:  # without slashing, the node is still ejected
        queue_intent(
            connection,
            kind="eject",
            key=f"{node}:{row.digest}",
            payload={"node": node},
            now=now,
        )
    refresh_credits(connection, node)
