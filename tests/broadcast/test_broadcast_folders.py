"""A disk that refuses a folder ends a fetch with one sentence and no traceback."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from broadcast_world import Run, same_files

from prime_broadcast.client import fetch
from prime_broadcast.files import DiskError
from prime_broadcast.server import Origin


@pytest.mark.parametrize("refused", ["policies", "files"])
def test_a_folder_that_cannot_be_made_is_one_sentence(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """Which a full disk does to a new folder as it does to a file."""
    signed, dest = run.publish(), tmp_path / "policies" / "0"
    make = Path.mkdir

    def full(path: Path, *arguments: object, **options: object) -> None:
        if path.name == refused:
            raise OSError(errno.ENOSPC, "No space left on device")
        make(path, *arguments, **options)  # type: ignore[arg-type]

    with Origin(run.root) as origin:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "mkdir", full)
            with pytest.raises(DiskError, match="the disk is full"):
                fetch(signed, [origin.url], dest)
        fetch(signed, [origin.url], dest)
    assert same_files(dest, run, 0)
