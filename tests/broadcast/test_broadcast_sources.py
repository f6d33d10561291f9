"""Where a policy is fetched from: relays, origins, plain mirrors; those that lie, fail, crawl or
hang are left for others."""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from blake3 import blake3
from broadcast_world import (
    CHUNK,
    Run,
    answer,
    bad_server,
    dead_url,
    get,
    plain_server,
    same_files,
)

from prime_broadcast import chunks, sources, transfer
from prime_broadcast.layout import Item
from prime_broadcast.server import Origin
from prime_broadcast.sources import Source, SourceBook, normal_url
from prime_core.errors import MalformedError, UnavailableError
from prime_core.ids import Digest


def test_one_connection_serves_many_chunks(run: Run, tmp_path: Path) -> None:
    signed = run.publish()
    with Origin(run.root) as origin:
        stats = get(signed, [origin.url], tmp_path / "0", per_source=1)
        assert stats.chunks > 10
        assert origin.counters.connections == 1


def test_a_flipped_byte_costs_one_chunk_and_names_its_sender(run: Run, tmp_path: Path) -> None:
    signed = run.publish()
    size = len(run.file(0))

    def flip(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        first = handler.span[0]  # type: ignore[attr-defined]
        if first == 5 * CHUNK:
            body = body[:-1] + bytes([body[-1] ^ 1])
        answer(handler, body)

    book = SourceBook()
    with Origin(run.root) as origin, bad_server(run.root, flip) as liar:
        stats = get(signed, [liar, origin.url], tmp_path / "0", book=book)
        assert same_files(tmp_path / "0", run, 0)
        assert stats.refetched == 1
        assert [(f.url, f.kind) for f in stats.faults] == [(liar, "bad_data")]
        assert "wrong chunk 5 of /policies/0/model.safetensors" in stats.faults[0].reason
        assert stats.bytes_received <= size + 1000  # the wrong chunk itself is not counted
        again = get(signed, [liar, origin.url], tmp_path / "again" / "0", book=book)
        assert set(again.by_source) == {origin.url}, "the liar is avoided from then on"


def test_if_every_source_sends_wrong_data_the_error_names_them(run: Run, tmp_path: Path) -> None:
    signed = run.publish()

    def lie(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        answer(handler, bytes(len(body)))

    with (
        bad_server(run.root, lie) as one,
        bad_server(run.root, lie) as two,
        pytest.raises(UnavailableError) as caught,
    ):
        get(signed, [one, two], tmp_path / "0")
    assert one in str(caught.value)
    assert two in str(caught.value)
    assert not (tmp_path / "0").exists()


def truncate(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    answer(handler, body[: len(body) // 2], claim=len(body))
    handler.close_connection = True


def shorter(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    answer(handler, body[:-1])


def longer(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    answer(handler, body + b"x")


def other_range(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    first, last, size = handler.span  # type: ignore[attr-defined]
    handler.span = (first + 1, last + 1, size)  # type: ignore[attr-defined]
    answer(handler, body)


def redirect(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    handler.send_response(302)
    handler.send_header("Location", "http://127.0.0.1:1/")
    handler.send_header("Content-Length", "0")
    handler.end_headers()


def refuse(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    handler.send_error(500)


def gibberish(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    handler.wfile.write(b"\x00\xff" * 100 + b"\r\n\r\n")
    handler.close_connection = True


def hang_up(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    "behave", [truncate, shorter, longer, other_range, redirect, refuse, gibberish, hang_up]
)
def test_a_source_that_does_not_deliver_is_left_for_another(
    run: Run, tmp_path: Path, behave: Callable[[BaseHTTPRequestHandler, bytes], None]
) -> None:
    signed = run.publish()
    with Origin(run.root) as origin, bad_server(run.root, behave) as bad:
        stats = get(signed, [bad, origin.url], tmp_path / "0")
        assert same_files(tmp_path / "0", run, 0)
        assert stats.by_source.get(bad, 0) < CHUNK  # a tiny file, asked for whole, may be right
        assert bad in {fault.url for fault in stats.faults}
        with pytest.raises(UnavailableError, match=bad):
            get(signed, [bad], tmp_path / "1", patience=0.3)
    assert not (tmp_path / "1").exists()


def test_silent_and_crawling_sources_are_abandoned(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signed = run.publish()
    monkeypatch.setattr(chunks, "HEDGE_AFTER", 0.05)
    monkeypatch.setattr(sources, "OVERDUE", 0.05)
    done = threading.Event()

    def silence(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        done.wait(30)
        handler.close_connection = True

    def crawl(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        answer(handler, body[:1], claim=len(body))
        for byte in body[1:]:
            if done.wait(0.05):
                break
            try:
                handler.wfile.write(bytes([byte]))
            except OSError:
                break
        handler.close_connection = True

    with (
        Origin(run.root) as origin,
        bad_server(run.root, silence) as mute,
        bad_server(run.root, crawl) as slow,
    ):
        try:
            get(signed, [mute, slow, origin.url], tmp_path / "0")
        finally:
            done.set()
    assert same_files(tmp_path / "0", run, 0)


@contextmanager
def tarpits(count: int) -> Iterator[tuple[list[str], list[int]]]:
    """Servers that accept a connection, drip a header for as long as it lives, and never answer.
    Yields their URLs and how many connections each had."""
    over = threading.Event()
    listeners = [socket.create_server(("127.0.0.1", 0), backlog=64) for _ in range(count)]
    asked = [0] * count

    def drip(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
            while not over.wait(0.05):
                connection.sendall(b"a")

    def serve(number: int) -> None:
        with suppress(OSError):
            while True:
                connection, _ = listeners[number].accept()
                asked[number] += 1
                threading.Thread(target=drip, args=(connection,), daemon=True).start()

    for number in range(count):
        threading.Thread(target=serve, args=(number,), daemon=True).start()
    try:
        yield [f"http://127.0.0.1:{one.getsockname()[1]}" for one in listeners], asked
    finally:
        over.set()
        for one in listeners:
            one.close()


def test_tarpit_relays_hold_up_neither_the_first_fetch_nor_a_later_one(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without any time-out to save it, a fetch that waits for one of them never ends.
    for name in ("HEAD_TIMEOUT", "READ_TIMEOUT", "SMALL_TIMEOUT"):
        monkeypatch.setattr(transfer, name, 3600.0)
    monkeypatch.setattr(chunks, "TOO_SLOW", 3600.0)
    first, second = run.publish(), run.publish()
    book = SourceBook()
    with Origin(run.root) as origin, tarpits(8) as (urls, asked):
        stats = get(first, [*urls, origin.url], tmp_path / "0", book=book)
        assert same_files(tmp_path / "0", run, 0)
        assert set(stats.by_source) == {origin.url}
        before = list(asked)
        get(second, [*urls, origin.url], tmp_path / "1", book=book)
        assert same_files(tmp_path / "1", run, 1)
        assert sum(asked) - sum(before) <= 1, "newcomers are tried one at a time, apart"
        # A fetch waits for its threads, so one that asks again costs a second.
        for thread in [one for one in threading.enumerate() if one.name.startswith("fetch-")]:
            thread.join(30)
            assert not thread.is_alive(), f"{thread.name} asks although the fetch is over"


def test_a_small_fetch_waits_neither_for_tarpits_nor_for_a_source_that_turned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without any time-out to save it, a fetch that waits for one of them fails.
    for name in ("HEAD_TIMEOUT", "READ_TIMEOUT", "SMALL_TIMEOUT"):
        monkeypatch.setattr(transfer, name, 3600.0)
    digest = Digest("0x" + blake3(b"abc").hexdigest())
    item = Item(0, "x", 3, digest, (digest,), CHUNK)
    served = tmp_path / "served" / item.address.lstrip("/")
    served.parent.mkdir(parents=True)
    served.write_bytes(b"abc")
    with plain_server(tmp_path / "served") as mirror, tarpits(8) as (urls, _):
        book, turned = SourceBook(), urls[0]
        book.get(turned).bytes_received = 1

        def small_fetch(folder: Path) -> chunks.ChunkFetcher:
            folder.mkdir()
            return chunks.ChunkFetcher(
                [item],
                folder,
                [*urls, mirror],
                book,
                chunks.Pace(),
                chunks.Hooks(stop=lambda: book.clock() > until),
            )

        for number in range(2):
            until = book.clock() + 20
            stats = small_fetch(tmp_path / f"{number}").run()
            assert set(stats.by_source) == {mirror}
            assert (tmp_path / f"{number}" / "x").read_bytes() == b"abc"
            assert book.get(turned).silences == number + 1, "it is remembered"
            book.get(mirror).bytes_received = 0  # so that the next one meets the turned source
            book.get(turned).resting_until = 0.0
        assert not book.get(turned).proven


def test_a_newcomer_proves_itself_apart_and_a_liar_among_them_is_named(
    run: Run, tmp_path: Path
) -> None:
    book = SourceBook()
    gate = threading.Event()

    def lie(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        answer(handler, bytes(len(body)))

    def wait_for_trials(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        gate.wait(30)
        answer(handler, body)

    with (
        bad_server(run.root, wait_for_trials) as known,
        bad_server(run.root, answer) as honest,
        bad_server(run.root, lie) as liar,
    ):
        book.get(known).bytes_received = 1

        def open_gate() -> None:
            while not (book.get(honest).proven and book.get(liar).banned):
                gate.wait(0.02)
            gate.set()

        threading.Thread(target=open_gate, daemon=True).start()
        stats = get(run.publish(), [known, honest, liar], tmp_path / "0", book=book, parallel=1)
    assert same_files(tmp_path / "0", run, 0)
    assert [(fault.url, fault.kind) for fault in stats.faults] == [(liar, "bad_data")]


def test_a_crawling_only_source_ends_in_an_error(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signed = run.publish()
    monkeypatch.setattr(transfer, "GRACE", 0.1)
    done = threading.Event()

    def crawl(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        try:
            answer(handler, body[:1], claim=len(body))
            while not done.wait(0.01):
                handler.wfile.write(b"x")
        except OSError:
            pass
        handler.close_connection = True

    with bad_server(run.root, crawl) as slow:
        try:
            with pytest.raises(UnavailableError, match="crawls"):
                get(signed, [slow], tmp_path / "0", patience=0.2)
        finally:
            done.set()


def test_dead_and_nonsensical_sources_cost_little(run: Run, tmp_path: Path) -> None:
    signed = run.publish()
    odd = ["ftp://x", "not a url", "http://", "http://user:pw@h/", "http://h:99999", dead_url()]
    with Origin(run.root) as origin:
        stats = get(signed, [*odd, origin.url], tmp_path / "0")
    assert same_files(tmp_path / "0", run, 0)
    assert set(stats.by_source) == {origin.url}


def test_without_any_source_the_error_says_so(run: Run, tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="no relay or origin is known"):
        get(run.publish(), [], tmp_path / "0")


def test_pythons_http_server_on_a_plain_copy_is_a_mirror(run: Run, tmp_path: Path) -> None:
    signed = run.publish()
    shutil.copytree(run.root, tmp_path / "copy")
    with plain_server(tmp_path / "copy") as mirror:
        stats = get(signed, [mirror], tmp_path / "0")
    assert same_files(tmp_path / "0", run, 0)
    assert stats.bytes_received == stats.policy_bytes
    assert not stats.faults


def test_a_server_without_ranges_serves_along_with_others_and_its_lies_are_noticed(
    run: Run, tmp_path: Path
) -> None:
    signed = run.publish()
    shutil.copytree(run.root, tmp_path / "copy")
    path = tmp_path / "copy" / "policies" / "0" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[5 * CHUNK + 7] ^= 1
    path.write_bytes(data)
    with plain_server(tmp_path / "copy") as mirror, bad_server(run.root, answer) as other:
        stats = get(signed, [mirror, other], tmp_path / "0")
        alone = tmp_path / "alone" / "0"
        with pytest.raises(UnavailableError, match="wrong chunk 5"):
            get(signed, [mirror], alone, patience=0.5)
    assert same_files(tmp_path / "0", run, 0)
    assert not alone.exists()
    assert stats.bytes_written == stats.policy_bytes


def test_a_resumed_fetch_from_a_server_without_ranges_writes_only_what_is_missing(
    run: Run, tmp_path: Path
) -> None:
    signed = run.publish()
    half = []

    def first_half(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        half.append(1)
        if len(half) > 8:
            handler.close_connection = True
            return
        answer(handler, body)

    with bad_server(run.root, first_half) as broken, pytest.raises(UnavailableError):
        get(signed, [broken], tmp_path / "0", patience=0.3)
    with plain_server(run.root) as mirror:
        stats = get(signed, [mirror], tmp_path / "0")
    assert same_files(tmp_path / "0", run, 0)
    assert stats.kept > 0
    assert stats.bytes_written < stats.policy_bytes


def test_any_plain_file_server_with_ranges_is_a_mirror(run: Run, tmp_path: Path) -> None:
    signed = run.publish()
    book = SourceBook()
    with bad_server(run.root, answer) as mirror:
        stats = get(signed, [mirror], tmp_path / "0", book=book)
    assert same_files(tmp_path / "0", run, 0)
    assert book.get(mirror).role == "mirror"
    assert stats.by_source == {mirror: stats.policy_bytes}


def test_origins_are_spared_while_a_relay_or_mirror_delivers(run: Run, tmp_path: Path) -> None:
    signed = run.publish()
    with Origin(run.root) as origin, bad_server(run.root, answer) as mirror:
        stats = get(signed, [origin.url, mirror], tmp_path / "0")
        assert set(stats.by_source) == {mirror}


def test_a_relay_prefers_mirrors_then_origins_then_relays() -> None:
    now = [0.0]
    book = SourceBook(lambda: now[0])
    urls = [f"http://{role}" for role in ("relay", "origin", "mirror")]
    relay, origin, mirror = (book.get(url) for url in urls)
    for source in (relay, origin, mirror):
        source.role = source.url.removeprefix("http://")

    def pick() -> Source | None:
        return book.pick(urls, (), 1, last_resorts=("origin", "relay"))

    for source in (mirror, origin, relay):
        assert pick() is source
        assert pick() is None, "the others wait until it is overdue"
        now[0] += 2
    book.good(relay, 1000, 1.0)
    book.release(origin)
    book.release(mirror)
    assert pick() is relay, "the only one that has delivered"
    tried = [book.newcomer(urls, ("origin", "relay")) for _ in range(3)]
    assert tried == [origin, mirror, None], "each may take its place"
    book.release(origin)
    book.good(mirror, 1000, 1.0)
    assert book.newcomer(urls, ("origin", "relay")) is None, "a mirror delivers"
    assert pick() is mirror


def test_base_urls_are_normalized_or_refused() -> None:
    assert normal_url("http://H:80/a/") == "http://h/a"
    refused = (
        "http://h/?q=1",
        "http://h/#f",
        "file:///etc/passwd",
        "http://h h/",
        "//h",
        "http://a..b",
    )
    for bad in (*refused, ""):
        with pytest.raises(MalformedError):
            normal_url(bad)


def test_the_fastest_source_is_asked_first_and_failures_rest_longer_each_time() -> None:
    now = [0.0]
    book = SourceBook(lambda: now[0])
    urls = ["http://a", "http://b"]

    def pick() -> str | None:
        source = book.pick(urls, (), 1)
        return source.url if source else None

    assert (pick(), pick(), pick()) == ("http://a", "http://b", None)
    book.good(book.get("http://a"), 1000, 1.0)
    book.good(book.get("http://b"), 1000, 0.1)
    assert pick() == "http://b"
    book.bad(book.get("http://b"), "refused")
    assert pick() == "http://a"
    book.release(book.get("http://a"))
    assert book.next_chance(["http://b"], ()) == pytest.approx(0.25)
    now[0] += 0.25
    assert pick() == "http://b"
    book.bad(book.get("http://b"), "refused")
    assert book.next_chance(["http://b"], ()) == pytest.approx(0.5)
    assert pick() == "http://a"
    book.wait(book.get("http://a"), 2.0)
    assert book.next_chance(["http://a"], ()) == pytest.approx(2.0)
    assert book.get("http://a").failures == 0, "to ask for patience is not a fault"
    now[0] += 2
    assert pick() == "http://b"
    assert pick() == "http://a"
    book.sent_bad_data(book.get("http://a"), "wrong chunk")
    assert book.next_chance(["http://a"], ()) is None
    assert pick() is None
    now[0] += 601
    assert pick() == "http://a"
