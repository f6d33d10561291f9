"""Evaluation leases: who gets them, what they ask, and that nothing trains on their files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from orchestrator_world import Session, World
from test_dropped_leases import Watch, owned
from test_rollouts_cli import MODEL, RIGHT, WRONG, Pool, pool, store
from typer.testing import CliRunner

from prime_core.draws import SaltOpening
from prime_core.errors import PrimeError, UserError
from prime_core.ids import ZERO_DIGEST
from prime_core.messages import LeaseAnswer, LeaseRequest
from prime_core.storage.base import put_object
from prime_core.task import SignedLease
from prime_orchestrator import scheduler
from prime_orchestrator.api import evaluating
from prime_orchestrator.api.status import status
from prime_orchestrator.cli.main import app
from prime_orchestrator.manager import reviews, standing
from prime_orchestrator.store import archive, evaluations, groups, leases, submissions
from prime_orchestrator.store.evaluations import EvaluationRow
from prime_verify.build import problem_indices

__all__ = ["pool", "store"]


def ask(world: World, session: Session, version: int = 0, *, heldout: bool = True) -> LeaseAnswer:
    path = "/v1/leases/evaluation" if heldout else "/v1/leases"
    answer = world.post(path, LeaseRequest(policy_version=version), session)
    assert answer.status_code == 200, answer.text
    return LeaseAnswer.model_validate_json(answer.content)


def leased(world: World, session: Session, version: int = 0) -> SignedLease:
    answer = ask(world, session, version)
    assert answer.lease is not None, answer.reason
    return answer.lease


def proven(world: World, number: int) -> Session:
    """A node whose provider has a record."""
    session = world.member(number)
    owned(world, session, number)
    with world.backend.store.begin() as connection:
        standing.kept(connection, [session.account.address])
    return session


def start(pool: Pool, *words: str) -> int:
    found = json.loads(pool.orchestrator("evaluations", "start", *words, "--json"))
    return int(found["id"])


def listed(pool: Pool) -> list[Any]:
    found: list[Any] = json.loads(pool.orchestrator("evaluations", "list", "--json"))["evaluations"]
    return found


def answered(pool: Pool, session: Session, answers: list[bool | None]) -> SignedLease:
    """An accepted file for an evaluation lease."""
    lease = leased(pool.world, session)
    assert lease.heldout is not None
    pool.hand_in(session, answers, lease)
    pool.judge(answers=answers)
    return lease


@pytest.mark.slow
def test_nodes_answer_held_out_problems_and_nothing_trains_on_them(
    pool: Pool, tmp_path: Path
) -> None:
    world, run = pool.world, pool.world.backend.context.run
    one, two = proven(world, 1), proven(world, 2)
    assert pool.orchestrator("evaluations", "list").startswith("no evaluation was started")
    number = str(start(pool, "--problems", "3"))
    with pytest.raises(UserError, match=f"no answer to evaluation {number} is accepted yet"):
        pool.orchestrator("evaluations", "grade", number, "--model", str(MODEL))
    first = answered(pool, one, [RIGHT, RIGHT, RIGHT, WRONG])
    assert (first.heldout, first.lease.step, first.policy_version) == (0, 0, 0)
    assert first.opens()
    assert problem_indices(ZERO_DIGEST, run, first.opening) == [100, 101]
    trains = leased(world, two)
    assert trains.heldout is None, "half of the leases are for training"
    pool.hand_in(two, [RIGHT, WRONG, WRONG, WRONG], trains)
    pool.judge(answers=[RIGHT, WRONG, WRONG, WRONG])
    second = answered(pool, two, [WRONG, WRONG, RIGHT, WRONG])
    assert second.heldout == 2

    (found,) = listed(pool)
    assert (found["problems"], found["answered"], found["rows"]) == (3, 3, 6), "not the fourth"
    assert found["reward"] == pytest.approx((1.0 + 0.5 + 0.0) / 3)
    assert found["interval"] == pytest.approx(1.96 * 0.5 / 3**0.5)
    graded = pool.orchestrator("evaluations", "grade", number, "--model", str(MODEL), "--json")
    shares = json.loads(graded)
    assert shares["pass_1"]["mean"] == pytest.approx(0.5)
    assert shares["pass_k"]["mean"] == pytest.approx(2 / 3), "of three problems, not the fourth"
    assert (shares["samples"], shares["pass_k"]["count"], shares["ungraded"]) == (2, 3, 0)
    assert found["ended_at"] is None, "the next lease ends it"
    assert leased(world, one).heldout is None
    assert listed(pool)[0]["ended_at"] == world.clock()
    assert "0.500 ± 0.566" in pool.orchestrator("evaluations", "list")
    assert [one.model_dump() for one in status(world.backend).evaluations] == listed(pool)

    with world.backend.store.read() as connection:
        free = groups.free(connection, step=0, max_staleness=2)
        assert groups.informative_share(connection, 100) == (1, 2), "of the training file alone"
    assert len(free) == 1
    states = [group["state"] for line in pool.listed() for group in line["groups"]]
    assert sorted(states) == ["dropped", "held out", "held out", "held out", "held out", "waiting"]
    pool.run("export", "--out", str(tmp_path / "rows.parquet"))
    assert pq.read_table(tmp_path / "rows.parquet").num_rows == 4, "the training file's"
    assert pool.json("show", pool.listed()[-1]["id"], "--model", str(MODEL), "--grade")["samples"][
        0
    ]["reason"], "graded as its lease asked"

    known = listed(pool)
    with world.backend.store.begin() as connection:
        names = [one.digest for one in evaluations.accepted(connection, int(number))]
        rows = archive.rows_of(connection, names)
        page = put_object(world.backend.objects, archive.encode(names, rows))
        archive.move(connection, page, names, rows, 0)
        assert evaluations.accepted(connection, int(number)) == []
    assert listed(pool) == known, "archived files count as before"
    again = pool.orchestrator("evaluations", "grade", number, "--model", str(MODEL), "--json")
    assert again == graded


def test_an_evaluation_leaves_out_answers_that_were_not_graded(pool: Pool) -> None:
    start(pool, "--problems", "3")
    answered(pool, proven(pool.world, 1), [RIGHT, None, None, None])
    (found,) = listed(pool)
    assert (found["answered"], found["rows"], found["reward"]) == (1, 1, 1.0)


def test_a_mistyped_folder_is_no_pool_and_is_not_made(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["evaluations", "list", "--data", str(tmp_path / "typo")])
    assert isinstance(done.exception, UserError)
    assert "there is no pool in" in str(done.exception)
    assert not (tmp_path / "typo").exists()


def test_only_proven_nodes_that_know_evaluations_get_them(pool: Pool) -> None:
    world = pool.world
    start(pool)
    old, newcomer = proven(world, 1), world.member(2)
    owned(world, newcomer, 2)
    without = ask(world, old, heldout=False).lease
    assert without is not None
    assert without.heldout is None
    answer = ask(world, newcomer)
    assert answer.lease is None or answer.lease.heldout is None
    assert leased(world, proven(world, 3)).heldout == 0


def test_every_lease_is_an_evaluation_once_enough_work_is_under_way(pool: Pool) -> None:
    start(pool)
    with pool.world.backend.store.read() as connection:
        row = evaluations.running(connection)
    assert row is not None
    run = pool.world.backend.context.run
    blocks = evaluating.Blocks(row, run, [4, 2, 0], given=1, others=0)
    assert blocks.next(0, idle=False) is None
    assert blocks.next(0, idle=True) == scheduler.Grant(0, 0, heldout=0)
    blocks.taken()
    assert blocks.next(0, idle=True) == scheduler.Grant(0, 0, heldout=2)


def test_an_older_policy_is_evaluated_while_the_pool_trains_a_newer_one(pool: Pool) -> None:
    world = pool.world
    one, two = proven(world, 1), proven(world, 2)
    world.publish(9)
    start(pool, "--policy", "8")
    assert leased(world, one, 7).heldout is None, "the node cannot load policy 8 yet"
    signed = leased(world, two, 9)
    assert (signed.policy_version, signed.lease.step, signed.heldout) == (8, 8, 0)
    assert signed.lease.policy_digest == world.manifest(8).manifest.digest()


def test_a_block_without_a_file_is_asked_again_four_times_and_never_trained(pool: Pool) -> None:
    world, watch = pool.world, Watch(pool.world)
    start(pool, "--problems", "2")
    for number in range(1, evaluating.TRIES + 1):
        session = proven(world, number)
        assert leased(world, session).heldout == 0
        watch.wait(61)
    last = leased(world, proven(world, 9))
    assert last.heldout is None
    assert last.opening is not None
    assert last.opening.problems is None, "held-out groups are not issued again for training"
    (found,) = listed(pool)
    assert (found["answered"], found["reward"]) == (0, None)
    assert found["ended_at"] is not None


def test_evaluation_leases_and_files_count_as_no_work_to_train_on(pool: Pool) -> None:
    world, session = pool.world, proven(pool.world, 1)
    start(pool)

    def under_way() -> list[tuple[int, float]]:
        with world.backend.store.read() as connection:
            now = world.clock()
            return leases.under_way(connection, now=now, younger_than=0, proven=1).groups

    lease = leased(world, session)
    assert lease.heldout == 0
    assert under_way() == []
    pool.hand_in(session, [RIGHT] * 4, lease)
    assert under_way() == []
    assert leased(world, session).heldout is None
    assert len(under_way()) == 1


def test_a_withdrawn_file_takes_its_results_along(pool: Pool) -> None:
    world = pool.world
    session = proven(world, 1)
    start(pool, "--problems", "2")
    answered(pool, session, [RIGHT] * 4)
    assert listed(pool)[0]["answered"] == 2
    name = pool.listed()[0]["id"]
    with world.backend.store.begin() as connection:
        row = submissions.get(connection, name)
        assert row is not None
        assert reviews.withdraw(connection, world.backend.context, row)
    assert listed(pool)[0]["answered"] == 0


def test_what_a_large_ended_evaluation_showed_is_read_once_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[int] = []
    monkeypatch.setattr(evaluations, "info", lambda _, row: read.append(row.id) or object())
    connection: Any = None
    kept = evaluations.KeptInfos()
    many, few = (EvaluationRow(number, 0, number, 0.0, 1.0) for number in (1000, 100))
    goes_on = replace(many, id=1, ended_at=None)
    for row in (many, few, goes_on):
        first = kept.of(connection, row, 100.0)
        assert (kept.of(connection, row, 100.0) is first) == (row is many)
    kept.of(connection, many, 100.0 + evaluations.KEPT_SECONDS * 1000)
    assert read == [1000, 100, 100, 1, 1, 1000]


def test_what_cannot_be_evaluated_is_refused_in_one_sentence(pool: Pool) -> None:
    def refused(*words: str) -> str:
        with pytest.raises(PrimeError) as caught:
            pool.orchestrator("evaluations", *words)
        error = caught.value
        return f"{error}; {error.hint}" if isinstance(error, UserError) else str(error)

    assert "policy 7 is not published; known versions: 0 to 0" in refused("start", "--policy", "7")
    assert "give --problems 10 or fewer" in refused("start", "--problems", "11")
    assert "there is no evaluation 5" in refused("end", "5")
    number = start(pool)
    assert f"evaluation {number} has ended with 0 of 10" in pool.orchestrator(
        "evaluations", "end", str(number)
    )
    assert leased(pool.world, proven(pool.world, 1)).heldout is None


def test_an_evaluation_that_goes_on_is_listed_however_old_it_is(pool: Pool) -> None:
    with pool.world.backend.store.begin() as connection:
        going, *ended = (evaluations.start(connection, 0, 5, now=0.0) for _ in range(3))
        for number in ended:
            evaluations.end(connection, number, now=1.0)
        found = evaluations.newest(connection, 2)
    assert [one.id for one in found] == [ended[-1], going]


def test_the_salt_binds_the_held_out_problem() -> None:
    one = "0x" + "11" * 32
    openings = [
        SaltOpening(random=ZERO_DIGEST, draws=ZERO_DIGEST, heldout=heldout, numeric_class=named)
        for heldout in (None, 0, 1)
        for named in (None, one)
    ]
    assert len({opening.salt() for opening in openings}) == len(openings)
    with pytest.raises(ValueError, match="not both"):
        SaltOpening(random=ZERO_DIGEST, draws=ZERO_DIGEST, heldout=0, problems=one)
