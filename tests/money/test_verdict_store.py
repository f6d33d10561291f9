"""Verdicts, batches and roots in the store: what one transaction writes, and what a kill leaves."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from judges import judge_of
from money_kit import MANAGER, RUN, TOKEN, VALIDATOR, ManagerSide
from money_kit import NODE as HONEST
from money_kit import OTHER as LIAR

from prime_core import encoding
from prime_core.ids import ZERO_DIGEST, Digest
from prime_core.rollout import MAX_PROMPT_TOKENS, decode_leaves
from prime_core.storage.base import ObjectStore, digest_key
from prime_core.verdict import Opinion, Reason, Verdict, VerdictRow, VerdictTable
from prime_orchestrator.manager import batches as batches_module
from prime_orchestrator.manager import judging, reviews
from prime_orchestrator.manager import roots as roots_module
from prime_orchestrator.manager.batches import seal_ready_batches
from prime_orchestrator.manager.roots import post_roots
from prime_orchestrator.store import batches as store_batches
from prime_orchestrator.store import schema


@pytest.fixture
def mgr(mgr: ManagerSide) -> ManagerSide:
    mgr.admit(LIAR)
    return mgr


def rows(mgr: ManagerSide, table: sa.Table) -> list[sa.RowMapping]:
    with mgr.store.read() as connection:
        return list(connection.execute(sa.select(table)).mappings())


def seal(mgr: ManagerSide) -> list[int]:
    return seal_ready_batches(mgr.store, mgr.objects, MANAGER, mgr.context, mgr.now)


def in_child(action: object, *arguments: object) -> int:
    """Runs `action` in a forked process and returns its wait status."""
    pid = os.fork()
    if pid == 0:
        try:
            action(*arguments)  # type: ignore[operator]
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_groups_compare_only_rows_that_are_trained_on() -> None:
    """Not those that could not be graded, which have no reward, nor those that a limit ended."""

    def table(rewards: list[int | None], limited: int) -> VerdictTable:
        rows = (
            VerdictRow(
                problem_id="p", group=number // 2, sample=number % 2, reward_micro=reward or 0,
                prompt_tokens=1, output_tokens=1, ungraded=reward is None,
                limited=number == limited,
            )
            for number, reward in enumerate(rewards)
        )  # fmt: skip
        none = ZERO_DIGEST
        return VerdictTable(
            submission_digest=none, sha256=none, policy_version=0, step=0, rows=tuple(rows)
        )

    submission: Any = SimpleNamespace(digest=ZERO_DIGEST, policy_version=0)
    found = judging.group_rows(table([4, 0, 4, None, None, None, 4, 0], 7), submission, 0.0)
    assert [(row.rows, row.ungraded) for row in found] == [(2, 0), (2, 1), (2, 2), (2, 0)]
    assert [row.reward_micro_sum for row in found] == [4, 4, 0, 4]
    assert [row.informative for row in found] == [True, False, False, False]


def test_the_mean_reward_of_a_batch_leaves_out_rows_that_were_not_graded(mgr: ManagerSide) -> None:
    for _ in range(2):
        mgr.judge(mgr.submit(HONEST))
    with mgr.store.begin() as connection:
        connection.execute(sa.update(schema.groups).values(rows=5, ungraded=3))
    assert seal(mgr) == [0]
    (batch,) = rows(mgr, schema.batches)
    taken = [g["reward_micro_sum"] for g in rows(mgr, schema.groups) if g["batch_step"] == 0]
    assert (batch["rows"], batch["mean_reward_micro"]) == (15, sum(taken) // 6)


def test_acceptance_writes_credit_groups_and_verdict_at_once(mgr: ManagerSide) -> None:
    row = mgr.submit(HONEST)
    after = mgr.judge(row, rewards=(0, 1_000_000, 500_000, 500_000))
    assert (after.status, after.units, after.validator) == ("accepted", 20, VALIDATOR.address)
    [credit] = rows(mgr, schema.credits)
    assert int(credit["amount"]) == 20 * TOKEN // 1000
    assert credit["status"] == "earned"
    assert [g["informative"] for g in rows(mgr, schema.groups)] == [True, False]
    assert [lease["status"] for lease in rows(mgr, schema.leases)] == ["submitted"]
    assert [job["status"] for job in rows(mgr, schema.jobs)] == ["done"]

    assert after.verdict is not None
    verdict = Verdict.model_validate_json(mgr.objects.get(digest_key(after.verdict), 1 << 20))
    (signed,) = verdict.opinions
    signed.check(mgr.context.domain(Opinion))
    assert signed.validator == VALIDATOR.address
    raw = mgr.objects.get(digest_key(signed.opinion.table), 1 << 20)
    assert VerdictTable.model_validate_json(raw).units == after.units


def test_an_acceptance_that_states_what_no_file_has_pays_nothing(mgr: ManagerSide) -> None:
    """A single validator's table sets the pay, and its numbers go into columns of 64 bits."""
    honest = mgr.table_rows()

    def wrong(**changes: Any) -> tuple[VerdictRow, ...]:
        return (*honest[:-1], honest[-1].model_copy(update=changes))

    lies: list[tuple[tuple[VerdictRow, ...], dict[str, Any]]] = [
        (wrong(prompt_tokens=MAX_PROMPT_TOKENS + 1), {}),
        (wrong(observation_tokens=RUN.max_output_tokens), {}),
        (wrong(reward_micro=2**63), {}),
        (wrong(group=2**63), {}),
        (wrong(sample=0), {}),
        (wrong(problem_id="another"), {}),
        (honest, {"repeated_rows": 2**63}),
        (honest, {"marks": {"\0": True}}),
        (honest, {"setup": "\0"}),
        (honest, {"shares": {"\0": "0.5"}}),
    ]
    for table, fields in lies:
        row = mgr.submit(HONEST)
        job = mgr.bench.claim()
        assert job is not None
        mgr.bench.say(job, Reason.NONE, table, **fields)
        assert judge_of(mgr.backend).tick() == []
        assert mgr.row(row.digest).status == "submitted"
    assert rows(mgr, schema.credits) == rows(mgr, schema.opinions) == []


def test_statistics_that_are_no_numbers_are_in_no_sum(mgr: ManagerSide) -> None:
    row = mgr.submit(HONEST)
    job = mgr.bench.claim()
    assert job is not None
    shares = {"sketch": "0.5", "sign": "nan", "mantissa": "inf", "exponent": "1e300"}
    mgr.bench.say(
        job, Reason.NONE, mgr.table_rows(), shares=shares, statistics={"compute_share": "inf"}
    )
    assert judge_of(mgr.backend).tick() == [row.digest]
    assert [(one["statistic"], one["total"]) for one in rows(mgr, schema.drift)] == [
        ("sketch", 0.5)
    ]
    assert mgr.row(row.digest).compute_share is None


def test_rejection_pays_nothing_quarantines_and_queues_one_slash(mgr: ManagerSide) -> None:
    good, bad = mgr.submit(LIAR), mgr.submit(LIAR)
    mgr.judge(good)
    mgr.judge(bad, Reason.WRONG_ACTIVATIONS)
    assert mgr.node_status(LIAR.address) == "quarantined"
    [slash] = rows(mgr, schema.slashes)
    assert (slash["status"], int(slash["amount"])) == ("queued", RUN.slash_amount)
    assert slash["validator"] == VALIDATOR.address
    [credit] = rows(mgr, schema.credits)
    assert credit["status"] == "held", "what was earned in the day up to the bad file waits"


def test_a_file_that_is_not_kept_yet_waits_for_a_later_batch(mgr: ManagerSide) -> None:
    """It was judged where it was uploaded; the trainer would end over a file that is nowhere."""
    first, *others = [mgr.submit(HONEST) for _ in range(3)]
    for row in (first, *others):
        mgr.judge(row)
    data = mgr.objects.get(digest_key(first.sha256), 1 << 20)
    mgr.objects.delete(digest_key(first.sha256))
    assert seal(mgr) == [0]
    taken = {g["submission_digest"] for g in rows(mgr, schema.groups) if g["batch_step"] == 0}
    assert taken == {row.digest for row in others}
    assert seal(mgr) == [], "three groups are left, two of them of the file that is not kept"
    mgr.objects.put(digest_key(first.sha256), data)
    assert seal(mgr) == [1]


def test_a_void_file_costs_no_account_anything(mgr: ManagerSide) -> None:
    row = mgr.submit(HONEST)
    mgr.judge(row, Reason.MALFORMED)
    assert mgr.row(row.digest).status == "void"
    assert mgr.node_status(HONEST.address) == "active"
    assert rows(mgr, schema.credits) == rows(mgr, schema.slashes) == []


def test_batches_are_sealed_in_order_near_the_policy_and_leave_out_equal_rewards(
    mgr: ManagerSide,
) -> None:
    for _ in range(5):  # 2 informative groups each, 3 to a batch
        mgr.judge(mgr.submit(HONEST))
    mgr.judge(mgr.submit(HONEST), rewards=(7, 7, 9, 9))
    assert seal(mgr) == [0, 1, 2]
    assert seal(mgr) == []
    taken = [(g["submission_digest"], g["group_no"]) for g in rows(mgr, schema.groups)]
    in_batches = []
    with mgr.store.read() as connection:
        for step in range(3):
            row = store_batches.get(connection, step)
            assert row is not None
            batch = row.signed()
            statement = batch.manifest.statement()
            signer = statement.recover(mgr.context.domain(statement), batch.signature)
            assert signer == MANAGER.address
            assert mgr.objects.get(digest_key(row.digest), 1 << 20) == batch.manifest.canonical()
            assert row.staleness_max <= RUN.max_staleness
            in_batches += [(f.submission_digest, g) for f in batch.manifest.files for g in f.groups]
    assert len(in_batches) == len(set(in_batches)) == 9
    assert set(in_batches) <= set(taken)
    marked = [g for g in rows(mgr, schema.groups) if g["batch_step"] is not None]
    assert len(marked) == 9
    assert all(g["informative"] for g in marked)


def test_a_file_that_is_withdrawn_while_a_batch_is_sealed_stays_out_of_it(
    mgr: ManagerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [mgr.submit(HONEST) for _ in range(2)]  # 2 informative groups each, 3 to a batch
    for row in files:
        mgr.judge(row)
    put_object = batches_module.put_object

    def withdraw(objects: ObjectStore, content: bytes) -> Digest:
        with mgr.store.begin() as connection:
            assert reviews.withdraw(connection, mgr.context, mgr.row(files[0].digest))
        return put_object(objects, content)

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(batches_module, "put_object", withdraw)
        assert seal(mgr) == []
    assert rows(mgr, schema.batches) == []
    assert {g["submission_digest"] for g in rows(mgr, schema.groups)} == {files[1].digest}
    mgr.judge(mgr.submit(HONEST))
    assert seal(mgr) == [0]


def test_no_step_is_sealed_beyond_the_allowed_staleness(mgr: ManagerSide) -> None:
    for _ in range(8):
        mgr.judge(mgr.submit(HONEST))
    assert seal(mgr) == [0, 1, 2]  # policy 0 + staleness 2
    mgr.publish(1)
    assert seal(mgr) == [], "what is left is of policy 0 and too old for step 3"
    for _ in range(2):
        mgr.judge(mgr.submit(HONEST, step=3, version=1))
    assert seal(mgr) == [3]


def test_a_kill_between_manifest_and_transaction_loses_and_repeats_nothing(
    mgr: ManagerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        mgr.judge(mgr.submit(HONEST))

    def die(*_: object) -> None:
        os._exit(9)

    monkeypatch.setattr(batches_module, "_write", die)
    mgr.store.close()
    assert in_child(seal, mgr) == 9
    monkeypatch.undo()
    orphans = set(mgr.objects.keys("sha256/"))
    assert rows(mgr, schema.batches) == []
    assert seal(mgr) == [0]
    assert set(mgr.objects.keys("sha256/")) == orphans, "the same manifest, to the byte"


def test_a_kill_between_leaves_object_and_transaction_posts_the_same_root(
    mgr: ManagerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = [mgr.submit(HONEST).digest for _ in range(3)]

    def die(*_: object) -> None:
        os._exit(9)

    monkeypatch.setattr(roots_module, "_write", die)
    mgr.store.close()
    assert in_child(post_roots, mgr.store, mgr.objects, mgr.context, mgr.now) == 9
    monkeypatch.undo()
    assert rows(mgr, schema.intents) == []
    [root] = post_roots(mgr.store, mgr.objects, mgr.context, mgr.now)
    assert root == encoding.merkle_root(digests), "in the order of arrival"
    [row] = rows(mgr, schema.roots)
    leaves = decode_leaves(mgr.objects.get(digest_key(row["leaves_object"]), 1 << 20))
    named = [leaf.submission.digest(mgr.context.domain(leaf.submission)) for leaf in leaves]
    assert named == digests
    [intent] = rows(mgr, schema.intents)
    assert intent["id"] == f"root:{root}"


def test_a_kill_before_the_verdict_commits_leaves_the_file_to_be_judged_again(
    mgr: ManagerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = mgr.submit(HONEST)

    def die(*_: object) -> None:
        os._exit(9)

    monkeypatch.setattr(judging, "_credit", die)
    job = mgr.bench.claim()
    assert job is not None
    mgr.bench.say(job, Reason.NONE, mgr.table_rows())
    mgr.store.close()
    assert in_child(judge_of(mgr.backend).tick) == 9
    monkeypatch.undo()
    assert mgr.row(row.digest).status == "submitted"
    assert judge_of(mgr.backend).tick() == [row.digest]
    assert len(rows(mgr, schema.credits)) == 1


def test_roots_are_posted_by_number_or_by_age(mgr: ManagerSide) -> None:
    def post() -> int:
        return len(post_roots(mgr.store, mgr.objects, mgr.context, mgr.now))

    mgr.submit(HONEST)
    assert post() == 0
    mgr.now.time += RUN.root_seconds
    assert post() == 1
    for _ in range(4):
        mgr.submit(HONEST)
    assert post() == 1, "three make a root; the fourth waits"
    mgr.now.time += RUN.root_seconds
    assert post() == 1
    assert post() == 0
