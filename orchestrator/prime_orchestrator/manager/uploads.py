"""Files between their upload and their submission: apart from all other objects, and not for long.

    signed URL ──► uploads/<lease's deadline>-<sha256>      whatever a node sends
    submission ──► sha256/<sha256>                          what was handed in, checked once more
    sweep          as a submission, for those that a crash left behind; the rest is deleted,
                   GRACE_SECONDS after its lease's deadline

Only what a submission names is ever copied to `sha256/`, where nothing is ever deleted: so a node
that uploads the very bytes of an object of ours has a copy deleted, not ours. No submission is
taken after its lease's deadline, and the grace is longer than any that came in time can still be
under way. Copying and deleting are done twice without harm, so several orchestrators on one store
may sweep at once, and beside those that take files in.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import Connection

from prime_core.encoding import sha256 as sha256_of
from prime_core.errors import NotFoundError, PrimeError, UntrustedError
from prime_core.ids import Digest
from prime_core.storage.base import ObjectStore, digest_key
from prime_orchestrator.api.backend import Backend
from prime_orchestrator.store import meta, submissions

log = logging.getLogger(__name__)
T = TypeVar("T")

PREFIX = "uploads/"
GRACE_SECONDS = 900
SWEEP_SECONDS = 60.0
SWEPT = "uploads_swept"
_STAGED = re.compile(PREFIX + r"\d+-[0-9a-f]{64}")


def staged_key(deadline: int, sha256: Digest) -> str:
    """Where the upload for a lease of this deadline (Unix seconds) lies until it is handed in: in
    no folder of its own, which would be left on a disk, and looked through by every sweep."""
    return f"{PREFIX}{deadline}-{sha256[2:]}"


def ask(deadline: int, sha256: Digest, question: Callable[[str], T]) -> T:
    """What `question` says of a file's key: as handed in (by anybody: its bytes are its name), else
    as uploaded for a lease of this deadline. Raises NotFoundError if it lies in neither place."""
    places = (digest_key(sha256), staged_key(deadline, sha256))
    for key in (*places, places[0]):  # it may move from the second to the first as we look
        try:
            return question(key)
        except NotFoundError:
            continue
    raise NotFoundError(f"the file {sha256} is not in the store: upload it first")


def size_of(objects: ObjectStore, deadline: int, sha256: Digest) -> int | None:
    """Bytes of a file, as handed in or as uploaded; None if it lies in neither place."""
    try:
        return ask(deadline, sha256, objects.size)
    except NotFoundError:
        return None


def read(objects: ObjectStore, deadline: int, sha256: Digest, limit: int) -> bytes:
    """A handed-in file's bytes, checked against its name, wherever they lie now.

    Raises NotFoundError, UntrustedError if they do not hash to it."""
    data = ask(deadline, sha256, lambda key: objects.get(key, limit))
    if sha256_of(data) != sha256:
        raise UntrustedError(f"the file {sha256} does not hash to its name")
    return data


def keep(objects: ObjectStore, deadline: int, sha256: Digest) -> None:
    """Makes the file of a submission one that stays. Says what hinders it and raises nothing: the
    next sweep tries again, and until then the file is read where it lies."""
    try:
        _keep(objects, staged_key(deadline, sha256), sha256)
    except PrimeError as error:
        log.error("the file %s that was handed in is not kept yet: %s", sha256, error)


def _keep(objects: ObjectStore, staged: str, sha256: Digest) -> None:
    kept = digest_key(sha256)
    try:
        objects.copy(staged, kept)
    except NotFoundError:
        if objects.exists(kept):  # by another orchestrator meanwhile
            return
        raise
    objects.delete(staged)


def sweep(backend: Backend) -> int:
    """Deletes what was never handed in; how many files. What was handed in and not kept is kept.
    Raises UnavailableError if the store does not answer: the next sweep goes on."""
    swept = 0
    staged = [key for key in backend.objects.keys(PREFIX) if _STAGED.fullmatch(key)]
    if not staged:
        return 0
    with backend.store.read() as connection:
        named = {key for key in staged if _is_named(connection, key)}
    for key in staged:
        deadline, sha256 = _parts(key)
        if key in named:
            keep(backend.objects, deadline, sha256)
        elif deadline + GRACE_SECONDS < backend.now():
            backend.objects.delete(key)
            swept += 1
    if swept:
        with backend.store.begin() as connection:
            meta.put(connection, SWEPT, str(swept_so_far(connection) + swept))
    return swept


def _parts(key: str) -> tuple[int, Digest]:
    deadline, _, name = key.removeprefix(PREFIX).partition("-")
    return int(deadline), Digest("0x" + name)


def _is_named(connection: Connection, key: str) -> bool:
    return submissions.names_upload(connection, *_parts(key))


def swept_so_far(connection: Connection) -> int:
    """Files that were uploaded and never handed in, deleted since the store was made."""
    return int(meta.get(connection, SWEPT) or 0)
