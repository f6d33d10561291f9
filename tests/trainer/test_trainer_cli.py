"""What a mistake at the trainer's command line looks like."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from prime_core.errors import UserError
from prime_trainer.cli import main


def test_a_mistake_and_what_to_do_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["trainer", "status", "--data", str(tmp_path)])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == UserError.exit_code
    file = tmp_path / "metrics.jsonl"
    assert capsys.readouterr().err == (
        f"trainer: no step is recorded in {file}; name the folder by --data\n"
    )


def test_the_status_of_a_run_that_is_writing_its_line_is_the_last_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 4, "version": 5, "reward": 0.5}\n{"ste')
    monkeypatch.setattr(sys, "argv", ["trainer", "status", "--data", str(tmp_path)])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code in (0, None)
    assert capsys.readouterr().out == "step 4: reward 0.500, policy 5\n"
