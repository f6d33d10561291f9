"""`python -m devnet` as a person types it: a run starts clean, and mistakes are one sentence."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from devnet.__main__ import MARK, _empty, main
from prime_core.errors import UserError


def typed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[int, str]:
    """Exit code, and the line on stderr."""
    monkeypatch.setattr(sys, "argv", ["devnet", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code, capsys.readouterr().err


def test_a_second_run_starts_from_an_empty_folder(tmp_path: Path) -> None:
    root = tmp_path / "run"
    _empty(root)
    (root / "report.json").write_text("{}")
    (root / "node" / "spool").mkdir(parents=True)
    (root / "node" / "spool" / "file").write_text("of the first run")
    _empty(root)
    assert [path.name for path in root.iterdir()] == [MARK]


def test_a_folder_that_no_run_has_marked_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="holds what is not a run's") as caught:
        _empty(tmp_path)
    assert "--root" in caught.value.hint
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["up", "--nodes", "2", "--liars", "2"], "leave no honest node — lower --liars"),
        (["up", "--runtime", "docker"], "--runtime docker needs the worker's image — --image"),
        (["up", "--runtime", "podman"], "no runtime 'podman' — process or docker"),
        (["up", "--liar", "charming"], "charming"),
        (["lies", "--kind", "charming"], "there is no lie 'charming' — known are"),
    ],
)
def test_a_mistake_is_one_sentence_before_anything_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    said: str,
) -> None:
    root = tmp_path / "run"
    code, line = typed(monkeypatch, capsys, *words, "--root", str(root))
    assert code == 64
    assert line.startswith("devnet: ")
    assert said in line
    assert line.count("\n") == 1
    assert not root.exists()


def test_a_run_that_still_runs_is_not_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pids.json").write_text("{}")
    code, line = typed(monkeypatch, capsys, "check", "--root", str(tmp_path))
    assert code == 64
    assert "still runs — python -m devnet stop" in line


def test_stopping_what_does_not_run_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["devnet", "stop", "--root", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert "nothing was left running" in capsys.readouterr().out
