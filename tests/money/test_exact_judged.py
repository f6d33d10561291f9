"""Verdicts on files of exact leases: what a mismatch costs in a class that is proven, and in one
that is not."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'prime-open[torch]'")

from judges import Bench, appoint, arm, bench, judge_of
from judging_kit import HONEST, LIAR, MODEL, JudgedPool, Make, StoreReader, small_run
from money_kit import VALIDATOR, key
from typer.testing import CliRunner

from prime_core.ids import Digest
from prime_core.messages import ClassRequest, LeaseRequest
from prime_core.run import RunDefinition
from prime_core.task import SignedLease
from prime_core.validator_messages import ClassList, ExactClass, Job, ReleaseRequest
from prime_core.verdict import Outcome, Reason, VerdictTable
from prime_engine.plain import PlainEngine
from prime_engine.variants import VARIANTS
from prime_orchestrator.api import classes, leasing
from prime_orchestrator.api import validators as api
from prime_orchestrator.cli.classes import app
from prime_orchestrator.manager import reviews
from prime_orchestrator.manager.judging import Judgement, by_statistics, enough
from prime_orchestrator.store import exact_classes, jobs, leases, nodes, opinions, schema
from prime_orchestrator.store.submissions import SubmissionRow
from prime_verify import build
from prime_verify.audit import audit_slash
from prime_verify.engines import FolderEngines, load_engine
from prime_verify.finding import Finding
from prime_verify.proofs.sampling_torch import gumbel
from prime_verify.proofs.thresholds import Calibration, ProvenClass, load, shipped
from prime_verify.rollout_file import write_rollout_file

SECOND, THIRD = key(70), key(71)


@cache
def _class_key() -> Digest:
    import torch

    torch.set_num_threads(1)
    return load_engine(MODEL).numeric_class().key


@cache
def _proven() -> Calibration:
    one = ProvenClass(key=_class_key(), rows=10_000, providers=3, longest=64)
    return shipped().model_copy(update={"proven": (one,)})


@pytest.fixture
def calibration(request: pytest.FixtureRequest) -> Calibration | None:
    return _proven() if getattr(request, "param", "") == "proven" else None


@pytest.fixture
def panel_run(calibration: Calibration | None) -> RunDefinition:
    run = small_run()
    named = {} if calibration is None else {"calibration": calibration.digest()}
    return run.model_copy(update={"replay_rows_micro": 250_000} | named)


@pytest.fixture
def exact(panel: JudgedPool, calibration: Calibration | None) -> ExactPool:
    return ExactPool(panel, calibration)


class ExactPool:
    """A pool with three validators, whose leases are in the exact class of its honest engine."""

    def __init__(self, panel: JudgedPool, calibration: Calibration | None) -> None:
        self.panel = panel
        self.calibration = calibration
        backend = panel.mgr.backend
        engine = panel.engines.engine(0, panel.engines.digest(0))
        self.numeric = engine.numeric_class()
        self.validators = [
            panel.validator,
            *(
                bench(backend, one, panel.mgr.folder, seed=int(one.address[:10], 16))
                for one in (SECOND, THIRD)
            ),
        ]
        for one in self.validators:
            arm(one, panel.policies, panel.engines, calibration)
            assert one.claim() is None

    def announce(self, *validators: Bench) -> None:
        """These validators are of the class."""
        one = ExactClass(facts=dict(self.numeric.facts), fingerprint=self.numeric.fingerprint)
        policy = self.panel.engines.digest(0)
        listed = ClassList(policy_version=0, policy_digest=policy, classes=(one,))
        for validator in validators:
            classes.announce_all(self.panel.mgr.backend, validator.signer.address, listed)

    def submit(self, make: Make, node: Any = LIAR) -> SubmissionRow:
        return self.panel.mgr.submit(node, make=make, numeric_class=self.numeric.digest())

    def leased(self) -> Digest | None:
        """The class of a lease that a node gets now. It is deleted: a node holds one at a time."""
        mgr = self.panel.mgr
        mgr.bench.draws.prepare()
        answer = leasing.lease(mgr.backend, HONEST.address, LeaseRequest(policy_version=0))
        assert answer.lease is not None, answer.reason
        with mgr.store.begin() as connection:
            connection.execute(schema.leases.delete())
        return answer.lease.numeric_class()

    def judge(self, row: SubmissionRow) -> SubmissionRow:
        """Validators judge until there is a verdict, or none of them has anything to do."""
        while any(one.judge_next() for one in self.validators):
            pass
        return self.panel.mgr.row(row.digest)

    def proved_by(self, variant: str) -> Make:
        """A file that is decoded honestly and proved with the weights of `variant`."""

        def make(signed: SignedLease, lease_digest: Digest) -> bytes:
            run, environment = self.panel.mgr.context.run, self.panel.environment
            honest = self.panel.engines.engine(0, signed.lease.policy_digest)
            liar = PlainEngine(
                self.panel.policies / "0", noise=gumbel, dtype="float32", prepare=VARIANTS[variant]
            )
            plan = build.plan_rows(
                signed.lease, lease_digest, run, environment, honest.tokenizer, signed.opening
            )
            made, proofs = build.generate_proved(lease_digest, plan, run, honest)
            made, digests = build.prove_exactly(lease_digest, plan, run, liar, made)
            rewards = build.grade_rows(plan, made, environment, honest.tokenizer)
            rows = build.assemble_rows(signed, plan, made, rewards, proofs, digests)
            named = signed.numeric_class()
            return write_rollout_file(rows, build.metadata_of(lease_digest, honest, run, named))

        return make

    def opinions_by(self, row: SubmissionRow) -> set[str]:
        with self.panel.mgr.store.read() as connection:
            return {one.validator for one in jobs.assignments(connection, row.digest)}

    def records(self) -> dict[str, tuple[int, int, bool]]:
        """Node → (files, mismatched files, whether rows count toward a proof)."""
        with self.panel.mgr.store.read() as connection:
            found = connection.execute(schema.class_records.select()).mappings().all()
            rows = connection.execute(schema.class_rows.select()).mappings().all()
        assert {row["key"] for row in (*found, *rows)} <= {self.numeric.key}
        equal = {row["node"] for row in rows if row["rows"] > 0}
        return {
            row["node"]: (row["files"], row["mismatched"], row["node"] in equal) for row in found
        }


def _slashes(panel: JudgedPool) -> int:
    with panel.mgr.store.read() as connection:
        return len(connection.execute(schema.slashes.select()).all())


@pytest.mark.slow
def test_a_mismatch_in_an_unproven_class_accuses_no_one(exact: ExactPool) -> None:
    exact.announce(*exact.validators)
    panel = exact.panel
    good = exact.judge(exact.submit(panel.honest, HONEST))
    assert good.status == "accepted"
    assert exact.records() == {HONEST.address: (1, 0, True)}
    with panel.mgr.store.begin() as connection:  # as after a review
        assert reviews.withdraw(connection, panel.mgr.context, good)
        opinions.forget(connection, good.digest)
        assert jobs.reopen(connection, good.digest)
    assert exact.judge(good).status == "accepted"
    assert exact.records() == {HONEST.address: (1, 0, True)}, "it counts once"
    bad = exact.judge(exact.submit(exact.proved_by("old1_1e6")))
    assert (bad.status, bad.reason) == ("void", Reason.UNPROVEN_MISMATCH)
    assert _slashes(panel) == 0
    assert panel.mgr.node_status(LIAR.address) == "active"
    assert exact.records() == {HONEST.address: (1, 0, True), LIAR.address: (1, 1, False)}


@pytest.mark.slow
@pytest.mark.parametrize("calibration", ["proven"], indirect=True)
def test_a_mismatch_in_a_proven_class_rejects_and_an_audit_matches(
    exact: ExactPool, calibration: Calibration
) -> None:
    exact.announce(*exact.validators)
    panel = exact.panel
    assert exact.judge(exact.submit(panel.honest, HONEST)).status == "accepted"
    bad = exact.judge(exact.submit(exact.proved_by("old1_1e6")))
    assert (bad.status, bad.reason) == ("rejected", Reason.WRONG_PROOF_PASS)
    assert _slashes(panel) == 1
    assert exact.records()[LIAR.address] == (1, 1, False)
    assert exact.records()[HONEST.address] == (1, 0, True)

    author = panel.evidence(bad).validator
    setting = replace(panel.setting(), calibration=calibration, validators=frozenset({author}))
    library = StoreReader(panel.mgr)
    assert audit_slash(panel.slash(bad), setting, library).result == "match"
    elsewhere = replace(setting, engines=FolderEngines(panel.policies, _with_other_facts))
    found = audit_slash(panel.slash(bad), elsewhere, library)
    assert found.result == "cannot tell"
    assert "threads 1" in found.detail, "it says which machine could repeat it"


def _with_other_facts(folder: Any) -> Any:
    engine = load_engine(folder)
    facts = dict(engine.facts()) | {"threads": "64"}
    engine.facts = lambda: facts
    return engine


def test_one_validator_cannot_void_a_file_by_a_mismatch_that_it_makes_up(
    exact: ExactPool,
) -> None:
    """No one can see it in the bytes, so it takes two, as a rejection does."""
    exact.announce(*exact.validators)
    row = exact.submit(exact.panel.honest, HONEST)
    liar, job = _claimed(exact, row)
    liar.say(job, Reason.UNPROVEN_MISMATCH)
    judge_of(exact.panel.mgr.backend).tick()
    assert exact.panel.mgr.row(row.digest).status == "submitted"
    assert exact.judge(row).status == "accepted"


def _claimed(exact: ExactPool, row: SubmissionRow) -> tuple[Bench, Job]:
    for one in exact.validators:
        if (job := one.claim()) is not None:
            assert job.submission_digest == row.digest
            return one, job
    raise AssertionError("no validator was assigned the file")


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ([Outcome.VOID], False),
        ([Outcome.VOID, Outcome.VOID], True),
        ([Outcome.VOID, Outcome.ACCEPTED], False),
    ],
)
def test_how_many_must_have_seen_a_mismatch(said: list[Outcome], expected: bool) -> None:
    assert enough(Outcome.VOID, said, 2, 1, Reason.UNPROVEN_MISMATCH, quorum=2) is expected
    talks = enough(Outcome.VOID, said, 2, 1, Reason.WRONG_ROWS, quorum=2, conversation=True)
    assert talks is expected
    assert enough(Outcome.VOID, said[:1], 2, 1, Reason.WRONG_ROWS, quorum=2)
    assert enough(Outcome.VOID, [Outcome.VOID], 1, 1, Reason.UNPROVEN_MISMATCH, quorum=2)
    assert enough(Outcome.VOID, [Outcome.VOID], 2, 1, Reason.MALFORMED, quorum=2)


@pytest.mark.slow
def test_files_of_an_exact_lease_go_to_validators_of_its_class(
    exact: ExactPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While any is live: the others would find nothing, and overrule those that do."""
    monkeypatch.setattr(api, "OUTSIDE_ONE_IN", 1 << 255)
    monkeypatch.setattr(api, "AGAIN_ONE_IN", 1 << 255)
    exact.announce(*exact.validators[1:])
    able = {one.signer.address for one in exact.validators[1:]}
    rows = [exact.submit(exact.panel.honest, HONEST) for _ in range(6)]
    for row in rows:
        exact.judge(row)
        assert exact.opinions_by(row) <= able
    bad = exact.judge(exact.submit(exact.proved_by("old1_1e6")))
    assert bad.reason == Reason.UNPROVEN_MISMATCH
    assert exact.opinions_by(bad) == able
    plain = [exact.panel.mgr.submit(HONEST, make=exact.panel.honest) for _ in range(12)]
    asked = set().union(*(exact.opinions_by(exact.judge(row)) for row in plain))
    assert VALIDATOR.address in asked, "other files go to all"


@pytest.mark.slow
@pytest.mark.parametrize("outside", [1, 1 << 255])
def test_one_of_two_that_judge_a_file_is_not_of_its_class(
    exact: ExactPool, monkeypatch: pytest.MonkeyPatch, outside: int
) -> None:
    """Two validators of a class that collude are not each other's only check. A mismatch still goes
    to those that can see it."""
    monkeypatch.setattr(api, "OUTSIDE_ONE_IN", outside)
    monkeypatch.setattr(api, "AGAIN_ONE_IN", 1)
    exact.announce(*exact.validators[1:])
    able = {one.signer.address for one in exact.validators[1:]}
    blind = FolderEngines(exact.panel.policies, _with_other_facts)
    arm(exact.validators[0], exact.panel.policies, blind, exact.calibration)
    for _ in range(8):
        row = exact.judge(exact.submit(exact.panel.honest, HONEST))
        assert row.status == "accepted"
        asked = exact.opinions_by(row)
        assert len(asked) == 2
        assert VALIDATOR.address in asked
    bad = exact.judge(exact.submit(exact.proved_by("old1_1e6")))
    assert bad.reason == Reason.UNPROVEN_MISMATCH
    assert exact.opinions_by(bad) == able | {VALIDATOR.address}


def test_a_member_of_the_class_that_has_gone_is_checked_by_another_than_a_member(
    exact: ExactPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "OUTSIDE_ONE_IN", 1 << 255)
    monkeypatch.setattr(api, "AGAIN_ONE_IN", 1 << 255)
    exact.announce(*exact.validators[1:])
    backend = exact.panel.mgr.backend
    row = exact.judge(exact.submit(exact.panel.honest, HONEST))
    (first,) = exact.opinions_by(row)
    assert first != VALIDATOR.address
    with backend.store.begin() as connection:
        jobs.change(connection, row.digest, status="open", needed=2)
        gone = schema.validators.c.address == first
        connection.execute(schema.validators.update().where(gone).values(seen_at=0.0))
        able = {one.signer.address for one in exact.validators} - {first}
        api.assign_files(connection, backend, backend.now(), [row.digest], {first, *able}, able)
    assert exact.opinions_by(row) == {first, VALIDATOR.address}


def test_a_file_that_no_one_else_can_judge_is_paid_by_statistics(
    exact: ExactPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two validators one is of the class: its mismatch alone voids nothing, and the file does
    not stay without a verdict."""
    monkeypatch.setattr(api, "AGAIN_ONE_IN", 1)
    exact.announce(exact.validators[0])
    blind = FolderEngines(exact.panel.policies, _with_other_facts)
    arm(exact.validators[1], exact.panel.policies, blind, exact.calibration)
    backend = exact.panel.mgr.backend
    appoint(backend.store, backend.context.pool, THIRD.address, on=False)
    row = exact.submit(exact.proved_by("old1_1e6"))
    while any(one.judge_next() for one in exact.validators[:2]):
        pass
    assert exact.panel.mgr.row(row.digest).status == "accepted"
    assert exact.opinions_by(row) == {VALIDATOR.address, SECOND.address}
    assert exact.records() == {}


@pytest.mark.slow
def test_a_file_is_decided_when_the_last_validator_left_for_it_abstains(
    exact: ExactPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One states a mismatch, one could not look for it, and the third has no policy."""
    monkeypatch.setattr(api, "AGAIN_ONE_IN", 1)
    exact.announce(exact.validators[0])
    blind = FolderEngines(exact.panel.policies, _with_other_facts)
    arm(exact.validators[1], exact.panel.policies, blind, exact.calibration)
    backend, third = exact.panel.mgr.backend, exact.validators[2]
    row = exact.submit(exact.proved_by("old1_1e6"))
    with backend.store.begin() as connection:
        jobs.note_validators(connection, [THIRD.address], 0.0)  # not seen for long
    while any(one.judge_next() for one in exact.validators[:2]):
        pass
    assert exact.panel.mgr.row(row.digest).status == "submitted", "the third is asked"
    job = third.claim()
    assert job is not None
    request = ReleaseRequest(
        worker="kit", submission=job.submission_digest, kind="abstain",
        reason=int(Reason.POLICY_MISSING), detail="",
    )  # fmt: skip
    api.release(backend, THIRD.address, request)
    assert exact.judge(row).status == "accepted"


def _said(outcome: Outcome, reason: Reason, *, compared: int, mismatches: bool) -> Judgement:
    stated: Any = SimpleNamespace(
        outcome=outcome, reason=reason, exact_rows=compared, mismatches=mismatches
    )
    return cast(Judgement, stated)


def test_a_mismatch_is_overruled_only_alone_and_only_by_those_that_could_not_look_for_it() -> None:
    void = _said(Outcome.VOID, Reason.UNPROVEN_MISMATCH, compared=4, mismatches=True)
    rejected = _said(Outcome.REJECTED, Reason.WRONG_PROOF_PASS, compared=4, mismatches=True)
    other = _said(Outcome.REJECTED, Reason.TAMPERED_REWARD, compared=0, mismatches=False)
    blind = _said(Outcome.ACCEPTED, Reason.NONE, compared=0, mismatches=False)
    equal = _said(Outcome.ACCEPTED, Reason.NONE, compared=4, mismatches=False)
    assert by_statistics([void, blind]) is blind
    assert by_statistics([blind, rejected]) is blind
    assert by_statistics([void, equal]) is None, "machines of the class disagree"
    assert by_statistics([void, rejected, blind]) is None
    assert by_statistics([other, blind]) is None
    assert by_statistics([void, other, blind]) is None
    assert by_statistics([void]) is None


@pytest.mark.slow
def test_some_files_of_an_exact_lease_go_to_any_validator(
    exact: ExactPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node and two validators that announce a class of their own are not among themselves. A
    mismatch that one states is still looked for by one that can see it."""
    monkeypatch.setattr(api, "OUTSIDE_ONE_IN", 1)
    exact.announce(*exact.validators[1:])
    able = {one.signer.address for one in exact.validators[1:]}
    rows = [exact.judge(exact.submit(exact.panel.honest, HONEST)) for _ in range(12)]
    assert VALIDATOR.address in set().union(*map(exact.opinions_by, rows))
    assert {row.status for row in rows} == {"accepted"}
    lie, reasons = exact.proved_by("old1_1e6"), list[int]()
    with monkeypatch.context() as patch:
        patch.setattr(api, "AGAIN_ONE_IN", 1 << 255)
        blind = FolderEngines(exact.panel.policies, _with_other_facts)
        arm(exact.validators[0], exact.panel.policies, blind, exact.calibration)
        for _ in range(6):
            row = exact.judge(exact.submit(lie))
            reasons.append(row.reason)
            first_was_blind = exact.opinions_by(row) == {VALIDATOR.address}
            assert first_was_blind or exact.opinions_by(row) == able
            assert (row.status == "accepted") == first_was_blind
    assert Reason.UNPROVEN_MISMATCH in reasons


@pytest.mark.slow
def test_a_validator_counts_rows_of_a_class_only_if_it_is_of_it_and_never_more_than_it_drew(
    exact: ExactPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact.announce(*exact.validators)
    stated = {"value": ""}
    table_of = Finding.verdict_table

    def lying(self: Finding, *given: Any) -> VerdictTable:
        table = table_of(self, *given)
        numbers = table.statistics | {"exact_rows": stated["value"]}
        return table.model_copy(update={"statistics": numbers})

    monkeypatch.setattr(Finding, "verdict_table", lying)
    for value in ("inf", "nan", "-1", "1e300", "9"):
        stated["value"] = value
        assert exact.judge(exact.submit(exact.panel.honest, HONEST)).status == "accepted"
    assert exact.records() == {}
    stated["value"] = "4"
    for one in exact.validators:
        with exact.panel.mgr.store.begin() as connection:
            exact_classes.join(connection, one.signer.address, 0, [], now=0.0, oldest=0)
    assert exact.judge(exact.submit(exact.panel.honest, HONEST)).status == "accepted"
    assert exact.records() == {}


@pytest.mark.slow
def test_a_mismatch_is_judged_by_statistics_where_no_second_machine_of_the_class_is_left(
    exact: ExactPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One machine alone neither voids nor rejects; the file is paid."""
    monkeypatch.setattr(api, "OUTSIDE_ONE_IN", 1 << 255)
    exact.announce(exact.validators[0])
    others = FolderEngines(exact.panel.policies, _with_other_facts)
    for one in exact.validators[1:]:
        arm(one, exact.panel.policies, others, exact.calibration)
    row = exact.judge(exact.submit(exact.proved_by("old1_1e6")))
    assert row.status == "accepted"
    assert exact.opinions_by(row) == {one.signer.address for one in exact.validators}


@pytest.mark.slow
def test_later_files_of_a_node_with_frequent_mismatches_are_replayed_whole(
    exact: ExactPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "AGAIN_ONE_IN", 1 << 255)  # one opinion voids
    exact.announce(*exact.validators)
    panel = exact.panel

    def rows_asked() -> int:
        """Rows to replay of the node's next file, whose lease names no class."""
        row = panel.mgr.submit(LIAR, make=panel.honest)
        judge, job = _claimed(exact, row)
        judge.say(job, Reason.MALFORMED)
        judge_of(panel.mgr.backend).tick()
        assert panel.mgr.row(row.digest).status == "void"
        return job.rows

    assert rows_asked() == 4, "a quarter of the rows, doubled for a newcomer"
    lie = exact.proved_by("old1_1e6")
    assert exact.judge(exact.submit(lie)).status == "void"
    assert rows_asked() == 4, "one mismatch may be the class's own"
    assert exact.judge(exact.submit(lie)).status == "void"
    assert exact.records()[LIAR.address] == (2, 2, False)
    assert rows_asked() == 8
    with panel.mgr.store.begin() as connection:
        for _ in range(9):  # a class in which a third of another node's files mismatch
            for mismatched in (True, False, False):
                exact_classes.judged(
                    connection, exact.numeric.key, HONEST.address, validator=VALIDATOR.address,
                    rows=4, longest=9, mismatched=mismatched, explained=False, now=1.0,
                )  # fmt: skip
    assert rows_asked() == 8, "two of two are far more than nine of 27"
    with panel.mgr.store.begin() as connection:
        for _ in range(10):
            exact_classes.judged(
                connection, exact.numeric.key, LIAR.address, validator=VALIDATOR.address, rows=4,
                longest=9, mismatched=False, explained=False, now=1.0,
            )  # fmt: skip
    assert rows_asked() == 4, "two of twelve are not"


def test_a_proven_class_is_written_into_a_calibration(exact: ExactPool, tmp_path: Path) -> None:
    exact.announce(*exact.validators)
    mgr, run = exact.panel.mgr, tmp_path / "run.json"
    run.write_bytes(mgr.context.run.raw())
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    before.write_bytes(shipped().canonical())
    longest = mgr.context.run.max_output_tokens

    def judged(node: int, rows: int, longest: int = 9, *, mismatched: bool = False) -> None:
        """Each of two validators compared so many rows."""
        with mgr.store.begin() as connection:
            for author in exact.validators[:2]:
                exact_classes.judged(
                    connection, exact.numeric.key, key(80 + node).address,
                    validator=author.signer.address, rows=rows, longest=longest,
                    mismatched=mismatched, explained=False, now=1.0,
                )  # fmt: skip

    def lacking() -> list[str]:
        arguments = ["--run", str(run), "--data", str(mgr.folder), "--database", mgr.url]
        arguments += ["--keep", str(before), "--out", str(after), "--json"]
        answer = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert answer.exit_code == 0, answer.output
        (one,) = json.loads(answer.stdout)["classes"]
        assert one["key"] == exact.numeric.key
        assert one["facts"] == exact.numeric.facts
        made = load(after)
        assert made.proven_to(exact.numeric.key) == (0 if one["lacking"] else longest)
        assert made.setups == shipped().setups
        return list(one["lacking"])

    for number in range(8):
        mgr.admit(key(80 + number))
        with mgr.store.begin() as connection:
            owner = key(90 + max(number, 1)).address  # the first two are of one provider
            address = schema.nodes.c.address == key(80 + number).address
            connection.execute(schema.nodes.update().where(address).values(provider=owner))
    judged(0, 7_000, longest - 1)
    judged(1, 1_000, longest - 1)
    row = f"a row of {longest} tokens"
    assert lacking() == ["2000 more rows", "2 more providers", row]
    judged(2, 1_000, longest)
    judged(3, 999)
    assert lacking() == ["1 more rows", "1 more providers"]
    judged(3, 1)
    assert lacking() == []
    judged(4, 4, mismatched=True)
    assert lacking() == ["10000 more rows"], "one provider differed"
    judged(4, 50_000, mismatched=False)
    judged(4, 4, mismatched=True)
    assert lacking() == ["10000 more rows"], "it counts once, and its equal rows do not"
    judged(2, 10_000)
    assert lacking() == []
    judged(5, 4, mismatched=True)
    judged(2, 10_000)
    assert lacking() == ["3 more providers"], "two of five differed"
    for number in (6, 7):
        judged(number, 1_000)
    assert lacking() == ["1 more providers"]


def test_leases_name_a_class_only_if_two_live_validators_of_several_announced_it(
    exact: ExactPool,
) -> None:
    """A rejection takes two."""
    backend, policy = exact.panel.mgr.backend, exact.panel.engines.digest(0)
    question = ClassRequest(policy_version=0, policy_digest=policy, facts=dict(exact.numeric.facts))
    announced = question.model_copy(update={"fingerprint": exact.numeric.fingerprint})

    def wanted(request: ClassRequest) -> bool:
        return classes.announce(backend, HONEST.address, request).wanted

    exact.announce(exact.validators[0])
    assert [wanted(question), wanted(announced)] == [False, False]
    assert exact.leased() is None
    exact.announce(exact.validators[1])
    assert [wanted(question), wanted(announced)] == [True, True]
    assert exact.leased() == exact.numeric.digest()
    assert wanted(question), "a worker starts again"
    assert exact.leased() is None, "until it has announced its class again"


@pytest.mark.parametrize("differs", ["facts", "fingerprint"])
def test_a_worker_that_starts_in_another_class_is_freed_of_a_lease_that_it_cannot_fulfil(
    exact: ExactPool, differs: str
) -> None:
    """Once a day, without a record; the groups go to another provider."""
    mgr, policy = exact.panel.mgr, exact.panel.engines.digest(0)
    exact.announce(*exact.validators)
    mgr.bench.draws.prepare()

    def ask(facts: dict[str, str], fingerprint: str | None = None) -> None:
        question = ClassRequest(
            policy_version=0, policy_digest=policy, facts=facts, fingerprint=fingerprint
        )
        classes.announce(mgr.backend, HONEST.address, question)

    def leased() -> SignedLease:
        answer = leasing.lease(mgr.backend, HONEST.address, LeaseRequest(policy_version=0))
        assert answer.lease is not None, answer.reason
        return answer.lease

    same = dict(exact.numeric.facts)

    def ask_as_another() -> None:
        if differs == "facts":
            ask(same | {"threads": "64"})
        else:
            ask(same)
            ask(same, "0x" + "ab" * 32)

    ask(same, exact.numeric.fingerprint)
    held = leased()
    assert held.numeric_class() == exact.numeric.digest()
    ask(same)
    assert leased() == held, "a worker of the same facts goes on with it"
    ask_as_another()
    after = leased()
    assert after.lease.index != held.lease.index
    assert after.numeric_class() is None
    with mgr.store.read() as connection:
        node = nodes.get(connection, HONEST.address)
        again = leases.to_issue_again(connection, [], since=0.0, tries=2)
    assert node is not None
    assert (node.missed, node.misses, node.rests_until) == (0, 0, 0)
    assert [row.digest for row in again] == [held.lease.digest(mgr.context.domain(held.lease))]
    ask_as_another()
    assert leased() == after, "it names no class"

    with mgr.store.begin() as connection:
        connection.execute(schema.leases.delete().where(schema.leases.c.status == "open"))
    ask(same, exact.numeric.fingerprint)
    second = leased()
    assert second.numeric_class() == exact.numeric.digest()
    ask_as_another()
    assert leased() == second, "not twice in a day"


def test_a_dismissed_validator_holds_no_class(exact: ExactPool) -> None:
    """It was live a moment ago; new draw lists do not name it."""
    mgr, policy = exact.panel.mgr, exact.panel.engines.digest(0)
    exact.announce(*exact.validators[:2])
    announced = ClassRequest(
        policy_version=0, policy_digest=policy, facts=dict(exact.numeric.facts),
        fingerprint=exact.numeric.fingerprint,
    )  # fmt: skip
    assert classes.announce(mgr.backend, HONEST.address, announced).wanted
    mgr.bench.draws.prepare()
    appoint(mgr.store, mgr.context.pool, SECOND.address, on=False)
    answer = leasing.lease(mgr.backend, HONEST.address, LeaseRequest(policy_version=0))
    assert answer.lease is not None, answer.reason
    assert answer.lease.numeric_class() is None
