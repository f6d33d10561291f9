"""Takes the base model from a source that the node's owner names: a folder, a mirror, or the
Hugging Face Hub.

Policy 0 of a run is the folder of its base model, file by file, as it was published. The same file
has the same chunks from any source. Chunks with the digest that the signed manifest states are
written where a fetch finds them (chunks.py); the pool's broadcast brings the others. A source is
not trusted: its errors are logged and end nothing.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

from blake3 import blake3
from pydantic import AfterValidator

from prime_broadcast.files import DiskError, create_sized, read_at, write_at
from prime_broadcast.landing import verified_chunks
from prime_broadcast.layout import Item
from prime_broadcast.sources import normal_url
from prime_core.errors import MalformedError, PrimeError, UnavailableError
from prime_core.ids import to_bytes
from prime_core.transport.addresses import authority

if TYPE_CHECKING:
    import httpx

log = logging.getLogger(__name__)

HUB = "https://huggingface.co"
FILES_AT_ONCE = 4
SILENCE = 30.0
SLOWEST = 128 << 10
"""Bytes per second: an answer may take SILENCE and one second more for each SLOWEST bytes."""
MOST_WRONG = 16
"""Chunks of wrong digest after which nothing more is taken from a source: it has another model."""
MOST_FAILED = 3
"""Files that failed for good after which a source is not asked any more: it is away."""
PAUSES = (1.0, 5.0, 15.0)
"""Seconds before a request that failed is repeated; a verified chunk begins them again."""
_HUB = re.compile(
    r"hf:(?P<repository>[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95})"
    r"(?:@(?P<revision>[A-Za-z0-9][A-Za-z0-9._/-]{0,254}))?\Z"
)


@dataclass(frozen=True)
class BaseModelSource:
    """Where the files lie: in `folder`, or each below `url`. `name` as the owner wrote it. `token`
    goes to the host of `url` only."""

    name: str
    folder: Path | None = None
    url: str = ""
    token: str = field(default="", repr=False)


def parse_source(text: str, environment: Mapping[str, str] | None = None) -> BaseModelSource:
    """The source `text` names: FOLDER, URL or `hf:owner/name[@revision]`. The Hub is at
    `HF_ENDPOINT` and gets `HF_TOKEN`, if `environment` has them. Raises MalformedError."""
    variables = environment or {}
    if text.startswith("hf:"):
        match = _HUB.match(text)
        if match is None or ".." in text:
            raise MalformedError(f"{text[:120]!r} is not of the form hf:owner/name@revision")
        endpoint = normal_url(variables.get("HF_ENDPOINT") or HUB)
        revision = quote(match["revision"] or "main", safe="")
        url = f"{endpoint}/{match['repository']}/resolve/{revision}"
        return BaseModelSource(text, url=url, token=variables.get("HF_TOKEN", ""))
    if "://" in text:
        return BaseModelSource(text, url=normal_url(text))
    folder = Path(text).expanduser().absolute()
    return BaseModelSource(str(folder), folder=folder)


def _checked(text: str | None) -> str | None:
    """The text with its folder absolute, for a setting. Raises ValueError."""
    try:
        return parse_source(text).name if text else None
    except MalformedError as error:
        raise ValueError(str(error)) from error


BaseModelText = Annotated[str | None, AfterValidator(_checked)]
"""A setting: what `parse_source` reads."""


@dataclass
class Brought:
    """What came from a source, verified, and how many bytes are `missing` of all."""

    chunks: int = 0
    bytes: int = 0
    missing: int = 0


def bring(
    source: BaseModelSource, items: Sequence[Item], folder: Path, *, public_only: bool
) -> Brought:
    """Writes every chunk of `items` that `source` has, and `folder` lacks, into the files
    `folder/<item name>`. With `public_only`, other hosts to which the source redirects must have
    public addresses. Faults of the source are logged. Raises DiskError."""
    brought = _Bringing(source, items, folder, public_only).run()
    log.info(
        "base model: %d of %d bytes came from %s",
        brought.bytes,
        sum(item.size for item in items),
        source.name,
    )
    return brought


class _OtherError(PrimeError):
    """The source does not have the file, or has another one: asking again does not help."""


class _Bringing:
    def __init__(
        self, source: BaseModelSource, items: Sequence[Item], folder: Path, public_only: bool
    ) -> None:
        self._source = source
        self._folder = folder
        self._public_only = public_only
        self._queue: SimpleQueue[Item] = SimpleQueue()
        for item in sorted(items, key=lambda item: -item.size):
            self._queue.put(item)
        self._threads = min(FILES_AT_ONCE, len(items))
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._wrong = self._failed = 0
        self._brought = Brought(missing=sum(item.size for item in items))

    def run(self) -> Brought:
        from prime_core.transport.paced import paced_client

        with paced_client(SILENCE, seconds=SILENCE, rate=SLOWEST) as client:
            # Daemons, so that a program that ends does not wait for them.
            threads = [
                threading.Thread(target=self._work, args=(client,), name="base-model", daemon=True)
                for _ in range(self._threads)
            ]
            for thread in threads:
                thread.start()
            try:
                for thread in threads:
                    thread.join()
            finally:
                self._over.set()
        if self._error is not None:
            raise self._error
        return self._brought

    def _work(self, client: httpx.Client) -> None:
        while not self._over.is_set():
            try:
                self._file(self._queue.get_nowait(), client)
            except Empty:
                return
            except BaseException as error:  # handed to run(), which raises it
                self._error = error
                self._over.set()

    def _file(self, item: Item, client: httpx.Client) -> None:
        path = self._folder / item.name
        kept = set(verified_chunks(path, item)) if path.exists() else set()
        missing = set(range(len(item.chunks))) - kept
        with self._lock:
            self._brought.missing -= sum(item.span(index)[1] for index in kept)
        fd = create_sized(path, item.size)
        refused = ""
        wrong: list[int] = []
        try:
            for index, data in self._chunks(item, missing, client):
                if not self._take(item, index, data, fd):
                    wrong.append(index)
                if self._over.is_set():
                    break
        except DiskError:
            raise
        except PrimeError as error:
            refused = str(error)
        finally:
            os.close(fd)
        left = len(missing) + len(wrong)
        if left:
            if wrong and not refused:
                refused = f"chunk {wrong[0]} has another digest than policy {item.version} states"
            log.warning(
                "base model: %d of %d chunks of %s do not come from %s, but from the pool: %s",
                left,
                len(item.chunks),
                item.name,
                self._source.name,
                refused or "this source is not asked any more",
            )

    def _take(self, item: Item, index: int, data: memoryview, fd: int) -> bool:
        """Writes a chunk if its digest is the manifest's."""
        if blake3(data).digest() != to_bytes(item.chunks[index]):
            with self._lock:
                self._wrong += 1
                if self._wrong == MOST_WRONG:
                    self._over.set()
                    log.warning(
                        "base model: %d chunks from %s have other digests than policy %d states: "
                        "the rest comes from the pool",
                        MOST_WRONG,
                        self._source.name,
                        item.version,
                    )
            return False
        write_at(fd, data, item.span(index)[0])
        with self._lock:
            self._brought.chunks += 1
            self._brought.bytes += len(data)
            self._brought.missing -= len(data)
        return True

    def _chunks(
        self, item: Item, missing: set[int], client: httpx.Client
    ) -> Iterator[tuple[int, memoryview]]:
        """Yields the chunks `missing` with their indices, and removes these from it. Raises
        PrimeError if the source does not give more."""
        if self._source.folder is not None:
            with _opened_file(self._source.folder / item.name) as fd:
                for index in sorted(missing):
                    try:
                        data = read_at(fd, *item.span(index))
                    except OSError as error:
                        raise _OtherError(f"it cannot be read: {error.strerror}") from error
                    missing.discard(index)
                    yield index, memoryview(data)
            return
        failed = 0
        while missing:
            before = len(missing)
            try:
                yield from self._answer(item, missing, client)
                continue
            except UnavailableError:
                failed = 0 if len(missing) < before else failed
                if failed == len(PAUSES):
                    self._note_failed()
                    raise
            if self._over.wait(PAUSES[failed]):
                return
            failed += 1

    def _note_failed(self) -> None:
        with self._lock:
            self._failed += 1
            if self._failed == MOST_FAILED:
                self._over.set()

    def _answer(
        self, item: Item, missing: set[int], client: httpx.Client
    ) -> Iterator[tuple[int, memoryview]]:
        """As `_chunks`, of one request: the first of the missing and those that follow it without
        a gap; or all of them, from a server that knows no ranges. Raises UnavailableError if the
        request may be repeated."""
        import httpx

        from prime_core.transport.paced import opened

        first = last = min(missing)
        while last + 1 in missing:
            last += 1
        begin, end = item.span(first)[0], sum(item.span(last))
        url = f"{self._source.url}/{item.name}"
        headers = {"Range": f"bytes={begin}-{end - 1}"} if (begin, end) != (0, item.size) else {}
        if self._source.token:
            headers["Authorization"] = f"Bearer {self._source.token}"
        try:
            with opened(
                client,
                url,
                headers=headers,
                public_only=self._public_only,
                private_at=authority(url),
            ) as answer:
                if not _is_range(answer, begin, end, item.size):
                    first, last = 0, max(missing)
                pieces = answer.iter_raw()
                rest = memoryview(b"")
                for index in range(first, last + 1):
                    data, rest = _exactly(item.span(index)[1], rest, pieces)
                    if index in missing:
                        missing.discard(index)
                        yield index, data
        except (httpx.HTTPError, OSError) as error:
            raise UnavailableError(f"{type(error).__name__}: {error}"[:200]) from error
        except (httpx.InvalidURL, ValueError) as error:
            raise _OtherError(f"it redirects to an invalid URL: {error}"[:200]) from error


def _is_range(answer: httpx.Response, begin: int, end: int, size: int) -> bool:
    """Whether the answer holds the bytes from `begin` to `end` of a file of `size` bytes; False:
    the whole file. Raises _OtherError for any other answer, UnavailableError for one that may
    change."""
    status, length = answer.status_code, answer.headers.get("Content-Length")
    if status in (408, 429) or status >= 500:
        raise UnavailableError(f"it answers {status}")
    if status not in (200, 206):
        raise _OtherError(f"it answers {status}")
    expected = size if status == 200 else end - begin
    if length is not None and length != str(expected):
        raise _OtherError(f"it offers {length[:20]} bytes instead of {expected}")
    if status == 206:
        stated = answer.headers.get("Content-Range", "none")
        if stated != f"bytes {begin}-{end - 1}/{size}":
            raise _OtherError(f"it answers with another range ({stated[:80]}) of {size} bytes")
    return bool(status == 206)


def _exactly(
    length: int, rest: memoryview, pieces: Iterator[bytes]
) -> tuple[memoryview, memoryview]:
    """The next `length` bytes of `rest` and `pieces`, and what is left of the last piece. Raises
    UnavailableError if they end before."""
    buffer = memoryview(bytearray(length))
    filled = 0
    while filled < length:
        if not rest:
            piece = next(pieces, None)
            if piece is None:
                raise UnavailableError("its answer ends early")
            rest = memoryview(piece)
        part = rest[: length - filled]
        buffer[filled : filled + len(part)] = part
        filled += len(part)
        rest = rest[len(part) :]
    return buffer, rest


@contextmanager
def _opened_file(path: Path) -> Iterator[int]:
    """A descriptor of a regular file; links are followed, because the Hub's cache consists of
    them. Raises _OtherError for anything else."""
    try:
        # O_NONBLOCK: opening a named pipe must not wait for its writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _OtherError(f"it cannot be opened: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise _OtherError("it is not a regular file")
        yield fd
    finally:
        os.close(fd)
