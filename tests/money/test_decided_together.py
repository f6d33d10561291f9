"""Verdicts on several files in one transaction: each file ends as it would alone."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from judges import appoint, bench, judge_of
from money_kit import NODE as HONEST
from money_kit import OTHER, VALIDATOR, ManagerSide, key, open_manager
from test_verdict_store import in_child, rows

from prime_core.encoding import sha256
from prime_core.errors import UnavailableError
from prime_core.ids import Digest
from prime_core.settlement import Settlement
from prime_core.storage.base import digest_key
from prime_core.storage.directory import DirectoryStore
from prime_core.verdict import Reason
from prime_orchestrator.manager import judging
from prime_orchestrator.manager.draws import DrawBoard
from prime_orchestrator.manager.endings import void_unjudged
from prime_orchestrator.manager.settlement import (
    CHAIN_BLOCK,
    CHAIN_TIME,
    settle_epochs,
)
from prime_orchestrator.store import chain, jobs, meta, opinions, schema

KEPT = (
    schema.submissions, schema.jobs, schema.nodes, schema.credits, schema.groups, schema.row_marks,
    schema.drift, schema.slashes, schema.opinions,
)  # fmt: skip
"""What verdicts write."""
RARE, SURE = True, False


def opened(folder: Path, url: str | None = None) -> ManagerSide:
    made = open_manager(folder, url=url)
    made.publish(0)
    for node in (HONEST, OTHER):
        made.admit(node)
    return made


@pytest.fixture
def mgr(mgr: ManagerSide) -> ManagerSide:
    mgr.admit(OTHER)
    return mgr


def accept(mgr: ManagerSide, **fields: Any) -> Digest:
    """The validator accepts the oldest file; the manager does not decide yet."""
    job = mgr.bench.claim()
    assert job is not None
    mgr.bench.say(job, Reason.NONE, mgr.table_rows(), **fields)
    return Digest(job.submission_digest)


def play(mgr: ManagerSide, tick: Callable[[], object]) -> None:
    """Files of two nodes, the last a shadow one, with an opinion on each; `tick` after every
    one."""
    for node in (HONEST, OTHER, HONEST, HONEST, OTHER, OTHER):
        mgr.submit(node)
    mgr.submit(HONEST, shadow=True)
    for number in range(7):
        job = mgr.bench.claim()
        assert job is not None
        if number == 5:
            mgr.bench.say(job, Reason.MALFORMED)
        else:
            mgr.bench.say(
                job, Reason.NONE, mgr.table_rows(), setup="plain/1 float32 cpu",
                shares={"sketch": "0.25", "sign": "0.5"},
                marks={f"{number:032x}": RARE, "f" * 32: SURE},
            )  # fmt: skip
        tick()


def written(mgr: ManagerSide) -> dict[str, list[tuple[Any, ...]]]:
    return {table.name: sorted(map(repr, map(tuple, rows_of(mgr, table)))) for table in KEPT}  # type: ignore[misc]


def rows_of(mgr: ManagerSide, table: sa.Table) -> list[Any]:
    with mgr.store.read() as connection:
        return list(connection.execute(sa.select(table)))


def together_and_alone(together: ManagerSide, alone: ManagerSide) -> None:
    play(alone, judge_of(alone.backend).tick)
    play(together, lambda: None)
    assert len(judge_of(together.backend).tick()) == 7
    assert written(together) == written(alone)
    assert sum(row.status == "accepted" for row in rows_of(together, schema.submissions)) == 6


def test_files_decided_in_one_transaction_end_as_if_decided_one_by_one(tmp_path: Path) -> None:
    together, alone = opened(tmp_path / "together"), opened(tmp_path / "alone")
    together_and_alone(together, alone)
    together.store.close()
    alone.store.close()


@pytest.mark.postgres
def test_the_same_in_postgresql(tmp_path: Path, empty_postgres: str) -> None:
    together = opened(tmp_path / "together", empty_postgres)
    alone = opened(tmp_path / "alone")
    together_and_alone(together, alone)
    together.store.close()
    alone.store.close()


def test_one_bad_opinion_leaves_the_other_files_accepted(mgr: ManagerSide) -> None:
    digests = []
    for _ in range(3):
        mgr.submit(HONEST)
        digests.append(accept(mgr))
    with mgr.store.read() as connection:
        (given,) = opinions.of(connection, digests[1])
    mgr.objects.delete(digest_key(Digest(given.signed().opinion.table)))
    assert judge_of(mgr.backend).tick() == [digests[0], digests[2]]
    assert mgr.row(digests[1]).status == "submitted"
    assert len(rows(mgr, schema.credits)) == 2
    with mgr.store.read() as connection:
        part = jobs.assignment(connection, digests[1], VALIDATOR.address)
    assert part is not None
    assert part.status == "abstained", "its author does not get the file again"


@pytest.mark.parametrize("damaged", ["tables", "draw list"])
def test_files_that_cannot_be_read_hold_up_no_verdict_and_are_tried_again(
    mgr: ManagerSide, monkeypatch: pytest.MonkeyPatch, damaged: str
) -> None:
    """They are older, and more than are decided in one tick."""
    monkeypatch.setattr(judging, "AT_ONCE", 2)
    monkeypatch.setattr(judging, "AGAIN_AT_ONCE", 1)
    old = []
    for _ in range(4):
        mgr.submit(HONEST)
        old.append(accept(mgr))
    with mgr.store.read() as connection:
        given = [opinions.of(connection, digest)[0].signed() for digest in old]
    names = {one.law.draws if damaged == "draw list" else one.opinion.table for one in given}
    places = {mgr.folder / "objects" / digest_key(Digest(name)) for name in names}
    whole = {place: place.read_bytes() for place in places}
    bench(mgr.backend, key(70), mgr.folder, seed=2)  # new leases name another list
    mgr.submit(HONEST)
    new = accept(mgr)
    for place in places:
        place.unlink() if damaged == "draw list" else place.write_bytes(b"damaged")
    mgr.board = DrawBoard(random.Random(6).randbytes)
    judge = judge_of(mgr.backend)
    for _ in range(2):
        with pytest.raises(UnavailableError):
            judge.tick()
    assert judge.tick() == [new]
    assert judge.tick() == [], "they are not read in each tick"
    mgr.now.time += judging.AGAIN_SECONDS
    with pytest.raises(UnavailableError):
        judge.tick()
    for place, data in whole.items():
        place.write_bytes(data)
    assert [judge.tick() for _ in range(3)] == [[digest] for digest in old[1:]]
    assert judge.tick() == []
    mgr.now.time += judging.AGAIN_SECONDS
    assert judge.tick() == old[:1]


def test_an_orchestrator_that_was_away_for_long_decides_files_before_it_settles(
    mgr: ManagerSide,
) -> None:
    """The opinions on two of three files were complete; those on one of the two cannot be read."""
    files = [mgr.submit(HONEST) for _ in range(3)]
    good, bad = accept(mgr), accept(mgr)
    with mgr.store.read() as connection:
        (given,) = opinions.of(connection, bad)
    table = mgr.folder / "objects" / digest_key(Digest(given.signed().opinion.table))
    table.write_bytes(b"damaged")
    run, posted = mgr.context.run, int(mgr.now())
    with mgr.store.begin() as connection:
        root = sha256(b"root")
        connection.execute(
            sa.insert(schema.roots).values(
                id=1, root=root, leaves_object=root, count=3, created_at=1.0, chain_seq=0,
                epoch=posted // run.epoch_seconds, posted_at=posted, block=1,
            )
        )  # fmt: skip
        connection.execute(sa.update(schema.submissions).values(root_id=1))
        mgr.now.time += run.validity_seconds + 2 * run.epoch_seconds
        meta.put(connection, CHAIN_BLOCK, "1")
        meta.put(connection, CHAIN_TIME, str(int(mgr.now())))
    judge = judge_of(mgr.backend)

    def ended(expected: int) -> Settlement | None:
        assert void_unjudged(mgr.store, mgr.context, mgr.now, judge.given_up()) == expected
        return settle_epochs(mgr.store, mgr.objects, mgr.context, mgr.now)

    assert ended(1) is None
    assert judge.tick() == [good]
    assert ended(0) is None
    mgr.now.time += judging.GIVEN_UP_SECONDS
    settlement = ended(1)
    assert settlement is not None
    states = {file.submission_digest: file.state for file in settlement.files}
    assert states == {good: "paid", bad: "unjudged", files[2].digest: "unjudged"}


def test_of_two_files_with_one_row_the_later_is_judged_again(mgr: ManagerSide) -> None:
    """They came in one tick; only some rows of each were replayed."""
    shared = {"marks": {"a" * 32: RARE}, "repeated_rows": 0}
    digests = []
    for _ in range(2):
        mgr.submit(HONEST)
        digests.append(accept(mgr, **shared))
    mgr.submit(OTHER)
    digests.append(accept(mgr, marks={"b" * 32: RARE}, repeated_rows=0))
    assert judge_of(mgr.backend).tick() == [digests[0], digests[2]]
    with mgr.store.read() as connection:
        job = jobs.get(connection, digests[1])
    assert job is not None
    assert (job.status, job.whole) == ("open", True)
    assert len(rows(mgr, schema.opinions)) == 2, "its author may judge it again"


def test_a_dismissed_validators_opinions_do_not_count(mgr: ManagerSide) -> None:
    for _ in range(2):
        mgr.submit(HONEST)
        accept(mgr)
    appoint(mgr.store, mgr.context.pool, VALIDATOR.address, on=False)
    with mgr.store.read() as connection:
        assert chain.appointed(connection, mgr.context.pool) == frozenset()
    assert judge_of(mgr.backend).tick() == []
    assert rows(mgr, schema.credits) == []


def test_a_kill_in_the_middle_of_several_verdicts_leaves_none_and_loses_none(
    mgr: ManagerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = []
    for _ in range(3):
        mgr.submit(HONEST)
        digests.append(accept(mgr))

    def die(*_: object) -> None:
        os._exit(9)

    monkeypatch.setattr(judging, "_credit", die)
    mgr.store.close()
    assert in_child(judge_of(mgr.backend).tick) == 9
    monkeypatch.undo()
    assert {mgr.row(digest).status for digest in digests} == {"submitted"}
    assert judge_of(mgr.backend).tick() == digests
    assert len(rows(mgr, schema.credits)) == 3
    assert judge_of(mgr.backend).tick() == []


def test_no_object_is_asked_for_while_a_claim_an_opinion_or_a_verdict_holds_locks(
    mgr: ManagerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        mgr.submit(HONEST)
    asked: list[str] = []
    for name in ("get", "size", "exists", "put", "signed_get"):
        honest = getattr(DirectoryStore, name)

        def guarded(self: DirectoryStore, *words: Any, _honest: Any = honest, **more: Any) -> Any:
            asked.append(_honest.__name__)
            assert not mgr.store._writing._is_owned(), f"{_honest.__name__} in a transaction"  # type: ignore[union-attr]
            return _honest(self, *words, **more)

        monkeypatch.setattr(DirectoryStore, name, guarded)
    for job in (mgr.bench.claim(), mgr.bench.claim()):
        assert job is not None
        mgr.bench.say(job, Reason.NONE, mgr.table_rows())
    assert len(judge_of(mgr.backend).tick()) == 2
    assert {"get", "size", "exists", "put"} <= {*asked}
