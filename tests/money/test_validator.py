"""The validator with the real model and checks: verdicts, abstentions, draws, and their audits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'prime-open[torch]'")

from court_kit import HONEST, LIAR, Court, Shelf
from money_kit import TRAINER, VALIDATOR, key

from orchestrator import judging
from orchestrator.policy_store import PolicyStore
from orchestrator.store import jobs, leases, schema
from orchestrator.store.submissions import SubmissionRow
from protocol.broadcast.manifest import Trust
from protocol.chain.history import Slash
from protocol.core import encoding
from protocol.core.checkpoint import PolicyStatement
from protocol.core.errors import UnavailableError
from protocol.core.ids import Digest
from protocol.core.task import SignedLease
from protocol.core.verdict import Evidence, Reason, SignedVerdict, VerdictTable
from protocol.environments.base import Problem, TaskScore
from protocol.environments.reverse import Reverse
from protocol.proofs.thresholds import STATISTICS
from protocol.storage.base import digest_key, put_object
from protocol.verification import verify
from protocol.verification.audit import audit_slash
from protocol.verification.engines import FolderEngines, load_engine
from protocol.verification.rollout_file import read_rollout_file, write_rollout_file


def test_an_honest_file_is_accepted_paid_and_grouped(court: Court) -> None:
    row = court.judged(court.honest)
    assert (row.status, row.reason) == ("accepted", Reason.NONE)
    assert row.verdict is not None
    assert row.verdict_table is not None
    shop = court.shop
    table = VerdictTable.model_validate_json(shop.objects.get(digest_key(row.verdict_table), 9999))
    assert row.units == sum(r.output_tokens for r in table.rows) > 0
    verdict = SignedVerdict.model_validate_json(shop.objects.get(digest_key(row.verdict), 9999))
    assert verdict.verdict.table == row.verdict_table
    with shop.store.read() as connection:
        assert len(connection.execute(schema.groups.select()).all()) == 2
    assert court.validator.judge_next() is None


def test_a_lie_is_rejected_on_evidence_that_an_auditor_replays(court: Court) -> None:
    row = court.judged(court.tampered, LIAR)
    assert (row.status, row.reason) == ("rejected", Reason.TAMPERED_REWARD)
    assert court.shop.node_status(LIAR.address) == "quarantined"
    evidence = court.evidence(row)
    assert evidence.validator == VALIDATOR.address
    found = court.audit(court.slash(row))
    assert (found.result, found.expected) == ("match", Reason.TAMPERED_REWARD), found


def test_replayed_rows_and_statistics_are_part_of_the_match(court: Court) -> None:
    row = court.judged(court.forged, LIAR)
    assert row.status == "rejected"
    evidence = court.evidence(row)
    assert evidence.rows_drawn
    found = court.audit(court.slash(row))
    assert found.result == "match", found
    assert found.statistics

    other_rows = tuple(n + 1 for n in evidence.rows_drawn)
    lying = evidence.model_copy(update={"rows_drawn": other_rows})
    assert court.audit(replaced(court, row, lying)).result == "mismatch"
    statistics = {n: "123" for n in evidence.statistics if not n.startswith("draw")}
    inflated = evidence.model_copy(update={"statistics": evidence.statistics | statistics})
    assert court.audit(replaced(court, row, inflated)).result == "mismatch"
    no_number = evidence.model_copy(update={"statistics": evidence.statistics | {"sketch": "x"}})
    assert court.audit(replaced(court, row, no_number)).result == "mismatch"


@pytest.mark.parametrize("lie", ["forged", "tampered"])
def test_how_sure_an_accusation_is_stands_in_its_evidence_and_an_audit_looks_at_it(
    court: Court, lie: str
) -> None:
    row = court.judged(getattr(court, lie), LIAR)
    evidence = court.evidence(row)
    by_chance = lie == "forged"
    assert (0 < float(evidence.chance) < 1e-6) if by_chance else evidence.chance == "0"
    found = court.audit(court.slash(row))
    assert (found.result, found.statistics["chance"]) == ("match", (evidence.chance,) * 2)
    for said in ("0.01", "0" if by_chance else "1e-15"):
        other = replaced(court, row, evidence.model_copy(update={"chance": said}))
        assert court.audit(other).result == "mismatch", said
    unsaid = evidence.model_dump(mode="json", exclude={"chance"})  # as it was before
    raw = put_object(court.shop.objects, encoding.canonical_json(unsaid))
    assert court.audit(court.slash(row, raw)).result == "match"


def test_statistics_of_single_rows_are_published_and_looked_at_by_an_audit(court: Court) -> None:
    row = court.judged(court.forged, LIAR)
    evidence = court.evidence(row)
    assert set(evidence.row_statistics) == set(STATISTICS)
    assert {len(v) for v in evidence.row_statistics.values()} == {len(evidence.rows_drawn)}
    worst = max(float(value) for value in evidence.row_statistics["logprob_max"])
    assert worst == pytest.approx(float(evidence.statistics["logprob_max"]), rel=1e-4)
    before = court.audit(court.slash(row)).notes
    assert not any("statistics" in note for note in before)

    def audited(changed: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
        other = evidence.model_copy(update={"row_statistics": changed})
        found = court.audit(replaced(court, row, other))
        assert found.result == "match", "the file's statistics decide"
        assert found.notes[: len(before)] == before
        return found.notes[len(before) :]

    stated = evidence.row_statistics["logprob_max"]
    (note,) = audited(evidence.row_statistics | {"logprob_max": ("99", *stated[1:])})
    assert note == f"statistics of rows {evidence.rows_drawn[0]} differ beyond rounding"
    (note,) = audited({"logprob_max": stated[1:]})
    assert "of other rows" in note


def test_tampering_is_audited_by_the_grader_alone_though_the_validator_replayed_first(
    court: Court, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(court.environment), "may_give_up", True)
    row = court.judged(court.tampered, LIAR)
    assert (row.status, row.reason) == ("rejected", Reason.TAMPERED_REWARD)
    assert court.evidence(row).rows_drawn == ()
    with monkeypatch.context() as nothing_replayed:
        nothing_replayed.setattr(verify, "_judge_replay", None)
        found = court.audit(court.slash(row))
    assert (found.result, found.expected) == ("match", Reason.TAMPERED_REWARD), found


def test_a_setup_that_nobody_calibrated_is_measured_once_and_ends_unpaid(
    court: Court, caplog: pytest.LogCaptureFixture
) -> None:
    """It used to go round for a score of whole replays, whoever declared it."""

    def elsewhere(signed: SignedLease, lease_digest: Digest) -> bytes:
        file = read_rollout_file(court.honest(signed, lease_digest))
        return write_rollout_file(file.rows, replace(file.metadata, device="NVIDIA H200"))

    caplog.set_level("INFO")
    row = court.judged(elsewhere, HONEST)
    assert (row.status, row.reason) == ("void", Reason.UNCALIBRATED)
    assert court.shop.node_status(HONEST.address) == "active"
    assert court.validator.judge_next() is None
    assert "NVIDIA H200: measured only: margin_mean" in caplog.text


def replaced(court: Court, row: SubmissionRow, evidence: Evidence) -> Slash:
    """The slash as it would stand with other evidence published."""
    raw = encoding.canonical_json(evidence.model_dump(mode="json"))
    slash = court.slash(row, put_object(court.shop.objects, raw))
    return replace(slash, reason=evidence.reason)


def test_a_slash_of_an_honest_file_is_a_mismatch(court: Court) -> None:
    """A validator that makes evidence up is found out by anyone."""
    bad, good = court.judged(court.tampered, LIAR), court.judged(court.honest)
    template = court.evidence(bad)
    with court.shop.store.read() as connection:
        lease = leases.get(connection, good.lease_digest)
    assert lease is not None
    made_up = template.model_copy(update={"submission": good.signed(), "lease": lease.signed()})
    slash = replace(replaced(court, good, made_up), node=HONEST.address)
    found = court.audit(slash)
    assert found.result == "mismatch", found


def test_evidence_of_another_file_or_reason_or_validator_is_a_mismatch(court: Court) -> None:
    row = court.judged(court.tampered, LIAR)
    evidence, slash = court.evidence(row), court.slash(row)
    assert court.audit(replace(slash, leaf=encoding.sha256(b"x"))).result == "mismatch"
    assert court.audit(replace(slash, reason=int(Reason.WRONG_SKETCH))).result == "mismatch"
    stranger = evidence.model_copy(update={"validator": key(99).address})
    assert court.audit(replaced(court, row, stranger)).result == "mismatch"


def test_an_audit_without_the_file_or_the_policy_cannot_tell(court: Court, tmp_path: Path) -> None:
    row = court.judged(court.forged, LIAR)
    nowhere = FolderEngines(tmp_path / "none", load_engine)
    setting = replace(court.setting(), engines=nowhere)
    assert audit_slash(court.slash(row), setting, Shelf(court.shop)).result == "cannot tell"
    court.shop.objects.delete(digest_key(row.sha256))
    assert court.audit(court.slash(row)).result == "cannot tell"


def test_a_malformed_file_is_void(court: Court) -> None:
    row = court.judged(lambda signed, digest: b"not parquet")
    assert row.status == "void"
    assert court.shop.node_status(HONEST.address) == "active"


class Broken(Reverse):
    """A grader with a defect."""

    def check(self, problem: Problem, output_text: str, output_tokens: int) -> TaskScore:
        raise ZeroDivisionError("a defect in the grader")


def test_a_crash_in_verification_is_an_abstention_and_punishes_nobody(court: Court) -> None:
    court.validator._environment = Broken({}, court.shop.context.run.budgets)
    row = court.judged(court.honest)
    assert row.status == "submitted"
    assert court.shop.node_status(HONEST.address) == "active"
    with court.shop.store.read() as connection:
        job = jobs.get(connection, row.digest)
    assert job is not None
    assert (job.status, job.abstentions, job.attempts) == ("ready", 1, 0)
    assert court.validator.judge_next() is None, "this validator waits; others need not"

    court.validator._environment = court.environment
    court.shop.now.time += 11
    assert court.validator.judge_next() == row.digest
    assert court.shop.row(row.digest).status == "accepted"


def test_a_file_that_our_store_lost_is_an_abstention(court: Court) -> None:
    row = court.shop.submit(HONEST, make=court.honest)
    court.shop.objects.delete(digest_key(row.sha256))
    assert court.validator.judge_next() == row.digest
    assert court.shop.row(row.digest).status == "submitted"


def test_a_full_disk_gives_the_job_back_uncounted(
    court: Court, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = court.shop.submit(HONEST, make=lambda signed, digest: b"not parquet")

    def full(key: str, data: bytes) -> None:
        raise UnavailableError("the disk is full")

    with monkeypatch.context() as disk:
        disk.setattr(court.shop.objects, "put", full)
        for _ in range(4):  # more often than a job may die or be abstained from
            with pytest.raises(UnavailableError, match="full"):
                court.validator.judge_next()
            with court.shop.store.read() as connection:
                job = jobs.get(connection, row.digest)
            assert job is not None
            assert (job.status, job.attempts, job.abstentions) == ("ready", 0, 0)
            court.shop.now.time += 31
    assert court.validator.judge_next() == row.digest
    assert court.shop.row(row.digest).status == "void"


def test_a_job_taken_by_a_database_outage_is_given_back_once_it_ends(
    court: Court, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = court.shop.submit(HONEST, make=lambda signed, digest: b"not parquet")

    def away(*_args: object, **_named: object) -> None:
        raise UnavailableError("the database is away")

    with monkeypatch.context() as outage:
        outage.setattr(judging, "publish_verdict", away)
        outage.setattr(jobs, "give_back", away)
        for _ in range(4):
            with pytest.raises(UnavailableError, match="away"):
                court.validator.judge_next()
            court.shop.now.time += 31
    assert court.validator.judge_next() is None, "given back, it rests"
    with court.shop.store.read() as connection:
        job = jobs.get(connection, row.digest)
    assert job is not None
    assert (job.status, job.attempts, job.abstentions) == ("ready", 0, 0)


def test_a_policy_that_nobody_serves_is_an_abstention(court: Court, tmp_path: Path) -> None:
    trust = Trust(TRAINER.address, court.shop.context.domain(PolicyStatement), 1)
    court.validator._policies = PolicyStore(
        tmp_path / "empty", court.shop.store, trust, now=court.shop.now
    )
    row = court.judged(court.honest)
    assert row.status == "submitted"


def test_an_audit_checks_that_the_rows_were_drawn_by_the_lease_s_secret(court: Court) -> None:
    row = court.judged(court.forged, LIAR)
    (note,) = court.audit(court.slash(row)).notes
    assert "is not shown before" in note
    run = court.shop.context.run
    court.shop.now.time += 2 * run.epoch_seconds + run.lease_seconds
    court.draws.prepare()
    after = court.audit(court.slash(row))
    assert (after.result, after.notes) == ("match", ())
    chosen = court.evidence(row).model_copy(update={"draw_secret": encoding.sha256(b"chosen")})
    lying = court.audit(replaced(court, row, chosen))
    assert lying.result == "mismatch"
    assert "not drawn by the secret" in lying.detail


def test_a_file_whose_lease_names_no_draw_of_ours_is_left_to_others(court: Court) -> None:
    row = court.shop.submit(HONEST, make=court.honest)
    with court.shop.store.begin() as connection:
        connection.execute(schema.draw_secrets.delete())  # another key's secrets now
    assert court.validator.judge_next() == row.digest
    assert court.shop.row(row.digest).status == "submitted"
