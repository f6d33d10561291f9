"""A folder that cannot be used is one sentence, whichever program it was named to."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from prime_core.errors import UserError
from prime_core.folders import held_alone, make_folder
from prime_orchestrator.store import open_store, sqlite_url
from prime_trainer.config import Settings
from prime_trainer.run import run_trainer

UNUSABLE = ("/proc/nothing/of/this", "/proc")


def test_a_folder_is_made_with_its_parents_and_left_empty(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    assert make_folder(folder) == make_folder(folder) == folder
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("path", UNUSABLE)
def test_a_folder_that_takes_no_files_is_refused(path: str) -> None:
    with pytest.raises(UserError, match=f"the folder {path} cannot be used") as caught:
        make_folder(Path(path))
    assert caught.value.hint


HOLDER = """
import sys
from pathlib import Path
from prime_core.folders import held_alone
with held_alone(Path(sys.argv[1]), "trainer"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_folder_is_held_by_one_at_a_time_and_free_again_however_the_holder_ends(
    tmp_path: Path,
) -> None:
    for ending in ("end", "kill"):
        with subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(tmp_path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        ) as child:  # fmt: skip
            assert child.stdout is not None
            assert child.stdout.readline() == "held\n"
            said = rf"another trainer \(process {child.pid}\) works in {tmp_path}"
            for _ in range(2):
                with pytest.raises(UserError, match=said), held_alone(tmp_path, "trainer"):
                    pass
            if ending == "kill":
                child.kill()
        with held_alone(tmp_path, "trainer"):
            pass


def test_a_file_in_the_way_is_named_as_that(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for path in (file, file / "below"):
        with pytest.raises(UserError, match="a file is in the way"):
            make_folder(path)
    assert file.is_file()


def test_a_store_in_an_unusable_folder_is_refused() -> None:
    with pytest.raises(UserError, match="cannot be used"):
        open_store(sqlite_url(Path("/proc/nothing/store.sqlite")))


@pytest.mark.parametrize(
    "command",
    [
        ["prime_orchestrator.cli.main", "store", "migrate", "--data", "/proc/nothing"],
        [
            "prime_orchestrator.cli.main",
            "relay",
            "--orchestrator",
            "http://unused",
            "--data",
            "/proc/nothing",
        ],
        ["devnet", "up", "--root", "/proc/nothing"],
    ],
)
def test_commands_say_so_in_one_line(command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == UserError.exit_code
    [said] = done.stderr.strip().splitlines()
    assert "the folder /proc/nothing cannot be used" in said


def test_the_trainer_says_so_before_it_asks_anybody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")  # this rank needs no wallet
    settings = Settings(orchestrator="http://unused", model=tmp_path, data=Path("/proc/nothing"))
    with pytest.raises(UserError, match="cannot be used"):
        run_trainer(settings, threading.Event())
