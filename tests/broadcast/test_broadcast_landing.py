"""Chunks on their way to their place: a kill costs almost nothing, and nothing overwrites."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from blake3 import blake3
from broadcast_world import Run, answer, bad_server, same_files, until
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_broadcast import chunks, landing
from prime_broadcast.chunks import ChunkFetcher, Hooks, Pace
from prime_broadcast.client import fetch
from prime_broadcast.landing import EARLY_SECONDS, MARGIN, ChunkClaim, Landing, beginning
from prime_broadcast.layout import file_items
from prime_broadcast.server import Origin
from prime_broadcast.sources import SourceBook
from prime_broadcast.transfer import Link, Sink, SupersededError, TransferError
from prime_core.checkpoint import SignedManifest
from prime_core.errors import UnavailableError

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


def test_a_wrong_beginning_costs_one_chunk_and_blames_no_server(
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


def test_nothing_is_written_over_a_chunk_that_another_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(CHUNK))
    claim = ChunkClaim()
    now = [0.0]
    monkeypatch.setattr("prime_broadcast.landing.monotonic", lambda: now[0])

    def opened(*, early: bool) -> Landing:
        buffer = memoryview(bytearray(CHUNK))
        return Landing(path, (0, CHUNK), claim, 0, buffer, early=early)

    def put(landing: Landing, letter: bytes, count: int) -> None:
        landing.room()[:count] = letter * count
        landing.arrived(count)

    with opened(early=True) as slow, opened(early=False) as quick:
        put(slow, b"w", STEP)
        assert path.read_bytes() == bytes(CHUNK), "too soon"
        now[0] += EARLY_SECONDS
        put(slow, b"w", STEP)
        assert path.read_bytes()[: 2 * STEP] == b"w" * (2 * STEP)
        put(quick, b"r", CHUNK)
        assert path.read_bytes()[: 2 * STEP] == b"w" * (2 * STEP), "unverified: the first one's"
        assert quick.digest() == blake3(b"r" * CHUNK).digest()
        assert claim.take()
        quick.finish()
        now[0] += EARLY_SECONDS
        put(slow, b"w", STEP)
        assert not claim.take(), "the second one is too late"
    assert path.read_bytes() == b"r" * CHUNK


class _SlowLink(Link):
    """A source that is still being connected to when its fetch is stopped, and lies then."""

    asked: threading.Event
    late: threading.Event

    def read_span(
        self,
        path: str,
        span: tuple[int, int],
        size: int,
        sink: Sink,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        self.asked.set()
        assert self.late.wait(60.0)
        room = sink.room()[: span[1] - span[0]]
        room[:] = b"w" * len(room)
        sink.arrived(len(room))
        raise SupersededError("fetched elsewhere meanwhile")


def test_a_fetch_that_was_stopped_writes_nothing_over_what_the_next_one_verified(
    big: tuple[Run, SignedManifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, signed = big
    items = [item for item in file_items(signed.manifest) if item.name == "model.safetensors"]
    book = SourceBook()
    book.get("http://127.0.0.1:1").role = "relay"
    before = set(threading.enumerate())
    _SlowLink.asked, _SlowLink.late = threading.Event(), threading.Event()
    with monkeypatch.context() as patched:
        patched.setattr(chunks, "Link", _SlowLink)
        stopped = ChunkFetcher(
            items,
            tmp_path,
            ["http://127.0.0.1:1"],
            book,
            Pace(per_source=1),
            Hooks(stop=_SlowLink.asked.is_set),
        )
        with pytest.raises(UnavailableError, match="stopped"):
            stopped.run()
    with Origin(run.root) as origin:
        ChunkFetcher(items, tmp_path, [origin.url], SourceBook(), Pace()).run()
    _SlowLink.late.set()
    until(lambda: set(threading.enumerate()) <= before, "the stopped fetch's thread ends")
    assert (tmp_path / "model.safetensors").read_bytes() == run.file(0)


def test_an_aborted_link_asks_nothing_again(big: tuple[Run, SignedManifest]) -> None:
    run, signed = big
    (item,) = (item for item in file_items(signed.manifest) if item.name == "model.safetensors")
    asked: list[str] = []

    def dies_then_serves(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        asked.append(handler.path)
        if len(asked) == 2:  # the connection is a kept-alive one: it would be requested again
            link.abort()
            return
        answer(handler, body)

    with bad_server(run.root, dies_then_serves) as url:
        link = Link(url)
        buffer = memoryview(bytearray(1000))
        link.read_range(item.address, 0, item.size, buffer)
        with pytest.raises(TransferError):
            link.read_range(item.address, 1000, item.size, buffer)
        link.close()
    assert len(asked) == 2


@given(
    size=st.integers(1, 60),
    room=st.integers(1, 20),
    begun=st.integers(0, 60),
    counts=st.lists(st.integers(1, 20), min_size=1, max_size=10),
    early=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_a_chunk_arrives_whole_in_any_pieces(
    size: int, room: int, begun: int, counts: list[int], early: bool
) -> None:
    """Each byte is hashed and written once, for any buffer and any point of resumption."""
    begun = min(begun, size) if early else 0
    data = bytes(range(100, 100 + size))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(b"...." + data[:begun] + bytes(size - begun) + b"....")
        claim = ChunkClaim()
        buffer = memoryview(bytearray(room))
        with Landing(path, (4, size), claim, begun, buffer, early=early) as landing:
            at, number = begun, 0
            while at < size:
                place = landing.room()
                count = min(len(place), counts[number % len(counts)])
                place[:count] = data[at : at + count]
                landing.arrived(count)
                at, number = at + count, number + 1
            assert landing.digest() == blake3(data).digest()
            assert claim.take()
            landing.finish()
        assert path.read_bytes() == b"...." + data + b"...."


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
