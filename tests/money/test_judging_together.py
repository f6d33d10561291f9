"""Several files at once: each ends as it would alone, and a deadly one takes none along."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'prime-open[torch]'")

from court_kit import HONEST, LIAR, Court

from prime_core.errors import UnavailableError
from prime_core.ids import Digest
from prime_core.verdict import Reason
from prime_orchestrator.api.validators import CLAIM_SECONDS
from prime_orchestrator.store import jobs
from prime_validator.api import ValidatorApi
from prime_validator.judging import LATER_SECONDS
from prime_verify import packing


def test_files_judged_together_end_as_alone(court: Court, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[packing.Packing] = []
    honest = packing.Packing.__init__

    def remember(self: packing.Packing, *words: object) -> None:
        made.append(self)
        honest(self, *words)  # type: ignore[arg-type]

    monkeypatch.setattr(packing.Packing, "__init__", remember)
    rows = [
        court.shop.submit(HONEST, make=court.honest),
        court.shop.submit(LIAR, make=court.forged),
        court.shop.submit(HONEST, make=lambda signed, digest: b"not parquet"),
        court.shop.submit(HONEST, make=court.honest),
    ]
    assert court.validator.judge_some(4) == [row.digest for row in rows]
    ended = [(court.shop.row(row.digest).status, court.shop.row(row.digest).reason) for row in rows]
    assert ended == [
        ("accepted", Reason.NONE),
        ("rejected", Reason.TAMPERED_LOGPROBS),
        ("void", Reason.MALFORMED),
        ("accepted", Reason.NONE),
    ]
    assert [len(one.prefills) for one in made] == [1], "one prefill for the three that replay"
    assert court.audit(court.slash(court.shop.row(rows[1].digest))).result == "match"
    assert court.validator.judge_some(4) == []


@pytest.mark.parametrize("deadly", [0, 1, 2])
def test_a_file_over_which_a_validator_died_is_judged_alone(court: Court, deadly: int) -> None:
    shop = court.shop
    rows = [shop.submit(HONEST) for _ in range(3)]
    with shop.store.begin() as connection:
        jobs.change(connection, rows[deadly].digest, created_at=0.0)
    assert court.validator.claim() is not None
    shop.now.time += CLAIM_SECONDS + 1
    others = [row.digest for i, row in enumerate(rows) if i != deadly]
    assert take(court, 4) == [rows[deadly].digest], "it took no other along"
    assert take(court, 4) == others


def test_only_files_of_one_policy_are_judged_together(court: Court) -> None:
    shop = court.shop
    shop.publish(1)
    old, new, old_too = shop.submit(HONEST), shop.submit(HONEST, version=1), shop.submit(HONEST)
    assert take(court, 8) == [old.digest, old_too.digest]
    assert take(court, 8) == [new.digest]


def take(court: Court, most: int) -> list[Digest]:
    """The files that one claim brings."""
    return [Digest(job.submission_digest) for job in court.validator.api.claim(most).jobs]


def test_an_outage_delays_every_file_and_counts_against_none(
    court: Court, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [court.shop.submit(HONEST, make=court.honest) for _ in range(2)]

    def away(*words: object, **more: object) -> None:
        raise UnavailableError("the orchestrator is away")

    with monkeypatch.context() as outage:
        outage.setattr(ValidatorApi, "file", away)
        assert court.validator.judge_some(4) == [row.digest for row in rows]
    assert court.validator.judge_some(4) == [], "they rest"
    court.shop.now.time += LATER_SECONDS
    assert court.validator.judge_some(4) == [row.digest for row in rows]
    assert {court.shop.row(row.digest).status for row in rows} == {"accepted"}
