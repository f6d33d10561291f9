"""Makes a verified folder visible at once and syncs it to disk in the background.

appear()  writes `.unsynced-<name>` with this boot's id next to the target, renames the folder to
          its name, and starts a thread that runs the fsyncs and removes the marker
settle()  runs at start: a marker of an earlier boot means that the folder may have lost bytes in a
          power loss, so the folder is verified again, or removed

A killed process loses nothing, because the kernel still holds the pages. Only a machine that goes
down between rename and fsync leaves a marker of another boot. Journaling file systems keep the
order of marker and rename.
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
    """Returns this boot's id; empty where the system has none, so that markers never match."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def appear(source: Path, target: Path) -> threading.Thread:
    """Renames `source` to `target`, which must not exist; the data becomes durable a little later.
    Returns the thread that syncs it; the caller need not wait for it. Raises DiskError; `source`
    then still exists."""
    note = target.with_name(NOTE + target.name)
    replace_file(note, boot_id().encode(), durable=False)
    with disk_errors():
        source.chmod(0o755)
        source.rename(target)
    thread = threading.Thread(target=_sync, args=(target, note), name="fsync", daemon=True)
    thread.start()
    return thread


def settle(root: Path, *, boot: Callable[[], str] = boot_id) -> list[str]:
    """Verifies the folders under `root` that were not synced when the machine went down. Returns
    the names of those that it removed. Folders of this boot are synced."""
    removed: list[str] = []
    for note in sorted(root.glob(NOTE + "*")):
        target = root / note.name.removeprefix(NOTE)
        try:
            same = bool(boot()) and note.read_text() == boot()
        except FileNotFoundError:  # its bytes have just been synced
            continue
        except (OSError, UnicodeDecodeError):
            same = False
        if same:
            if target.is_dir():  # otherwise it is about to appear
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
    """Syncs one folder. On failure the marker stays and the folder is verified after the next
    boot."""
    try:
        if target.is_dir():
            sync_folder(target)
            sync_path(target.parent)
        note.unlink(missing_ok=True)
    except FileNotFoundError:
        note.unlink(missing_ok=True)  # removed in the meantime
    except OSError as error:
        log.warning("%s is not synced to disk yet: %s", target, error)
