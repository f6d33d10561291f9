"""A verified folder appears at once; its way to the platter is nobody's wait.

    appear()  notes `.unsynced-<name>` (this boot's id) beside the target, renames the folder to its
              name, and hands the fsyncs to a thread, which removes the note
    settle()  after a restart: what a note of another boot names may have lost bytes with the power,
              so it is read and verified again, or removed

A killed process loses nothing (the kernel still has the pages); only a machine that went down
between rename and fsync leaves a note of another boot behind. File systems with a journal keep the
note and the rename in order.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from prime_broadcast.files import (
    disk_errors,
    remove_folder,
    replace_file,
    sync_folder,
    sync_path,
)
from prime_broadcast.manifest import MANIFEST_NAME, read_signed, verify_folder
from prime_core.errors import PrimeError

log = logging.getLogger(__name__)

NOTE = ".unsynced-"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """This boot's name; empty where the system does not tell, so that notes never match."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def appear(source: Path, target: Path) -> threading.Thread:
    """Makes `source` appear as `target` (which must not exist) at once, and durably a little
    later. Returns the thread that sees to the latter; nobody needs to wait for it. Raises
    DiskError; `source` is then still there."""
    note = target.with_name(NOTE + target.name)
    replace_file(note, boot_id().encode(), durable=False)
    with disk_errors():
        source.chmod(0o755)
        source.rename(target)
    thread = threading.Thread(target=_sync, args=(target, note), name="fsync", daemon=True)
    thread.start()
    return thread


def settle(root: Path, *, boot: Callable[[], str] = boot_id) -> list[str]:
    """Verifies the folders under `root` that were not on the platter when the machine went down;
    returns the names of those that had to be removed. Those of this boot are synced."""
    removed: list[str] = []
    for note in sorted(root.glob(NOTE + "*")):
        target = root / note.name.removeprefix(NOTE)
        try:
            same = bool(boot()) and note.read_text() == boot()
        except FileNotFoundError:  # its bytes have just reached the platter
            continue
        except (OSError, UnicodeDecodeError):
            same = False
        if same:
            if target.is_dir():  # else it is about to appear
                _sync(target, note)
            continue
        try:
            if target.is_dir():
                verify_folder(target, read_signed(target / MANIFEST_NAME).manifest)
        except PrimeError as error:
            log.warning("%s was damaged when the machine went down: %s", target, error)
            remove_folder(target)
            removed.append(target.name)
        _sync(target, note)
    return removed


def _sync(target: Path, note: Path) -> None:
    """On failure the note stays, and the folder is verified after the next boot."""
    try:
        if target.is_dir():
            sync_folder(target)
            sync_path(target.parent)
        note.unlink(missing_ok=True)
    except FileNotFoundError:
        note.unlink(missing_ok=True)  # removed meanwhile
    except OSError as error:
        log.warning("%s is not on the platter yet: %s", target, error)
