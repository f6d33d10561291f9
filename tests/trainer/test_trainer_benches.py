"""The benches' own arithmetic: where a curve crosses, what an interval is, what is said of gaps."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from bench import file_times, gpu, report
from bench.form import Row, result
from bench.gpu import Size, rates
from bench.learning import MAIN, SEEDS, mean_interval, rows, wanted
from bench.learning_page import NAMES, THIN, length_table, pictures, table, write
from bench.learning_run import MODES, Record, crossing
from bench.learning_run import TARGETS as TARGET_LENGTHS
from bench.trainer import packing
from bench.trainer_parts import TARGETS, bench_model, published_lengths
from prime_core.errors import MalformedError, UnavailableError
from prime_envs.lengths import balanced_targets
from prime_trainer.parallel import World


def test_the_goal_is_crossed_where_the_line_through_the_rewards_meets_it() -> None:
    curve = [(0, 0, 0.4), (4, 1000, 0.6), (8, 2000, 0.8), (12, 3000, 0.7)]
    assert crossing(curve, 0.75) == pytest.approx(1750)
    assert crossing(curve, 0.9) is None
    assert crossing([(0, 0, 0.9)], 0.75) == 0.0


def test_an_interval_is_students_and_a_single_value_has_none() -> None:
    mean, half, count = mean_interval([1.0, 2.0, 3.0])
    assert (mean, count) == (2.0, 3)
    assert half == pytest.approx(4.30 / math.sqrt(3))
    assert mean_interval([5.0])[1] == math.inf


def record(mode: str, seed: int, samples: float | None) -> Record:
    return Record(mode, seed, 8, samples=2000, samples_to_goal=samples)


def test_a_ratio_has_its_bar_only_when_every_seed_is_there() -> None:
    some = [record("sync", s, 1000.0 + s) for s in range(3)]
    some += [record("stale2", s, 1100.0 + s) for s in range(3)]
    found = {row.name: row for row in rows(some)}
    assert found["stale2_vs_sync"].bar is None
    assert "seeds missing" in found["stale2_vs_sync"].unit
    whole = [record(m, s, 1000.0 + s) for m in ("sync", "stale2") for s in SEEDS]
    found = {row.name: row for row in rows(whole)}
    assert found["stale2_vs_sync"].bar == 1.15
    assert found["stale2_vs_sync"].ok


def test_a_mode_that_does_not_always_reach_the_goal_has_no_mean() -> None:
    found = {row.name: row for row in rows([record("sync", 0, 900.0), record("sync", 1, None)])}
    assert "sync" not in found
    assert found["sync_reached"].value == 0.5


def test_a_record_is_read_as_it_was_written() -> None:
    one = record("sync", 1, 2.5)
    assert Record.from_json(one.to_json()) == one
    assert set(MODES) >= {"sync", "stale2", "stale4", "liars20"}


def test_published_lengths_lie_around_the_published_targets() -> None:
    lengths = published_lengths(2000, 0)
    mean = sum(output for _, output in lengths) / len(lengths)
    assert mean == pytest.approx(sum(TARGETS) / len(TARGETS), rel=0.06)
    assert lengths == published_lengths(2000, 0)


def test_packing_meets_its_bars_at_the_quick_size() -> None:
    found = {row.name: row for row in packing(quick=True)}
    assert found["packing_fill"].ok
    assert found["rank_imbalance"].ok


def test_the_main_runs_come_before_the_ablations_and_each_once() -> None:
    every = wanted(tuple(MODES))
    assert len(every) == len(set(every)) == 32 + 3 * (len(MODES) - len(MAIN))
    assert {name for name, _ in every[:32]} == set(MAIN)
    assert every[:4] == [(name, 0) for name in MAIN]
    assert wanted(("sync",)) == [("sync", seed) for seed in SEEDS]


def test_a_rejected_honest_file_misses_the_bench() -> None:
    found = {row.name: row for row in rows([replace(record("liars20", 0, 9.0), liars_files=4)])}
    assert found["liars20_missed"].value == 0.0
    assert found["liars20_wronged"].ok
    wronged = replace(record("liars20", 0, 9.0), liars_files=4, wronged=1)
    assert not {row.name: row for row in rows([wronged])}["liars20_wronged"].ok


def test_a_chart_draws_every_run_and_names_every_mode(tmp_path: Path) -> None:
    runs = [
        replace(
            record(mode, seed, 1000.0 + 10 * seed),
            curve=[(0, 0, 0.4), (4, 900, 0.6), (8, 2000, 0.8)], gradient_norms=[0.1, 2000.0],
            actual={str(t): [9.0, t + 1, t] for t in TARGET_LENGTHS},
            lengths={str(t): [5.0, 1.0, 0.0] for t in TARGET_LENGTHS},
        )
        for mode in MODES for seed in range(2)
    ]  # fmt: skip
    assert {path.name for path in write(tmp_path, runs)} == {
        "reward.svg", "clipping.svg", "norms.svg", "clip.svg", "filter.svg", "rates.svg",
        "lengths.svg",
    }  # fmt: skip
    for path in tmp_path.iterdir():
        ElementTree.fromstring(path.read_text())
    figures = pictures(runs)
    (axes,) = figures["reward.svg"].axes
    assert sum(line.get_alpha() == THIN["alpha"] for line in axes.lines) == 2 * len(MAIN)
    assert len(axes.containers) == len(MAIN), "one interval a mode"
    assert [text.get_text() for text in axes.get_legend().texts] == [NAMES[mode] for mode in MAIN]
    for mode in MAIN:
        assert f"| {NAMES[mode]} | 2 | 1,005 ± " in table(runs)
    assert figures["norms.svg"].axes[0].get_yscale() == "log"
    assert length_table(runs).splitlines()[-1] == "| 14 | 9.0 | 5.0 | 14.0 | 0.0 |"
    assert pictures([]) == {}


def test_the_gpu_bench_runs_its_steps_on_any_device_and_says_where_there_is_none(
    tmp_path: Path, world: World
) -> None:
    model = bench_model(tmp_path / "m", hidden=64, layers=2, vocabulary=128, positions=1024)
    found = rates(model, Size("tiny", 256, 1 / 200, 2), world, rounds=2, bf16=False, peer=1.0)
    assert found[0].name == "tokens_s_tiny"
    assert found[0].value > 0
    if not torch.cuda.is_available():
        with pytest.raises(UnavailableError, match="needs a CUDA device"):
            gpu.run(quick=True)


def test_the_live_devnets_budgets_part_a_fourfold_difference() -> None:
    chosen = balanced_targets(
        file_times.MENU, {1: Fraction(1), 2: Fraction(4)}, answer_tokens=file_times.ANSWER_TOKENS
    )
    assert max(chosen["1"]) < min(chosen["2"])
    assert max(file_times.MENU) < 100  # the demo's prompts hold two digits


def test_the_page_of_figures_holds_every_row_and_names_what_is_missed(tmp_path: Path) -> None:
    rows_ = [Row("fast", 1234.5, "1/s", 2000, "higher", 600.0, "a peer"), Row("plain", 0.5, "s")]
    found = result("some", rows_, (), quick=False)
    (tmp_path / "some.json").write_text(json.dumps({"date": "2026-01-02", **found}))
    (tmp_path / "other.json").write_text("{}")
    page = tmp_path / "page.md"
    assert report.write(tmp_path, page) == 1
    assert "| `fast` | 1,234 1/s **not met** | ≥ 2,000 | 600 (a peer) |" in page.read_text()
    assert "| `plain` | 0.5 s |  |  |" in page.read_text()
    (tmp_path / "some.json").write_text('{"bench": 1, "rows": 2}')
    with pytest.raises(MalformedError, match=r"some\.json is not a result"):
        report.write(tmp_path, page)
