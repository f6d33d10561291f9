"""What a mistake at the trainer's command line looks like."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
import torch
from trainer_kit import run_definition

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


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("status --data {none}", "line 2 of {none}/metrics.jsonl is damaged: it has no 'version'"),
        ("samples {none}", "line 1 of {none}/samples.jsonl is damaged: it is no object"),
        ("samples {bytes}", "{bytes}/samples.jsonl cannot be read: it is not text in UTF-8"),
        ("samples {file}", "{file}/samples.jsonl has no samples"),
        ("local . --model {demo} --out {none}/out --steps 1", ". is a folder, not a run's TOML"),
        ("evaluate --problems 4 --model {none} --run {run}", "{none} is not a model folder"),
        (
            "evaluate --problems 4 --model {none} --run {run} --answers {none}",
            "{none} is not a model folder",
        ),
        ("follow --orchestrator http://x --data {file}", "the folder {file} cannot be used"),
        ("follow --orchestrator http://x --data {none} --tracker x", "there is no tracker 'x'"),
        (
            "follow --orchestrator http://x --data {none} --tensorboard {file}",
            "the folder {file} cannot be used",
        ),
    ],
)
def test_wrong_files_and_names_are_one_sentence(
    command: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    places = {name: str(tmp_path / name) for name in ("none", "bytes", "file", "run")}
    places["demo"] = str(Path(__file__).parents[2] / "devnet" / "model")
    for name in ("none", "bytes"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "run").write_bytes(run_definition().raw())
    (tmp_path / "none" / "metrics.jsonl").write_text('{"step": 1, "version": 2}\n{"step": 2}\n')
    (tmp_path / "none" / "samples.jsonl").write_text("[1]\n")
    (tmp_path / "bytes" / "samples.jsonl").write_bytes(b"\xff\n")
    monkeypatch.setattr("prime_trainer.cli.until_stopped", lambda **_: threading.Event())
    monkeypatch.setattr(sys, "argv", ["trainer", *command.format(**places).split()])
    threads = torch.get_num_threads()
    with pytest.raises(SystemExit) as caught:
        main()
    torch.set_num_threads(threads)
    assert caught.value.code == UserError.exit_code
    sentence = capsys.readouterr().err.splitlines()[-1]
    assert sentence.startswith(f"trainer: {said.format(**places)}")
    assert "; " in sentence, "what to type next"


def test_the_status_of_a_run_that_is_writing_its_line_is_the_last_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 4, "version": 5, "reward": 0.5}\n{"ste')
    monkeypatch.setattr(sys, "argv", ["trainer", "status", "--data", str(tmp_path)])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code in (0, None)
    assert capsys.readouterr().out == "step 4: reward 0.500, policy 5\n"
