"""Heads of answers, and bodies read in few calls: strict, bounded, and never held for long."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from prime_broadcast import transfer
from prime_broadcast.transfer import MAX_HEAD, TimedSocket, parse_answer, read_answer
from prime_core.errors import MalformedError


def receiver(*parts: bytes) -> object:
    """Gives one part a call, then the end of the stream."""
    left = list(parts)

    def receive(buffer: memoryview) -> int:
        if not left:
            return 0
        part = left.pop(0)
        taken = part[: len(buffer)]
        buffer[: len(taken)] = taken
        if len(part) > len(taken):
            left.insert(0, part[len(taken) :])
        return len(taken)

    return receive


def read(*parts: bytes) -> tuple[int, dict[str, str], int | None, bool, bytes]:
    head, early = read_answer(receiver(*parts))  # type: ignore[arg-type]
    return head.status, head.fields, head.length, head.closes, early


def test_a_head_is_read_in_any_pieces() -> None:
    raw = b"HTTP/1.1 206 Partial Content\r\nContent-Length: 5\r\nX-Y:  z \r\n\r\nabc"
    expected = (206, {"content-length": "5", "x-y": "z"}, 5, False, b"abc")
    assert read(raw) == expected
    status, fields, length, closes, early = read(*(raw[i : i + 1] for i in range(len(raw))))
    assert (status, fields, length, closes) == expected[:4]
    assert early == b"", "what follows the head stays in the socket"


def test_interim_answers_are_passed_over() -> None:
    raw = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
    assert read(raw + b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")[:3] == (
        200,
        {"content-length": "0"},
        0,
    )


@pytest.mark.parametrize(
    ("head", "closes"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", False),
        (b"HTTP/1.1 200 OK\r\nConnection: Close\r\n\r\n", True),
        (b"HTTP/1.0 200 OK\r\n\r\n", True),
        (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n\r\n", False),
    ],
)
def test_the_head_tells_whether_another_answer_follows(head: bytes, closes: bool) -> None:
    assert parse_answer(head).closes is closes


def test_a_body_in_a_transfer_coding_has_no_length_that_counts() -> None:
    raw = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert parse_answer(raw).length is None


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"ICY 200 OK\r\n\r\n", "does not answer in HTTP"),
        (b"HTTP/1.1 2x0 OK\r\n\r\n", "does not answer in HTTP"),
        (b"HTTP/2 200\r\n\r\n", "does not answer in HTTP"),
        (b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n", "cannot be read"),
        (b"HTTP/1.1 200 OK\r\n folded: x\r\n\r\n", "cannot be read"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", "two lengths"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "no length that could be"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0x10\r\n\r\n", "no length that could be"),
    ],
)
def test_a_head_that_is_not_one_is_refused(raw: bytes, why: str) -> None:
    with pytest.raises(MalformedError, match=why):
        parse_answer(raw)


def test_a_head_without_end_is_refused_before_it_fills_the_memory() -> None:
    with pytest.raises(MalformedError, match="too long"):
        read(b"HTTP/1.1 200 OK\r\n", *(b"x: y\r\n" * 1000 for _ in range(MAX_HEAD // 1000)))


def test_a_stream_that_ends_within_a_head_is_a_closed_connection() -> None:
    with pytest.raises(ConnectionError):
        read(b"HTTP/1.1 200")


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[socket.socket, TimedSocket]]:
    monkeypatch.setattr(transfer, "PATIENCE", 0.05)
    ours, theirs = socket.socketpair()
    timed = TimedSocket(ours, 5.0)
    yield theirs, timed
    timed.close()
    theirs.close()


def test_a_piece_is_filled_by_one_call_however_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "PATIENCE", 60.0)  # a machine that stands still changes nothing
    ours, theirs = socket.socketpair()
    timed = TimedSocket(ours, 5.0)

    def send() -> None:
        for _ in range(8):
            theirs.sendall(b"x" * 1000)
            time.sleep(0.01)  # so that a single recv would find less

    thread = threading.Thread(target=send)
    thread.start()
    buffer = memoryview(bytearray(8000))
    filled = 0
    calls = 0
    while filled < 8000:
        count = timed.fill(buffer[filled:])
        assert count is not None
        filled, calls = filled + count, calls + 1
    thread.join()
    timed.close()
    theirs.close()
    assert bytes(buffer) == b"x" * 8000
    assert calls == 1


def test_a_crawling_source_holds_its_reader_for_a_moment_only(
    pair: tuple[socket.socket, TimedSocket],
) -> None:
    """What has come is given back, so that the reader may look for another source."""
    theirs, timed = pair
    buffer = memoryview(bytearray(8000))
    assert timed.fill(buffer) is None, "nothing came"
    theirs.sendall(b"y" * 10)
    assert timed.fill(buffer) == 10
    theirs.close()
    assert timed.fill(buffer) == 0, "the end"


def test_after_a_body_the_deadline_of_a_head_holds_again(
    pair: tuple[socket.socket, TimedSocket],
) -> None:
    theirs, timed = pair
    theirs.sendall(b"z")
    assert timed.fill(memoryview(bytearray(1))) == 1
    timed.within(0.05)
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        timed.receive(memoryview(bytearray(1)))
    assert time.monotonic() >= begun + 0.05
