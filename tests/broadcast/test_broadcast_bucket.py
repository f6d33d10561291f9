"""A bucket as a mirror: the layout's files under their keys, and nothing that is ours around them.

The server answers as S3's REST interface does for objects (Amazon S3 API reference, GetObject):
ranges, its own ETags and headers, `binary/octet-stream`, XML for errors, 403 instead of 404 for a
missing key where listing is not allowed, 503 SlowDown under load; no /healthz, no index of its own.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from broadcast_world import CHUNK, TRAINER, Run, same_files
from served import served

from prime_broadcast.chunks import PER_SOURCE
from prime_broadcast.cli import main
from prime_broadcast.client import Base, fetch
from prime_broadcast.sources import SourceBook

_RANGE = re.compile(r"bytes=(\d+)-(\d+)\Z")


class Bucket:
    """Objects by key, under /bucket/; `slow_downs`: so many requests are refused first."""

    def __init__(self, root: Path) -> None:
        self.asked: list[str] = []
        self.slow_downs = 0
        self.bytes_sent = 0
        bucket = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True
            server_version, sys_version = "AmazonS3", ""

            def do_GET(self) -> None:
                bucket.asked.append(self.path)
                key = self.path.partition("?")[0].removeprefix("/bucket/")
                path = root / key
                if bucket.slow_downs > 0:
                    bucket.slow_downs -= 1
                    self._error(503, "SlowDown", "Please reduce your request rate.")
                elif not self.path.startswith("/bucket/") or not path.is_file():
                    self._error(403, "AccessDenied", "Access Denied")
                else:
                    self._object(path.read_bytes())

            def _object(self, data: bytes) -> None:
                match = _RANGE.match(self.headers.get("Range", ""))
                body = data
                if match:
                    first, last = int(match[1]), min(int(match[2]), len(data) - 1)
                    if first > last:
                        self._error(416, "InvalidRange", "The requested range is not satisfiable")
                        return
                    body = data[first : last + 1]
                    self._head(206, len(body), "binary/octet-stream", data)
                    self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
                else:
                    self._head(200, len(body), "binary/octet-stream", data)
                self.end_headers()
                bucket.bytes_sent += len(body)
                self.wfile.write(body)

            def _head(self, status: int, length: int, kind: str, data: bytes) -> None:
                self.send_response(status)
                self.send_header("x-amz-request-id", "0A49CE4060975EAC")
                self.send_header("ETag", f'"{hashlib.md5(data).hexdigest()}"')
                self.send_header("Accept-Ranges", "bytes")
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(length))

            def _error(self, status: int, code: str, message: str) -> None:
                text = f"<?xml version='1.0'?><Error><Code>{code}</Code>"
                body = f"{text}<Message>{message}</Message></Error>".encode()
                self._head(status, len(body), "application/xml", body)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                pass

        self.handler = Handler
        self.url = ""


@pytest.fixture
def bucket(run: Run) -> Iterator[Bucket]:
    found = Bucket(run.root)
    with served(found.handler) as url:
        found.url = f"{url}/bucket"
        yield found


def test_a_bucket_serves_chunk_by_chunk_and_each_byte_once(
    run: Run, bucket: Bucket, tmp_path: Path
) -> None:
    signed = run.publish()
    book = SourceBook()
    stats = fetch(signed, [bucket.url], tmp_path / "0", book=book, patience=10.0)
    assert same_files(tmp_path / "0", run, 0)
    assert bucket.bytes_sent == stats.bytes_received == stats.policy_bytes
    assert stats.chunks > len(run.file(0)) // CHUNK
    assert book.get(bucket.url).role == "mirror"
    assert stats.faults == []


def test_a_bucket_that_asks_to_slow_down_is_asked_again_later(
    run: Run, bucket: Bucket, tmp_path: Path
) -> None:
    signed = run.publish()
    bucket.slow_downs = 3
    stats = fetch(signed, [bucket.url], tmp_path / "0", patience=10.0)
    assert same_files(tmp_path / "0", run, 0)
    assert stats.bytes_received == stats.policy_bytes


def test_what_a_bucket_lacks_comes_from_the_whole_it_has(
    run: Run, bucket: Bucket, tmp_path: Path
) -> None:
    """A copy that was made without the deltas: 403 for each of them."""
    zero, one = run.publish(), run.publish()
    fetch(zero, [bucket.url], tmp_path / "0", patience=10.0)
    (run.root / "policies" / "1" / "delta-0").unlink()
    base = Base(tmp_path / "0", zero.manifest)
    stats = fetch(one, [bucket.url], tmp_path / "1", bases=[base], patience=10.0)
    assert stats.route == "whole"
    assert bucket.asked.count("/bucket/policies/1/delta-0") <= PER_SOURCE, (
        "not for all of its patience"
    )
    assert same_files(tmp_path / "1", run, 1)


def test_the_command_fetches_from_a_bucket_by_its_index(
    run: Run, bucket: Bucket, tmp_path: Path
) -> None:
    run.publish()
    run.publish()
    with pytest.raises(SystemExit) as ended:
        main(
            [
                *("fetch", bucket.url, str(tmp_path), "--signer", TRAINER.address),
                *("--pool", "7", "--chain-id", "31337", "--json"),
            ]
        )
    assert not ended.value.code
    assert same_files(tmp_path / "1", run, 1)
    assert "/bucket/policies/index.json" in bucket.asked
