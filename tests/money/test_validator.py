"""The validator with the real model and checks: verdicts, abstentions, draws, and their audits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'prime-open[torch]'")

from court_kit import HONEST, LIAR, Court, Shelf
from judges import judge_of
from money_kit import TRAINER, VALIDATOR, key

from prime_broadcast.manifest import Trust
from prime_chain.history import Slash
from prime_core import encoding
from prime_core.checkpoint import PolicyStatement
from prime_core.errors import UnavailableError
from prime_core.ids import Digest
from prime_core.storage.base import digest_key, put_object
from prime_core.task import SignedLease
from prime_core.verdict import Evidence, Reason, Verdict, VerdictTable
from prime_envs.base import Problem, TaskScore
from prime_envs.reverse import Reverse
from prime_orchestrator.api.validators import CLAIM_SECONDS, LOST_SECONDS, MAX_ATTEMPTS
from prime_orchestrator.manager.draws import reveal_second
from prime_orchestrator.store import jobs, leases, schema
from prime_orchestrator.store.submissions import SubmissionRow
from prime_validator.folder import Folder
from prime_validator.policies import Policies
from prime_verify import verify
from prime_verify.audit import audit_slash
from prime_verify.engines import FolderEngines, load_engine
from prime_verify.proofs.thresholds import STATISTICS
from prime_verify.rollout_file import read_rollout_file, write_rollout_file


def test_an_honest_file_is_accepted_paid_and_grouped(court: Court) -> None:
    row = court.judged(court.honest)
    assert (row.status, row.reason) == ("accepted", Reason.NONE)
    assert row.verdict is not None
    assert row.verdict_table is not None
    shop = court.shop
    table = VerdictTable.model_validate_json(
        shop.objects.get(digest_key(row.verdict_table), 1 << 20)
    )
    assert row.units == sum(r.output_tokens for r in table.rows) > 0
    verdict = Verdict.model_validate_json(shop.objects.get(digest_key(row.verdict), 9999))
    (signed,) = verdict.opinions
    assert signed.opinion.table == row.verdict_table
    assert set(table.row_statistics) == set(STATISTICS)
    assert {len(values) for values in table.row_statistics.values()} == {len(table.rows_drawn)}
    signed.check(shop.context.domain(signed.opinion))
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


def status_of(court: Court, row: SubmissionRow) -> tuple[str, str]:
    """Of the job, and of this validator's part in it."""
    with court.shop.store.read() as connection:
        job = jobs.get(connection, row.digest)
        part = jobs.assignment(connection, row.digest, VALIDATOR.address)
    assert job is not None
    assert part is not None
    return job.status, part.status


def broken(court: Court) -> None:
    """The validator's grader has a defect from now on."""
    assert court.validator.validator is not None
    run = court.shop.context.run
    grader = Broken({}, run.budgets)
    court.validator.validator._runs._environments[run.digest()] = grader


def test_a_validator_that_abstains_never_gets_the_file_again_and_punishes_no_one(
    court: Court,
) -> None:
    second = court.another(key(70))
    assert court.validator.validator is not None
    broken(court)
    row = court.judged(court.honest)
    assert status_of(court, row) == ("open", "abstained")
    assert court.shop.node_status(HONEST.address) == "active"
    court.validator.validator._runs._environments.clear()
    court.shop.now.time += 10_000
    assert court.validator.judge_next() is None
    assert second.judge_next() == row.digest
    assert court.shop.row(row.digest).status == "accepted"


def test_a_file_from_which_every_validator_abstained_is_set_aside(court: Court) -> None:
    assert court.validator.validator is not None
    broken(court)
    row = court.judged(court.honest)
    assert court.validator.judge_next() is None
    assert status_of(court, row) == ("quarantined", "abstained")


def test_a_validator_that_dies_three_times_over_a_file_leaves_it_to_others(court: Court) -> None:
    row = court.shop.submit(HONEST)
    for _ in range(MAX_ATTEMPTS):
        assert court.validator.claim() is not None
        court.shop.now.time += CLAIM_SECONDS + 1
    assert court.validator.claim() is None
    assert status_of(court, row) == ("quarantined", "abstained")


def test_a_file_that_the_store_lost_waits(court: Court) -> None:
    row = court.shop.submit(HONEST, make=court.honest)
    data = court.file(row)
    court.shop.objects.delete(digest_key(row.sha256))
    assert court.validator.judge_next() is None
    assert status_of(court, row) == ("open", "assigned")
    court.shop.objects.put(digest_key(row.sha256), data)
    court.shop.now.time += LOST_SECONDS
    assert court.validator.judge_next() == row.digest
    assert court.shop.row(row.digest).status == "accepted"


def test_a_full_disk_of_the_manager_only_delays_the_verdict(
    court: Court, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = court.shop.submit(HONEST, make=court.honest)
    judge = judge_of(court.shop.backend)

    def full(key: str, data: bytes) -> None:
        raise UnavailableError("the disk is full")

    assert court.validator.validator is not None
    court.validator.validator.judge_some(1)
    with monkeypatch.context() as disk:
        disk.setattr(court.shop.objects, "put", full)
        with pytest.raises(UnavailableError, match="full"):
            judge.tick()
    assert court.shop.row(row.digest).status == "submitted"
    assert judge.tick() == [row.digest]
    assert court.shop.row(row.digest).status == "accepted"


def test_a_policy_that_no_relay_serves_delays_the_file(court: Court, tmp_path: Path) -> None:
    trust = Trust(TRAINER.address, court.shop.context.domain(PolicyStatement), 1)
    assert court.validator.validator is not None
    court.validator.validator._policies = Policies(tmp_path / "empty", court.validator.api, trust)
    row = court.judged(court.honest)
    assert status_of(court, row) == ("open", "assigned")


def test_an_audit_checks_that_the_rows_were_drawn_by_the_lease_s_secret(court: Court) -> None:
    row = court.judged(court.forged, LIAR)
    (note,) = court.audit(court.slash(row)).notes
    assert "is not shown before" in note
    run = court.shop.context.run
    court.shop.now.time += 2 * run.epoch_seconds + run.lease_seconds + 30
    court.validator.draws.prepare()
    (note,) = court.audit(court.slash(row)).notes
    assert "is not shown before" in note, "the manager's second secret is missing"
    assert reveal_second(court.shop.store, court.shop.objects, court.shop.context, court.shop.now)
    after = court.audit(court.slash(row))
    assert (after.result, after.notes) == ("match", ())
    chosen = court.evidence(row).model_copy(update={"draw_secret": encoding.sha256(b"chosen")})
    lying = court.audit(replaced(court, row, chosen))
    assert lying.result == "mismatch"
    assert "not drawn by the secrets" in lying.detail


def test_a_file_whose_lease_names_no_draw_of_ours_is_left_to_others(
    court: Court, tmp_path: Path
) -> None:
    row = court.shop.submit(HONEST, make=court.honest)
    court.validator.draws._folder = Folder(tmp_path / "another")  # of the same key
    assert court.validator.judge_next() == row.digest
    assert status_of(court, row)[1] == "abstained"
