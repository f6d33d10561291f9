"""Several files at once: each ends as it would alone, and a deadly one takes none along."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'prime-open[torch]'")

from judging_kit import HONEST, LIAR, JudgedPool

from prime_core.errors import UnavailableError
from prime_core.ids import Digest
from prime_core.verdict import Reason
from prime_orchestrator.api.validators import CLAIM_SECONDS
from prime_orchestrator.store import jobs
from prime_validator.api import ValidatorApi
from prime_validator.judging import LATER_SECONDS
from prime_verify import packing


def test_files_judged_together_end_as_alone(
    panel: JudgedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[packing.Packing] = []
    honest = packing.Packing.__init__

    def remember(self: packing.Packing, *words: object) -> None:
        made.append(self)
        honest(self, *words)  # type: ignore[arg-type]

    monkeypatch.setattr(packing.Packing, "__init__", remember)
    rows = [
        panel.mgr.submit(HONEST, make=panel.honest),
        panel.mgr.submit(LIAR, make=panel.forged),
        panel.mgr.submit(HONEST, make=lambda signed, digest: b"not parquet"),
        panel.mgr.submit(HONEST, make=panel.honest),
    ]
    assert panel.validator.judge_some(4) == [row.digest for row in rows]
    ended = [(panel.mgr.row(row.digest).status, panel.mgr.row(row.digest).reason) for row in rows]
    assert ended == [
        ("accepted", Reason.NONE),
        ("rejected", Reason.TAMPERED_LOGPROBS),
        ("void", Reason.MALFORMED),
        ("accepted", Reason.NONE),
    ]
    assert [len(one.prefills) for one in made] == [1], "one prefill for the three that replay"
    assert panel.audit(panel.slash(panel.mgr.row(rows[1].digest))).result == "match"
    assert panel.validator.judge_some(4) == []


@pytest.mark.parametrize("deadly", [0, 1, 2])
def test_a_file_over_which_a_validator_died_is_judged_alone(panel: JudgedPool, deadly: int) -> None:
    mgr = panel.mgr
    rows = [mgr.submit(HONEST) for _ in range(3)]
    with mgr.store.begin() as connection:
        jobs.change(connection, rows[deadly].digest, created_at=0.0)
    assert panel.validator.claim() is not None
    mgr.now.time += CLAIM_SECONDS + 1
    others = [row.digest for i, row in enumerate(rows) if i != deadly]
    assert take(panel, 4) == [rows[deadly].digest], "it took no other along"
    assert take(panel, 4) == others


def test_only_files_of_one_policy_are_judged_together(panel: JudgedPool) -> None:
    mgr = panel.mgr
    mgr.publish(1)
    old, new, old_too = mgr.submit(HONEST), mgr.submit(HONEST, version=1), mgr.submit(HONEST)
    assert take(panel, 8) == [old.digest, old_too.digest]
    assert take(panel, 8) == [new.digest]


def take(panel: JudgedPool, most: int) -> list[Digest]:
    """The files that one claim brings."""
    return [Digest(job.submission_digest) for job in panel.validator.api.claim(most).jobs]


def test_an_outage_delays_every_file_and_counts_against_none(
    panel: JudgedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [panel.mgr.submit(HONEST, make=panel.honest) for _ in range(2)]

    def away(*words: object, **more: object) -> None:
        raise UnavailableError("the orchestrator is away")

    with monkeypatch.context() as outage:
        outage.setattr(ValidatorApi, "file", away)
        assert panel.validator.judge_some(4) == [row.digest for row in rows]
    assert panel.validator.judge_some(4) == [], "they rest"
    panel.mgr.now.time += LATER_SECONDS
    assert panel.validator.judge_some(4) == [row.digest for row in rows]
    assert {panel.mgr.row(row.digest).status for row in rows} == {"accepted"}
