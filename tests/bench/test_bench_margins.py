"""The bench of sums of margins: its files are a validator's, and its nodes are found by the sums
alone."""

from __future__ import annotations

import random

import pytest

from bench import few, margins
from bench.honest_files import Maker
from prime_orchestrator.manager import history
from prime_verify.proofs.thresholds import STATISTICS
from prime_verify.replay import RowStatistics

DRIFT = RowStatistics(0, 64, 2, 1.0, dict.fromkeys(STATISTICS, 0.05), 0.0, False, 0, 0.0)


def _work(margin: float, files: int = 8) -> margins.Work:
    """Files of rows whose mean margins are spread evenly around `margin`."""
    unit = few.Unit(few.SMOL, Maker("plain", "bfloat16", 64), 64, files)

    def row(number: int) -> RowStatistics:
        values = dict.fromkeys(STATISTICS, 0.0)
        values["twin_margin"] = margin * (number % 8 + 1) / 4.5
        return RowStatistics(number % 8, 64, 2, 1.0, values, 0.0, False, 0, 0.0)

    return margins.Work(
        [few.File(unit, [row(n) for n in range(8)], [DRIFT] * 8) for _ in range(files)]
    )


def test_a_new_nodes_first_files_are_drawn_twice_as_often_and_some_later_ones_whole() -> None:
    lot, work = random.Random(0), _work(0.01)
    kinds = [work.draw(lot, before, whole=False).kind for before in range(200)]
    assert set(kinds[: history.NEWCOMER_FILES]) == {"9"}  # 256 tokens
    assert set(kinds[history.NEWCOMER_FILES :]) == {"8", "10"}  # 128 and 512
    assert work.draw(lot, 0, whole=True).kind == "10"


@pytest.mark.parametrize(("margin", "found"), [(0.02, True), (0.01, False), (0.005, False)])
def test_only_a_node_whose_margins_are_larger_is_found(margin: float, found: bool) -> None:
    lot, honest, others = random.Random(0), _work(0.01), margins.Sums()
    for number in range(100):
        others.add(honest.draw(lot, number, whole=False))
    after = margins.files_until_found(_work(margin), others, 30, lot)
    assert (after is not None) == found
    assert after is None or after >= history.LEAST_FILES
