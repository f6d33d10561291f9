"""The detection bench's kept work: nothing is done twice, nothing half done counts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench import detection, detection_kept, detection_units
from bench.__main__ import main
from bench.detection_units import Line, Units, honest_lines, limits_key, numbered
from bench.honest_files import makers


@pytest.fixture
def units(tmp_path: Path) -> Units:
    model: Any = SimpleNamespace(folder=tmp_path)
    return Units(model, tmp_path / "kept")


def _keep(units: Units, line: Line, number: int, records: list[dict[str, Any]]) -> None:
    units.keep(f"{line.name}.{limits_key(line)}.{number:05}", records)


def test_the_line_furthest_behind_its_aim_is_next_and_done_lines_are_not(units: Units) -> None:
    short, long = Line("short", 2, 1), Line("long", 10, 1)
    for number in range(2):
        _keep(units, long, number, [])
    assert units.behind([short, long]) == short
    _keep(units, short, 0, [])
    assert units.behind([short, long]) == long
    for number in range(2, 10):
        _keep(units, long, number, [{"number": number}])
    assert units.behind([short, long]) == short
    _keep(units, short, 1, [])
    assert units.behind([short, long]) is None
    assert [record["number"] for record in units.records(long)] == list(range(2, 10))


def test_a_unit_that_was_cut_off_does_not_count(units: Units) -> None:
    line = Line("short", 2, 1)
    (units.folder / f"short.{limits_key(line)}.00000.part").write_text("[{")
    assert units.done(line) == 0


def test_units_judged_by_other_limits_do_not_count(units: Units) -> None:
    units.keep("short.00000000.00000", [])
    assert units.done(Line("short", 2, 1)) == 0


def test_what_is_measured_once_is_kept(units: Units) -> None:
    assert units.once("cost", lambda: [1]) == units.once("cost", lambda: [2]) == [1]


def _record(number: int) -> dict[str, Any]:
    return {
        "number": number, "commit": "c", "outcome": "ACCEPTED", "reason": "NONE", "detail": "",
        "rows": 8, "shares": {"mantissa": 0.5, "sketch": 0.7}, "compute_share": 0.3,
        "series": {"sketch": [1.0]},
    }  # fmt: skip


def test_kept_work_is_taken_up_on_another_machine_but_not_after_the_sources_changed(
    units: Units, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line, kept = Line("short", 2, 1), tmp_path / "kept.json"
    _keep(units, line, 0, [_record(4)])
    assert detection_kept.keep(units, {"short": (64, "sketch")}, kept) == 1
    model: Any = SimpleNamespace(folder=tmp_path / "another")
    there = Units(model, tmp_path / "there")
    assert detection_kept.restore(there, kept) == {"short": (64, "sketch")}
    (found,) = there.records(line)
    assert found == {**_record(4), "shares": {"sketch": 0.7}, "series": None}
    _keep(there, line, 0, [_record(5)])  # what was made here stands
    detection_kept.restore(there, kept)
    assert there.records(line)[0]["number"] == 5
    monkeypatch.setattr(detection_kept, "sources_digest", lambda: "others")
    empty = Units(model, tmp_path / "empty")
    assert detection_kept.restore(empty, kept) == {}
    assert empty.done(line) == 0


def test_another_attack_source_or_model_starts_anew(tmp_path: Path) -> None:
    model: Any = SimpleNamespace(folder=tmp_path)
    before = Units(model, tmp_path / "kept").folder
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert Units(model, tmp_path / "kept").folder != before


def test_honest_lines_reach_their_sum_over_every_setup_and_share_no_lease() -> None:
    lines = honest_lines(20_000)
    assert {line.maker for line in lines} == set(makers())
    rows = {line.name: line.aim * line.files * detection_units.ROWS_OF_A_FILE for line in lines}
    assert sum(rows.values()) >= 20_000
    assert all(
        rows[line.name] <= 320 for line in lines if line.maker and line.maker.batch_rows == 1
    )
    first = dict(numbered(lines))
    assert len(set(first.values())) == len(lines)


def test_auc_counts_ties_half() -> None:
    assert detection.auc(np.array([0.0, 1.0]), np.array([1.0])) == 0.75
    assert detection.auc(np.zeros(3), np.ones(2)) == 1


def test_an_option_without_its_number_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["detection", "--minutes", "soon"]) == 64
    assert main(["gas", "--minutes", "3"]) == 64
    assert "usage" in capsys.readouterr().err
