"""How much of this machine's disk a task can take: what it sends, and what it writes."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from pathlib import Path

import pytest
from bridge_kit import Bench, Flag, Kit, bridge_kit, hand_in, take_lease
from full_disk import fill
from full_disk import small_disk as small_disk
from node_world import NodeWorld, until
from other_user import OTHER_UID, as_another_user, open_path

from prime_core.errors import ConflictError, MalformedError, NotFoundError, UnavailableError
from prime_core.rollout import MAX_FILE_BYTES
from prime_core.task import Task
from prime_node.bridge_messages import FILES, HandIn
from prime_node.runtime import process as process_runtime
from prime_node.runtime.base import Mounts, WorkerOptions
from prime_node.runtime.process import ProcessHandle, ProcessRuntime, holds_more_than
from prime_node.spool import TaskUploads
from prime_node.worker.loop import work


def put(kit: Kit, name: str, body: bytes, length: int | None = None) -> bytes:
    """The answer to a file sent byte by byte as given."""
    size = len(body) if length is None else length
    fields = f"Prime-Protocol: 1\r\nContent-Length: {size}"
    head = f"PUT {FILES}{name} HTTP/1.0\r\n{fields}\r\n\r\n".encode()
    return kit.raw(head + body)


def test_a_sent_file_is_handed_in_and_nothing_of_it_is_left(kit: Kit, tmp_path: Path) -> None:
    lease = take_lease(kit)
    (tmp_path / "f.parquet").write_bytes(b"file")
    kit.uploader.start()
    kit.client.send_file(tmp_path / "f.parquet")
    answer = kit.client.submit(HandIn(lease_digest=lease, file="f.parquet"))
    assert answer.receipt is not None
    assert kit.uploader.stop(10) == 0
    assert not list(kit.folder.iterdir())


def test_the_worker_keeps_no_file_that_it_sent(kit: Kit) -> None:
    """Where a container writes there is room for two."""
    stop = Flag()
    kit.uploader.start()
    work(kit.client, Bench(kit, stop), stop)  # type: ignore[arg-type]
    assert not list(kit.world.folder.glob("*.parquet"))
    assert len(kit.world.submissions()) == 1
    assert kit.uploader.stop(10) == 0


def test_however_much_a_task_sends_one_file_lies_here(kit: Kit) -> None:
    take_lease(kit)
    for number in range(20):
        assert b" 200 " in put(kit, f"f{number}", b"x" * 1000)
    assert [path.name for path in kit.folder.iterdir()] == ["f19"]


def test_a_file_larger_than_any_rollout_file_is_refused_unread(kit: Kit) -> None:
    take_lease(kit)
    for size in (0, MAX_FILE_BYTES + 1, 10**8):
        assert b"400" in put(kit, "f", b"", size).split(b"\r\n")[0]
    assert not list(kit.folder.iterdir())


@pytest.mark.parametrize("size", [MAX_FILE_BYTES + 1, MAX_FILE_BYTES + (8 << 20)])
def test_a_worker_whose_file_is_too_large_hears_so(kit: Kit, tmp_path: Path, size: int) -> None:
    """It sends the file whole before it reads: what is refused is taken and forgotten."""
    take_lease(kit)
    with (tmp_path / "f").open("wb") as file:
        file.truncate(size)
    with pytest.raises(MalformedError, match=f"bytes, not {size}"):
        kit.client.send_file(tmp_path / "f")
    assert not list(kit.folder.iterdir())


def test_a_body_that_no_route_takes_is_answered_all_the_same(kit: Kit) -> None:
    with pytest.raises(MalformedError, match="exceeds"):
        kit.client._request("POST", "/lease", b"x" * (4 << 20))
    with pytest.raises(NotFoundError):
        kit.client._request("PUT", "/elsewhere", b"x" * (4 << 20))


def test_a_file_that_ends_too_early_is_not_kept(tmp_path: Path) -> None:
    task_uploads, pieces = TaskUploads(tmp_path / "i"), [b"12", b""]
    with pytest.raises(MalformedError, match="ended 2 bytes too early"):
        task_uploads.receive("f", 4, lambda most: pieces.pop(0))
    assert not list(task_uploads.folder.iterdir())


@pytest.mark.parametrize("name", ["", "../f", "a/b", ".receiving", "..", "%2e%2e", "x" * 200])
def test_a_sent_files_name_can_name_no_other_place(kit: Kit, name: str) -> None:
    take_lease(kit)
    assert put(kit, name, b"x").split(b"\r\n")[0].split()[1] in (b"400", b"404")
    assert not list(kit.folder.iterdir())


def test_no_file_is_taken_while_no_lease_is_open(kit: Kit, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * (8 << 20))
    with pytest.raises(ConflictError, match="no lease is open"):
        kit.client.send_file(tmp_path / "f")
    assert not list(kit.folder.iterdir())


def test_one_file_is_received_at_a_time(tmp_path: Path) -> None:
    task_uploads, begun, go_on = TaskUploads(tmp_path / "i"), threading.Event(), threading.Event()

    def slowly(most: int) -> bytes:
        begun.set()
        go_on.wait(30)
        return b"1"

    first = threading.Thread(target=lambda: task_uploads.receive("first", 1, slowly))
    first.start()
    assert begun.wait(30)
    with pytest.raises(ConflictError, match="one is sent at a time"):
        task_uploads.receive("second", 1, lambda most: b"2")
    go_on.set()
    first.join(30)
    assert [path.read_bytes() for path in task_uploads.folder.iterdir()] == [b"1"]


# -- a disk that is really full --------------------------------------------------------------------


def test_a_full_disk_loses_nothing_that_was_handed_in(world: NodeWorld, small_disk: Path) -> None:
    """The next file is refused in one sentence; the one before is delivered; with room again the
    next is taken, too."""
    with bridge_kit(world, small_disk / "k") as kit:
        first = hand_in(kit, b"first")
        kit.uploader.start()
        until(lambda: kit.spool.find(first).state == "receipted", "the first is delivered")  # type: ignore[union-attr]
        lease = take_lease(kit)
        filler = small_disk / "filler"
        fill(filler)
        file_to_send = world.folder / "f"
        file_to_send.write_bytes(b"y" * 50_000)
        with pytest.raises(UnavailableError, match="cannot keep the file 'f': No space left"):
            kit.client.send_file(file_to_send)
        assert not list(kit.folder.iterdir())
        filler.unlink()
        kept = kit.spool.find(first)
        assert kept is not None
        assert kept.receipt is not None
        kit.client.send_file(file_to_send)
        answer = kit.client.submit(HandIn(lease_digest=lease, file="f"))
        assert answer.receipt is not None
        assert kit.uploader.stop(10) == 0


# -- the process runtime ---------------------------------------------------------------------------


def start(tmp_path: Path, code: str) -> tuple[ProcessHandle, Path]:
    """A task without container that runs `code` in its outbox."""
    mounts = Mounts(tmp_path / "policies", tmp_path / "outbox", tmp_path / "bridge")
    for folder in (mounts.policies, mounts.outbox, mounts.bridge):
        folder.mkdir()
    (mounts.outbox / "left by an earlier one").write_bytes(b"x")
    command = (sys.executable, "-c", code)
    return ProcessRuntime(tmp_path / "logs", command).start(
        Task(image="process"), mounts, WorkerOptions()
    ), mounts.outbox


ENDLESS_FILE = "f = open('f', 'wb')\nwhile True: f.write(b'x' * 65536); f.flush()"
ENDLESS_FILES = "n = 0\nwhile True: open(f'{n}', 'w').close(); n += 1"
IN_A_CHILD = (
    "import subprocess, sys, time\n"
    f"subprocess.Popen([sys.executable, '-c', {ENDLESS_FILE!r}])\n"
    "time.sleep(600)"
)
ENDLESS_WORDS = "while True: print('x' * 65536)"


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (ENDLESS_FILE, "wrote more than 1 MiB"),
        (ENDLESS_FILES, "(or 1000 files)"),
        (IN_A_CHILD, "wrote more than 1 MiB"),
        (ENDLESS_WORDS, "its log"),
    ],
    ids=["one file", "many files", "in a child", "its log"],
)
def test_a_task_that_writes_endlessly_is_ended_with_one_sentence(
    tmp_path: Path,
    code: str,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(process_runtime, "OUTBOX_BYTES", 1 << 20)
    monkeypatch.setattr(process_runtime, "LARGEST_LOG", 1 << 20)
    handle, outbox = start(tmp_path, code)
    assert handle.wait(60) == -9
    handle.stop(0.0)
    said = [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
    assert len(said) == 1
    assert said[0].startswith("the task was ended: ")
    assert sentence in said[0]
    assert said[0] in handle.logs()
    assert not list(outbox.iterdir()), "there is room again"
    until(lambda: not working_in(outbox), "no process of the task is left")


def working_in(folder: Path) -> list[Path]:
    """Processes whose working folder this is."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cwd").resolve(strict=True) == folder:
                found.append(process)
    return found


def test_a_task_that_writes_what_it_should_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    code = "open('f', 'wb').write(b'x' * 1000); print('done')"
    handle, outbox = start(tmp_path, code)
    assert handle.wait(60) == 0
    handle.stop(0.0)
    assert [path.name for path in outbox.iterdir()] == ["f"], "and no earlier one's"
    assert not caplog.records
    assert handle.logs() == "done\n"


def test_room_is_counted_as_the_disk_counts_it(tmp_path: Path) -> None:
    (tmp_path / "sparse").touch()
    os.truncate(tmp_path / "sparse", 1 << 30)
    assert not holds_more_than(tmp_path, 1 << 20, 10)
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "full").write_bytes(b"x" * (2 << 20))
    assert holds_more_than(tmp_path, 1 << 20, 10)
    assert holds_more_than(tmp_path, 1 << 30, 3)
    (tmp_path / "a" / "b" / "full").unlink()
    (tmp_path / "link").symlink_to("/")
    assert not holds_more_than(tmp_path, 1 << 20, 10)


def test_a_folder_that_the_task_closed_ends_no_watch(tmp_path: Path) -> None:
    """Names in it can be read, what they name cannot: that must not end the thread that counts."""
    closed = tmp_path / "room" / "closed"
    closed.mkdir(parents=True)
    (closed / "f").write_bytes(b"x")
    (tmp_path / "room" / "full").write_bytes(b"x" * (2 << 20))
    os.chown(closed, OTHER_UID if os.getuid() == 0 else -1, -1)
    closed.chmod(0o444)

    def counts() -> str:
        return f"{holds_more_than(tmp_path / 'room', 8 << 20, 10)}"

    open_path(closed)
    try:
        assert (as_another_user(counts) if os.getuid() == 0 else counts()) == "False"
    finally:
        closed.chmod(0o755)


def test_a_task_without_its_log_is_looked_after_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process_runtime, "OUTBOX_BYTES", 1 << 20)
    code = "import os, time; os.remove('../logs/worker.log'); time.sleep(0.5)\n" + ENDLESS_FILE
    handle, outbox = start(tmp_path, code)
    assert handle.wait(60) == -9
    handle.stop(0.0)
    assert "wrote more than 1 MiB" in caplog.text
    assert not list(outbox.iterdir())
