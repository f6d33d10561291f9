"""`bench researcher`: our half of a round, the rows of two programs' rounds, lines counted."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'prime-open[torch]'")

from bench import researcher
from bench.researcher import Round
from prime_core.errors import UnavailableError


def a_round(wall: float, tokens: float, peak: int) -> Round:
    parts = {"generate": wall / 2, "loss": wall / 4, "optimizer": 0.1, "publish": 0.2}
    return Round(wall, 2 * wall, parts, 128, tokens, peak)


def test_ratios_are_those_of_pairs_and_values_are_medians() -> None:
    ours = [a_round(1.0, 100, 500), a_round(2.0, 100, 500), a_round(4.0, 100, 600)]
    theirs = [a_round(2.0, 50, 1000), a_round(3.0, 50, 1000), a_round(4.0, 50, 1000)]
    rows = {row.name: row for row in researcher.table(ours, theirs)}
    assert rows["step_ratio_vs_trl"].value == 1.5  # of 2, 1.5 and 1
    assert rows["token_ratio_vs_trl"].value == 3.0
    assert (rows["step_s"].value, rows["step_s"].peer) == (2.0, 3.0)
    assert (rows["step_cpu_s"].value, rows["loss_s"].value) == (4.0, 0.5)
    assert rows["memory_ratio_vs_trl"].value == pytest.approx(0.5)
    assert rows["step_ratio_vs_trl"].ok
    assert not {r.name: r for r in researcher.table(theirs, ours)}["step_ratio_vs_trl"].ok


def test_blank_lines_comments_and_docstrings_are_not_counted(tmp_path: Path) -> None:
    script, settings = tmp_path / "a.py", tmp_path / "a.toml"
    script.write_text(
        '"""One\n\nmore."""\n\nx = [\n    1,\n]  # y\n# z\ndef f():\n  "doc"\n  return x\n'
    )
    settings.write_text('# a comment\n\nname = "a"  # kept\n[table]\n')
    assert researcher.python_lines(script) == 5
    assert researcher.python_lines(script, "f") == 2
    assert researcher.toml_lines(settings) == 2


def test_problems_for_trl_are_those_of_the_run(tmp_path: Path) -> None:
    path = researcher.write_problems(tmp_path / "problems.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == researcher.PROBLEMS
    for line in lines[:8]:
        assert line["prompt"] == f"{line['target']:02d}|{line['answer'][::-1]}>"
    assert {line["target"] for line in lines} == {2, 6, 10, 14}


@pytest.mark.soak
def test_a_round_of_trainer_local_is_measured_by_part(tmp_path: Path) -> None:
    found = researcher.our_round(tmp_path / "out", researcher.WARM_UP + 1)
    assert found.rows >= 128
    assert found.tokens > found.rows
    assert 0 < sum(found.parts.values()) <= found.wall
    assert found.cpu > 0
    assert found.peak > 1e8


def test_a_program_that_fails_says_why() -> None:
    words = [sys.executable, "-c", "raise SystemExit('no such model')"]
    with pytest.raises(UnavailableError, match="TRL's script failed: no such model"):
        researcher._last_line("TRL's script", words, {})
