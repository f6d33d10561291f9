"""The validator with the real model and checks: verdicts, abstentions, draws, and their audits."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa

pytest.importorskip("torch", reason="needs torch: pip install 'prime-open[torch]'")

from judges import judge_of
from judging_kit import HONEST, LIAR, JudgedPool, Make, StoreReader, small_run
from money_kit import TRAINER, VALIDATOR, key
from test_audit_export import Published

from prime_broadcast.folder import PolicyFolder
from prime_broadcast.manifest import Trust
from prime_broadcast.pool import Policies
from prime_broadcast.sources import SourceBook
from prime_chain.history import Slash
from prime_core import encoding
from prime_core.checkpoint import PolicyStatement
from prime_core.errors import (
    FatalError,
    MalformedError,
    NotFoundError,
    PrimeError,
    UnavailableError,
    UntrustedError,
)
from prime_core.ids import ZERO_DIGEST, Address, Digest
from prime_core.logs import fields
from prime_core.loops import Loops
from prime_core.messages import ReceiptAnswer
from prime_core.rollout import Receipt
from prime_core.run import RunDefinition
from prime_core.seeds import drawn_rows
from prime_core.storage.base import ObjectStore, digest_key, put_object
from prime_core.task import SignedLease, shadow_pool
from prime_core.validator_messages import Job
from prime_core.verdict import Evidence, Reason, Verdict, VerdictTable
from prime_engine.variants import VARIANTS
from prime_envs.base import Problem, TaskScore
from prime_envs.environments.reverse import Reverse
from prime_orchestrator.api.validators import CLAIM_SECONDS, LOST_SECONDS, MAX_ATTEMPTS
from prime_orchestrator.context import read_object
from prime_orchestrator.manager import draws, uncalibrated
from prime_orchestrator.manager.appointments import end_appointments
from prime_orchestrator.manager.draws import compare_acceptances, reveal_second
from prime_orchestrator.store import jobs, leases, schema
from prime_orchestrator.store.submissions import SubmissionRow
from prime_validator import judging
from prime_validator.folder import Folder, Sealed
from prime_validator.judging import LATER_SECONDS, Validator, _AbstainError, _LaterError
from prime_validator.run import PASSING, judge_until
from prime_verify import replay
from prime_verify.audit import audit_slash, audit_submission
from prime_verify.audit_compare import Audit
from prime_verify.build import build_rollout_file
from prime_verify.case import Case
from prime_verify.engines import EngineProvider, FolderEngines, load_engine
from prime_verify.finding import Finding
from prime_verify.proofs.thresholds import STATISTICS
from prime_verify.rollout_file import read_rollout_file, write_rollout_file


def test_an_honest_file_is_accepted_paid_and_grouped(
    panel: JudgedPool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "prime_validator.judging")
    row = panel.judged(panel.honest)
    (logged,) = (one for one in caplog.records if one.name == "prime_validator.judging")
    due = fields(kind="opinion", status="accepted", reason="NONE", **row.about())
    assert vars(logged).items() >= due.items()
    assert (row.status, row.reason) == ("accepted", Reason.NONE)
    assert row.verdict is not None
    assert row.verdict_table is not None
    mgr = panel.mgr
    table = VerdictTable.model_validate_json(
        mgr.objects.get(digest_key(row.verdict_table), 1 << 20)
    )
    assert row.units == sum(r.output_tokens for r in table.rows) > 0
    verdict = Verdict.model_validate_json(mgr.objects.get(digest_key(row.verdict), 9999))
    (signed,) = verdict.opinions
    assert signed.opinion.table == row.verdict_table
    assert set(table.row_statistics) == set(STATISTICS)
    assert {len(values) for values in table.row_statistics.values()} == {len(table.rows_drawn)}
    signed.check(mgr.context.domain(signed.opinion))
    with mgr.store.read() as connection:
        assert len(connection.execute(schema.groups.select()).all()) == 2
    assert panel.validator.judge_next() is None


def test_a_lie_is_rejected_on_evidence_that_an_auditor_replays(
    panel: JudgedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = list[bytes]()
    monkeypatch.setattr(panel.validator.validator, "_hold", held.append)
    panel.judged(panel.honest)
    assert held == [], "an opinion that accuses no node needs no bytes"
    row = panel.judged(panel.tampered, LIAR)
    names = [encoding.sha256(data) for data in held]
    assert [names[0], names[-1], len(names)] == [row.sha256, row.evidence, 3]
    with panel.mgr.store.read() as connection:
        lease = leases.get(connection, row.lease_digest)
    assert lease is not None
    shadow = lease.signed().lease.model_copy(update={"pool": shadow_pool(1)})
    panel.validator.validator._keep_for_strangers(shadow, b"a lie that costs nothing")
    assert len(held) == 3
    assert (row.status, row.reason) == ("rejected", Reason.TAMPERED_REWARD)
    assert panel.mgr.node_status(LIAR.address) == "quarantined"
    evidence = panel.evidence(row)
    assert evidence.validator == VALIDATOR.address
    found = panel.audit(panel.slash(row))
    assert (found.result, found.expected) == ("match", Reason.TAMPERED_REWARD), found


def test_replayed_rows_and_statistics_are_part_of_the_match(panel: JudgedPool) -> None:
    row = panel.judged(panel.forged, LIAR)
    assert row.status == "rejected"
    evidence = panel.evidence(row)
    assert evidence.rows_drawn
    found = panel.audit(panel.slash(row))
    assert found.result == "match", found
    assert found.statistics

    other_rows = tuple(n + 1 for n in evidence.rows_drawn)
    lying = evidence.model_copy(update={"rows_drawn": other_rows})
    assert panel.audit(replaced(panel, row, lying)).result == "mismatch"
    statistics = {n: "123" for n in evidence.statistics if not n.startswith("draw")}
    inflated = evidence.model_copy(update={"statistics": evidence.statistics | statistics})
    assert panel.audit(replaced(panel, row, inflated)).result == "mismatch"
    no_number = evidence.model_copy(update={"statistics": evidence.statistics | {"sketch": "x"}})
    assert panel.audit(replaced(panel, row, no_number)).result == "mismatch"


@pytest.mark.parametrize("lie", ["forged", "tampered"])
def test_how_sure_an_accusation_is_stands_in_its_evidence_and_an_audit_looks_at_it(
    panel: JudgedPool, lie: str
) -> None:
    row = panel.judged(getattr(panel, lie), LIAR)
    evidence = panel.evidence(row)
    by_chance = lie == "forged"
    assert (0 < float(evidence.chance) < 1e-6) if by_chance else evidence.chance == "0"
    found = panel.audit(panel.slash(row))
    assert (found.result, found.statistics["chance"]) == ("match", (evidence.chance,) * 2)
    for said in ("0.01", "0" if by_chance else "1e-15"):
        other = replaced(panel, row, evidence.model_copy(update={"chance": said}))
        assert panel.audit(other).result == "mismatch", said
    unsaid = evidence.model_dump(mode="json", exclude={"chance"})  # as it was before
    raw = put_object(panel.mgr.objects, encoding.canonical_json(unsaid))
    assert panel.audit(panel.slash(row, raw)).result == "match"


def test_statistics_of_single_rows_are_published_and_looked_at_by_an_audit(
    panel: JudgedPool,
) -> None:
    row = panel.judged(panel.forged, LIAR)
    evidence = panel.evidence(row)
    assert set(evidence.row_statistics) == set(STATISTICS)
    assert {len(v) for v in evidence.row_statistics.values()} == {len(evidence.rows_drawn)}
    worst = max(float(value) for value in evidence.row_statistics["logprob_max"])
    assert worst == pytest.approx(float(evidence.statistics["logprob_max"]), rel=1e-4)
    before = panel.audit(panel.slash(row)).notes
    assert not any("statistics" in note for note in before)

    def audited(changed: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
        other = evidence.model_copy(update={"row_statistics": changed})
        found = panel.audit(replaced(panel, row, other))
        assert found.result == "match", "the file's statistics decide"
        assert found.notes[: len(before)] == before
        return found.notes[len(before) :]

    stated = evidence.row_statistics["logprob_max"]
    (note,) = audited(evidence.row_statistics | {"logprob_max": ("99", *stated[1:])})
    assert note == f"statistics of rows {evidence.rows_drawn[0]} differ beyond rounding"
    (note,) = audited({"logprob_max": stated[1:]})
    assert "of other rows" in note


def test_tampering_is_audited_by_the_grader_alone_though_the_validator_replayed_first(
    panel: JudgedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(panel.environment), "may_give_up", True)
    row = panel.judged(panel.tampered, LIAR)
    assert (row.status, row.reason) == ("rejected", Reason.TAMPERED_REWARD)
    assert panel.evidence(row).rows_drawn == ()
    with monkeypatch.context() as nothing_replayed:
        nothing_replayed.setattr(replay, "Replayed", None)
        found = panel.audit(panel.slash(row))
    assert (found.result, found.expected) == ("match", Reason.TAMPERED_REWARD), found


@pytest.fixture
def panel_run() -> RunDefinition:
    """Its tasks get GPUs."""
    run = small_run()
    return run.model_copy(update={"task": run.task.model_copy(update={"gpus": True})})


def on_a_card(make: Make) -> Make:
    """What `make` makes, as a file of a card that was never measured."""

    def made(signed: SignedLease, lease_digest: Digest) -> bytes:
        file = read_rollout_file(make(signed, lease_digest))
        return write_rollout_file(file.rows, replace(file.metadata, device="NVIDIA H200"))

    return made


def test_an_honest_file_of_an_unmeasured_card_is_replayed_whole_and_paid(
    panel: JudgedPool,
) -> None:
    row = panel.judged(on_a_card(panel.honest), HONEST)
    assert (row.status, row.reason) == ("accepted", Reason.NONE)
    assert row.units > 0
    with panel.mgr.store.read() as connection:
        credits = connection.execute(schema.credits.select()).mappings().all()
    assert [(one["submission_digest"], one["units"]) for one in credits] == [
        (row.digest, row.units)
    ]
    table = VerdictTable.model_validate_json(
        panel.mgr.objects.get(digest_key(row.verdict_table or ZERO_DIGEST), 1 << 20)
    )
    assert sorted(table.rows_drawn) == list(range(panel.mgr.context.run.rows_per_lease))
    assert table.setup == "plain/1 float32 NVIDIA H200"


def test_a_lie_on_an_unmeasured_card_is_void_unpaid_and_never_slashed(
    panel: JudgedPool, caplog: pytest.LogCaptureFixture
) -> None:
    """By the same file of a measured processor its node would be slashed."""
    caplog.set_level("INFO")
    row = panel.judged(on_a_card(panel.forged), LIAR)
    assert (row.status, row.reason, row.evidence) == ("void", Reason.UNCALIBRATED, None)
    assert panel.mgr.node_status(LIAR.address) == "active"
    with panel.mgr.store.read() as connection:
        assert connection.execute(schema.credits.select()).first() is None
        assert connection.execute(schema.slashes.select()).first() is None
        assert connection.execute(schema.intents.select()).first() is None
    assert panel.validator.judge_next() is None
    assert "on NVIDIA H200: outside the widest limits, " in caplog.text
    assert panel.judged(panel.forged, LIAR).status == "rejected"


def test_eight_bit_weights_on_an_unmeasured_card_are_bounded_by_the_number_of_tries(
    panel: JudgedPool,
) -> None:
    """Each file is void and unpaid, and its provider gets no more leases for such cards."""
    liar = load_engine(panel.policies / "0", prepare=VARIANTS["int8"])

    def in_eight_bits(signed: SignedLease, lease_digest: Digest) -> bytes:
        run = panel.mgr.context.run
        return build_rollout_file(signed, lease_digest, run, liar, panel.environment)

    for tries in range(1, uncalibrated.OUTSIDE + 1):
        row = panel.judged(on_a_card(in_eight_bits), LIAR)
        assert (row.status, row.reason) == ("void", Reason.UNCALIBRATED)
        with panel.mgr.store.read() as connection:
            found = uncalibrated.failing(connection, [HONEST.address, LIAR.address])
            assert connection.execute(schema.credits.select()).first() is None
            assert connection.execute(schema.slashes.select()).first() is None
        assert found == (LIAR.address if tries == uncalibrated.OUTSIDE else None)
    assert panel.mgr.node_status(LIAR.address) == "active"


def test_one_validator_of_two_cannot_void_a_file_of_an_unmeasured_card(panel: JudgedPool) -> None:
    """Its replay decides, so that the file's bytes alone show no one whether it is right."""
    other = panel.another(key(77))
    row = panel.mgr.submit(LIAR, make=on_a_card(panel.forged))
    judged = [panel.validator.judge_next() or other.judge_next()]
    assert panel.mgr.row(row.digest).status == "submitted"
    judged += [panel.validator.judge_next() or other.judge_next()]
    assert judged == [row.digest, row.digest]
    assert panel.mgr.row(row.digest).status == "void"


def replaced(panel: JudgedPool, row: SubmissionRow, evidence: Evidence) -> Slash:
    """The slash as it would stand with other evidence published."""
    raw = encoding.canonical_json(evidence.model_dump(mode="json"))
    slash = panel.slash(row, put_object(panel.mgr.objects, raw))
    return replace(slash, reason=evidence.reason)


def test_a_slash_of_an_honest_file_is_a_mismatch(panel: JudgedPool) -> None:
    """A validator that makes evidence up is found out by anyone."""
    bad, good = panel.judged(panel.tampered, LIAR), panel.judged(panel.honest)
    template = panel.evidence(bad)
    with panel.mgr.store.read() as connection:
        lease = leases.get(connection, good.lease_digest)
    assert lease is not None
    made_up = template.model_copy(update={"submission": good.signed(), "lease": lease.signed()})
    slash = replace(replaced(panel, good, made_up), node=HONEST.address)
    found = panel.audit(slash)
    assert found.result == "mismatch", found


def test_evidence_of_another_file_or_reason_or_validator_is_a_mismatch(panel: JudgedPool) -> None:
    row = panel.judged(panel.tampered, LIAR)
    evidence, slash = panel.evidence(row), panel.slash(row)
    assert panel.audit(replace(slash, leaf=encoding.sha256(b"x"))).result == "mismatch"
    assert panel.audit(replace(slash, reason=int(Reason.WRONG_SKETCH))).result == "mismatch"
    stranger = evidence.model_copy(update={"validator": key(99).address})
    assert panel.audit(replaced(panel, row, stranger)).result == "mismatch"


def test_an_audit_without_the_file_or_the_policy_cannot_tell(
    panel: JudgedPool, tmp_path: Path
) -> None:
    row = panel.judged(panel.forged, LIAR)
    nowhere = FolderEngines(tmp_path / "none", load_engine)
    setting = replace(panel.setting(), engines=nowhere)
    assert audit_slash(panel.slash(row), setting, StoreReader(panel.mgr)).result == "cannot tell"
    panel.mgr.objects.delete(digest_key(row.sha256))
    assert panel.audit(panel.slash(row)).result == "cannot tell"


def test_a_malformed_file_is_void(panel: JudgedPool) -> None:
    row = panel.judged(lambda signed, digest: b"not parquet")
    assert row.status == "void"
    assert panel.mgr.node_status(HONEST.address) == "active"


class Broken(Reverse):
    """A grader with a defect."""

    def check(self, problem: Problem, output_text: str, output_tokens: int) -> TaskScore:
        raise ZeroDivisionError("a defect in the grader")


def status_of(panel: JudgedPool, row: SubmissionRow) -> tuple[str, str]:
    """Of the job, and of this validator's part in it."""
    with panel.mgr.store.read() as connection:
        job = jobs.get(connection, row.digest)
        part = jobs.assignment(connection, row.digest, VALIDATOR.address)
    assert job is not None
    assert part is not None
    return job.status, part.status


def broken(panel: JudgedPool) -> None:
    """The validator's grader has a defect from now on."""
    assert panel.validator.validator is not None
    run = panel.mgr.context.run
    grader = Broken({}, run.budgets)
    panel.validator.validator._runs._environments[run.digest()] = grader


def test_a_validator_that_abstains_never_gets_the_file_again_and_punishes_no_one(
    panel: JudgedPool,
) -> None:
    second = panel.another(key(70))
    assert panel.validator.validator is not None
    broken(panel)
    row = panel.judged(panel.honest)
    assert status_of(panel, row) == ("open", "abstained")
    assert panel.mgr.node_status(HONEST.address) == "active"
    panel.validator.validator._runs._environments.clear()
    panel.mgr.now.time += 10_000
    assert panel.validator.judge_next() is None
    assert second.judge_next() == row.digest
    assert panel.mgr.row(row.digest).status == "accepted"


def test_a_file_from_which_every_validator_abstained_is_set_aside(panel: JudgedPool) -> None:
    assert panel.validator.validator is not None
    broken(panel)
    row = panel.judged(panel.honest)
    assert panel.validator.judge_next() is None
    assert status_of(panel, row) == ("quarantined", "abstained")


def test_a_validator_that_dies_three_times_over_a_file_leaves_it_to_others(
    panel: JudgedPool,
) -> None:
    row = panel.mgr.submit(HONEST)
    for _ in range(MAX_ATTEMPTS):
        assert panel.validator.claim() is not None
        panel.mgr.now.time += CLAIM_SECONDS + 1
    assert panel.validator.claim() is None
    assert status_of(panel, row) == ("quarantined", "abstained")


def test_a_file_that_the_store_lost_waits(panel: JudgedPool) -> None:
    row = panel.mgr.submit(HONEST, make=panel.honest)
    data = panel.file(row)
    panel.mgr.objects.delete(digest_key(row.sha256))
    assert panel.validator.judge_next() is None
    assert status_of(panel, row) == ("open", "assigned")
    panel.mgr.objects.put(digest_key(row.sha256), data)
    panel.mgr.now.time += LOST_SECONDS
    assert panel.validator.judge_next() == row.digest
    assert panel.mgr.row(row.digest).status == "accepted"


def test_a_full_disk_of_the_manager_only_delays_the_verdict(
    panel: JudgedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = panel.mgr.submit(HONEST, make=panel.honest)
    judge = judge_of(panel.mgr.backend)

    def full(key: str, data: bytes) -> None:
        raise UnavailableError("the disk is full")

    assert panel.validator.validator is not None
    panel.validator.validator.judge_some(1)
    with monkeypatch.context() as disk:
        disk.setattr(panel.mgr.objects, "put", full)
        with pytest.raises(UnavailableError, match="full"):
            judge.tick()
    assert panel.mgr.row(row.digest).status == "submitted"
    assert judge.tick() == [row.digest]
    assert panel.mgr.row(row.digest).status == "accepted"


def test_a_file_of_another_pool_of_the_same_manager_is_not_judged(
    panel: JudgedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = panel.mgr.submit(HONEST, make=panel.honest)
    validator = panel.validator.validator
    assert validator is not None
    monkeypatch.setattr(validator, "_pool", replace(validator._pool, number=77))
    assert validator.judge_some(1) == [row.digest]
    assert status_of(panel, row)[1] == "abstained"


@pytest.mark.parametrize("most", [1, 2])
def test_a_file_given_twice_or_not_asked_for_is_not_judged(
    panel: JudgedPool, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    panel.mgr.submit(HONEST)
    validator = panel.validator.validator
    assert validator is not None
    given = validator._api.claim(1)
    doubled = given.model_copy(update={"jobs": given.jobs * 2})
    monkeypatch.setattr(validator._api, "claim", lambda most: doubled)
    monkeypatch.setattr(validator, "_judge_claimed", lambda job, engines: None)
    with pytest.raises(MalformedError, match="2 files"):
        validator.judge_some(most)


def test_a_full_disk_of_the_validator_leaves_the_file_to_others_and_ends_nothing(
    panel: JudgedPool,
) -> None:
    row = panel.mgr.submit(HONEST, make=panel.honest)
    assert panel.validator.validator is not None
    folder = panel.validator.validator._folder
    folder._run("INSERT INTO opinions VALUES ('', '', zeroblob(4000), NULL, 1)")
    folder._run("PRAGMA max_page_count = 1")  # no page is left, as on a full disk
    with pytest.raises(UnavailableError, match=r"validator.sqlite cannot be used: .* full"):
        panel.validator.validator.judge_some(1)
    assert status_of(panel, row) == ("open", "assigned"), "delayed, as by other trouble of its own"
    folder._run("PRAGMA max_page_count = 1000000")
    panel.mgr.now.time += LATER_SECONDS
    assert panel.validator.judge_next() == row.digest
    assert panel.mgr.row(row.digest).status == "accepted"


def test_a_validator_short_of_memory_tries_once_more_and_then_leaves_the_file_to_others(
    panel: JudgedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = panel.mgr.submit(HONEST, make=panel.honest)

    def full(case: Case) -> Finding:
        raise MemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(judging, "verify_file", full)
        assert panel.validator.judge_next() == row.digest
        assert status_of(panel, row) == ("open", "assigned"), "what is short may be free soon"
        panel.mgr.now.time += LATER_SECONDS
        assert panel.validator.judge_next() == row.digest
    assert status_of(panel, row)[1] == "abstained"


def test_a_validator_whose_card_failed_abstains_once_and_ends(
    panel: JudgedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = panel.mgr.submit(HONEST, make=panel.honest)

    def fails(case: Case) -> Finding:
        raise FatalError("a card failed while the engine used it: CUDA error")

    monkeypatch.setattr(judging, "verify_file", fails)
    with pytest.raises(FatalError, match="a card failed"):
        panel.validator.judge_next()
    assert status_of(panel, row)[1] == "abstained", "it is not offered this file again"


def test_memory_that_is_free_again_lets_the_file_be_judged(
    panel: JudgedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = panel.mgr.submit(HONEST, make=panel.honest)
    short = Finding(Reason.OUT_OF_RESOURCES, "replay ran out of memory")
    with monkeypatch.context() as patch:
        patch.setattr(judging, "verify_file", lambda case: short)
        panel.validator.judge_next()
    panel.mgr.now.time += LATER_SECONDS
    assert panel.validator.judge_next() == row.digest
    assert panel.mgr.row(row.digest).status == "accepted"


def test_a_file_whose_receipt_is_later_than_its_lease_is_void(panel: JudgedPool) -> None:
    """The manager refuses such files; a validator does not rely on that."""
    row = panel.mgr.submit(HONEST, make=panel.honest)
    with panel.mgr.store.begin() as connection:
        lease = leases.get(connection, row.lease_digest)
        assert lease is not None
        at = int(lease.deadline) + 1
        receipt = Receipt(submission_digest=row.digest, received_at=at)
        answer = ReceiptAnswer(receipt=receipt, signature=panel.mgr.backend.sign(receipt))
        connection.execute(
            sa.update(schema.submissions)
            .where(schema.submissions.c.digest == row.digest)
            .values(received_at=at, receipt=answer.model_dump_json())
        )
    assert panel.validator.judge_next() == row.digest
    after = panel.mgr.row(row.digest)
    assert (after.status, after.reason) == ("void", Reason.LATE)


@pytest.mark.parametrize("kind", [_LaterError, _AbstainError])
def test_a_claim_that_is_lost_before_the_file_is_given_up_ends_nothing(
    panel: JudgedPool, monkeypatch: pytest.MonkeyPatch, kind: type[_AbstainError]
) -> None:
    row = panel.mgr.submit(HONEST, make=panel.honest)
    validator = panel.validator.validator
    assert validator is not None

    def too_late(job: object, engines: object) -> Sealed:
        with panel.mgr.store.begin() as connection:
            jobs.end_assignment(connection, row.digest, VALIDATOR.address, "missed", now=0.0)
        raise kind(Reason.OUT_OF_RESOURCES, "the machine is too slow")

    monkeypatch.setattr(validator, "_judge", too_late)
    assert validator.judge_some(1) == [row.digest]
    assert status_of(panel, row)[1] == "missed"


def test_an_opinion_that_another_process_of_the_key_sealed_is_the_one_handed_in(
    panel: JudgedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = panel.mgr.submit(HONEST, make=panel.honest)
    validator = panel.validator.validator
    assert validator is not None
    judge = validator._judge

    def slower(job: Job, engines: EngineProvider) -> Sealed:
        sealed = judge(job, engines)
        opinion = sealed.signed.opinion
        earlier = opinion.model_copy(update={"judged_at": opinion.judged_at - 1})
        signed = panel.validator.sign(earlier, sealed.signed.law)
        validator._folder.keep_opinion(replace(sealed, signed=signed))
        assert validator._api.seal(row.digest, signed.seal())
        return sealed

    with monkeypatch.context() as patched:
        patched.setattr(validator, "_judge", slower)
        assert validator.judge_some(1) == [row.digest]
    panel.validator.judge_next()
    assert panel.mgr.row(row.digest).status == "accepted"


def test_a_policy_that_no_relay_serves_delays_the_file(
    panel: JudgedPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trust = Trust(TRAINER.address, panel.mgr.context.domain(PolicyStatement), 1)
    api = panel.validator.api
    assert panel.validator.validator is not None
    policies = Policies(PolicyFolder(tmp_path / "empty", trust), api)
    panel.validator.validator._policies = policies
    row = panel.judged(panel.honest)
    assert status_of(panel, row) == ("open", "assigned")

    def page(version: int) -> None:
        raise MalformedError("a proxy's page")

    monkeypatch.setattr(api, "policy", page)
    policies._known.clear()
    panel.mgr.now.time += LATER_SECONDS
    asked = panel.validator.judge_next()
    assert asked == row.digest
    assert status_of(panel, row) == ("open", "assigned")


@pytest.mark.parametrize("kind", [MalformedError, NotFoundError, UntrustedError])
def test_another_program_s_answer_or_a_wrong_clock_does_not_end_a_validator(
    kind: type[PrimeError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a proxy sends while the orchestrator is away is not in its protocol. A clock that was
    just set makes signatures look old."""
    stop, left = threading.Event(), 2

    def ask(most: int = 1) -> list[Digest]:
        nonlocal left
        left -= 1
        if not left:
            stop.set()
        raise kind("it is another program's")

    judging: Any = SimpleNamespace(judge_some=ask)
    judge_until(stop, judging, 1, 0.0)
    assert left == 0

    stop, left = threading.Event(), 2
    loops = Loops(stop.set, stop=stop, passing=PASSING)
    loops.start("a test", ask, 0.0)
    assert stop.wait(60)
    loops.stop(None)
    loops.raise_crash()
    assert left == 0

    stop, left = threading.Event(), 2
    monkeypatch.setattr("prime_validator.judging.KEEP_SECONDS", 0.01)
    keeping: Any = SimpleNamespace(_keeping=SimpleNamespace(keep=lambda digests: ask()))
    Validator._keep(keeping, [], stop)
    assert left == 0


def test_a_validator_connects_to_no_private_address_that_a_pool_names(
    panel: JudgedPool, tmp_path: Path
) -> None:
    trust = Trust(TRAINER.address, panel.mgr.context.domain(PolicyStatement), 1)
    api = panel.validator.api
    version = 0
    signed = api.policy(version)
    with socket.create_server(("127.0.0.1", 0)) as relay:
        relay.settimeout(0.2)
        url = f"http://127.0.0.1:{relay.getsockname()[1]}"
        folder = PolicyFolder(tmp_path / "empty", trust, book=SourceBook(public_only=True))
        policies = Policies(folder, api, sources=[url], patience=0.2)
        with pytest.raises(UnavailableError):
            policies.ensure(version, signed.manifest.digest())
        with pytest.raises(TimeoutError):
            relay.accept()


@pytest.mark.slow
def test_an_audit_checks_that_the_rows_were_drawn_by_the_lease_s_secret(panel: JudgedPool) -> None:
    row = panel.judged(panel.forged, LIAR)
    (note,) = panel.audit(panel.slash(row)).notes
    assert "is not shown before" in note
    run = panel.mgr.context.run
    panel.mgr.now.time += 2 * run.epoch_seconds + run.lease_seconds + 30
    panel.validator.draws.prepare()
    (note,) = panel.audit(panel.slash(row)).notes
    assert "is not shown before" in note, "the manager's second secret is missing"
    assert reveal_second(panel.mgr.store, panel.mgr.objects, panel.mgr.context, panel.mgr.now)
    after = panel.audit(panel.slash(row))
    assert (after.result, after.notes) == ("match", ())
    chosen = panel.evidence(row).model_copy(update={"draw_secret": encoding.sha256(b"chosen")})
    lying = panel.audit(replaced(panel, row, chosen))
    assert lying.result == "mismatch"
    assert "not drawn by the secrets" in lying.detail


def _known(name: Digest | None) -> Digest:
    assert name is not None
    return name


def test_the_manager_and_an_audit_check_that_an_acceptance_is_of_the_rows_that_were_drawn(
    panel: JudgedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the second file the validator chose the secret, on the third the rows."""
    mgr, library = panel.mgr, Published(panel.mgr)

    def compare() -> Address | None:
        return compare_acceptances(mgr.store, mgr.objects, mgr.context, mgr.now)

    rows = [panel.judged(panel.honest)]
    shadow = key(60)
    mgr.admit(shadow, "shadow")
    unpaid = mgr.submit(shadow, shadow=True, make=panel.honest).digest
    assert panel.validator.judge_next() == unpaid
    assert mgr.row(unpaid).status == "accepted"
    said = VerdictTable.model_validate_json(library.object(_known(rows[0].verdict_table), 1 << 20))
    number, least = len(said.rows), mgr.context.run.least_drawn(len(said.rows))
    assert least < number
    for chosen in ("secret", "rows"):
        row = mgr.submit(HONEST, make=panel.honest)
        job = panel.validator.claim()
        assert job is not None
        mine = panel.validator.draws.draw(job).secret
        secret = encoding.sha256(b"chosen") if chosen == "secret" else mine
        drawn = drawn_rows(secret, row.digest, number, least)
        if chosen == "rows":
            drawn = sorted((one + 1) % number for one in drawn)
        fields = {"draw_secret": secret, "rows_drawn": tuple(drawn)}
        panel.validator.say(job, Reason.NONE, said.rows, **fields)
        judge_of(mgr.backend).tick()
        rows.append(mgr.row(row.digest))
    assert {row.status for row in rows} == {"accepted"}
    assert compare() is None

    def audit(row: SubmissionRow) -> Audit:
        return audit_submission(row.digest, panel.setting(), library, lambda _: row.signed())

    (note,) = audit(rows[0]).notes
    assert "is not shown before" in note
    mgr.now.time += 2 * mgr.context.run.epoch_seconds + mgr.context.run.lease_seconds + 30
    panel.validator.draws.prepare()
    assert compare() is None
    assert reveal_second(mgr.store, mgr.objects, mgr.context, mgr.now)
    for row in (rows[0], mgr.row(unpaid)):
        found = audit(row)
        assert (found.result, found.notes) == ("accepted", ()), found
    lease = library.lease(rows[0].lease_digest)
    assert lease.opening is not None
    listed = mgr.board.listed(mgr.objects, lease)
    mgr.objects.delete(digest_key(lease.opening.draws))  # as in a mirror, which copies no lists
    found = audit(rows[0])
    assert found.result == "accepted"
    assert "is not checked" in found.notes[0]
    put_object(mgr.objects, listed.canonical())
    for row, why in zip(rows[1:], ("not drawn by the secrets", "other rows"), strict=True):
        found = audit(row)
        assert found.result == "mismatch"
        assert why in found.detail
        assert panel.validator.signer.address in found.detail
    me = panel.validator.signer.address
    assert end_appointments(mgr.store, mgr.context, lambda: 0, mgr.now) == []

    def read(objects: ObjectStore, name: Digest, limit: int = 1 << 20) -> bytes:
        if name == rows[1].verdict_table:
            return b"no table"
        if broken:
            raise UnavailableError("the object store does not answer")
        return read_object(objects, name, limit)

    monkeypatch.setattr(draws, "read_object", read)
    broken = True
    with pytest.raises(UnavailableError):
        compare()
    broken = False
    assert compare() == me, "by the third file"
    assert compare() is None, "once"
    assert end_appointments(mgr.store, mgr.context, lambda: 1, mgr.now) == [], "the quorum needs it"
    assert end_appointments(mgr.store, mgr.context, lambda: 0, mgr.now) == [me]


def test_an_opinion_that_cannot_be_handed_in_holds_up_no_other_file(
    panel: JudgedPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def gone(*_: object) -> None:
        raise UnavailableError("the object store does not answer")

    rows = []
    with monkeypatch.context() as patch:
        patch.setattr(panel.validator.api, "opinion", gone)
        for _ in range(2):
            rows.append(panel.mgr.submit(HONEST, make=panel.honest))
            assert panel.validator.judge_next() == rows[-1].digest
        assert panel.validator.judge_next() is None
    assert sum("cannot be handed in now" in line for line in caplog.messages) == len(rows)
    assert {panel.mgr.row(one.digest).status for one in rows} == {"submitted"}
    assert panel.validator.judge_next() is None
    assert {panel.mgr.row(one.digest).status for one in rows} == {"accepted"}


def test_a_file_whose_lease_names_no_draw_of_ours_is_left_to_others(
    panel: JudgedPool, tmp_path: Path
) -> None:
    row = panel.mgr.submit(HONEST, make=panel.honest)
    panel.validator.draws._folder = Folder(tmp_path / "another")  # of the same key
    assert panel.validator.judge_next() == row.digest
    assert status_of(panel, row)[1] == "abstained"
