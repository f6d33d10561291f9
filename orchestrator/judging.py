"""A finding becomes a verdict: objects first, then one store transaction.

    accepted  submission, lease, credit, groups for batches, marks of its rows, job done
    rejected  submission, lease, node quarantined, slash and its `propose` intent, job done
    void      submission, lease, job done
    (where another validator is to be heard first: its opinion, and the job goes on to that one)
    (of a shadow lease, whatever the verdict: submission, lease, marks, job done, nothing else)
    (of an accepted file that is looked at once more: reviews.py says what)
    abstained the job goes back; nothing is decided about the file or its node

Killed between the objects and the transaction, the job's claim runs out and the file is judged
again; the objects left behind are named by nothing.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from sqlalchemy import Connection

from orchestrator import reviews, slashing
from orchestrator.context import PoolContext
from orchestrator.intents import queue_intent
from orchestrator.members import apply_node_event
from orchestrator.opinions import agreed
from orchestrator.settlement import refresh_credits
from orchestrator.store import (
    drift,
    groups,
    jobs,
    leases,
    nodes,
    opinions,
    row_marks,
    schema,
    submissions,
)
from orchestrator.store.engine import Store, lock
from orchestrator.store.groups import GroupRow
from orchestrator.store.opinions import OpinionRow
from orchestrator.store.rows import insert_new
from orchestrator.store.submissions import SubmissionRow
from protocol.core import encoding
from protocol.core.errors import FatalError
from protocol.core.ids import ZERO_DIGEST, Address, Digest
from protocol.core.lifecycle import LeaseEventKind, LeaseState, step_lease
from protocol.core.signing import Signer
from protocol.core.task import LeaseStatus
from protocol.core.verdict import Outcome, Reason, SignedVerdict, Verdict, VerdictTable
from protocol.storage.base import ObjectStore, put_object

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Judgement:
    """What a validator is about to write down. `table` iff accepted; `evidence` (the Evidence
    object's bytes) iff rejected; `units` = generated tokens of the accepted rows."""

    reason: Reason
    units: int
    table: VerdictTable | None
    evidence: bytes | None
    setup: str = ""
    shares: Mapping[str, float] = field(default_factory=dict)
    """Of an accepted file: what made it, and its statistics as shares of their limits."""
    compute_share: float | None = None
    """What the replay computed, as a share of what making the file did."""
    repeated_rows: int | None = None
    """How many rows other files had; None where nobody looked."""
    marks: Mapping[str, bool] = field(default_factory=dict)
    """Of an accepted file: what its rows are remembered by (protocol.verification.repeats)."""
    whole: bool = False
    """Whether every row was replayed."""

    @property
    def partly_seen(self) -> bool:
        """Whether only some rows were replayed since no other file had any of them, then."""
        return self.repeated_rows is not None and not self.whole

    def __post_init__(self) -> None:
        outcome = self.reason.outcome
        if outcome is Outcome.ABSTAINED:
            raise FatalError("an abstention is no judgement")
        if (self.table is not None) != (outcome is Outcome.ACCEPTED):
            raise FatalError("a verdict table goes with acceptance and with nothing else")
        if (self.evidence is not None) != (outcome is Outcome.REJECTED):
            raise FatalError("evidence goes with rejection and with nothing else")


@dataclass(frozen=True)
class PublishedVerdict:
    """A judgement whose objects are published: what the store records."""

    judgement: Judgement
    signed: SignedVerdict
    object: Digest


def table_bytes(table: VerdictTable) -> bytes:
    """Canonical bytes of a verdict table object."""
    return encoding.canonical_json(table.model_dump(mode="json"))


def publish_verdict(
    objects: ObjectStore,
    context: PoolContext,
    signer: Signer,
    submission: Digest,
    judgement: Judgement,
    *,
    judged_at: int,
) -> PublishedVerdict:
    """Writes table or evidence and the signed verdict as objects. `judged_at` in Unix seconds."""
    table = put_object(objects, table_bytes(judgement.table)) if judgement.table else ZERO_DIGEST
    evidence = put_object(objects, judgement.evidence) if judgement.evidence else ZERO_DIGEST
    verdict = Verdict(
        pool=context.pool,
        submission_digest=submission,
        outcome=int(judgement.reason.outcome),
        reason=int(judgement.reason),
        units=judgement.units,
        table=table,
        evidence=evidence,
        judged_at=judged_at,
    )
    signed = SignedVerdict(
        verdict=verdict,
        validator=signer.address,
        signature=signer.sign(verdict, context.domain(Verdict)),
    )
    name = put_object(objects, encoding.canonical_json(signed.model_dump(mode="json")))
    return PublishedVerdict(judgement, signed, name)


def record_verdict(
    store: Store,
    context: PoolContext,
    submission: Digest,
    published: PublishedVerdict,
    *,
    worker: str,
    now: float,
    needed: int = 1,
) -> bool:
    """Writes an opinion and, if `needed` validators agree by now, the verdict and all that follows
    from it, in one transaction. Otherwise the job waits for another validator.

    False, and nothing written, if `worker` lost its claim or the submission was judged already;
    or if a file that was judged beside it, and was accepted first, has rows of it: it is judged
    once more, and whole. A file with rows of one that was replayed whole goes back (reviews.py).
    """
    verdict, judgement = published.signed.verdict, published.judgement
    outcome = judgement.reason.outcome
    status: LeaseStatus = _STATUS[outcome]
    with store.begin() as connection:
        row = submissions.get(connection, submission)
        if row is None:
            raise FatalError(f"a job names submission {submission}, which the store does not hold")
        if row.status == "accepted" and not _withdrawn(
            connection, context, row, published, worker=worker, now=now
        ):
            return jobs.finish(connection, submission, worker)
        earlier = opinions.of(connection, submission)
        if not agreed(outcome, [opinion.outcome for opinion in earlier], needed):
            if not jobs.hand_on(connection, submission, worker):
                return False
            log.info("submission %s: a second opinion is asked for", submission)
            _opine(connection, submission, published, now)
            return True
        if outcome is Outcome.ACCEPTED:
            lock(connection, "row_marks")  # one acceptance sees the rows of the one before it
        if judgement.partly_seen and row_marks.seen(connection, judgement.marks, but=submission):
            log.info(
                "submission %s: its rows came in another file meanwhile; once more", submission
            )
            jobs.hand_on(connection, submission, worker)
            return False
        if not jobs.finish(connection, submission, worker):
            return False
        _opine(connection, submission, published, now)
        fresh = submissions.judge(
            connection,
            submission,
            status,
            reason=int(judgement.reason),
            units=judgement.units,
            verdict=published.object,
            verdict_table=None if verdict.table == ZERO_DIGEST else verdict.table,
            evidence=None if verdict.evidence == ZERO_DIGEST else verdict.evidence,
            validator=published.signed.validator,
            compute_share=judgement.compute_share,
            repeated_rows=row.repeated_rows
            if judgement.repeated_rows is None  # nobody looks where evidence names the rows
            else judgement.repeated_rows,
            judged_at=float(verdict.judged_at),
        )
        if not fresh:
            log.warning("submission %s was judged already; this verdict is dropped", submission)
            return False
        if judgement.whole:
            reviews.send_back(connection, context, submission, judgement.marks)
        nodes.lock_row(connection, row.node)  # two verdicts on one node follow one another
        _end_lease(connection, row.lease_digest, _LEASE_EVENT[outcome], now)
        row_marks.remember(connection, submission, judgement.marks, now=now)
        if row.shadow:
            log.info("shadow submission: nothing follows from its verdict")
        elif outcome is Outcome.ACCEPTED:
            _credit(connection, context, row, judgement, now)
        elif outcome is Outcome.REJECTED:
            _punish(connection, context, row, published, now)
    log.info(
        "submission %s of %s: %s (%s), %d units",
        submission,
        row.node,
        status,
        judgement.reason.name,
        judgement.units,
    )
    return True


def _withdrawn(
    connection: Connection,
    context: PoolContext,
    row: SubmissionRow,
    published: PublishedVerdict,
    *,
    worker: str,
    now: float,
) -> bool:
    """What a look at a file that stands accepted brings; whether it is to be judged anew."""
    if not jobs.holds(connection, row.digest, worker):
        return False
    judgement = published.judgement
    if judgement.reason.outcome is not Outcome.ACCEPTED:
        return reviews.withdraw(connection, context, row)
    reviews.uphold(connection, row, judgement.repeated_rows)
    _opine(connection, row.digest, published, now)
    return False


def _opine(
    connection: Connection, submission: Digest, published: PublishedVerdict, now: float
) -> None:
    """What a validator found at its second look takes the place of its first: an acceptance that it
    no longer gives must neither stand nor bring the file back to it."""
    evidence = published.signed.verdict.evidence
    opinions.replace(
        connection,
        OpinionRow(
            submission,
            published.signed.validator,
            int(published.judgement.reason),
            published.object,
            None if evidence == ZERO_DIGEST else evidence,
            now,
        ),
    )


_STATUS: dict[Outcome, LeaseStatus] = {
    Outcome.ACCEPTED: "accepted",
    Outcome.REJECTED: "rejected",
    Outcome.VOID: "void",
}
_LEASE_EVENT: dict[Outcome, LeaseEventKind] = {
    Outcome.ACCEPTED: "accepted",
    Outcome.REJECTED: "rejected",
    Outcome.VOID: "void",
}


def _end_lease(connection: Connection, digest: Digest, event: LeaseEventKind, now: float) -> None:
    lease = leases.lock_row(connection, digest)
    if lease is None:
        raise FatalError(f"a submission names lease {digest}, which the store does not hold")
    state, _ = step_lease(LeaseState(lease.status, lease.deadline), event, now)
    leases.set_status(connection, digest, state.status)


def _credit(
    connection: Connection,
    context: PoolContext,
    row: SubmissionRow,
    judgement: Judgement,
    now: float,
) -> None:
    assert judgement.table is not None
    insert_new(
        connection,
        schema.credits,
        {
            "submission_digest": row.digest,
            "node": row.node,
            "units": judgement.units,
            "amount": str(judgement.units * context.run.price_per_unit),
            "earned_at": row.receipt_answer().receipt.received_at,
            "status": "earned",
        },
    )
    refresh_credits(connection, Address(row.node))
    drift.add(connection, Address(row.node), judgement.setup, judgement.shares)
    groups.add(connection, group_rows(judgement.table, row, now))


def group_rows(table: VerdictTable, row: SubmissionRow, now: float) -> list[GroupRow]:
    """The groups of an accepted file, from its verdict table."""
    rewards: dict[int, list[int]] = defaultdict(list)
    for entry in table.rows:
        rewards[entry.group].append(entry.reward_micro)
    return [
        GroupRow(
            submission_digest=row.digest,
            group_no=group,
            policy_version=row.policy_version,
            rows=len(values),
            informative=len(set(values)) > 1,
            reward_micro_sum=sum(values),
            accepted_at=now,
        )
        for group, values in sorted(rewards.items())
    ]


def _punish(
    connection: Connection,
    context: PoolContext,
    row: SubmissionRow,
    published: PublishedVerdict,
    now: float,
) -> None:
    node = Address(row.node)
    apply_node_event(connection, context, node, "rejected", now)
    order = slashing.decide(published.judgement.reason, context.run)
    if order is not None:
        slashing.queue_slash(
            connection,
            submission=row.digest,
            node=node,
            validator=published.signed.validator,
            evidence=published.signed.verdict.evidence,
            order=order,
            now=now,
        )
    else:  # a run that slashes nothing still works with no liar
        queue_intent(
            connection,
            lane=context.manager,
            kind="eject",
            key=f"{node}:{row.digest}",
            payload={"node": node},
            now=now,
        )
    refresh_credits(connection, node)


def record_abstention(
    store: Store,
    submission: Digest,
    reason: Reason,
    detail: str,
    *,
    worker: str,
    now: float,
    retry_seconds: float,
    max_abstentions: int,
) -> bool:
    """Gives the job back: to another validator at once, to this one after `retry_seconds`.

    After `max_abstentions` it is quarantined: never paid, never punished by itself.
    """
    if reason.outcome is not Outcome.ABSTAINED:
        raise FatalError(f"{reason.name} is a judgement, not an abstention")
    log.warning("abstained from %s: %s: %s", submission, reason.name, detail)
    with store.begin() as connection:
        return jobs.give_back(
            connection,
            submission,
            worker,
            not_before=now + retry_seconds,
            max_abstentions=max_abstentions,
        )
