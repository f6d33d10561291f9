"""Reviews accepted files that share rows with another file: either may be the copy, and the copy
may have been accepted first.

    send_back   the later file was replayed whole and accepted: the other file's job is reopened
    judged      by any validator; the shared rows make it replay the file whole (repeats.py)
    uphold      no fault was found: the verdict stands, and the file is never sent back again
    withdraw    a fault was found, or a row that is not work: verdict, pay and free groups are taken
                back, and the file is judged like any other (judging.py says how many must agree)
    end_late    no validator came while the file's validity lasted: the verdict stands

Until `withdraw` the node loses nothing, and if no validator comes it never does. No file is sent
back twice, so an attacker can cause at most one extra whole replay per file. Groups that a batch
has taken stay trained on. Once a file's root is past its validity, its pay is final and no slash
can be proposed, so it is neither sent back nor withdrawn. Neither is a shadow file, whose verdict
has no consequences. In both cases its marks are deleted instead; otherwise one false claim in them
would cause every file with a foreseeable answer to be replayed whole for a week.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from prime_core.ids import Address, Digest
from prime_orchestrator.context import PoolContext
from prime_orchestrator.manager.settlement import CHAIN_LOCK, chain_clock
from prime_orchestrator.manager.slashing import expired
from prime_orchestrator.store import (
    Connection,
    groups,
    jobs,
    nodes,
    opinions,
    rewards,
    roots,
    row_marks,
    submissions,
)
from prime_orchestrator.store.engine import Store, lock, on_commit
from prime_orchestrator.store.submissions import SubmissionRow

log = logging.getLogger(__name__)


def send_back(
    connection: Connection, context: PoolContext, submission: Digest, marks: Mapping[str, bool]
) -> list[Digest]:
    """Reopens the jobs of accepted files that share rows with `submission`, which was replayed
    whole without fault; returns them. The caller holds the lock "row_marks" and their jobs."""
    sent = []
    for other in row_marks.holders(connection, marks, but=submission):
        row = submissions.get(connection, other)
        if row is not None and (row.status != "accepted" or row.repeated_rows):
            continue  # a file with shared rows was already replayed whole
        if row is None or row.shadow or _final(connection, context, row):  # None: archived
            row_marks.forget_file(connection, other)
        elif jobs.reopen(connection, other):
            opinions.forget(connection, other)  # their authors may judge it again
            on_commit(
                connection, log.warning, "submission %s has rows of %s: judged once more",
                other, submission,
            )  # fmt: skip
            sent.append(other)
    return sent


def uphold(connection: Connection, row: SubmissionRow, repeated_rows: int | None) -> None:
    """Records that an accepted file was sent back and that its verdict stands."""
    submissions.change(connection, row.digest, repeated_rows=max(1, repeated_rows or 0))
    on_commit(connection, log.info, "submission %s was judged once more and stands", row.digest)


def withdraw(connection: Connection, context: PoolContext, row: SubmissionRow) -> bool:
    """Reverts a file's acceptance, as if it had not been judged. Returns False and does nothing if
    its pay is final."""
    lock(connection, CHAIN_LOCK)  # no settlement reads its facts in the meantime
    if _final(connection, context, row):
        log.error("submission %s of %s is not what it was paid for: too late", row.digest, row.node)
        return False
    nodes.lock_row(connection, Address(row.node))
    submissions.withdraw(connection, row.digest)
    rewards.drop_credits(connection, [row.digest])
    groups.drop_free(connection, row.digest)
    row_marks.forget_file(connection, row.digest)
    on_commit(
        connection, log.warning, "submission %s of %s is accepted no longer", row.digest, row.node
    )
    return True


def end_late(store: Store, context: PoolContext) -> list[Digest]:
    """Ends the reviews that wait for a validator, of files whose pay is final; returns the files.
    Their leases may name none that is appointed."""
    with store.read() as connection:
        clock = chain_clock(connection)
        if clock is None:
            return []
        rooted_before = clock.time - context.run.validity_seconds
        late = jobs.late_reviews(connection, rooted_before)
    if not late:
        return []
    with store.begin() as connection:
        lock(connection, "assignments")
        lock(connection, "row_marks")
        jobs.lock_rows(connection, late)
        still = set(jobs.late_reviews(connection, rooted_before))
        ended = [digest for digest in late if digest in still]
        jobs.finish(connection, ended)
        for digest in ended:
            row_marks.forget_file(connection, digest)
            log.warning("the review of submission %s ended without a judgement", digest)
    return ended


def _final(connection: Connection, context: PoolContext, row: SubmissionRow) -> bool:
    """Whether the file's root is past its validity."""
    clock = chain_clock(connection)
    root = roots.of(connection, row.digest)
    if clock is None or root is None or root.posted_at is None:
        return False
    return expired(root.posted_at, context.run.validity_seconds, clock.time)
