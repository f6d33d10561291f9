"""File access: opens files without following links, writes in place, replaces by rename."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prime_core.errors import MalformedError, UnavailableError

DATA_MODE = 0o644
"""Policies are public; containers that run as another user read them."""


@contextmanager
def open_regular(path: Path) -> Iterator[int]:
    """Yields a read-only descriptor of a regular file. Raises MalformedError for a link, device or
    folder, and UnavailableError if the file is missing. The check is on the descriptor, so it has
    no race."""
    try:
        # O_NONBLOCK: opening a named pipe must not wait for its writer.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise MalformedError(f"{path.name} is a symbolic link") from error
        raise UnavailableError(f"cannot open {path}: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise MalformedError(f"{path.name} is not a regular file")
        yield fd
    finally:
        os.close(fd)


def read_at(fd: int, offset: int, length: int) -> bytes:
    """Returns exactly `length` bytes from `offset`. Raises UnavailableError if the file ends
    before."""
    parts: list[bytes] = []
    while length > 0:
        part = os.pread(fd, length, offset)
        if not part:
            raise UnavailableError(f"the file ends {length} bytes early")
        parts.append(part)
        offset += len(part)
        length -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def read_into(fd: int, buffer: memoryview, offset: int) -> None:
    """Fills `buffer` from `offset`. Raises UnavailableError if the file ends before."""
    while buffer:
        count = os.preadv(fd, [buffer], offset)
        if not count:
            raise UnavailableError(f"the file ends {len(buffer)} bytes early")
        buffer = buffer[count:]
        offset += count


WRITE = 256 << 10
"""Bytes per write. For larger writes the kernel looks for large folios, which is slower
(docs/broadcast.md)."""


def write_at(fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
    """Writes all of `data` at `offset`. Raises DiskError if the write fails."""
    view = memoryview(data)
    try:
        while view:
            count = os.pwrite(fd, view[:WRITE], offset)
            view = view[count:]
            offset += count
    except OSError as error:
        raise disk_error(error) from error


class DiskError(UnavailableError):
    """The local disk is full or fails; another source does not help."""


class FullError(DiskError):
    """The disk lacks the room; freeing space may help."""


def disk_error(error: OSError) -> DiskError:
    """Returns the DiskError for a failed write."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return FullError("the disk is full: free some space (what was verified is kept)")
    return DiskError(f"the disk refused a write: {error.strerror or error}")


@contextmanager
def disk_errors() -> Iterator[None]:
    """Turns each OSError raised inside into a DiskError."""
    try:
        yield
    except OSError as error:
        raise disk_error(error) from error


def make_folder(path: Path) -> None:
    """Creates the folder and its parents if missing. Raises DiskError."""
    with disk_errors():
        path.mkdir(mode=0o755, parents=True, exist_ok=True)


def require_space(folder: Path, needed: int) -> None:
    """Raises FullError if `needed` bytes do not fit on the disk of `folder`."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise FullError(
            f"{folder} has {free >> 20} MiB free and {(needed >> 20) + 1} MiB are needed: "
            "free some space"
        )


def create_sized(path: Path, size: int) -> int:
    """Yields a read-write descriptor of `path`, created or resized (sparse) to `size` bytes.
    Existing bytes stay, for a resumed transfer."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, DATA_MODE)
    except OSError as error:
        raise disk_error(error) from error
    try:
        os.fchmod(fd, DATA_MODE)  # the umask must not hide it from a container
        if os.fstat(fd).st_size != size:
            os.ftruncate(fd, size)
    except OSError as error:
        os.close(fd)
        raise disk_error(error) from error
    return fd


def write_whole(path: Path, data: bytes) -> None:
    """Replaces `path` by `data` atomically and durably."""
    replace_file(path, data, durable=True)


def replace_file(path: Path, data: bytes, *, durable: bool) -> None:
    """Replaces `path` by `data` atomically. With `durable`, waits until the bytes are on disk.
    Raises DiskError; no partial file is left."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    with disk_errors():
        fd = os.open(temporary, flags, DATA_MODE)
        try:
            try:
                os.fchmod(fd, DATA_MODE)
                write_at(fd, data, 0)
                if durable:
                    os.fsync(fd)
            finally:
                os.close(fd)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def sync_folder(folder: Path) -> None:
    """Syncs a folder's files and entries; call it before the rename that publishes the folder."""
    for entry in sorted(folder.iterdir()):
        if entry.is_file() and not entry.is_symlink():
            sync_path(entry)
    sync_path(folder)


def rename_folder(source: Path, target: Path) -> None:
    """Renames `source` to `target` atomically and durably. `target` must not exist."""
    sync_folder(source)
    source.chmod(0o755)
    source.rename(target)
    sync_path(target.parent)


def remove_folder(folder: Path) -> None:
    """Removes a folder. It is renamed first, so that concurrent readers never see it half
    removed."""
    trash = folder.with_name(f".trash-{folder.name}-{os.getpid()}")
    try:
        folder.rename(trash)
    except FileNotFoundError:
        return
    shutil.rmtree(trash, ignore_errors=True)


def sync_path(path: Path) -> None:
    """Syncs one file or folder."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
