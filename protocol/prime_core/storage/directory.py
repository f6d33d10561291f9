"""The embedded object store: objects in a directory.

An object appears by renaming a completely written and synced temporary file, so readers see it as a
whole or not at all, even after a crash. Temporary names begin with a dot, which keys cannot.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from prime_core import ids
from prime_core.encoding import sha256 as sha256_digest
from prime_core.errors import MalformedError, NotFoundError, UnavailableError
from prime_core.folders import sync
from prime_core.ids import Digest
from prime_core.storage.base import (
    CHUNK_BYTES,
    DIGEST_PREFIX,
    ObjectStat,
    SignedUrl,
    check_key,
    check_prefix,
    named_digest,
)
from prime_core.storage.signing import UrlGrant, sign_url, verify_url

_TEMPORARY = ".tmp-"


class DirectoryStore:
    """ObjectStore over `root`. `base_url` is the URL of this store's HTTP server."""

    def __init__(self, root: Path, base_url: str = "", secret: bytes = b"") -> None:
        self.root = root
        self.base_url = base_url.rstrip("/")
        self._secret = secret
        with _medium("create the object store"):
            root.mkdir(parents=True, exist_ok=True)

    def __repr__(self) -> str:
        return f"DirectoryStore({self.root})"

    # -- writing -------------------------------------------------------------------------------

    def put(self, key: str, data: bytes) -> None:
        promised = named_digest(key)
        if promised is not None and sha256_digest(data) != promised:
            raise MalformedError("the bytes do not have the digest that was announced")
        with self._new(key) as file, _medium("write the object"):
            file.write(data)

    def put_file(self, key: str, path: Path) -> None:
        with path.open("rb") as source:
            size = os.fstat(source.fileno()).st_size
            with self.receive(key, size=size) as sink:
                while block := source.read(CHUNK_BYTES):
                    sink.write(block)

    def copy(self, source: str, target: str, seen: ObjectStat | None = None) -> None:
        size, pieces = self.size(source), self.chunks(source)
        with self.receive(target, size=size) as sink:
            for piece in pieces:
                sink.write(piece)

    @contextmanager
    def receive(self, key: str, *, size: int, sha256: Digest | None = None) -> Iterator[Sink]:
        """Stores what is written inside the block, if it is exactly `size` bytes and (if given) has
        that digest. Raises MalformedError as soon as that is impossible."""
        promised = {name for name in (sha256, named_digest(key)) if name is not None}
        if len(promised) > 1:
            raise MalformedError("the key names another digest than the one announced")
        with self._new(key) as file:
            sink = Sink(file, size)
            yield sink
            sink.finish(promised.pop() if promised else None)

    @contextmanager
    def _new(self, key: str) -> Iterator[BinaryIO]:
        """Yields a temporary file. It becomes the object if the block ends without an error."""
        folder, _, name = f"{self.root}/{check_key(key)}".rpartition("/")
        temporary = f"{folder}/{_TEMPORARY}{secrets.token_hex(8)}"
        try:
            with _medium(f"write {key}"):
                file = self._create(temporary)
        except (FileExistsError, NotADirectoryError) as error:
            raise MalformedError(f"part of the key {key} already names an object") from error
        written = False
        try:
            try:
                yield file
                with _medium("write the object"):
                    file.flush()
                    os.fsync(file.fileno())
            finally:
                with _medium(f"write {key}"):  # closing writes what is left in the buffer
                    file.close()
            with _medium(f"write {key}"):
                os.replace(temporary, f"{folder}/{name}")  # noqa: PTH105
                written = True
                sync(Path(folder))
        except IsADirectoryError as error:
            raise MalformedError(f"the key {key} is part of other keys") from error
        finally:
            if not written:
                Path(temporary).unlink(missing_ok=True)

    def _create(self, temporary: str) -> BinaryIO:
        """Creates a file, and the folders of its path below the root."""
        try:
            return open(temporary, "xb")  # noqa: PTH123
        except FileNotFoundError:
            self._check_root()
            Path(temporary).parent.mkdir(parents=True, exist_ok=True)
            return open(temporary, "xb")  # noqa: PTH123

    def delete(self, key: str) -> None:
        path = self._path(key)
        with _medium(f"delete {key}"):
            path.unlink(missing_ok=True)

    # -- reading -------------------------------------------------------------------------------

    def get(self, key: str, limit: int) -> bytes:
        try:  # a file object takes as long as the rest
            file = os.open(self._name(key), os.O_RDONLY)
            try:
                # Python reserves as many bytes as are asked for. Of what is too large, one byte is
                # read: that fails if it is a folder.
                size = os.fstat(file).st_size
                data = os.read(file, size + 1 if size <= limit else 1)
            finally:
                os.close(file)
        except OSError as error:
            raise self._unread(key, error) from error
        if max(size, len(data)) > limit:
            raise MalformedError(f"object {key} is larger than {limit} bytes")
        name = key.removeprefix(DIGEST_PREFIX)
        if name != key and hashlib.sha256(data).hexdigest() != name:
            raise UnavailableError(f"object {key} is damaged: its bytes have another digest")
        return data

    def chunks(self, key: str) -> Iterator[bytes]:
        return _blocks(self._open(key))

    def exists(self, key: str) -> bool:
        if self._path(key).is_file():
            return True
        self._check_root()
        return False

    def size(self, key: str) -> int:
        with self._open(key) as file:
            return os.fstat(file.fileno()).st_size

    def stat(self, key: str) -> ObjectStat:
        running, size = hashlib.sha256(), 0
        for block in self.chunks(key):
            running.update(block)
            size += len(block)
        return ObjectStat(size, ids.digest(running.digest()))

    def keys(self, prefix: str = "") -> Iterator[str]:
        start = self.root / check_prefix(prefix).rpartition("/")[0]
        self._check_root()
        found = (
            path.relative_to(self.root).as_posix()
            for path in start.rglob("*")
            if not path.name.startswith(".") and path.is_file()
        )
        return iter(sorted(key for key in found if key.startswith(prefix)))

    # -- signed URLs ---------------------------------------------------------------------------

    def signed_put(self, key: str, size: int, sha256: Digest, expires_at: int) -> SignedUrl:
        grant = UrlGrant("PUT", check_key(key), expires_at, size, sha256)
        url = sign_url(self.base_url, self._signing_secret(), grant)
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(size)}
        return SignedUrl(url=url, expires_at=expires_at, headers=headers)

    def signed_get(self, key: str, expires_at: int) -> str:
        grant = UrlGrant("GET", check_key(key), expires_at)
        return sign_url(self.base_url, self._signing_secret(), grant)

    def check_url(
        self, method: str, key: str, query: Iterable[tuple[str, str]], *, now: float
    ) -> UrlGrant:
        """Returns the grant of a requested URL; see `prime_core.storage.signing.verify_url`."""
        return verify_url(self._signing_secret(), method, key, query, now=now)

    # -- below ---------------------------------------------------------------------------------

    def _signing_secret(self) -> bytes:
        if not self._secret:
            raise UnavailableError("this object store was opened without a secret to sign URLs")
        return self._secret

    def _path(self, key: str) -> Path:
        return self.root / check_key(key)

    def _name(self, key: str) -> str:
        return f"{self.root}/{check_key(key)}"  # joining paths takes as long as opening one

    def _open(self, key: str) -> BinaryIO:
        try:
            return open(self._name(key), "rb")  # noqa: PTH123
        except OSError as error:
            raise self._unread(key, error) from error

    def _unread(self, key: str, error: OSError) -> NotFoundError | UnavailableError:
        """Returns the error to raise for an object that could not be opened or read."""
        if isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError):
            self._check_root()
            return NotFoundError(f"there is no object {key}")
        return _failure(f"read {key}", error)

    def _check_root(self) -> None:
        """Raises UnavailableError if the folder is gone: its disk may be unmounted, and objects
        must neither seem deleted nor be written to another disk."""
        if not self.root.is_dir():
            raise UnavailableError(
                f"the object store's folder {self.root} is gone: mount its disk",
                public="the object store cannot be used now",
            )


class Sink:
    """Counts, hashes and limits what is written to a temporary file."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._left = size
        self._hash = hashlib.sha256()

    def write(self, data: bytes) -> None:
        """Appends bytes. Raises MalformedError if they exceed the announced size."""
        if len(data) > self._left:
            raise MalformedError("more bytes came than were announced")
        self._left -= len(data)
        self._hash.update(data)
        with _medium("write the object"):
            self._file.write(data)

    def finish(self, promised: Digest | None) -> None:
        """Checks length and digest."""
        if self._left:
            raise MalformedError(f"the object ended {self._left} bytes too early")
        if promised is not None and ids.digest(self._hash.digest()) != promised:
            raise MalformedError("the bytes do not have the digest that was announced")


@contextmanager
def _medium(what: str) -> Iterator[None]:
    """Turns disk errors into UnavailableError; a missing file passes through."""
    try:
        yield
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, FileExistsError):
        raise
    except OSError as error:
        raise _failure(what, error) from error


def _failure(what: str, error: OSError) -> UnavailableError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    why = "the disk is full; free some space" if full else (error.strerror or str(error))
    return UnavailableError(f"cannot {what}: {why}")


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    with file:
        while block := _block(file):
            yield block


def _block(file: BinaryIO) -> bytes:
    with _medium("read the object"):
        return file.read(CHUNK_BYTES)
