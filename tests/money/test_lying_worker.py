"""The worker of a lying node, before the real validator and the real audit."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'prime-open[torch]'")

from court_kit import LIAR, Court

from prime_core.verdict import Outcome, Reason
from prime_node.planting import LyingWorkshop
from prime_node.worker.workshop import Job, Options
from prime_verify.canaries.lies import LIES


def test_a_worker_that_copies_from_its_earlier_file_is_slashed_and_the_audit_agrees(
    court: Court, tmp_path: Path
) -> None:
    options = Options(socket=tmp_path / "s", policies=court.policies, outbox=tmp_path)
    lie = LIES["copied_earlier"].make
    workshop = LyingWorkshop(lambda _: lie, court.shop.context.run, options)
    first = court.judged(lambda *lease: workshop.make(Job(*lease)), LIAR)
    assert first.status == "accepted", "there was nothing to copy from"
    second = court.judged(lambda *lease: workshop.make(Job(*lease)), LIAR)
    assert Reason(second.reason).outcome is Outcome.REJECTED
    audit = court.audit(court.slash(second))
    assert audit.result == "match", audit.detail


def test_a_lie_that_is_no_file_is_handed_in_all_the_same(court: Court, tmp_path: Path) -> None:
    options = Options(socket=tmp_path / "s", policies=court.policies, outbox=tmp_path)
    lie = LIES["truncated"].make
    workshop = LyingWorkshop(lambda _: lie, court.shop.context.run, options)
    found = court.judged(lambda *lease: workshop.build(Job(*lease)).path.read_bytes(), LIAR)
    assert (found.status, Reason(found.reason)) == ("void", Reason.MALFORMED)
