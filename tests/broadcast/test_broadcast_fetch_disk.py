"""A full disk and deltas: the delta is not blamed, and no source is asked for the whole in vain."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from broadcast_world import CHUNK, Run, same_files

from prime_broadcast.client import Base, fetch
from prime_broadcast.files import DiskError
from prime_broadcast.manifest import total_size
from prime_broadcast.server import Origin
from prime_broadcast.sources import Fault
from prime_core.checkpoint import SignedManifest


@pytest.fixture
def signed(run: Run) -> list[SignedManifest]:
    return [run.publish(), run.publish()]


@pytest.mark.parametrize("full", ["delta", "model"], ids=["as it arrives", "as it is applied"])
def test_a_full_disk_is_no_fault_of_the_delta_and_the_whole_is_not_tried_in_its_place(
    run: Run,
    tmp_path: Path,
    signed: list[SignedManifest],
    monkeypatch: pytest.MonkeyPatch,
    full: str,
) -> None:
    faults: list[Fault] = []
    real = os.pwrite

    def fills(fd: int, data: bytes, offset: int) -> int:
        if full in Path(f"/proc/self/fd/{fd}").readlink().name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, offset)

    with Origin(run.root) as origin:
        fetch(signed[0], [origin.url], tmp_path / "0")
        bases, sent = [Base(tmp_path / "0", signed[0].manifest)], origin.counters.bytes_sent
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", fills)
            with pytest.raises(DiskError, match="the disk is full"):
                fetch(signed[1], [origin.url], tmp_path / "1", bases=bases, on_fault=faults.append)
        assert faults == []
        assert origin.counters.bytes_sent - sent <= signed[1].manifest.deltas[0].size + CHUNK
        assert fetch(signed[1], [origin.url], tmp_path / "1", bases=bases).route == "delta"
    assert same_files(tmp_path / "1", run, 1)


def test_a_disk_without_room_for_a_lock_is_a_full_disk(
    run: Run, tmp_path: Path, signed: list[SignedManifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def fills(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if ".lock-" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", fills)
    with Origin(run.root) as origin, pytest.raises(DiskError, match="the disk is full"):
        fetch(signed[0], [origin.url], tmp_path / "0")


def test_where_only_the_whole_has_room_the_whole_is_fetched_and_nothing_is_a_fault(
    run: Run, tmp_path: Path, signed: list[SignedManifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Origin(run.root) as origin:
        fetch(signed[0], [origin.url], tmp_path / "0")
        bases = [Base(tmp_path / "0", signed[0].manifest)]
        free = total_size(signed[1].manifest)
        usage = shutil.disk_usage(tmp_path)._replace(free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
        stats = fetch(signed[1], [origin.url], tmp_path / "1", bases=bases)
    assert (stats.route, stats.faults) == ("whole", [])
    assert same_files(tmp_path / "1", run, 1)
