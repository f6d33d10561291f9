"""A relay whose disk is full, or refuses: one sentence, what it has is served, and no traceback."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from broadcast_world import CHUNK, TRAINER, TRUST, Run, same_files, until

from prime_broadcast import layout, relay
from prime_broadcast.client import Base, fetch
from prime_broadcast.files import DiskError, replace_file
from prime_broadcast.manifest import MANIFEST_NAME, total_size, verify_folder
from prime_broadcast.relay import Relay, RelayEvent, partial_folder
from prime_broadcast.server import Origin
from prime_broadcast.transfer import Link

FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "DISK_RETRY_SECONDS", 0.05)


class Disk:
    """Refuses what `refuses(path)` names, below `root`, as long as it is `full`. Everything goes by
    the system calls that the relay makes."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.full = False
        self.root = root
        self.refused = 0
        self._patch = patch

    def refuse(self, module: object, name: str, refuses: Callable[..., bool]) -> None:
        real = getattr(module, name)

        def call(*arguments: object, **options: object) -> object:
            if self.full and refuses(*arguments):
                self.refused += 1
                raise FULL
            return real(*arguments, **options)

        self._patch.setattr(module, name, call)

    def below(self, path: int | str | Path, word: str = "") -> bool:
        """Whether a path lies below the root, with `word` in its name."""
        where = Path(f"/proc/self/fd/{path}").readlink() if isinstance(path, int) else Path(path)
        return self.root in where.parents and word in where.name


REFUSALS: dict[str, Callable[[Disk], None]] = {
    "the folder": lambda disk: disk.refuse(os, "mkdir", lambda path, *_: disk.below(path)),
    "a file": lambda disk: disk.refuse(os, "ftruncate", lambda fd, *_: disk.below(fd)),
    "a chunk": lambda disk: disk.refuse(os, "pwrite", lambda fd, *_: disk.below(fd, "model")),
    "the manifest": lambda disk: disk.refuse(
        os, "open", lambda path, *_: disk.below(path, MANIFEST_NAME)
    ),
    "the manifest's bytes": lambda disk: disk.refuse(
        os, "pwrite", lambda fd, *_: disk.below(fd, MANIFEST_NAME)
    ),
    "the note": lambda disk: disk.refuse(os, "open", lambda path, *_: disk.below(path, "unsynced")),
    "the rename": lambda disk: disk.refuse(
        os, "rename", lambda path, *_: disk.below(path, ".partial")
    ),
    "the space": lambda disk: disk._patch.setattr(
        shutil,
        "disk_usage",
        lambda path, real=shutil.disk_usage: (
            SimpleNamespace(free=1000) if disk.full and disk.below(path) else real(path)
        ),
    ),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_a_relay_with_a_full_disk_says_so_once_serves_what_it_has_and_goes_on_when_there_is_room(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    zero = run.publish()
    events: list[RelayEvent] = []
    disk = Disk(tmp_path / "r", monkeypatch)
    with Origin(run.root) as origin, Relay(tmp_path / "r", TRUST, on_event=events.append) as there:
        there.offer([zero], [[origin.url]])
        until(lambda: there.complete() == [0], "version 0")
        REFUSALS[what](disk)
        disk.full = True
        one = run.publish()

        def attempts() -> int:
            text = Link(there.url).read_small("/metrics", 1 << 20).decode()
            for line in text.splitlines():
                if line.startswith("prime_broadcast_faults_total{") and 'kind="disk"' in line:
                    return int(float(line.split()[-1]))
            return 0

        there.offer([one, zero], [[origin.url]])
        until(lambda: attempts() >= 3, "it keeps trying")
        there.offer([one, zero], [[origin.url]])  # raises what the fetching thread died of
        assert there.complete() == [0]
        assert layout.versions(tmp_path / "r") == [0], "never half a version"
        fetch(zero, [there.url], tmp_path / "n" / "0", patience=10.0)
        said = [event.detail for event in events if event.kind == "fault"]
        assert len(said) == 1, said
        assert "free some space" in said[0]
        assert "failed" not in {event.kind for event in events}
        disk.full = False
        until(lambda: there.complete() == [0, 1], "version 1, once there is room")
        fetch(one, [there.url], tmp_path / "n" / "1", patience=10.0)
    assert same_files(tmp_path / "n" / "0", run, 0)
    assert same_files(tmp_path / "n" / "1", run, 1)
    verify_folder(layout.version_folder(tmp_path / "r", 1), one.manifest)


def test_a_disk_that_refuses_to_let_an_old_version_go_ends_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signed = [run.publish(), run.publish()]
    disk = Disk(tmp_path / "r", monkeypatch)
    disk.refuse(os, "rename", lambda path, *_: disk.below(path) and Path(path).name == "0")
    disk.full = True
    with Origin(run.root) as origin, Relay(tmp_path / "r", TRUST, keep=1) as there:
        for one in signed:
            there.offer([one], [[origin.url]])
            until(lambda v=one.manifest.version: there.complete() == [v], "the version")  # type: ignore[misc]
        until(lambda: disk.refused > 0, "the refusal")
        there.offer([signed[1]], [[origin.url]])
        assert there.versions() == [1]
    disk.full = False
    with Relay(tmp_path / "r", TRUST, keep=1) as there:
        assert layout.versions(tmp_path / "r") == [1], "it goes at the next start"


def test_a_relay_without_room_for_the_files_passes_the_deltas_on(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zero, one = run.publish(), run.publish()
    room = SimpleNamespace(free=1 << 40)
    disk = Disk(tmp_path / "r", monkeypatch)
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: room if disk.below(path) else real(path))
    with Origin(run.root) as origin, Relay(tmp_path / "r", TRUST) as there:
        there.offer([zero], [[origin.url]])
        until(lambda: there.complete() == [0], "version 0")
        room.free = one.manifest.deltas[0].size
        there.offer([one, zero], [[origin.url]])
        fetch(zero, [there.url], tmp_path / "n" / "0", patience=10.0)
        bases = [Base(tmp_path / "n" / "0", zero.manifest)]
        stats = fetch(one, [there.url], tmp_path / "n" / "1", bases=bases, patience=10.0)
        assert stats.route == "delta"
        assert there.complete() == [0]
        sent = origin.counters.bytes_sent
        room.free = 1 << 40
        until(lambda: there.complete() == [0, 1], "version 1, once there is room")
        assert origin.counters.bytes_sent == sent, "the delta is here"
    assert same_files(tmp_path / "n" / "1", run, 1)


def test_where_fewer_versions_fit_than_are_kept_the_oldest_goes_for_a_newer_one_and_stays_away(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signed = [run.publish() for _ in range(4)]
    events: list[RelayEvent] = []
    disk = Disk(tmp_path / "r", monkeypatch)
    real = shutil.disk_usage
    holds = int(2.5 * total_size(signed[0].manifest)) + 4 * signed[1].manifest.deltas[0].size

    def usage(path: Path) -> object:
        if not disk.below(path):
            return real(path)
        used = 0
        for file in disk.root.glob("policies/*/*"):
            with contextlib.suppress(FileNotFoundError):
                used += file.stat().st_blocks * 512
        return SimpleNamespace(free=holds - used)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    with (
        Origin(run.root) as origin,
        Relay(tmp_path / "r", TRUST, on_event=events.append) as there,
    ):
        there.offer(signed[:3], [[origin.url]])
        until(lambda: ("fault", 0) in {(e.kind, e.version) for e in events}, "no room for 0")
        assert there.complete() == [1, 2], "none goes for an older one"
        for _ in range(3):
            there.offer(signed, [[origin.url]])
            until(lambda: there.versions() == there.complete() == [2, 3], "3 in the place of 1")
        fetch(signed[3], [there.url], tmp_path / "n" / "3", patience=10.0)
    assert same_files(tmp_path / "n" / "3", run, 3)
    assert {e.version for e in events if e.kind == "dropped"} == {0, 1}
    assert layout.versions(tmp_path / "r") == [2, 3]


def test_what_kills_left_of_versions_that_aged_out_meanwhile_goes_at_the_next_start(
    run: Run, tmp_path: Path
) -> None:
    signed = [run.publish() for _ in range(4)]
    with Origin(run.root) as origin, Relay(tmp_path / "r", TRUST, keep=2) as there:
        there.offer([signed[3]], [[origin.url]])
        until(lambda: there.complete() == [3], "version 3")
    aged = [partial_folder(tmp_path / "r", one) for one in signed[:2]]
    aged.append(layout.policies_folder(tmp_path / "r") / ".trash-0-1")
    wanted = partial_folder(tmp_path / "r", signed[2])
    for folder in (*aged, wanted):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(bytes(CHUNK))
    with Relay(tmp_path / "r", TRUST, keep=2) as there:
        assert there.complete() == [3]
        assert [folder for folder in aged if folder.exists()] == []
        assert wanted.exists(), "it may be resumed"


def test_a_relay_serves_nothing_it_knows_to_be_wrong_though_the_disk_keeps_it_in_its_place(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signed = run.publish()
    events: list[RelayEvent] = []
    disk = Disk(tmp_path / "r", monkeypatch)
    disk.refuse(os, "rename", lambda path, *_: disk.below(path))
    monkeypatch.setattr(relay, "SCRUB_RATE", 1e9)
    with (
        Origin(run.root) as origin,
        Relay(tmp_path / "r", TRUST, on_event=events.append) as there,
    ):
        there.offer([signed], [[origin.url]])
        until(lambda: there.complete() == [0], "version 0")
        sent = origin.counters.bytes_sent
        disk.full = True
        with (layout.version_folder(tmp_path / "r", 0) / "model.safetensors").open("r+b") as file:
            file.seek(3 * CHUNK + 5)
            byte = file.read(1)
            file.seek(3 * CHUNK + 5)
            file.write(bytes([byte[0] ^ 1]))
        until(lambda: "rot" in {event.kind for event in events}, "the rot is noticed")
        assert there.versions() == there.complete() == []
        there.offer([signed], [[origin.url]])
        tried = disk.refused
        until(lambda: disk.refused > tried + 1, "it tries to mend it")
        assert origin.counters.bytes_sent == sent, "not a byte comes before there is a place for it"
        disk.full = False
        until(lambda: there.complete() == [0], "it is mended once the disk lets it")
        assert origin.counters.bytes_sent - sent <= 2 * CHUNK, "only what was wrong came again"
        fetch(signed, [there.url], tmp_path / "n" / "0", patience=10.0)
    assert same_files(tmp_path / "n" / "0", run, 0)


def test_a_file_that_cannot_be_replaced_stays_and_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_file(tmp_path / "file", b"old", durable=False)
    disk = Disk(tmp_path, monkeypatch)
    disk.refuse(os, "pwrite", lambda fd, *_: disk.below(fd))
    disk.full = True
    with pytest.raises(DiskError, match="the disk is full"):
        replace_file(tmp_path / "file", b"new", durable=False)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"old"


def test_a_relay_process_that_may_write_no_large_file_goes_on_and_ends_when_asked(
    run: Run, tmp_path: Path
) -> None:
    """The system itself refuses here (RLIMIT_FSIZE: EFBIG), in a process of its own."""
    run.publish()
    limit = "import resource,signal,sys;signal.signal(signal.SIGXFSZ,signal.SIG_IGN);"
    limit += "resource.setrlimit(resource.RLIMIT_FSIZE,(100_000,100_000));"
    limit += "from prime_broadcast.cli import main;main(sys.argv[1:])"
    tail = ["--signer", TRAINER.address, "--pool", "7", "--chain-id", "31337", "--port", "0"]
    with Origin(run.root) as origin:
        child = subprocess.Popen(
            [
                *(sys.executable, "-c", limit, "relay", origin.url, "--json"),
                *("--data", str(tmp_path / "r"), *tail),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert child.stdout is not None
            line = next(line for line in child.stdout if '"fault"' in line)
            assert "the disk refused a write: File too large" in line
            child.send_signal(signal.SIGTERM)
            _, trouble = child.communicate(timeout=60)
        finally:
            child.kill()
            child.wait()
    assert child.returncode == 0, trouble
    assert "Traceback" not in trouble
    assert layout.versions(tmp_path / "r") == []
