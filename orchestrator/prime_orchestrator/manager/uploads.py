"""Stores uploaded files apart from all other objects until they are submitted.

    signed URL ──► uploads/<lease's deadline>-<sha256>      any bytes a node sends
    submission ──► sha256/<sha256>                          submitted files, checked again
    sweep          keeps submitted files that a crash left behind; deletes the rest
                   GRACE_SECONDS after its lease's deadline

Only files that a submission names are copied to `sha256/`, where only store/removal.py deletes any,
long after nothing depends on them. Files of shadow leases are not copied: they stay here while a
submission names them (store.shadows). If a node uploads the exact bytes of one of our objects, only
its copy is deleted. No submission is accepted after its lease's deadline, and the grace period is
longer than a timely one can take. Copying and deleting are idempotent, so several orchestrators on
one store may sweep concurrently, also while others accept files.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from prime_core.encoding import sha256 as sha256_of
from prime_core.errors import NotFoundError, PrimeError, UntrustedError
from prime_core.ids import Digest
from prime_core.storage.base import ObjectStat, ObjectStore, digest_key
from prime_orchestrator.store import Connection, Store, meta, submissions

log = logging.getLogger(__name__)
T = TypeVar("T")

PREFIX = "uploads/"
GRACE_SECONDS = 900
SWEEP_SECONDS = 60.0
SWEPT = "uploads_swept"
_STAGED = re.compile(PREFIX + r"\d+-[0-9a-f]{64}")


def staged_key(deadline: int, sha256: Digest) -> str:
    """Returns the key of an upload for a lease with this deadline (Unix seconds) until it is
    submitted. It has no folder of its own: on a disk, that would remain, and every sweep would
    search it."""
    return f"{PREFIX}{deadline}-{sha256[2:]}"


def ask(deadline: int, sha256: Digest, question: Callable[[str], T]) -> T:
    """Calls `question` with a file's permanent key (content-addressed, so any uploader's bytes will
    do), then with its upload key for a lease with this deadline, and returns the first answer.
    Raises NotFoundError if the file is in neither place."""
    places = (digest_key(sha256), staged_key(deadline, sha256))
    for key in (*places, places[0]):  # it may move to the first during the search
        try:
            return question(key)
        except NotFoundError:
            continue
    raise NotFoundError(f"the file {sha256} is not in the store: upload it first")


def stat(objects: ObjectStore, deadline: int, sha256: Digest) -> ObjectStat:
    """Returns size and digest of a file that is to be submitted, looking at its upload key first:
    usually it is there. Raises NotFoundError if it is in neither place."""
    try:
        return objects.stat(staged_key(deadline, sha256))
    except NotFoundError:
        return ask(deadline, sha256, lambda key: replace(objects.stat(key), tag=""))


def size_of(objects: ObjectStore, deadline: int, sha256: Digest) -> int | None:
    """Returns a file's size in bytes, submitted or uploaded; None if it is in neither place."""
    try:
        return ask(deadline, sha256, objects.size)
    except NotFoundError:
        return None


def read(objects: ObjectStore, deadline: int, sha256: Digest, limit: int) -> bytes:
    """Returns a submitted file's bytes from either place, checked against its digest.

    Raises NotFoundError, or UntrustedError if they do not hash to it.
    """
    data = ask(deadline, sha256, lambda key: objects.get(key, limit))
    if sha256_of(data) != sha256:
        raise UntrustedError(f"the file {sha256} does not hash to its name")
    return data


def keep(
    objects: ObjectStore, deadline: int, sha256: Digest, seen: ObjectStat | None = None
) -> None:
    """Moves a submission's file to permanent storage; `seen`: what `stat` returned. Logs failures
    and raises nothing: the next sweep retries, and until then the file is read from its upload
    key."""
    try:
        _keep(objects, staged_key(deadline, sha256), sha256, seen)
    except PrimeError as error:
        log.error("the file %s that was handed in is not kept yet: %s", sha256, error)


def _keep(
    objects: ObjectStore, staged: str, sha256: Digest, seen: ObjectStat | None = None
) -> None:
    kept = digest_key(sha256)
    try:
        objects.copy(staged, kept, seen if seen is not None and seen.tag else None)
    except NotFoundError:
        if objects.exists(kept):  # copied by another orchestrator
            return
        raise
    objects.delete(staged)


def sweep(store: Store, objects: ObjectStore, now: Callable[[], float]) -> int:
    """Deletes expired uploads that no submission names, and returns how many. Keeps submitted
    files that are not kept yet. Raises UnavailableError if the store does not answer; the next
    sweep continues."""
    swept = 0
    staged = [key for key in objects.keys(PREFIX) if _STAGED.fullmatch(key)]
    if not staged:
        return 0
    with store.read() as connection:
        paid = {key: submissions.upload_is_paid(connection, *_parts(key)) for key in staged}
    for key in staged:
        deadline, sha256 = _parts(key)
        if paid[key]:
            keep(objects, deadline, sha256)
        elif paid[key] is None and deadline + GRACE_SECONDS < now():
            objects.delete(key)
            swept += 1
    if swept:
        with store.begin() as connection:
            meta.put(connection, SWEPT, str(swept_so_far(connection) + swept))
    return swept


def _parts(key: str) -> tuple[int, Digest]:
    deadline, _, name = key.removeprefix(PREFIX).partition("-")
    return int(deadline), Digest("0x" + name)


def swept_so_far(connection: Connection) -> int:
    """Returns how many uploads were deleted without submission since the store was created."""
    return int(meta.get(connection, SWEPT) or 0)
