"""`prime-node audit export`: everything that an audit rests on, as files named by what they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'prime-open[torch]'")

from judging_kit import LIAR, JudgedPool, StoreReader
from money_kit import ManagerSide

from prime_core import encoding
from prime_core.errors import NotFoundError, UserError
from prime_core.ids import ZERO_DIGEST, Digest
from prime_core.messages import SubmissionInfo
from prime_core.run import RunDefinition
from prime_core.task import SignedLease
from prime_node.audit import gather, submission_of, write
from prime_orchestrator.store.submissions import SubmissionRow


class Published(StoreReader):
    """With what the orchestrator says of submissions."""

    def __init__(self, mgr: ManagerSide) -> None:
        super().__init__(mgr)
        self._rows = mgr

    def submission(self, digest: Digest) -> SubmissionInfo:
        if digest == ZERO_DIGEST:
            raise NotFoundError("no such submission")
        row: SubmissionRow = self._rows.row(digest)
        return SubmissionInfo(
            submission_digest=row.digest, node=row.node, lease_digest=row.lease_digest,
            step=row.step, sha256=row.sha256, status=row.status, reason=row.reason,
            units=row.units, root=None, verdict=row.verdict, evidence=row.evidence,
        )  # fmt: skip


def test_a_slash_s_folder_holds_evidence_file_lease_and_run_as_published(
    panel: JudgedPool, tmp_path: Path
) -> None:
    row = panel.judged(panel.tampered, LIAR)
    slash, library = panel.slash(row), Published(panel.mgr)
    assert submission_of(row.evidence or ZERO_DIGEST, slash, library) == row.digest
    folder = tmp_path / "case"
    paths = write(gather(row.digest, slash, lambda _: panel.mgr.context.run, library), folder)
    assert {path.name for path in paths} == {
        "slash.json", "evidence.json", "submission.json", "lease.json", "run.json",
        "rollout.parquet", "verdict.json", "verdict_table.json", "index.json",
    }  # fmt: skip
    index = json.loads((folder / "index.json").read_text())
    assert index.pop("rollout.parquet") == row.sha256
    assert index["evidence.json"] == row.evidence
    assert index["verdict.json"] == row.verdict
    for name, digest in index.items():
        assert encoding.sha256((folder / name).read_bytes()) == digest
    run = RunDefinition.parse((folder / "run.json").read_bytes())
    lease = SignedLease.model_validate_json((folder / "lease.json").read_text())
    assert lease.lease.run_digest == run.digest()
    with pytest.raises(UserError, match="not an empty folder"):
        write({}, folder)


def test_an_accepted_file_s_folder_holds_its_table(panel: JudgedPool) -> None:
    row = panel.judged(panel.honest)
    found = gather(row.digest, None, lambda _: panel.mgr.context.run, Published(panel.mgr))
    assert encoding.sha256(found["verdict_table.json"]) == row.verdict_table
    assert "evidence.json" not in found


def test_a_subject_of_nothing_is_a_user_s_mistake(panel: JudgedPool) -> None:
    with pytest.raises(UserError, match="neither a submission nor a slash"):
        submission_of(ZERO_DIGEST, None, Published(panel.mgr))
