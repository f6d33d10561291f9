"""A node's history: more rows for newcomers and by lot, and what many files show together."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_core import encoding
from prime_core.ids import Address, address
from prime_orchestrator.api import metrics
from prime_orchestrator.api.metrics import PoolMetrics, RequestCounts, _drift
from prime_orchestrator.manager.history import (
    FULL_EVERY,
    LEAST_FILES,
    NEWCOMER_FILES,
    Drifting,
    draw_count,
    excess,
    others_of,
)
from prime_orchestrator.store import drift, open_store, sqlite_url
from prime_orchestrator.store.drift import DriftRow
from prime_verify.setups import synthetic_run

RUN = synthetic_run(8)
ROWS, FLOOR = RUN.rows_per_lease, RUN.least_drawn(RUN.rows_per_lease)
NODE = address("0x" + "11" * 20)
OTHER = address("0x" + "22" * 20)
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


def _sums(node: Address, values: list[float], statistic: str = "sketch") -> DriftRow:
    squares = sum(value * value for value in values)
    return DriftRow(node, SETUP, statistic, len(values), sum(values), squares)


def test_a_small_excess_shows_over_many_files_and_not_in_few() -> None:
    others = [_sums(OTHER, [0.2, 0.4] * 200)]  # mean 0.3, standard deviation 0.1
    few, many = _sums(NODE, [0.35] * 8), _sums(NODE, [0.35] * 400)
    assert excess(few, others) == pytest.approx(0.5 * 8**0.5, rel=0.02)
    assert excess(many, others) == pytest.approx(0.5 * 200**0.5)
    assert excess(_sums(NODE, [0.35] * (LEAST_FILES - 1)), others) is None
    assert excess(many, [_sums(OTHER, [0.3] * 100)]) is None
    assert excess(many, []) is None


@pytest.mark.parametrize("statistic", ["margin_mean", "twin_margin"])
def test_means_of_margins_are_compared_once_they_rest_on_enough_tokens(statistic: str) -> None:
    rare = _sums(OTHER, [0.0] * 450 + [0.3] * 50, statistic)
    assert excess(_sums(NODE, [0.0] * 90 + [0.6] * 10, statistic), [rare]) is None
    found = excess(_sums(NODE, [0.0] * 450 + [0.6] * 50, statistic), [rare])
    assert found == pytest.approx(0.03 / (0.18 * (2 / 500) ** 0.5))  # its own deviation
    own = _sums(NODE, [0.2, 0.4] * 20, statistic)
    assert excess(own, [_sums(OTHER, [0.0] * 460 + [0.3] * 40, statistic)]) is None
    often = _sums(OTHER, [0.1, 0.3] * 20, statistic)
    assert excess(own, [often]) == pytest.approx(0.1 / (0.1 * (2 / 40) ** 0.5))
    assert excess(_sums(NODE, [0.0] * 8, statistic), [often]) is None
    assert excess(_sums(NODE, [1e-200] * 8, statistic), [often]) is None
    assert excess(_sums(NODE, [0.4] * 99, "margin_max"), [_sums(OTHER, [0.1, 0.3] * 9)]) is None


def test_a_node_is_compared_with_other_nodes_of_its_setup_only() -> None:
    own = _sums(NODE, [0.1])
    totals = {(SETUP, "sketch"): (3, 0.5, 0.09), ("vllm/1 float32 cpu", "sketch"): (9, 1.0, 1.0)}
    (rest,) = others_of(own, totals)
    assert (rest.files, rest.total, rest.squares) == pytest.approx((2, 0.4, 0.08))
    assert others_of(own, {}) == []


def test_a_node_that_drifts_beyond_the_limit_is_replayed_whole_and_others_are_not(
    tmp_path: Path,
) -> None:
    store = open_store(sqlite_url(tmp_path / "s.sqlite"))
    store.migrate()
    drifting = Drifting()
    with store.begin() as connection:
        for n in range(200):
            drift.add(connection, OTHER, SETUP, {"sketch": 0.2 + 0.2 * (n % 2)})
        for _ in range(LEAST_FILES - 1):
            drift.add(connection, NODE, SETUP, {"sketch": 0.9})
        assert not drifting.among(connection, [NODE], 0.0), "too few files to tell"
        drift.add(connection, NODE, SETUP, {"sketch": 0.9})
        assert drifting.among(connection, [NODE], 1.0)
        assert not drifting.among(connection, [OTHER], 2.0), "0.3 against 0.9 is below the others"
        assert not drifting.among(connection, [address("0x" + "33" * 20)], 3.0)
        far = [address(f"0x{n:040x}") for n in range(1, 4)]
        for node in far:
            drift.add(connection, node, SETUP, {"margin_max": 1.0})
        assert not drifting.among(connection, far, 100.0)
    store.close()


def test_sums_are_kept_by_node_setup_and_statistic_and_become_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(sqlite_url(tmp_path / "s.sqlite"))
    store.migrate()
    with store.begin() as connection:
        drift.add(connection, NODE, SETUP, {"sketch": 0.5, "sign": 0.0})
        drift.add(connection, NODE, SETUP, {"sketch": 0.25, "sign": 0.5})
        drift.add(connection, OTHER, SETUP, {"sketch": 1.0})
    backend: Any = SimpleNamespace(now=lambda: 100.0)
    collector = PoolMetrics(backend, RequestCounts())
    with store.read() as connection:
        rows, totals = drift.every(connection), drift.totals(connection)
        first = collector._kept_drifts(connection)
        assert collector._kept_drifts(connection) is not first, "few sums are read each time"
        monkeypatch.setattr(metrics, "FEW_SUMS", len(rows) - 1)
        kept = collector._kept_drifts(connection)
        assert kept == first
        assert collector._kept_drifts(connection) is kept
        backend.now = lambda: 100.0 + 2 * metrics.DRIFT_SECONDS * len(rows)
        assert collector._kept_drifts(connection) is not kept
    store.close()
    found = {(row.node, row.statistic): (row.files, row.total, row.squares) for row in rows}
    assert found[NODE, "sketch"] == (2, 0.75, 0.3125)
    assert found[NODE, "sign"] == (2, 0.5, 0.25)
    assert found[OTHER, "sketch"] == (1, 1.0, 1.0)
    labels = {"node": NODE, "setup": SETUP, "statistic": "sketch"}
    mean, _, beyond = _drift(rows, totals)
    assert ("prime_node_drift", labels, 0.375) in [sample[:3] for sample in mean.samples]
    assert not beyond.samples  # too few files
    many = [_sums(OTHER, [0.2, 0.4] * 200), _sums(NODE, [0.35] * 400)]
    files, total, squares = (
        sum(getattr(row, name) for row in many) for name in ("files", "total", "squares")
    )
    *_, beyond = _drift(many, {(SETUP, "sketch"): (files, total, squares)})
    assert {sample.labels["node"] for sample in beyond.samples} == {NODE, OTHER}
    monkeypatch.setattr(metrics, "MOST_DRIFTING", 1)
    *_, beyond = _drift(many, {(SETUP, "sketch"): (files, total, squares)})
    assert [sample.labels["node"] for sample in beyond.samples] == [NODE], "the largest"
