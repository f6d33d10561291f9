"""Long work says how far it has come: a bar on a terminal, nothing anywhere else."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from broadcast_world import Run
from rich.console import Console

from prime_broadcast import bars, layout
from prime_broadcast.cli import main
from prime_broadcast.manifest import build_manifest, total_size, verify_folder
from prime_broadcast.progress import watched_by


class Progress:
    """Parts as (name, total, bytes that went)."""

    def __init__(self) -> None:
        self.parts: list[tuple[str, int, int]] = []

    def part(self, name: str, total: int) -> None:
        self.parts.append((name, total, 0))

    def went(self, count: int) -> None:
        name, total, done = self.parts.pop()
        self.parts.append((name, total, done + count))


def test_hashing_comparing_and_verifying_come_to_their_end_byte_for_byte(run: Run) -> None:
    run.publish()
    received = Progress()
    with watched_by(received):
        signed = run.publish()
        verify_folder(layout.version_folder(run.root, 1), signed.manifest)
    size, delta = total_size(signed.manifest), signed.manifest.deltas[0].size
    assert [(name, total) for name, total, _ in received.parts] == [
        ("hashing", size),
        ("comparing with policy 0", size),
        ("hashing the delta", delta),
        ("verifying", size + delta),
    ]
    assert all(total == done for _, total, done in received.parts), received.parts
    build_manifest(run.folder / "checkpoint-0", pool=0, version=0, step=0)
    assert len(received.parts) == 4, "no one watches it now"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    drawn = io.StringIO()
    monkeypatch.setattr(bars, "console", lambda: Console(file=drawn, force_terminal=True))
    return drawn


def end(*arguments: object) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*map(str, arguments)])
    assert not ended.value.code


def commands(run: Run, folder: Path) -> dict[str, tuple[tuple[object, ...], tuple[str, ...]]]:
    """Arguments of each command, and what its bars are called."""
    run.publish()
    run.publish()
    one, two = run.folder / "checkpoint-0", run.folder / "checkpoint-1"
    serve = ("serve", one, "--data", folder / "data", "--key", folder / "key", "--once")
    return {
        "serve": (serve, ("hashing",)),
        "verify": (("verify", layout.version_folder(run.root, 0)), ("verifying",)),
        "diff": (
            ("diff", one, two),
            ("hashing", "comparing with policy 0", "applying to policy 0", "verifying"),
        ),
    }


@pytest.mark.parametrize("name", ["serve", "verify", "diff"])
def test_each_command_draws_its_bars_on_a_terminal(
    run: Run, tmp_path: Path, terminal: io.StringIO, name: str
) -> None:
    arguments, names = commands(run, tmp_path)[name]
    end(*arguments, "--json")
    assert terminal.getvalue() == "", "--json is for machines"
    end(*arguments)
    for one in names:
        assert one in terminal.getvalue()


def test_no_bar_is_drawn_without_a_terminal(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, _ in commands(run, tmp_path).values():
        end(*arguments)
    assert capsys.readouterr().err == ""
