"""A node's history: more rows for newcomers and by lot, and what many files show together."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.history import FULL_EVERY, NEWCOMER_FILES, draw_count, excess
from orchestrator.metrics import _drift
from orchestrator.store import drift, open_store, sqlite_url
from orchestrator.store.drift import DriftRow
from protocol.core import encoding
from protocol.core.ids import Address, address
from protocol.proofs import tails
from protocol.proofs.thresholds import STATISTICS, Calibration, SetupLimits
from protocol.verification.setups import synthetic_run
from protocol.verification.verify import least_drawn

RUN = synthetic_run(8)
ROWS, FLOOR = RUN.rows_per_lease, least_drawn(RUN, RUN.rows_per_lease)
NODE = address("0x" + "11" * 20)
SETUP = "plain/1 bfloat16 cpu"


@given(st.integers(0, 10_000), st.binary(min_size=32, max_size=32))
def test_the_runs_share_is_the_floor_and_the_file_the_ceiling(before: int, secret: bytes) -> None:
    assert FLOOR <= draw_count(RUN, before, encoding.sha256(secret)) <= ROWS


def test_newcomers_have_twice_as_many_rows_replayed() -> None:
    secret = encoding.sha256(b"")
    assert all(draw_count(RUN, n, secret) == 2 * FLOOR for n in range(NEWCOMER_FILES))


def test_a_lot_that_only_the_secret_shows_has_whole_files_replayed() -> None:
    counts = [
        draw_count(RUN, NEWCOMER_FILES, encoding.sha256(n.to_bytes(2, "big"))) for n in range(3200)
    ]
    assert set(counts) == {FLOOR, ROWS}
    assert counts.count(ROWS) == pytest.approx(len(counts) / FULL_EVERY, rel=0.25)


def _calibration(median: float, ninety: float) -> Calibration:
    tail = tails.Tail(
        count=100, quantiles=(round(median * 1e6), round(ninety * 1e6), 10**6),
        largest=10**6, start=0, scale=0, limit=10**6,
    )  # fmt: skip
    every = dict.fromkeys(STATISTICS, tail)
    setup = SetupLimits(
        engine="plain/1", dtype="bfloat16", device="cpu", batches=(64,), rows=1, files=1, tokens=1,
        row=every, file=every,
    )  # fmt: skip
    return Calibration(replay_engine="plain/1", replay_dtype="float32", source="", setups=(setup,))


def test_a_small_excess_shows_over_many_files_and_not_in_one() -> None:
    calibration = _calibration(0.30, 0.42816)  # honest standard deviation 0.1
    one = DriftRow(NODE, SETUP, "sketch", 1, 0.35, 0.0)
    many = DriftRow(NODE, SETUP, "sketch", 400, 0.35 * 400, 0.0)
    assert excess(one, calibration) == pytest.approx(0.5)
    assert excess(many, calibration) == pytest.approx(10)
    assert excess(DriftRow(NODE, "vllm/1 float32 cpu", "sketch", 1, 1, 1), calibration) is None
    assert excess(one, _calibration(0.3, 0.3)) is None


def test_sums_are_kept_by_node_setup_and_statistic_and_become_metrics(tmp_path: Path) -> None:
    store = open_store(sqlite_url(tmp_path / "s.sqlite"))
    store.migrate()
    other: Address = address("0x" + "22" * 20)
    with store.begin() as connection:
        drift.add(connection, NODE, SETUP, {"sketch": 0.5, "sign": 0.0})
        drift.add(connection, NODE, SETUP, {"sketch": 0.25, "sign": 0.5})
        drift.add(connection, other, SETUP, {"sketch": 1.0})
    with store.read() as connection:
        rows = drift.every(connection)
    store.close()
    found = {(row.node, row.statistic): (row.files, row.total, row.squares) for row in rows}
    assert found[NODE, "sketch"] == (2, 0.75, 0.3125)
    assert found[NODE, "sign"] == (2, 0.5, 0.25)
    assert found[other, "sketch"] == (1, 1.0, 1.0)
    text = "\n".join(_drift(rows, _calibration(0.3, 0.42816)))
    assert f'prime_node_drift{{node="{NODE}",setup="{SETUP}",statistic="sketch"}} 0.375' in text
    assert f'prime_node_drift_excess{{node="{other}"' in text
    assert "prime_node_drift_excess" not in "\n".join(_drift(rows, None)[3:])
