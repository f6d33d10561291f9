"""Evaluation leases by the worker's and the validator's own code, from lease to verdict."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'prime-open[torch]'")


from bridge_kit import Kit
from judges import judge_of
from test_exact_leases import Party, party

from prime_core.draws import SaltOpening
from prime_core.storage.base import digest_key
from prime_core.verdict import Reason
from prime_node.bridge_messages import LeaseWish
from prime_orchestrator.manager import standing
from prime_orchestrator.store import evaluations, groups, rewards, schema, submissions
from prime_verify import build
from prime_verify.rollout_file import read_rollout_file

__all__ = ["party"]


def start(party: Party, problems: int) -> int:
    party.kit.broker.set_working(True, evaluates=True)
    with party.world.store.begin() as connection:
        member = party.world.rows(schema.nodes)[0]["address"]
        standing.kept(connection, [member])
        return evaluations.start(connection, 0, problems, now=time.time())


def test_a_worker_answers_held_out_problems_that_a_validator_verifies_and_the_pool_pays(
    party: Party,
) -> None:
    run = party.world.backend.context.run
    number = start(party, run.groups_per_lease)
    lease = party.make_file()
    assert lease.heldout == 0
    digest = party.judge.judge_next()
    assert digest is not None
    with party.world.store.read() as connection:
        row = submissions.get(connection, digest)
        assert row is not None
        assert row.status == "accepted"
        found = evaluations.results(connection, number, run.groups_per_lease)
        (credit,) = rewards.credits_of(connection, row.node, ("earned",))
        assert groups.free_counts(connection, oldest_version=0) == []
    assert [one.problem for one in found] == list(range(run.groups_per_lease))
    assert {one.rows for one in found} == {run.samples_per_group}
    assert int(credit.amount) > 0
    file = read_rollout_file(party.world.backend.objects.get(digest_key(row.sha256), 1 << 22))
    environment = party.builder.environment
    first = run.environment.train_size
    expected = [environment.problem(first + n).problem_id for n in range(run.groups_per_lease)]
    assert list(dict.fromkeys(one.problem_id for one in file.rows)) == expected


def test_answers_to_other_problems_are_no_evaluation(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node cannot choose easier problems, or training ones, for an evaluation lease."""
    number = start(party, 2)
    given = build.problem_indices
    with monkeypatch.context() as patched:
        patched.setattr(build, "problem_indices", lambda seed, run, _: given(seed, run, None))
        assert party.make_file().heldout == 0
    digest = party.judge.judge_next()
    assert digest is not None
    judge_of(party.world.backend).tick()
    with party.world.store.read() as connection:
        row = submissions.get(connection, digest)
        assert row is not None
        assert (row.status, Reason(row.reason)) == ("rejected", Reason.WRONG_PROMPTS)
        assert evaluations.results(connection, number, 2) == []


def test_a_node_takes_no_held_out_problem_that_its_run_does_not_have(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = kit.world.backend.context.run.environment.heldout_size
    api = kit.broker._api
    given = api.lease

    for heldout, taken in ((size, False), (size - 1, True)):

        def changed(version: int, *_: object, first: int = heldout, **__: object) -> object:
            answer = given(version)
            assert answer.lease is not None
            old = answer.lease.opening
            assert old is not None
            opening = SaltOpening(random=old.random, draws=old.draws, heldout=first)
            lease = answer.lease.lease.model_copy(update={"salt": opening.salt()})
            signed = answer.lease.model_copy(update={"lease": lease, "opening": opening})
            return answer.model_copy(update={"lease": signed})

        monkeypatch.setattr(api, "lease", changed)
        offer = kit.client.lease(LeaseWish(wait_seconds=0))
        assert (offer.lease is not None) == taken, offer.reason
        assert taken or f"held-out problem {size}, which the run does not have" in offer.reason
