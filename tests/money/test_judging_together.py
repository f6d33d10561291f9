"""Several files at once: each ends as it would alone, and a deadly one takes none along."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'prime-open[torch]'")

import sqlalchemy as sa
from court_kit import HONEST, LIAR, Court
from money_kit import VALIDATOR, Shop

from orchestrator.claims import Claims
from orchestrator.store import jobs, schema
from orchestrator.store.submissions import SubmissionRow
from protocol.core.errors import UnavailableError
from protocol.core.verdict import Reason
from protocol.verification import packing


def claims(shop: Shop) -> Claims:
    return Claims(shop.store, "w", VALIDATOR.address, seconds=30, judge_seconds=60, now=shop.now)


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


def attempts(shop: Shop, row: SubmissionRow, number: int) -> None:
    with shop.store.begin() as connection:
        connection.execute(
            sa.update(schema.jobs)
            .where(schema.jobs.c.submission_digest == row.digest)
            .values(attempts=number)
        )


@pytest.mark.parametrize("deadly", [0, 1, 2])
def test_a_file_over_which_somebody_died_is_judged_alone(court: Court, deadly: int) -> None:
    shop = court.shop
    rows = [shop.submit(HONEST) for _ in range(3)]
    attempts(shop, rows[deadly], 1)
    others = [row.digest for i, row in enumerate(rows) if i != deadly]
    first, second = claims(shop).take(4), claims(shop).take(4)
    if deadly == 0:
        assert (first, second) == ([rows[0].digest], others)
    else:
        assert (first, second) == (others, [rows[deadly].digest])


def test_only_files_of_one_policy_are_judged_together(court: Court) -> None:
    shop = court.shop
    shop.publish(1)
    old, new, old_too = shop.submit(HONEST), shop.submit(HONEST, version=1), shop.submit(HONEST)
    assert claims(shop).take(8) == [old.digest, old_too.digest]
    assert claims(shop).take(8) == [new.digest]


def test_an_outage_gives_every_job_back(court: Court, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [court.shop.submit(HONEST, make=court.honest) for _ in range(2)]

    def away(*words: object, **more: object) -> None:
        raise UnavailableError("the store is away")

    monkeypatch.setattr("orchestrator.judging.publish_verdict", away)
    with pytest.raises(UnavailableError):
        court.validator.judge_some(4)
    with court.shop.store.read() as connection:
        found = [jobs.get(connection, row.digest) for row in rows]
    assert [(job.status, job.attempts, job.abstentions) for job in found if job] == [
        ("ready", 0, 0)
    ] * 2
