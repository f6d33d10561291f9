"""Rows of several files in one prefill: same findings, one call, and every file ends by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from prime_core.errors import MalformedError
from prime_core.ids import Digest, digest
from prime_core.verdict import Outcome
from prime_engine.base import Engine
from prime_verify.case import Case
from prime_verify.finding import Finding
from prime_verify.packing import Packing
from prime_verify.verify import verify_file


def judged(world: Any, files: Sequence[Any]) -> tuple[list[Finding], Packing]:
    """All files side by side, as a validator does it."""
    packing = Packing(world.policies, len(files))

    def judge(file: Any) -> Finding:
        try:
            return verify_file(
                Case(
                    file.data,
                    file.signed,
                    file.lease_digest,
                    world.run,
                    world.environment,
                    packing.engines(),
                    draw_secret=digest(bytes(32)),
                    submission_digest=file.lease_digest,
                )
            )
        finally:
            packing.ended()

    with ThreadPoolExecutor(len(files)) as pool:
        return list(pool.map(judge, files)), packing


@pytest.fixture(scope="module")
def small(world: Any) -> Any:
    run = world.run.model_copy(
        update={"groups_per_lease": 2, "samples_per_group": 4, "replay_rows_micro": 500_000}
    )
    return type(world)(run, world.environment, world.engine)


def test_files_judged_side_by_side_share_a_prefill_and_end_as_alone(small: Any) -> None:
    files = [small.honest(number) for number in range(4)]
    files[2] = small.made(
        2, change=lambda rows, plan, made: [replace(row, logprobs=row.logprobs - 1) for row in rows]
    )
    alone = [small.judge(file) for file in files]
    together, packing = judged(small, files)
    assert packing.prefills == [16], "four rows of each of four files, in one call"
    assert [found.reason for found in together] == [found.reason for found in alone]
    assert [found.outcome for found in together].count(Outcome.REJECTED) == 1
    for one, other in zip(together, alone, strict=True):
        assert one.rows_drawn == other.rows_drawn
        assert one.units == other.units
        for name, value in other.statistics.items():
            assert one.statistics[name] == pytest.approx(value, abs=1e-4, rel=1e-2), name


def test_a_file_that_ends_early_makes_no_reader_wait(small: Any) -> None:
    broken = replace(small.honest(5), data=b"not parquet")
    together, packing = judged(small, [broken, small.honest(6), broken])
    assert [found.outcome for found in together] == [Outcome.VOID, Outcome.ACCEPTED, Outcome.VOID]
    assert packing.prefills == [4]


@dataclass
class Fussy:
    """An engine that refuses some rows, and so any call that holds them."""

    refused: str
    calls: list[list[str]] = field(default_factory=list)

    def replay(self, requests: Sequence[str], temperature: float) -> list[str]:
        self.calls.append(list(requests))
        if self.refused in requests:
            raise MalformedError("a row does not fit the model")
        return [request.upper() for request in requests]


@dataclass
class One:
    """A provider of one engine."""

    held: Any

    def engine(self, version: int, policy_digest: Digest) -> Engine:
        return self.held  # type: ignore[no-any-return]

    def earlier(self, version: int) -> Iterator[tuple[int, Engine]]:
        yield from ()


def test_a_file_that_the_engine_refuses_fails_alone() -> None:
    engine = Fussy(refused="bad")
    packing = Packing(One(engine), 3)  # type: ignore[arg-type]

    def ask(rows: list[str]) -> Any:
        try:
            return packing.engines().engine(0, digest(bytes(32))).replay(rows, 1.0)  # type: ignore[arg-type]
        except MalformedError as error:
            return str(error)
        finally:
            packing.ended()

    with ThreadPoolExecutor(3) as pool:
        said = list(pool.map(ask, [["a"], ["bad", "b"], ["c", "d"]]))
    assert said == [["A"], "a row does not fit the model", ["C", "D"]]
    assert len(engine.calls) == 4, "together, then each by itself"


def test_a_crash_of_the_engine_reaches_every_file_and_hangs_none() -> None:
    class Broken:
        def replay(self, requests: Sequence[str], temperature: float) -> list[str]:
            raise ZeroDivisionError

    packing = Packing(One(Broken()), 2)  # type: ignore[arg-type]

    def ask(rows: list[str]) -> bool:
        try:
            packing.engines().engine(0, digest(bytes(32))).replay(rows, 1.0)  # type: ignore[arg-type]
        except ZeroDivisionError:
            return True
        finally:
            packing.ended()
        return False

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(ask, [["a"], ["b"]])) == [True, True]
