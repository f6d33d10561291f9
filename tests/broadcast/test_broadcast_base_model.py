"""The base model from a folder, a mirror or the Hub: what matches the signed manifest is taken,
what differs comes from the pool, and nothing that a source sends does harm."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from broadcast_world import CHUNK, TRUST, Run, plain_server, same_files
from served import served

from prime_broadcast import base_model
from prime_broadcast.base_model import bring, parse_source
from prime_broadcast.folder import PolicyFolder
from prime_broadcast.layout import file_items
from prime_broadcast.server import Origin
from prime_core.checkpoint import SignedManifest
from prime_core.errors import MalformedError

WEIGHTS = "model.safetensors"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_model, "PAUSES", (0.0, 0.0, 0.0))


@pytest.fixture
def signed(run: Run) -> SignedManifest:
    return run.publish()


@pytest.fixture
def model(run: Run, signed: SignedManifest, tmp_path: Path) -> Path:
    """A copy of the folder that was published as policy 0."""
    return Path(shutil.copytree(run.folder / "checkpoint-0", tmp_path / "model"))


def folder_of(tmp_path: Path, source: str, **environment: str) -> PolicyFolder:
    return PolicyFolder(tmp_path / "node", TRUST, base_model=parse_source(source, environment))


def size_of(signed: SignedManifest) -> int:
    return sum(file.size for file in signed.manifest.files)


class Files(BaseHTTPRequestHandler):
    """Serves `files` with ranges, as a bucket does. `asked`: each path and its headers."""

    protocol_version = "HTTP/1.1"
    files: Path
    asked: list[tuple[str, dict[str, str]]]

    def do_GET(self) -> None:
        self.asked.append((self.path, dict(self.headers)))
        self.respond(urlsplit(self.path).path.lstrip("/"))

    def respond(self, name: str) -> None:
        path = self.files / name
        if not path.is_file():
            self.send_error(404)
            return
        data = path.read_bytes()
        first, last = self.span(len(data))
        self.send(data[first : last + 1], first, len(data))

    def span(self, size: int) -> tuple[int, int]:
        text = self.headers.get("Range", f"bytes=0-{size - 1}").removeprefix("bytes=")
        first, last = (int(part) for part in text.split("-"))
        return first, min(last, size - 1)

    def send(self, body: bytes, first: int, size: int) -> None:
        partial = "Range" in self.headers
        self.send_response(206 if partial else 200)
        if partial:
            self.send_header("Content-Range", f"bytes {first}-{first + len(body) - 1}/{size}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def redirect(self, status: int, location: str) -> None:
        self.send_response(status)
        self.send_header("Location", location)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def serving(
    files: Path, respond: Callable[[Files, str], None] = Files.respond
) -> Iterator[tuple[str, list[tuple[str, dict[str, str]]]]]:
    """The URL of such a server, and what it was asked."""
    asked: list[tuple[str, dict[str, str]]] = []
    kind = type("Server", (Files,), {"files": files, "asked": asked, "respond": respond})
    with served(kind) as url:
        yield url, asked


def hub(files: Path, handler: Files, name: str) -> None:
    """Answers as the Hub: weights are elsewhere, small files behind a relative redirect."""
    prefix = "owner/name/resolve/v1%2Fx/"
    if name.startswith(prefix):
        if handler.headers["Authorization"] != "Bearer secret":
            handler.send_error(401)
        elif name.endswith("safetensors"):
            host = handler.headers["Host"].replace("127.0.0.1", "localhost")
            handler.redirect(302, f"http://{host}/lfs/{name.removeprefix(prefix)}?sig=1")
        else:
            handler.redirect(307, f"/cache/{name.removeprefix(prefix)}")
    else:
        Files.respond(handler, name.split("/", 1)[1])


def links(model: Path, tmp_path: Path) -> Path:
    """The same files as the Hub's cache holds them: a snapshot of links to blobs."""
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for path in model.iterdir():
        (snapshot / path.name).symlink_to(os.path.relpath(path, snapshot))
    return snapshot


@pytest.mark.parametrize("kind", ["folder", "Hub's cache", "mirror", "no ranges", "Hub"])
def test_what_matches_is_not_asked_of_the_pool(
    run: Run, signed: SignedManifest, model: Path, tmp_path: Path, kind: str
) -> None:
    plain, ranged = plain_server(model), serving(model)
    at_hub = serving(model, lambda handler, name: hub(model, handler, name))
    with (
        Origin(run.root) as origin,
        plain as plain_url,
        ranged as (ranged_url, _),
        at_hub as (hub_url, asked),
    ):
        text = {
            "folder": str(model),
            "Hub's cache": str(links(model, tmp_path)),
            "mirror": ranged_url,
            "no ranges": plain_url,
            "Hub": "hf:owner/name@v1/x",
        }[kind]
        folder = folder_of(tmp_path, text, HF_ENDPOINT=hub_url, HF_TOKEN="secret")
        stats = folder.ensure(0, signed, [origin.url]).stats
        assert origin.counters.requests == 0
        assert stats.by_source == {text: size_of(signed)}
        assert (stats.chunks, stats.kept) == (sum(len(f.chunks) for f in signed.manifest.files), 0)
        assert same_files(folder.path(0), run, 0)
        assert not any(path.is_symlink() for path in folder.path(0).iterdir())
        later = run.publish()
        assert folder.ensure(1, later, [origin.url]).stats.route == "delta"
    assert same_files(folder.path(1), run, 1)
    if kind == "Hub":
        sent = {path.split("/")[1]: "Authorization" in headers for path, headers in asked}
        assert sent == {"owner": True, "lfs": False, "cache": True}


def wrong_tensor(model: Path) -> None:
    data = bytearray((model / WEIGHTS).read_bytes())
    data[3 * CHUNK + 5] ^= 1
    (model / WEIGHTS).write_bytes(data)


def truncated(model: Path) -> None:
    os.truncate(model / WEIGHTS, 3 * CHUNK + 5)


def missing(model: Path) -> None:
    (model / WEIGHTS).unlink()


def pipe(model: Path) -> None:
    missing(model)
    os.mkfifo(model / WEIGHTS)


@pytest.mark.parametrize(
    ("harm", "served_by"),
    [
        *itertools.product((wrong_tensor, truncated, missing), ("folder", "mirror", "no ranges")),
        (pipe, "folder"),
    ],
)
def test_what_differs_comes_from_the_pool(
    run: Run,
    signed: SignedManifest,
    model: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    harm: Callable[[Path], None],
    served_by: str,
) -> None:
    harm(model)
    weights = next(file for file in signed.manifest.files if file.name == WEIGHTS)
    from_pool = {wrong_tensor: CHUNK, truncated: weights.size - 3 * CHUNK}.get(harm, weights.size)
    if harm is truncated and served_by != "folder":  # an answer of another length is not read
        from_pool = weights.size
    with Origin(run.root) as origin, serving(model) as (url, _), plain_server(model) as plain:
        text = {"folder": str(model), "mirror": url, "no ranges": plain}[served_by]
        folder = folder_of(tmp_path, text)
        stats = folder.ensure(0, signed, [origin.url]).stats
        assert stats.by_source == {text: size_of(signed) - from_pool, origin.url: from_pool}
    assert same_files(folder.path(0), run, 0)
    assert stats.faults == []
    chunks = -(-from_pool // CHUNK)
    said = f"base model: {chunks} of {len(weights.chunks)} chunks of {WEIGHTS} do not come from"
    assert said in caplog.text


def test_a_folder_on_a_disk_that_fails_is_left(
    run: Run, signed: SignedManifest, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(fd: int, offset: int, length: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(base_model, "read_at", fails)
    with Origin(run.root) as origin:
        folder = folder_of(tmp_path, str(model))
        stats = folder.ensure(0, signed, [origin.url]).stats
        assert stats.by_source[origin.url] == size_of(signed)
    assert same_files(folder.path(0), run, 0)


def oversize(handler: Files, name: str) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", str(1 << 40))
    handler.end_headers()


def endless(handler: Files, name: str) -> None:
    """Right bytes, and then more without an end, of no stated length."""
    handler.send_response(200)
    handler.send_header("Connection", "close")
    handler.end_headers()
    handler.close_connection = True
    handler.wfile.write((handler.files / name).read_bytes())
    try:
        while True:
            handler.wfile.write(bytes(1 << 20))
    except OSError:
        pass


def other_range(handler: Files, name: str) -> None:
    handler.send_response(206)
    handler.send_header("Content-Range", "bytes 5-9/10")
    handler.send_header("Content-Length", "5")
    handler.end_headers()
    handler.wfile.write(b"12345")


def circle(handler: Files, name: str) -> None:
    handler.redirect(302, f"/{name}")


def elsewhere(handler: Files, name: str) -> None:
    handler.redirect(302, "file:///etc/passwd")


def no_address(handler: Files, name: str) -> None:
    handler.redirect(302, "http://[::1")


def failing(handler: Files, name: str) -> None:
    handler.send_error(503)


@pytest.mark.parametrize(
    ("behave", "taken"),
    [
        (oversize, False),
        (endless, True),
        (other_range, False),
        (circle, False),
        (elsewhere, False),
        (no_address, False),
        (failing, False),
    ],
)
def test_a_source_that_answers_as_it_likes_delays_but_ends_nothing(
    run: Run,
    signed: SignedManifest,
    model: Path,
    tmp_path: Path,
    behave: Callable[[Files, str], None],
    taken: bool,
) -> None:
    with Origin(run.root) as origin, serving(model, behave) as (url, asked):
        folder = folder_of(tmp_path, url)
        stats = folder.ensure(0, signed, [origin.url]).stats
    size = size_of(signed)
    assert stats.by_source[url] == (size if taken else 0)
    assert stats.by_source.get(origin.url, 0) == (0 if taken else size)
    assert same_files(folder.path(0), run, 0)
    assert len(asked) <= 2 * 4 * 6, "each of the two files four times, with five redirects"


def test_a_request_that_breaks_off_goes_on_at_the_first_chunk_that_is_missing(
    run: Run, signed: SignedManifest, model: Path, tmp_path: Path
) -> None:
    def breaks(handler: Files, name: str) -> None:
        data = (model / name).read_bytes()
        first, last = handler.span(len(data))
        handler.send_response(206 if first or name != WEIGHTS else 200)
        if first:
            handler.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
        handler.send_header("Content-Length", str(last + 1 - first))
        handler.end_headers()
        handler.wfile.write(data[first : min(last + 1, first + 4 * CHUNK + 7)])
        handler.close_connection = True

    (model / "config.json").unlink()
    weights = next(item for item in file_items(signed.manifest) if item.name == WEIGHTS)
    (tmp_path / "to").mkdir()
    with serving(model, breaks) as (url, asked):
        brought = bring(parse_source(url), [weights], tmp_path / "to", public_only=True)
    assert (brought.bytes, brought.missing) == (weights.size, 0)
    begins = [int(headers["Range"][6:].split("-")[0]) for _, headers in asked[1:]]
    assert begins == list(range(4 * CHUNK, weights.size, 4 * CHUNK))
    again = bring(parse_source(url), [weights], tmp_path / "to", public_only=True)
    assert (again.bytes, again.missing) == (0, 0), "what is there is not asked for again"


def test_another_model_is_given_up_after_few_chunks(
    run: Run, signed: SignedManifest, model: Path, tmp_path: Path
) -> None:
    weights = next(file for file in signed.manifest.files if file.name == WEIGHTS)
    (model / WEIGHTS).write_bytes(os.urandom(weights.size))
    with Origin(run.root) as origin, serving(model) as (url, _):
        folder = folder_of(tmp_path, url)
        stats = folder.ensure(0, signed, [origin.url]).stats
        assert stats.by_source[origin.url] >= weights.size
    assert len(weights.chunks) > base_model.MOST_WRONG
    assert same_files(folder.path(0), run, 0)


def test_redirects_lead_to_public_addresses_only(
    run: Run, signed: SignedManifest, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    items = file_items(signed.manifest)
    with serving(model) as (inside, asked):

        def onwards(handler: Files, name: str) -> None:
            handler.redirect(302, f"{inside}/{name}")

        with serving(model, onwards) as (url, _):
            for public_only, count in ((True, 0), (False, size_of(signed))):
                into = tmp_path / f"to-{public_only}"
                into.mkdir()
                brought = bring(parse_source(url), items, into, public_only=public_only)
                assert brought.bytes == count
                assert bool(asked) is not public_only
    assert "is the private address 127.0.0.1" in caplog.text


def test_a_new_node_makes_a_later_policy_from_the_base_model(
    run: Run, signed: SignedManifest, model: Path, tmp_path: Path
) -> None:
    known = [signed, *(run.publish() for _ in range(3))]
    deltas = sum(one.manifest.deltas[0].size for one in known[1:])
    with Origin(run.root) as origin:
        folder = folder_of(tmp_path, str(model))
        stats = folder.ensure(3, known[3], [origin.url], others=known[:3]).stats
        assert (stats.route, stats.hops) == ("delta", (1, 2, 3))
        assert stats.by_source == {str(model): size_of(signed), origin.url: deltas}
        assert (folder.versions(), same_files(folder.path(3), run, 3)) == ([3], True)

        other = PolicyFolder(tmp_path / "other", TRUST, base_model=parse_source("/nothing"))
        stats = other.ensure(3, known[3], [origin.url], others=known[:3]).stats
        assert (stats.route, stats.by_source[origin.url]) == ("whole", size_of(known[3]))
        assert stats.faults == []
    assert same_files(other.path(3), run, 3)


def test_what_names_a_source() -> None:
    assert parse_source("http://Mirror.example:80/m/").url == "http://mirror.example/m"
    assert parse_source("relative").folder == Path.cwd() / "relative"
    found = parse_source("hf:a/b")
    assert (found.url, found.token) == ("https://huggingface.co/a/b/resolve/main", "")
    named = parse_source("hf:a/b@refs/pr/1", {"HF_ENDPOINT": "http://hub/x", "HF_TOKEN": "t"})
    assert named.url == "http://hub/x/a/b/resolve/refs%2Fpr%2F1"
    assert "'t'" not in repr(named)
    for text in (
        "hf:a",
        "hf:../b",
        "hf:a/b@../x",
        "hf:a/b/c",
        "ftp://a",
        "http://u:p@a",
        "hf:a/b?x",
    ):
        with pytest.raises(MalformedError):
            parse_source(text)
