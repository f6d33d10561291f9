"""The bench of few rows: its draws are a validator's, and its chances follow from their shares."""

from __future__ import annotations

import pytest

from bench import few
from bench.honest_files import Maker
from prime_verify.proofs.thresholds import LEAST_TOKENS, STATISTICS
from prime_verify.replay import RowStatistics


def _file(dtype: str, lengths: list[int]) -> few.File:
    values = dict.fromkeys(STATISTICS, 0.0)
    rows = [
        RowStatistics(i, tokens, 1, 1.0, values, 0.0, False, 0, 0.0)
        for i, tokens in enumerate(lengths)
    ]
    unit = few.Unit("devnet", Maker("plain", dtype, 64), max(lengths), 1)
    return few.File(unit, rows, [] if dtype == "float32" else rows)


def test_every_draw_counts_once_and_is_as_long_as_a_validators() -> None:
    for dtype, least in (("float32", 0), ("bfloat16", LEAST_TOKENS)):
        file = _file(dtype, [8, 8, 40, 40, 64, 64, 64, 64])
        found = few.draws(file, 2)
        assert len({tuple(numbers[:2]) for numbers in found}) == len(found) == 28
        for numbers in found:
            assert len(set(numbers)) == len(numbers) >= 2
            assert sum(file.rows[number].tokens for number in numbers) >= least
            assert len(numbers) == 2 or sum(file.rows[n].tokens for n in numbers[:-1]) < least


def test_a_new_nodes_first_files_are_drawn_twice_as_often() -> None:
    assert few.within(1, 0.5, 0.75) == 0.75
    assert few.within(10, 0.5, 0.0) == 0.75
    assert few.within(10, 0.5, 0.75) == pytest.approx(1 - 0.25**8 * 0.5**2)


def test_no_lease_of_a_setup_is_measured_twice() -> None:
    seen = set()
    for unit in few.units():
        for number in range(unit.first, unit.first + unit.files):
            key = (unit.model, unit.maker, unit.tokens, unit.lie, unit.settings, number)
            assert key not in seen, unit.name
            seen.add(key)
    by_vllm = [unit for unit in few.units() if unit.maker.engine == "vllm"]
    assert {unit.first >= few.EVALUATED for unit in by_vllm} == {False, True}
