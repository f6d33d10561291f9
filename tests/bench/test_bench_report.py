"""The page of figures says where each was measured, next to what, and which bars are missed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import report
from bench.report import PAGE, gpu_section, section, write
from prime_core.errors import MalformedError

FOUND: dict[str, Any] = {
    "bench": "proofs", "date": "2026-11-22", "commit": "abc", "quick": False,
    "load": "three others at work", "machine": {"cpu": "a CPU", "cores": 2},
    "rows": [
        {
            "name": "build_ratio", "value": 4.4, "unit": "×", "bar": 6.0, "better": "higher",
            "peer": 29.0, "peer_name": "toploc", "ok": False,
        },
    ],
}  # fmt: skip


def test_a_figure_states_the_load_and_that_its_bar_is_missed() -> None:
    page = section(FOUND)
    assert "2026-11-22, commit abc, 2 cores of a CPU (three others at work)." in page
    assert "| `build_ratio` | 4.4 × **not met** | ≥ 6 | 29 (toploc) |" in page
    assert "()" not in section({**FOUND, "load": None})


def test_variants_of_a_simulation_are_one_table() -> None:
    rows = [
        {**FOUND["rows"][0], "name": name, "value": value, "peer": None}
        for name, value in {"files": 9, "files_of_a": 1, "busy_of_a": 2, "busy_of_b": 3}.items()
    ]
    page = section({**FOUND, "bench": "population", "rows": rows})
    assert "| `files` | 9 × **not met** | ≥ 6 |" in page
    assert "| variant | `files` | `busy` |" in page
    assert "| `a` | 1 | 2 |\n| `b` |  | 3 |" in page
    assert "variant" not in section({**FOUND, "rows": rows})


def test_the_last_record_of_each_part_of_the_gpu_kit_is_shown(tmp_path: Path) -> None:
    machine = {"card": "H100", "commit": "abc"}
    records: list[dict[str, Any]] = [
        {"part": "a", "name": "x", "ok": True, "values": {"ms": 1.0}, "machine": machine},
        {"part": "a", "name": "x", "ok": True, "values": {"t": {"ms": 2}}, "machine": machine},
        {"part": "a", "name": "part", "ok": True, "values": {}, "machine": machine},
        {"part": "b", "name": "y", "ok": False, "error": "no\ncard", "machine": machine},
        {"part": "c", "name": "part", "ok": False, "error": "stopped after 60 s"},
    ]
    (tmp_path / "1.jsonl").write_text("\n".join(json.dumps(one) for one in records))
    (page,) = gpu_section(tmp_path)
    assert "| `a.x` | H100, abc | t.ms 2 |" in page
    assert "| `b.y` | H100, abc | no card |" in page
    assert "| `c.part` | no card, no commit | stopped after 60 s |" in page
    assert "ms 1" not in page
    assert gpu_section(tmp_path / "none") == []


def test_a_result_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "proofs.json").write_text(json.dumps({**FOUND, "machine": None}))
    with pytest.raises(MalformedError, match=r"proofs\.json is not a result of a bench"):
        write(tmp_path, tmp_path / "page.md")


def test_the_page_is_what_the_results_give(tmp_path: Path) -> None:
    """`python -m bench report` after a change of bench/results."""
    write(page=tmp_path / "page.md")
    assert (tmp_path / "page.md").read_text() == PAGE.read_text()
    assert report.RESULTS.is_dir()
