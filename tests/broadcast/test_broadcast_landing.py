"""Chunks on their way to their place: a kill costs almost nothing, and nothing overwrites."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from broadcast_world import Run, answer, bad_server, same_files

from protocol.broadcast import landing
from protocol.broadcast.client import fetch
from protocol.broadcast.landing import EARLY_SECONDS, MARGIN, Claim, Landing, beginning
from protocol.broadcast.server import Origin
from protocol.core.checkpoint import SignedManifest
from protocol.core.errors import UnavailableError

CHUNK = 1 << 20
STEP = 256 << 10


@pytest.fixture
def big(tmp_path: Path) -> tuple[Run, SignedManifest]:
    """A policy of some four chunks of 1 MiB."""
    run = Run(tmp_path / "big", size=2_000_000)
    return run, run.publish(chunk_size=CHUNK)


def cut_after(count: int) -> object:
    """A server that sends `count` bytes of each longer answer, and then hangs up."""

    def behave(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        if len(body) <= count:
            answer(handler, body)
            return
        answer(handler, body[:count], claim=len(body))
        handler.wfile.flush()
        handler.close_connection = True

    return behave


def interrupted(run: Run, signed: SignedManifest, dest: Path, count: int) -> Path:
    """A fetch that ended with `count` bytes of each chunk; its file as it was left."""
    with bad_server(run.root, cut_after(count)) as broken, pytest.raises(UnavailableError):  # type: ignore[arg-type]
        fetch(signed, [broken], dest, patience=0.3)
    (left,) = dest.parent.glob(f".partial-{dest.name}-*/files/model.safetensors")
    return left


def test_what_had_arrived_of_a_chunk_is_not_fetched_again(
    big: tuple[Run, SignedManifest], tmp_path: Path
) -> None:
    run, signed = big
    left = interrupted(run, signed, tmp_path / "n" / "0", 700_000)
    assert beginning(left, 0, CHUNK) > 0
    with Origin(run.root) as origin:
        stats = fetch(signed, [origin.url], tmp_path / "n" / "0", patience=10.0)
    assert same_files(tmp_path / "n" / "0", run, 0)
    assert stats.bytes_received < stats.policy_bytes - 400_000
    assert stats.bytes_written == stats.bytes_received
    assert (stats.refetched, stats.faults) == (0, [])


def test_a_wrong_beginning_costs_one_chunk_and_nobody_the_blame(
    big: tuple[Run, SignedManifest], tmp_path: Path
) -> None:
    run, signed = big
    left = interrupted(run, signed, tmp_path / "n" / "0", 700_000)
    kept = beginning(left, 0, CHUNK)
    with left.open("r+b") as file:
        file.write(b"\xff" * 100)
    with Origin(run.root) as origin:
        stats = fetch(signed, [origin.url], tmp_path / "n" / "0", patience=10.0)
    assert same_files(tmp_path / "n" / "0", run, 0)
    assert kept > 0
    assert (stats.refetched, stats.faults) == (1, [])


def test_a_beginning_is_asked_of_servers_without_ranges_too(
    big: tuple[Run, SignedManifest], tmp_path: Path
) -> None:
    run, signed = big
    interrupted(run, signed, tmp_path / "n" / "0", 700_000)

    def whole(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        data = (run.root / handler.path.lstrip("/")).read_bytes()
        handler.span = (0, len(data) - 1, len(data))  # type: ignore[attr-defined]
        answer(handler, data)

    with bad_server(run.root, whole) as plain:
        fetch(signed, [plain], tmp_path / "n" / "0", patience=10.0)
    assert same_files(tmp_path / "n" / "0", run, 0)


def test_nothing_is_written_over_a_chunk_that_another_verified(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(CHUNK))
    claim = Claim()
    wrong, right = memoryview(b"w" * CHUNK), memoryview(b"r" * CHUNK)
    now = [0.0]
    with (
        Landing(path, 0, wrong, claim, 0, early=True, clock=lambda: now[0]) as slow,
        Landing(path, 0, right, claim, 0, early=False, clock=lambda: now[0]) as quick,
    ):
        slow.arrived(STEP)
        assert path.read_bytes() == bytes(CHUNK), "too soon"
        now[0] += EARLY_SECONDS
        slow.arrived(STEP)
        assert path.read_bytes()[:STEP] == b"w" * STEP
        quick.arrived(CHUNK)
        assert path.read_bytes()[:STEP] == b"w" * STEP, "unverified: the first one's"
        assert claim.take()
        quick.finish()
        now[0] += EARLY_SECONDS
        slow.arrived(3 * STEP)
        assert not claim.take(), "the second one is too late"
    assert path.read_bytes() == bytes(right)


def test_the_beginning_is_what_lies_before_the_first_hole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(2 * CHUNK)
        file.seek(CHUNK)
        file.write(b"x" * (5 * MARGIN))
    assert beginning(path, 0, CHUNK) == 0
    assert beginning(path, CHUNK, CHUNK) == 4 * MARGIN


def test_a_chunk_that_comes_at_once_is_written_by_one_write(
    big: tuple[Run, SignedManifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many small writes of it cost more than one; only who is slow needs its beginning kept."""
    run, signed = big
    sizes: list[int] = []
    write = landing.write_at

    def counted(fd: int, data: memoryview, offset: int) -> None:
        sizes.append(len(data))
        write(fd, data, offset)

    monkeypatch.setattr(landing, "write_at", counted)
    monkeypatch.setattr(landing, "EARLY_SECONDS", 1e9)
    with Origin(run.root) as origin:
        stats = fetch(signed, [origin.url], tmp_path / "n" / "0", patience=30.0)
    assert len(sizes) == stats.chunks == sum(len(f.chunks) for f in signed.manifest.files)
    assert sum(sizes) == stats.policy_bytes
