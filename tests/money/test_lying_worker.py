"""The worker of a lying node, before the real validator and the real audit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'prime-open[torch]'")

from judging_kit import LIAR, JudgedPool

from devnet.kinds import LIES
from devnet.liars import Liar
from prime_core.verdict import Outcome, Reason
from prime_node.worker.rollout_builder import Job, Options


def test_a_worker_that_copies_from_its_earlier_file_is_slashed_and_the_audit_agrees(
    panel: JudgedPool, tmp_path: Path
) -> None:
    options = Options(socket=tmp_path / "s", policies=panel.policies, outbox=tmp_path)
    builder = Liar(LIES["copied_earlier"].make, panel.mgr.context.run, options)

    def made(*lease: Any) -> bytes:
        return builder.build(Job(*lease)).path.read_bytes()

    first = panel.judged(made, LIAR)
    assert first.status == "accepted", "there was nothing to copy from"
    second = panel.judged(made, LIAR)
    assert Reason(second.reason).outcome is Outcome.REJECTED
    audit = panel.audit(panel.slash(second))
    assert audit.result == "match", audit.detail


def test_a_lie_that_is_no_file_is_handed_in_all_the_same(panel: JudgedPool, tmp_path: Path) -> None:
    options = Options(socket=tmp_path / "s", policies=panel.policies, outbox=tmp_path)
    builder = Liar(LIES["truncated"].make, panel.mgr.context.run, options)
    found = panel.judged(lambda *lease: builder.build(Job(*lease)).path.read_bytes(), LIAR)
    assert (found.status, Reason(found.reason)) == ("void", Reason.MALFORMED)
