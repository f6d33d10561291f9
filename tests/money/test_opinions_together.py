"""Requests about several files: each entry is done or refused as if it had come alone."""

from __future__ import annotations

import os
import threading

import pytest
from judges import Bench, bench, judge_of, only
from money_kit import NODE as HONEST
from money_kit import VALIDATOR, ManagerSide, key
from test_verdict_store import in_child, rows

from prime_core.encoding import sha256
from prime_core.errors import ConflictError, UnavailableError
from prime_core.ids import Digest
from prime_core.storage.base import digest_key
from prime_core.validator_messages import (
    ClaimRequest,
    EntryAnswer,
    GivenOpinion,
    Job,
    RowsRequest,
    SealRequest,
    TogetherAnswer,
    TogetherRequest,
)
from prime_core.verdict import Reason, SignedOpinion
from prime_orchestrator.api import validators
from prime_orchestrator.manager import endings
from prime_orchestrator.store import row_marks, schema
from prime_validator.api import Entry, Together

SECOND = key(70)


def claimed(mgr: ManagerSide, count: int) -> list[Job]:
    for _ in range(count):
        mgr.submit(HONEST)
    request = ClaimRequest(worker="kit", most=count)
    answer = only(validators.claim_all(mgr.backend, [(VALIDATOR.address, request)]))
    assert len(answer.jobs) == count
    assert answer.together >= count
    return list(answer.jobs)


def post(mgr: ManagerSide, request: TogetherRequest) -> TogetherAnswer:
    return mgr.bench.api.client.post("/v1/validators/together", request, TogetherAnswer)


def opinion(mgr: ManagerSide, job: Job) -> tuple[SignedOpinion, bytes]:
    """An accepting opinion and its table, which the store does not hold."""
    signed = mgr.bench.opinion(job, Reason.NONE, mgr.table_rows())
    name = digest_key(Digest(signed.opinion.table))
    table = mgr.objects.get(name, 1 << 20)
    mgr.objects.delete(name)
    return signed, table


def seal(signed: SignedOpinion, worker: str = "kit") -> SealRequest:
    return SealRequest(worker=worker, submission=signed.opinion.submission, seal=signed.seal())


def test_a_bad_entry_affects_no_other(mgr: ManagerSide) -> None:
    jobs = claimed(mgr, 4)
    said = [opinion(mgr, job) for job in jobs]
    mark = "ab" * 16
    with mgr.store.begin() as connection:
        row_marks.remember(connection, sha256(b"an older file"), {mark: True}, now=mgr.now())
    asked = [RowsRequest(submission=job.submission_digest, marks={mark: False}) for job in jobs]
    answer = post(
        mgr,
        TogetherRequest(
            rows=(asked[0], RowsRequest(submission=sha256(b"none"), marks={}), asked[1]),
            seals=(
                seal(said[0][0]),
                seal(said[1][0], worker="another"),
                seal(said[2][0]),
                seal(said[0][0]),
            ),
        ),
    )
    assert [(one.status, one.marks) for one in answer.rows] == [
        (200, (mark,)), (409, ()), (200, (mark,)),
    ]  # fmt: skip
    assert "no claim" in answer.rows[1].problem
    assert [(one.status, one.reveal) for one in answer.seals] == [
        (200, True), (409, False), (200, True), (200, True),
    ]  # fmt: skip

    given = [GivenOpinion(signed=signed, table=table.decode()) for signed, table in said]
    forged = given[2].signed.model_copy(update={"signature": given[0].signed.signature})
    opinions = (
        given[0],
        given[1],
        GivenOpinion(signed=forged, table=given[2].table),
        GivenOpinion(signed=given[2].signed, table="another"),
        GivenOpinion(signed=given[2].signed),
        given[0],
    )
    found = post(mgr, TogetherRequest(opinions=opinions)).opinions
    assert [one.status for one in found] == [200, 409, 401, 400, 404, 200]
    kept = {row["submission_digest"] for row in rows(mgr, schema.opinions)}
    assert kept == {jobs[0].submission_digest}
    assert not mgr.objects.exists(digest_key(Digest(given[1].signed.opinion.table))), "not sealed"
    assert post(mgr, TogetherRequest(opinions=(given[2],))).opinions[0].status == 200
    assert set(judge_of(mgr.backend).tick()) == {
        jobs[0].submission_digest,
        jobs[2].submission_digest,
    }


def judged_twice(
    mgr: ManagerSide, monkeypatch: pytest.MonkeyPatch
) -> tuple[Bench, Job, SignedOpinion, bytes]:
    """A second live validator, a file that it must judge too, and the first one's opinion on it
    with its table."""
    monkeypatch.setattr(validators, "AGAIN_ONE_IN", 1)
    second = bench(mgr.backend, SECOND, mgr.folder, seed=2)
    second.claim()
    (job,) = claimed(mgr, 1)
    return second, job, *opinion(mgr, job)


def test_what_is_not_due_is_neither_stored_nor_shown(
    mgr: ManagerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is judged twice: its table shows what the first validator found."""
    second, _, signed, table = judged_twice(mgr, monkeypatch)
    answer = post(mgr, TogetherRequest(seals=(seal(signed),)))
    assert not answer.seals[0].reveal
    given = TogetherRequest(opinions=(GivenOpinion(signed=signed, table=table.decode()),))
    (refused,) = post(mgr, given).opinions
    assert refused.status == 409
    assert "not sealed yet" in refused.problem
    assert not mgr.objects.exists(digest_key(Digest(signed.opinion.table)))
    its = second.claim()
    assert its is not None
    other = second.opinion(its, Reason.WRONG_SAMPLING)
    assert second.seal(other)
    assert post(mgr, given).opinions[0].status == 200


def test_the_last_opinion_on_a_file_that_ended_does_not_have_it_decided_again(
    mgr: ManagerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    second, job, signed, table = judged_twice(mgr, monkeypatch)
    post(mgr, TogetherRequest(seals=(seal(signed),)))
    its = second.claim()
    assert its is not None
    other = second.opinion(its, Reason.WRONG_SAMPLING)
    assert second.seal(other)
    second.give(other)
    with mgr.store.begin() as connection:
        endings.void(connection, job.submission_digest, Reason.UNAVAILABLE, mgr.now())
    given = TogetherRequest(opinions=(GivenOpinion(signed=signed, table=table.decode()),))
    assert post(mgr, given).opinions[0].status == 200
    assert [row["status"] for row in rows(mgr, schema.jobs)] == ["done"]


def test_a_kill_before_opinions_are_written_loses_none(
    mgr: ManagerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = claimed(mgr, 2)
    said = [opinion(mgr, job) for job in jobs]
    post(mgr, TogetherRequest(seals=tuple(seal(signed) for signed, _ in said)))
    given = [validators.Given(VALIDATOR.address, signed, table) for signed, table in said]

    def die(*_: object) -> None:
        os._exit(9)

    monkeypatch.setattr(validators.jobs, "set_full", die)
    mgr.store.close()
    assert in_child(validators.give_all, mgr.backend, given) == 9
    monkeypatch.undo()
    assert rows(mgr, schema.opinions) == []
    assert judge_of(mgr.backend).tick() == []
    assert validators.give_all(mgr.backend, given) == [True, True]
    assert judge_of(mgr.backend).tick() == [Digest(job.submission_digest) for job in jobs]
    assert len(rows(mgr, schema.credits)) == 2


# ── the validator's side ──


def marks(number: int) -> RowsRequest:
    return RowsRequest(submission=sha256(str(number).encode()), marks={})


class Server:
    """Answers entries; the first request waits until `released`."""

    def __init__(self) -> None:
        self.began, self.released = threading.Event(), threading.Event()
        self.sizes: list[int] = []
        self.error: Exception | None = None

    def post(self, request: TogetherRequest) -> TogetherAnswer:
        self.sizes.append(len(request.rows))
        self.began.set()
        assert self.released.wait(60)
        if self.error is not None:
            raise self.error
        return TogetherAnswer(
            rows=tuple(
                EntryAnswer(status=409, problem='{"type":"urn:prime:problem:conflict"}')
                if one == marks(3)
                else EntryAnswer(marks=(one.submission,))
                for one in request.rows
            )
        )


def asked_at_once(
    together: Together, server: Server, entries: list[Entry]
) -> list[EntryAnswer | Exception | None]:
    """Asks the first entry, then the others while it is under way; the answers."""
    found: list[EntryAnswer | Exception | None] = [None] * len(entries)

    def ask(at: int) -> None:
        try:
            found[at] = together.ask(entries[at])
        except Exception as error:
            found[at] = error

    threads = [threading.Thread(target=ask, args=(at,)) for at in range(len(entries))]
    threads[0].start()
    assert server.began.wait(60)
    for thread in threads[1:]:
        thread.start()
    while len(together._waiting) < len(entries) - 1:
        threads[-1].join(0.01)
    server.released.set()
    for thread in threads:
        thread.join(60)
    return found


def test_entries_made_while_a_request_is_under_way_share_the_next_one() -> None:
    server = Server()
    together = Together(server.post, most=4)
    entries: list[Entry] = [marks(number) for number in range(7)]
    found = asked_at_once(together, server, entries)
    assert server.sizes == [1, 4, 2]
    assert isinstance(found[3], ConflictError), "the refusal is of its entry alone"
    for number, one in enumerate(found):
        if number != 3:
            assert isinstance(one, EntryAnswer)
            assert one.marks == (marks(number).submission,)


def test_a_request_that_fails_fails_its_entries_and_the_next_one_is_made() -> None:
    server = Server()
    together = Together(server.post, most=8)
    server.error = UnavailableError("away")
    entries: list[Entry] = [marks(number) for number in range(3)]
    found = asked_at_once(together, server, entries)
    assert all(isinstance(one, UnavailableError) for one in found)
    server.error = None
    assert together.ask(marks(0)).marks == (marks(0).submission,)
