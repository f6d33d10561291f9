"""A node's history: more rows for newcomers and by lot, and what many files show together."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_core import encoding
from prime_core.ids import ZERO_DIGEST, Address, address
from prime_core.run import RunDefinition
from prime_core.verdict import VerdictRow, VerdictTable
from prime_orchestrator.api import metrics
from prime_orchestrator.api.metrics import PoolMetrics, RequestCounts, _drift
from prime_orchestrator.manager.history import (
    FULL_EVERY,
    LEAST_FILES,
    MOST_EXCESS,
    NEWCOMER_FILES,
    Drifting,
    by_statistic,
    draw_count,
    excess,
    kind_of,
    others_of,
)
from prime_orchestrator.store import Store, drift, open_store, sqlite_url
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


def _sums(
    node: Address, values: list[float], statistic: str = "sketch", kind: str = "short"
) -> DriftRow:
    squares = sum(value * value for value in values)
    return DriftRow(node, SETUP, kind, statistic, len(values), sum(values), squares)


def _totals(*sums: DriftRow) -> dict[tuple[str, str, str], tuple[int, float, float]]:
    """What the store has of all nodes together."""
    found: dict[tuple[str, str, str], tuple[int, float, float]] = {}
    for row in sums:
        files, total, squares = found.get((row.setup, row.kind, row.statistic), (0, 0.0, 0.0))
        found[row.setup, row.kind, row.statistic] = (
            files + row.files, total + row.total, squares + row.squares
        )  # fmt: skip
    return found


def _excess(own: DriftRow, *others: DriftRow) -> float | None:
    return excess([own], _totals(own, *others))


def test_a_small_excess_shows_over_many_files_and_not_in_few() -> None:
    others = _sums(OTHER, [0.2, 0.4] * 20_000)  # mean 0.3, standard deviation 0.1
    few, many = _sums(NODE, [0.35] * 8), _sums(NODE, [0.35] * 400)
    assert _excess(few, others) == pytest.approx(0.5 * 8**0.5, rel=0.01)
    assert _excess(many, others) == pytest.approx(0.5 * 400**0.5, rel=0.01)
    assert _excess(_sums(NODE, [0.25] * 8), others) == pytest.approx(-0.5 * 8**0.5, rel=0.01)
    assert _excess(_sums(NODE, [0.35] * (LEAST_FILES - 1)), others) is None
    for same in (0.3, 0.35, 0.7):
        assert _excess(many, _sums(OTHER, [same] * 100)) is None, "rounding is no deviation"
    assert _excess(many) is None


def test_few_files_of_others_estimate_their_deviation_poorly() -> None:
    """Chances of t = 6 with 7 and 99 degrees of freedom: 2.7e-4 and 1.6e-8."""
    own = _sums(NODE, [0.9] * 8)
    for files, expected in ((8, 3.5), (100, 5.5)):
        mean = 0.9 - 6 * 0.1 * (1 / files + 1 / 8) ** 0.5
        others = _sums(OTHER, [mean - 0.1, mean + 0.1] * (files // 2))
        assert _excess(own, others) == pytest.approx(expected, abs=0.1)


@pytest.mark.parametrize("statistic", ["margin_mean", "twin_margin"])
def test_means_of_margins_are_compared_once_they_rest_on_enough_tokens(statistic: str) -> None:
    rare = _sums(OTHER, [0.0] * 4500 + [0.3] * 500, statistic)
    assert _excess(_sums(NODE, [0.0] * 90 + [0.6] * 10, statistic), rare) is None
    found = _excess(_sums(NODE, [0.0] * 450 + [0.6] * 50, statistic), rare)
    assert found == pytest.approx(0.03 / (0.18 * (11 / 5000) ** 0.5), rel=0.01)  # its own deviation
    own = _sums(NODE, [0.2, 0.4] * 20, statistic)
    assert _excess(own, _sums(OTHER, [0.0] * 460 + [0.3] * 40, statistic)) is None
    often = _sums(OTHER, [0.1, 0.3] * 2000, statistic)
    assert _excess(own, often) == pytest.approx(0.1 / (0.1 * (1 / 40 + 1 / 4000) ** 0.5), rel=0.01)
    assert _excess(_sums(NODE, [0.0] * 8, statistic), often) is None
    assert _excess(_sums(NODE, [1e-200] * 8, statistic), often) is None
    assert _excess(_sums(NODE, [0.4] * 99, "margin_max"), _sums(OTHER, [0.1, 0.3] * 9)) is None


def test_a_node_is_compared_with_other_nodes_of_its_setup_and_kind_only() -> None:
    own = _sums(NODE, [0.1])
    totals = {
        (SETUP, "short", "sketch"): (3, 0.5, 0.09),
        (SETUP, "long", "sketch"): (9, 1.0, 1.0),
        ("vllm/1 float32 cpu", "short", "sketch"): (9, 1.0, 1.0),
    }
    rest = others_of(own, totals)
    assert rest is not None
    assert (rest.files, rest.total, rest.squares) == pytest.approx((2, 0.4, 0.08))
    assert others_of(own, {}) is None


def test_files_of_another_kind_accuse_no_honest_node_and_a_new_kind_forgets_no_lie() -> None:
    """Long files have larger statistics than short ones. One node makes mostly long ones. Another
    exceeds the others by half a deviation, in files of two kinds of which neither shows it."""
    short, long = [0.2, 0.4] * 2000, [0.6, 0.8] * 2000
    others = [_sums(OTHER, short), _sums(OTHER, long, kind="long")]
    honest = [_sums(NODE, [0.2, 0.4] * 10), _sums(NODE, [0.6, 0.8] * 200, kind="long")]
    assert excess(honest, _totals(*honest, *others)) == pytest.approx(0.0, abs=1e-9)
    mixed = _sums(NODE, [0.2, 0.4] * 10 + [0.6, 0.8] * 200)
    assert (_excess(mixed, _sums(OTHER, short + long)) or 0.0) > MOST_EXCESS
    lying = [_sums(NODE, [0.25, 0.45] * 50), _sums(NODE, [0.65, 0.85] * 50, kind="long")]
    for one in lying:
        assert (excess([one], _totals(*lying, *others)) or 0.0) < MOST_EXCESS
    assert (excess(lying, _totals(*lying, *others)) or 0.0) > MOST_EXCESS
    fresh = [*lying, _sums(NODE, [0.9] * 5, kind="of no other node")]
    assert excess(fresh, _totals(*fresh, *others)) == excess(lying, _totals(*lying, *others))


def test_a_kind_is_a_revision_and_about_as_many_replayed_tokens() -> None:
    def kind(run: RunDefinition, tokens: int, rows: int) -> str:
        row = VerdictRow(
            problem_id="p", group=0, sample=0, reward_micro=0, prompt_tokens=1, output_tokens=tokens
        )
        table = VerdictTable(
            submission_digest=ZERO_DIGEST, sha256=ZERO_DIGEST, policy_version=0, step=0,
            rows=(row,) * 8, rows_drawn=tuple(range(rows)),
        )  # fmt: skip
        return kind_of(run, table)

    assert kind(RUN, 64, 2) == kind(RUN, 50, 4)
    assert kind(RUN, 64, 2) != kind(RUN, 64, 4)
    assert kind(RUN, 64, 2) != kind(synthetic_run(16), 64, 2)


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


def test_old_files_fade_and_a_new_kind_counts_with_them(either_store: Store) -> None:
    """After files of 0.5, a node's mean becomes that of its newest files, of any kind."""
    store, most = either_store, drift.MOST_FILES

    def sums(kind: str, share: float, files: int) -> dict[tuple[Address, str], DriftRow]:
        with store.begin() as connection:
            for node in (NODE, OTHER):
                shares = {"sketch": share if node == NODE else 0.5}
                drift.add_files(connection, [(node, SETUP, kind, shares)] * files)
            return {(row.node, row.kind): row for row in drift.every(connection)}

    assert sums("once", 0.9, 1)[NODE, "once"].files == 1
    before = sums("first", 0.5, most - 2)
    assert before[NODE, "first"].files == most - 2
    full = sums("first", 0.5, 1)
    assert (NODE, "once") not in full
    assert (full[NODE, "first"].files, full[NODE, "first"].mean) == (most // 2 - 1, 0.5)
    assert full[NODE, "first"].variance == 0
    for _ in range(6):
        newest = sums("second", 0.1, most // 2)
    (own,) = by_statistic(row for (node, _), row in newest.items() if node == NODE)
    assert most // 2 - 2 <= sum(row.files for row in own) < most
    mean = sum(row.total for row in own) / sum(row.files for row in own)
    assert mean == pytest.approx(0.1, abs=0.02)


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
    many = [_sums(OTHER, [0.2, 0.4] * 200), _sums(NODE, [0.3, 0.4] * 200)]
    *_, beyond = _drift(many, _totals(*many))
    assert {sample.labels["node"] for sample in beyond.samples} == {NODE, OTHER}
    monkeypatch.setattr(metrics, "MOST_DRIFTING", 1)
    *_, beyond = _drift(many, _totals(*many))
    assert [sample.labels["node"] for sample in beyond.samples] == [NODE], "the largest"
