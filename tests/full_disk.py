"""Full disks: a file system of one MiB (needs root), or a limit on the size of files."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

MOUNT = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    if os.getuid() != 0:
        pytest.skip("only root may mount")
    place = tmp_path / "disk"
    place.mkdir()
    if MOUNT.mount(b"tmpfs", bytes(place), b"tmpfs", 0, b"size=1m") != 0:
        pytest.skip(f"only root with rights may mount: {os.strerror(ctypes.get_errno())}")
    yield place
    MOUNT.umount2(bytes(place), 2)  # MNT_DETACH


def fill(file: Path) -> None:
    """Writes until nothing more fits."""
    with contextlib.suppress(OSError), file.open("wb", buffering=0) as filler:
        while True:
            filler.write(b"x" * 4096)
    with pytest.raises(OSError, match="No space left"):
        file.with_name("one more").write_bytes(b"x" * 4096)


@contextlib.contextmanager
def a_full_disk(largest_file: int = 0) -> Iterator[None]:
    """This process cannot write files over `largest_file` bytes (RLIMIT_FSIZE). Python ignores
    SIGXFSZ, so such a write raises OSError, in torch and safetensors too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
