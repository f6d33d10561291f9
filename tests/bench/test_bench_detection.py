"""The detection bench's kept work: nothing is done twice, nothing half done counts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench import detection, detection_kept, detection_units, form
from bench.__main__ import main
from bench.detection_units import Line, Units, attack_lines, honest_lines, limits_key, numbered
from bench.honest_files import makers


@pytest.fixture
def units(tmp_path: Path) -> Units:
    model: Any = SimpleNamespace(folder=tmp_path, device="cpu")
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
        "alone": [True, False], "series": {"sketch": [1.0]},
    }  # fmt: skip


def test_kept_work_is_taken_up_on_another_machine_but_not_by_other_statistics(
    units: Units, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line, kept = Line("short", 2, 1), tmp_path / "kept.json"
    _keep(units, line, 0, [_record(4)])
    assert detection_kept.keep(units, {"short": (64, "sketch")}, kept) == 1
    model: Any = SimpleNamespace(folder=tmp_path / "another", device="cpu")
    there = Units(model, tmp_path / "there")
    assert detection_kept.restore(there, kept) == {"short": (64, "sketch")}
    (found,) = there.records(line)
    assert found == {**_record(4), "shares": {"sketch": 0.7}, "series": None}
    _keep(there, line, 0, [_record(5)])  # what was made here stands
    detection_kept.restore(there, kept)
    assert there.records(line)[0]["number"] == 5
    monkeypatch.setattr(detection_kept, "STATISTICS", -1)
    empty = Units(model, tmp_path / "empty")
    assert detection_kept.restore(empty, kept) == {}
    assert empty.done(line) == 0


def test_other_attacks_restart_and_honest_files_stay(
    units: Units, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lie, kept = Line("t09", 2, 1), tmp_path / "kept.json"
    honest = next(line for line in honest_lines(600) if line.maker)
    for line in (lie, honest):
        _keep(units, line, 0, [_record(1)])
    detection_kept.keep(units, {"t09": (64, "sketch")}, kept)
    for module in (detection_kept, detection_units):
        monkeypatch.setattr(module, "attacks_digest", lambda: "other ways")
    assert detection_kept.restore(units, kept) == {}
    assert (units.done(lie), units.done(honest)) == (0, 1)


def test_another_model_device_or_value_of_a_statistic_restarts_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = SimpleNamespace(folder=tmp_path, device="cpu")
    folders = {Units(model, tmp_path / "kept").folder}
    model.device = "cuda:0"
    folders.add(Units(model, tmp_path / "kept").folder)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    folders.add(Units(model, tmp_path / "kept").folder)
    monkeypatch.setattr(detection_units, "STATISTICS", -1)
    folders.add(Units(model, tmp_path / "kept").folder)
    assert len(folders) == 4


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
    assert main(["gas", "--device", "cpu"]) == 64
    assert main(["proofs", "--costs"]) == 64
    assert "usage" in capsys.readouterr().err


def _lie(outcome: str, alone: list[bool] | None) -> dict[str, Any]:
    reason = {"REJECTED": "WRONG_SAMPLING", "VOID": "UNKNOWN_SETUP", "ACCEPTED": "NONE"}[outcome]
    return {**_record(1), "outcome": outcome, "reason": reason, "alone": alone}


def test_the_share_of_single_sequences_counts_those_that_lie() -> None:
    records = [_lie("REJECTED", [True] + 7 * [False]), _lie("ACCEPTED", 8 * [False])]
    rows = {row.name: row for row in detection.attack_rows("t09", records, (64, "margin"))}
    assert (rows["caught_t09"].value, rows["caught256_t09"].value) == (0.5, 1 / 16)
    assert not rows["caught_t09"].ok
    assert rows["tokens_t09"].value == 64
    (_, one, _) = detection.attack_rows("tampered_reward", records)
    assert one.value == 0.5  # one row a file is tampered with
    (_, copied, _) = detection.attack_rows("copied_rows", [_lie("REJECTED", 8 * [True])])
    assert "of 6 sequences" in copied.unit


def test_the_same_file_declared_as_vllms_work_is_held_to_the_same_bar() -> None:
    rows = detection.attack_rows("int4_as_vllm", [_lie("ACCEPTED", 8 * [False])])
    assert [row.name for row in rows] == ["caught_int4_as_vllm", "caught256_int4_as_vllm"]
    assert rows[0].bar == 0.99


def test_without_limits_nothing_is_held_to_a_bar() -> None:
    rows = detection.attack_rows("t09", [_lie("VOID", None)])
    assert [row.name for row in rows] == ["caught_t09", "tokens_t09"]
    assert all(row.ok for row in rows)


def test_an_honest_row_accused_alone_is_shown_even_if_its_file_was_accepted() -> None:
    found = {"plain": [_lie("ACCEPTED", 7 * [False] + [True]), _lie("ACCEPTED", None)]}
    rows = {row.name: row for row in detection.honest_rows(found, 16)}
    assert rows["honest_rejected"].ok
    assert rows["honest_rows_accused"].value == 1
    assert not rows["honest_rows_accused"].ok
    assert rows["honest_sequences"].value == 16
    measured = {row.name: row for row in detection.honest_rows({"gpu": [_lie("VOID", None)]}, 8)}
    assert measured["honest_rejected"].value == 0


def test_costs_alone_are_remeasured_and_kept(units: Units, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detection, "Units", lambda bench: units)
    monkeypatch.setattr(detection, "bench_of", lambda model, device: None)
    measured = iter(([("validate_ratio_b64", 4.0, "×", 5)], [("validate_ratio_b64", 6.0, "×", 5)]))
    monkeypatch.setattr(detection, "cost_rows", lambda folder, device, turns: next(measured))
    assert [row.ok for row in detection.run(True, costs=True)] == [False]
    assert [row.ok for row in detection.run(True, costs=True)] == [True]
    assert units.kept("cost") == [["validate_ratio_b64", 6.0, "×", 5]]


@pytest.mark.parametrize("bench", ["detection", "proofs"])
def test_a_gpu_that_is_not_there_is_refused_in_one_sentence(
    bench: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([bench, "--quick", "--device", "cuda:0"]) == 69
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert "there is no CUDA device cuda:0" in said[0]
    assert main([bench, "--quick", "--device", "tpu"]) == 64


def test_figures_of_a_gpu_have_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form, "_gpu", lambda device: "NVIDIA Something")
    apart = form.result("detection", [], [], False, "cuda:1")
    assert apart["bench"] == "detection-cuda"
    assert apart["machine"]["device"] == "NVIDIA Something"
    here = form.result("detection", [], [], False, "cpu")
    assert here["bench"] == "detection"
    assert "device" not in here["machine"]


def test_older_policies_are_measured_against_honest_files_of_that_policy(units: Units) -> None:
    """Else a change of the policy would pass for a change that the lie made."""
    honest = detection_units.older_line()
    text = next(one for one in honest_lines(600) if one.name == detection_units.REFERENCE_SETUP)
    for line, value in ((honest, 3.0), (text, 1.0)):
        record = {**_record(1), "series": {"sketch": 64 * [value]}}
        _keep(units, line, 0, [record])
    lie, other = (
        next(one for one in attack_lines(25) if one.name == n) for n in ("old1_1e6", "t09")
    )
    for line in (lie, other):
        _keep(units, line, 0, [{**_record(1), "series": {"sketch": 64 * [2.0]}}])
    units.bench.device = "cpu"
    assert detection.tokens_of(units) == {"old1_1e6": (-1, ""), "t09": (32, "sketch")}
