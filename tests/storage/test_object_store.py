"""The behaviour suite of the object-store port; a further store joins by a further fixture."""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import pytest
from full_disk import a_full_disk

from devnet.s3 import S3Bucket
from prime_core.encoding import sha256
from prime_core.errors import (
    FatalError,
    MalformedError,
    NotFoundError,
    PrimeError,
    UnavailableError,
    UntrustedError,
)
from prime_core.storage.base import CHUNK_BYTES, ObjectStore, digest_key, put_object
from prime_core.storage.directory import DirectoryStore
from prime_core.storage.signing import load_secret, save_secret
from prime_core.transport.problems import to_problem

SECRET = b"s" * 32
BAD_KEYS = [
    "",
    "/etc/passwd",
    "../secret",
    "a/../b",
    "a//b",
    "a/",
    ".hidden",
    "a/.tmp-1",
    "a\\b",
    "a\x00b",
    "a b",
    "a\n",
    "ä",
    "a" * 201,
    "a/" * 300 + "a",
    "sha256/abc",
    "sha256/" + "A" * 64,
    "sha256/" + "0" * 64 + "/x",
]


@pytest.fixture
def directory(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "objects", "http://here", SECRET)


@pytest.fixture(params=["directory", "s3"])
def store(request: pytest.FixtureRequest) -> ObjectStore:
    """One store of each kind, empty."""
    if request.param == "directory":
        found: ObjectStore = request.getfixturevalue("directory")
        return found
    from prime_core.storage.s3 import S3Store

    bucket: S3Bucket = request.getfixturevalue("s3")
    prefix = f"test/{secrets.token_hex(8)}"
    return S3Store(bucket.name, prefix=prefix, endpoint=bucket.url, region=bucket.region)


def test_a_medium_that_fails_while_it_is_read_is_unavailable(
    directory: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = directory
    store.put("a", b"data")

    class Broken:
        def __enter__(self) -> Broken:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def read(self, _: int) -> bytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(DirectoryStore, "_open", lambda *_: Broken())
    with pytest.raises(UnavailableError, match="Input/output error"):
        list(store.chunks("a"))


def test_what_was_put_is_got_whole_and_in_chunks(store: ObjectStore) -> None:
    data = os.urandom(CHUNK_BYTES * 2 + 17)
    store.put("policies/3/model.bin", data)
    assert store.get("policies/3/model.bin", len(data)) == data
    pieces = list(store.chunks("policies/3/model.bin"))
    assert b"".join(pieces) == data
    assert max(map(len, pieces)) <= CHUNK_BYTES
    assert store.size("policies/3/model.bin") == len(data)
    assert store.stat("policies/3/model.bin").sha256 == sha256(data)


def test_an_empty_object_is_an_object(store: ObjectStore) -> None:
    store.put("empty", b"")
    assert store.exists("empty")
    assert store.get("empty", 0) == b""


def test_put_is_idempotent_and_put_file_stores_the_same(store: ObjectStore, tmp_path: Path) -> None:
    name = put_object(store, b"rollout")
    assert put_object(store, b"rollout") == name
    (tmp_path / "file").write_bytes(b"rollout")
    store.put_file(digest_key(name), tmp_path / "file")
    assert list(store.keys("sha256/")) == [digest_key(name)]


def test_a_digest_key_takes_only_bytes_of_that_digest(store: ObjectStore) -> None:
    key = digest_key(sha256(b"right"))
    with pytest.raises(MalformedError, match="digest"):
        store.put(key, b"wrong")
    assert not store.exists(key)


def test_get_refuses_more_than_its_limit(store: ObjectStore) -> None:
    store.put("big", b"12345")
    with pytest.raises(MalformedError, match="larger"):
        store.get("big", 4)


def test_what_is_missing_is_not_found(store: ObjectStore) -> None:
    for read in (
        lambda: store.get("none", 1),
        lambda: store.chunks("none"),
        lambda: store.size("none"),
        lambda: store.stat("none"),
        lambda: store.copy("none", "other"),
    ):
        with pytest.raises(NotFoundError):
            read()
    assert not store.exists("none")
    store.delete("none")


def test_a_deleted_object_is_gone(store: ObjectStore) -> None:
    store.put("a/b", b"x")
    store.delete("a/b")
    assert not store.exists("a/b")
    assert list(store.keys()) == []


def test_keys_are_listed_by_prefix(store: ObjectStore) -> None:
    for key in ("policies/2/b", "policies/1/a", "policies/10/a", "other"):
        store.put(key, b"x")
    assert sorted(store.keys("policies/1")) == ["policies/1/a", "policies/10/a"]
    assert list(store.keys("policies/1/")) == ["policies/1/a"]
    assert sorted(store.keys()) == ["other", "policies/1/a", "policies/10/a", "policies/2/b"]
    with pytest.raises(MalformedError):
        list(store.keys("../"))


def test_a_copy_is_a_second_object_and_keeps_the_promise_of_its_key(store: ObjectStore) -> None:
    name = sha256(b"data")
    store.put("uploads/1", b"data")
    seen = store.stat("uploads/1")
    store.copy("uploads/1", digest_key(name))
    store.copy("uploads/1", digest_key(name), seen)
    store.delete("uploads/1")
    assert store.get(digest_key(name), 4) == b"data"
    assert store.stat(digest_key(name)).sha256 == name
    store.put("uploads/1", b"dat4")
    with pytest.raises(MalformedError, match="digest"):
        store.copy("uploads/1", digest_key(name))
    with pytest.raises(PrimeError):  # other bytes than were seen
        store.copy("uploads/1", digest_key(name), seen)
    with pytest.raises(MalformedError, match="digest"):
        store.copy("uploads/1", digest_key(sha256(b"data?")), store.stat("uploads/1"))
    with pytest.raises(MalformedError, match="digest"):
        store.copy("uploads/1", digest_key(sha256(b"data?")))
    assert sorted(store.keys()) == [digest_key(name), "uploads/1"]
    assert store.get(digest_key(name), 4) == b"data"


@pytest.mark.parametrize("key", BAD_KEYS)
def test_tricks_in_keys_are_refused_by_every_method(store: ObjectStore, key: str) -> None:
    store.put("b", b"x")
    for call in (
        lambda: store.put(key, b"x"),
        lambda: store.get(key, 1),
        lambda: store.chunks(key),
        lambda: store.exists(key),
        lambda: store.size(key),
        lambda: store.stat(key),
        lambda: store.delete(key),
        lambda: store.copy(key, "b"),
        lambda: store.copy("b", key),
        lambda: store.signed_put(key, 1, sha256(b"x"), 10),
        lambda: store.signed_get(key, 10),
    ):
        with pytest.raises(MalformedError):
            call()


@pytest.mark.parametrize(
    ("written", "complaint"),
    [([b"1234"], "too early"), ([b"123", b"456"], "more bytes"), ([b"54321"], "digest")],
)
def test_a_stream_that_is_short_long_or_different_leaves_nothing(
    directory: DirectoryStore, written: list[bytes], complaint: str
) -> None:
    store = directory
    key = digest_key(sha256(b"12345"))

    def send() -> None:
        with store.receive(key, size=5) as sink:
            for piece in written:
                sink.write(piece)

    with pytest.raises(MalformedError, match=complaint):
        send()
    assert list(store.keys()) == []


def test_a_broken_off_stream_leaves_the_old_object(
    directory: DirectoryStore, tmp_path: Path
) -> None:
    store = directory
    store.put("a/object", b"old")

    def send() -> None:
        with store.receive("a/object", size=5) as sink:
            sink.write(b"ne")
            raise ConnectionResetError("the peer went away")

    with pytest.raises(ConnectionResetError):
        send()
    assert store.get("a/object", 9) == b"old"
    assert [p.name for p in (tmp_path / "objects" / "a").iterdir()] == ["object"]


def test_a_key_that_runs_through_an_object_is_refused(directory: DirectoryStore) -> None:
    store = directory
    store.put("a/b", b"x")
    with pytest.raises(MalformedError):
        store.put("a/b/c", b"y")
    with pytest.raises(MalformedError):
        store.put("a", b"y")
    with pytest.raises(NotFoundError):
        store.get("a", 5)
    assert store.get("a/b", 5) == b"x"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_unavailable_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    store = DirectoryStore(tmp_path / "objects")

    def full(_descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UnavailableError, match="disk is full"):
        store.put("a/b", b"data")
    monkeypatch.undo()
    assert list((tmp_path / "objects" / "a").iterdir()) == []


@pytest.mark.parametrize("size", [2, 2 * CHUNK_BYTES])
def test_a_disk_that_fills_while_an_object_is_written_is_unavailable(
    tmp_path: Path, size: int
) -> None:
    """A short object fails when it is flushed, and again when its file is closed."""
    store = DirectoryStore(tmp_path / "objects")
    with a_full_disk(), pytest.raises(UnavailableError):
        store.put("a/b", bytes(size))
    assert list((tmp_path / "objects" / "a").iterdir()) == []


def test_a_damaged_object_is_never_handed_out(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    name = put_object(store, b"precious")
    (tmp_path / digest_key(name)).write_bytes(b"precious?")
    with pytest.raises(UnavailableError, match="damaged"):
        store.get(digest_key(name), 100)
    put_object(store, b"precious")
    assert store.get(digest_key(name), 100) == b"precious"


# -- signed URLs of the directory's own server ------------------------------------------------


def parts(url: str) -> tuple[str, list[tuple[str, str]]]:
    split = urlsplit(url)
    assert split.path.startswith("/v1/store/")
    return split.path.removeprefix("/v1/store/"), parse_qsl(split.query, strict_parsing=True)


@pytest.fixture
def signing(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path, "http://here/", SECRET)


def test_a_signed_url_carries_its_grant(signing: DirectoryStore) -> None:
    name = sha256(b"x")
    put = signing.signed_put(digest_key(name), 1, name, 100)
    assert put.headers["Content-Length"] == "1"
    assert put.url.startswith("http://here/v1/store/sha256/")
    grant = signing.check_url("PUT", *parts(put.url), now=100)
    assert (grant.size, grant.sha256, grant.expires_at) == (1, name, 100)
    assert signing.check_url("GET", *parts(signing.signed_get("a/b", 5)), now=4).key == "a/b"


def test_a_signed_url_ends_at_its_expiry(signing: DirectoryStore) -> None:
    with pytest.raises(UntrustedError, match="expired"):
        signing.check_url("GET", *parts(signing.signed_get("a", 100)), now=101)


def test_a_signed_url_holds_for_its_method_and_key_only(signing: DirectoryStore) -> None:
    name = sha256(b"x")
    key, query = parts(signing.signed_put("a", 1, name, 100).url)
    with pytest.raises(UntrustedError):
        signing.check_url("PUT", "b", query, now=1)
    with pytest.raises(MalformedError):
        signing.check_url("GET", key, query, now=1)
    key, query = parts(signing.signed_get("a", 100))
    with pytest.raises(MalformedError):
        signing.check_url("PUT", key, query, now=1)
    with pytest.raises(UntrustedError):
        signing.check_url("DELETE", key, query, now=1)


@pytest.mark.parametrize(
    ("name", "value"),
    [("size", "2"), ("expires", "101"), ("sha256", sha256(b"y")), ("signature", "0" * 64)],
)
def test_no_field_of_a_signed_url_can_be_changed(
    signing: DirectoryStore, name: str, value: str
) -> None:
    key, query = parts(signing.signed_put("a", 1, sha256(b"x"), 100).url)
    changed = [(k, value if k == name else v) for k, v in query]
    with pytest.raises(UntrustedError):
        signing.check_url("PUT", key, changed, now=1)


@pytest.mark.parametrize("value", ["", "-1", "+1", "01", "1e3", "٣", "9" * 16, " 1"])
def test_numbers_in_a_signed_url_are_plain_digits(signing: DirectoryStore, value: str) -> None:
    key, query = parts(signing.signed_get("a", 100))
    with pytest.raises(MalformedError):
        signing.check_url(
            "GET", key, [(k, value if k == "expires" else v) for k, v in query], now=1
        )


def test_a_signed_url_names_each_field_once(signing: DirectoryStore) -> None:
    key, query = parts(signing.signed_get("a", 100))
    with pytest.raises(MalformedError):
        signing.check_url("GET", key, [*query, ("expires", "999")], now=1)
    with pytest.raises(MalformedError):
        signing.check_url("GET", key, query[:1], now=1)


def test_a_url_signed_with_another_secret_is_refused(tmp_path: Path) -> None:
    ours, other = (DirectoryStore(tmp_path, "", c * 32) for c in (b"a", b"b"))
    with pytest.raises(UntrustedError):
        ours.check_url("GET", *parts(other.signed_get("a", 100)), now=1)


def test_a_store_without_secret_signs_nothing(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError):
        DirectoryStore(tmp_path).signed_get("a", 1)


def test_the_secret_is_made_once_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "secret"
    first = load_secret(path)
    assert len(first) == 32
    assert load_secret(path) == first
    assert path.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in path.parent.iterdir()] == ["secret"]
    save_secret(path, b"\x01" * 32)
    assert load_secret(path) == b"\x01" * 32
    assert path.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in path.parent.iterdir()] == ["secret"]
    path.write_text("short")
    with pytest.raises(FatalError):
        load_secret(path)


def test_a_folder_that_is_gone_is_an_outage_and_no_absence(directory: DirectoryStore) -> None:
    directory.put("a/b", b"kept")
    elsewhere = directory.root.with_name("unmounted")
    directory.root.rename(elsewhere)
    for act in (
        lambda: directory.get("a/b", 10),
        lambda: directory.exists("a/b"),
        lambda: directory.size("a/b"),
        lambda: directory.keys(),
        lambda: directory.put("a/c", b"lost"),
    ):
        with pytest.raises(UnavailableError, match="is gone") as caught:
            act()
        assert str(directory.root) not in str(to_problem(caught.value))
    assert not directory.root.exists()
    elsewhere.rename(directory.root)
    assert directory.get("a/b", 10) == b"kept"
