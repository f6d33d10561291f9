"""Fetching under faults: each ends in the right weights or one clear error, never half-applied."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler
from pathlib import Path

import pytest
from broadcast_world import (
    CHUNK,
    Run,
    answer,
    bad_server,
    dead_url,
    same_files,
    sign,
)
from served import served

from protocol.broadcast import chunks, delta, layout, sources, transfer
from protocol.broadcast.client import Base, FetchStats, fetch, plan_route
from protocol.broadcast.durable import NOTE
from protocol.broadcast.manifest import verify_folder
from protocol.broadcast.server import Origin
from protocol.broadcast.sources import SourceBook, normal_url
from protocol.core.checkpoint import SignedManifest
from protocol.core.errors import MalformedError, UnavailableError, UntrustedError

LIES = {"lie"}


def get(signed: SignedManifest, sources: list[str], dest: Path, **options: object) -> FetchStats:
    options.setdefault("patience", 5.0)
    return fetch(signed, sources, dest, **options)  # type: ignore[arg-type]


def base_of(folder: Path, signed: SignedManifest) -> Base:
    return Base(folder, signed.manifest)


def left_in(folder: Path) -> set[str]:
    """What lies there, but for locks and notes of what is on its way to the platter."""
    return {p.name for p in folder.iterdir() if not p.name.startswith((".lock", NOTE, f".{NOTE}"))}


def test_a_policy_arrives_whole_verified_and_under_its_name(run: Run, tmp_path: Path) -> None:
    signed = run.publish()
    seen: list[tuple[int, int]] = []
    with Origin(run.root) as origin:
        stats = get(
            signed, [origin.url], tmp_path / "n" / "0", progress=lambda *at: seen.append(at)
        )
    assert same_files(tmp_path / "n" / "0", run, 0)
    assert left_in(tmp_path / "n") == {"0"}
    verify_folder(tmp_path / "n" / "0", signed.manifest)
    size = stats.policy_bytes
    assert (stats.route, stats.bytes_received, stats.bytes_written) == ("whole", size, size)
    assert stats.by_source == {origin.url: size}
    assert seen[-1] == (size, size)
    assert not stats.faults
    assert {p.stat().st_mode & 0o777 for p in (tmp_path / "n" / "0").iterdir()} == {0o644}


def test_what_is_there_already_is_not_fetched_again(run: Run, tmp_path: Path) -> None:
    signed = run.publish()
    with Origin(run.root) as origin:
        get(signed, [origin.url], tmp_path / "0")
    assert get(signed, [], tmp_path / "0").route == "present"


def test_another_policy_under_the_same_name_is_refused(run: Run, tmp_path: Path) -> None:
    signed = run.publish()
    with Origin(run.root) as origin:
        get(signed, [origin.url], tmp_path / "0")
    other = sign(signed.manifest.model_copy(update={"step": 5}))
    with pytest.raises(UntrustedError, match="one version has one manifest"):
        get(other, [], tmp_path / "0")


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
        assert [(f.url, f.kind) for f in stats.faults] == [(liar, "lie")]
        assert "wrong chunk 5 of /policies/0/model.safetensors" in stats.faults[0].reason
        assert stats.bytes_received <= size + 1000  # the wrong chunk itself is not counted
        again = get(signed, [liar, origin.url], tmp_path / "again" / "0", book=book)
        assert set(again.by_source) == {origin.url}, "the liar is avoided from then on"


def test_when_everybody_lies_the_error_names_them(run: Run, tmp_path: Path) -> None:
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


class PlainHandler(SimpleHTTPRequestHandler):
    """Python's own file server, which knows no ranges."""

    def log_message(self, *args: object) -> None:
        pass


def plain_server(root: Path) -> AbstractContextManager[str]:
    return served(partial(PlainHandler, directory=str(root)))


def test_pythons_http_server_on_a_plain_copy_is_a_mirror(run: Run, tmp_path: Path) -> None:
    signed = run.publish()
    shutil.copytree(run.root, tmp_path / "copy")
    with plain_server(tmp_path / "copy") as mirror:
        stats = get(signed, [mirror], tmp_path / "0")
    assert same_files(tmp_path / "0", run, 0)
    assert stats.bytes_received == stats.policy_bytes
    assert not stats.faults


def test_a_server_without_ranges_helps_beside_others_and_its_lies_are_noticed(
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


def test_a_failed_fetch_resumes_without_fetching_a_verified_chunk_again(
    run: Run, tmp_path: Path
) -> None:
    signed = run.publish()
    served: list[int] = []

    def dies(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        if len(served) == 10:
            handler.close_connection = True
            return
        served.append(len(body))
        answer(handler, body)

    with bad_server(run.root, dies) as mortal, pytest.raises(UnavailableError):
        get(signed, [mortal], tmp_path / "0", patience=0.3)
    assert not (tmp_path / "0").exists()
    with Origin(run.root) as origin:
        stats = get(signed, [origin.url], tmp_path / "0")
    assert stats.kept == 10
    assert stats.bytes_received == stats.policy_bytes - sum(served)
    assert same_files(tmp_path / "0", run, 0)


def test_damage_in_what_an_earlier_try_left_is_found(run: Run, tmp_path: Path) -> None:
    signed = run.publish()
    count = [0]

    def dies(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        count[0] += 1
        if count[0] > 8:
            handler.close_connection = True
            return
        answer(handler, body)

    with bad_server(run.root, dies) as mortal, pytest.raises(UnavailableError):
        get(signed, [mortal], tmp_path / "0", patience=0.3)
    (partial,) = (p for p in tmp_path.iterdir() if p.name.startswith(".partial-0-"))
    left = [
        (path, start)
        for path in (partial / "files").iterdir()
        for start in range(0, len(run.file(0, path.name)), CHUNK)
        if path.read_bytes()[start : start + CHUNK] == run.file(0, path.name)[start : start + CHUNK]
    ]
    assert len(left) > 4
    path, start = left[2]
    with path.open("r+b") as file:
        file.seek(start + 7)
        byte = file.read(1)
        file.seek(start + 7)
        file.write(bytes([byte[0] ^ 1]))
    with Origin(run.root) as origin:
        stats = get(signed, [origin.url], tmp_path / "0")
    assert stats.kept == len(left) - 1
    assert same_files(tmp_path / "0", run, 0)


@pytest.mark.parametrize("allowed", [0, 1, 7])
def test_a_full_disk_is_one_sentence_and_can_be_resumed_from_the_same_source(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: int
) -> None:
    signed = run.publish()
    book = SourceBook()
    real, count = os.pwrite, [0]

    def fills(fd: int, data: bytes, offset: int) -> int:
        count[0] += 1
        if count[0] > allowed:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, offset)

    with Origin(run.root) as origin:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", fills)
            with pytest.raises(UnavailableError, match="disk is full"):
                get(signed, [origin.url], tmp_path / "0", book=book)
        assert not (tmp_path / "0").exists()
        stats = get(signed, [origin.url], tmp_path / "0", book=book)
        assert book.get(origin.url).in_use == 0
    assert stats.kept == allowed
    assert same_files(tmp_path / "0", run, 0)


def test_a_full_disk_costs_a_source_without_ranges_nothing_either(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signed = run.publish()
    book = SourceBook()

    real = os.pwrite

    def full(fd: int, data: bytes, offset: int) -> int:
        if "model" in Path(f"/proc/self/fd/{fd}").readlink().name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, offset)

    with plain_server(run.root) as mirror:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            with pytest.raises(UnavailableError, match="disk is full"):
                get(signed, [mirror], tmp_path / "0", book=book)
        get(signed, [mirror], tmp_path / "0", book=book)
    assert same_files(tmp_path / "0", run, 0)


def test_too_little_space_is_said_before_anything_is_fetched(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    signed = run.publish()
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with Origin(run.root) as origin:
        with pytest.raises(UnavailableError, match="are needed"):
            get(signed, [origin.url], tmp_path / "0")
        assert origin.counters.requests == 0


# Deltas


def test_a_node_with_the_base_fetches_only_the_delta(run: Run, tmp_path: Path) -> None:
    zero, one = run.publish(), run.publish()
    with Origin(run.root) as origin:
        get(zero, [origin.url], tmp_path / "0")
        stats = get(one, [origin.url], tmp_path / "1", bases=[base_of(tmp_path / "0", zero)])
    assert (stats.route, stats.hops) == ("delta", (1,))
    assert stats.bytes_received == one.manifest.deltas[0].size < stats.policy_bytes / 10
    assert same_files(tmp_path / "1", run, 1)
    assert left_in(tmp_path) == {"run", "0", "1"}


def test_a_node_that_missed_versions_takes_the_chain_if_it_is_cheaper(
    run: Run, tmp_path: Path
) -> None:
    signed = [run.publish() for _ in range(4)]
    chain = {s.manifest.version: s.manifest for s in signed}
    with Origin(run.root) as origin:
        get(signed[0], [origin.url], tmp_path / "0")
        stats = get(
            signed[3],
            [origin.url],
            tmp_path / "3",
            bases=[base_of(tmp_path / "0", signed[0])],
            chain=chain,
        )
    assert (stats.route, stats.hops) == ("delta", (1, 2, 3))
    assert same_files(tmp_path / "3", run, 3)
    assert left_in(tmp_path) == {"run", "0", "3"}


def test_the_plan_is_the_cheapest_path(run: Run, tmp_path: Path) -> None:
    signed = [run.publish() for _ in range(4)]
    manifests = [s.manifest for s in signed]
    chain = {m.version: m for m in manifests}
    bases = [Base(tmp_path / str(v), manifests[v]) for v in (0, 2)]
    assert [h.target.version for h in plan_route(manifests[3], bases, chain).hops] == [3]
    assert [h.target.version for h in plan_route(manifests[3], bases[:1], chain).hops] == [1, 2, 3]
    assert plan_route(manifests[3], bases[:1], {}).hops == ()
    assert plan_route(manifests[3], [], chain).hops == ()
    dear = manifests[3].model_copy(
        update={"deltas": (manifests[3].deltas[0].model_copy(update={"size": 1 << 30}),)}
    )
    assert plan_route(dear, bases, chain).hops == ()
    other = manifests[2].model_copy(update={"result_digest": manifests[0].result_digest})
    assert plan_route(manifests[3], [Base(tmp_path / "2", other)], chain).hops == ()


def test_a_damaged_base_falls_back_to_the_whole(run: Run, tmp_path: Path) -> None:
    zero, one = run.publish(), run.publish()
    with Origin(run.root) as origin:
        get(zero, [origin.url], tmp_path / "0")
        with (tmp_path / "0" / "model.safetensors").open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last[0] ^ 1]))
        stats = get(one, [origin.url], tmp_path / "1", bases=[base_of(tmp_path / "0", zero)])
    assert stats.route == "whole"
    assert [fault.kind for fault in stats.faults] == ["delta"]
    assert same_files(tmp_path / "1", run, 1)


def test_a_missing_delta_falls_back_to_the_whole(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from protocol.broadcast import client

    monkeypatch.setattr(client, "DELTA_PATIENCE", 0.3)
    zero, one = run.publish(), run.publish()
    with Origin(run.root) as origin:
        get(zero, [origin.url], tmp_path / "0")
        (layout.version_folder(run.root, 1) / "delta-0").unlink()
        stats = get(one, [origin.url], tmp_path / "1", bases=[base_of(tmp_path / "0", zero)])
    assert stats.route == "whole"
    assert same_files(tmp_path / "1", run, 1)


def test_a_kill_while_applying_a_delta_leaves_nothing_half_applied(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zero, one = run.publish(), run.publish()

    class Killed(BaseException):
        pass

    real = delta.write_at
    count = [0]

    def dies(fd: int, data: bytes, offset: int) -> None:
        count[0] += 1
        real(fd, data[: len(data) // 2], offset)
        raise Killed

    with Origin(run.root) as origin:
        get(zero, [origin.url], tmp_path / "0")
        bases = [base_of(tmp_path / "0", zero)]
        with monkeypatch.context() as patch:
            patch.setattr(delta, "write_at", dies)
            with pytest.raises(Killed):
                get(one, [origin.url], tmp_path / "1", bases=bases)
        assert count == [1]
        assert not (tmp_path / "1").exists()
        stats = get(one, [origin.url], tmp_path / "1", bases=bases)
    assert stats.route == "delta"
    assert stats.bytes_received == 0, "the delta itself was kept"
    assert same_files(tmp_path / "1", run, 1)


def test_a_manifest_whose_chunks_and_file_disagree_is_refused_before_a_byte_is_fetched(
    run: Run, tmp_path: Path
) -> None:
    from protocol.broadcast.manifest import result_digest

    signed = run.publish()
    files = tuple(
        f.model_copy(update={"digest": signed.manifest.files[1].digest}) if n == 0 else f
        for n, f in enumerate(signed.manifest.files)
    )
    forged = signed.manifest.model_copy(
        update={"files": files, "result_digest": result_digest(files)}
    )
    with Origin(run.root) as origin:
        with pytest.raises(MalformedError, match="not made of its chunks"):
            fetch(forged, [origin.url], tmp_path / "0", patience=5.0)
        assert origin.counters.requests == 0
    assert not (tmp_path / "0").exists()


def test_two_fetches_of_one_policy_do_not_disturb_each_other(run: Run, tmp_path: Path) -> None:
    signed = run.publish()
    routes: list[str] = []
    with Origin(run.root) as origin:
        threads = [
            threading.Thread(
                target=lambda: routes.append(get(signed, [origin.url], tmp_path / "0").route)
            )
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(routes) == ["present"] * 3 + ["whole"]
    assert same_files(tmp_path / "0", run, 0)


# Sources


def test_base_urls_are_normalised_or_refused() -> None:
    assert normal_url("http://h:80/a/") == "http://h:80/a"
    for bad in ("http://h/?q=1", "http://h/#f", "file:///etc/passwd", "http://h h/", "//h", ""):
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
    assert book.get("http://a").failures == 0, "to ask for patience is no fault"
    now[0] += 2
    assert pick() == "http://b"
    assert pick() == "http://a"
    book.lied(book.get("http://a"), "wrong chunk")
    assert book.next_chance(["http://a"], ()) is None
    assert pick() is None
    now[0] += 601
    assert pick() == "http://a"
