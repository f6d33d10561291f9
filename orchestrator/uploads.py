"""Files between their upload and their submission: apart from all other objects, and not for long.

    signed URL ──► uploads/<lease's deadline>-<sha256>      whatever a node sends
    submission ──► sha256/<sha256>                          what was handed in, checked once more
    sweep          the rest, GRACE_SECONDS after its lease's deadline

Nothing ever refers to a key under `uploads/`, so the sweep asks nobody: a node that uploads the
very bytes of an object of ours has a copy deleted, not ours. No submission is taken after its
lease's deadline, and the grace is longer than any that came in time can still be under way.
Deleting is done twice without harm, so several orchestrators on one store may sweep at once.
"""

from __future__ import annotations

from sqlalchemy import Connection

from orchestrator.backend import Backend
from orchestrator.store import meta
from protocol.core.ids import Digest
from protocol.storage.base import ObjectStore, digest_key

PREFIX = "uploads/"
GRACE_SECONDS = 900
SWEEP_SECONDS = 60.0
SWEPT = "uploads_swept"


def staged_key(deadline: int, sha256: Digest) -> str:
    """Where the upload for a lease of this deadline (Unix seconds) lies until it is handed in: in
    no folder of its own, which would be left on a disk, and looked through by every sweep."""
    return f"{PREFIX}{deadline}-{sha256[2:]}"


def find(objects: ObjectStore, deadline: int, sha256: Digest) -> str | None:
    """Key of a file: as handed in (by anybody: its bytes are its name), else as uploaded for a
    lease of this deadline; None if it is in neither place."""
    return next(
        (key for key in (digest_key(sha256), staged_key(deadline, sha256)) if objects.exists(key)),
        None,
    )


def keep(objects: ObjectStore, key: str, size: int, sha256: Digest) -> None:
    """Makes an uploaded file one that stays; its bytes are checked on the way. Raises
    NotFoundError if it has gone."""
    if key == digest_key(sha256):
        return
    pieces = objects.chunks(key)
    with objects.receive(digest_key(sha256), size=size, sha256=sha256) as sink:
        for piece in pieces:
            sink.write(piece)


def sweep(backend: Backend) -> int:
    """Deletes what was never handed in; how many files. Raises UnavailableError if the store does
    not answer: the next sweep goes on."""
    swept = 0
    for key in backend.objects.keys(PREFIX):
        deadline = key.removeprefix(PREFIX).partition("-")[0]
        if deadline.isdigit() and int(deadline) + GRACE_SECONDS < backend.now():
            backend.objects.delete(key)
            swept += 1
    if swept:
        with backend.store.begin() as connection:
            meta.put(connection, SWEPT, str(swept_so_far(connection) + swept))
    return swept


def swept_so_far(connection: Connection) -> int:
    """Files that were uploaded and never handed in, deleted since the store was made."""
    return int(meta.get(connection, SWEPT) or 0)
