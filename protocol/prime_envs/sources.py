"""Locates a dataset or corpus pinned by digest: a local file, a fetched file, or a URL.

A file is accepted only if its SHA-256 is the one that the run pins. Fetched files are stored by
digest under `$PRIME_DATASETS` (default `~/.cache/prime-open/datasets`); on a machine without
network, files can be placed there manually.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from prime_core.errors import MalformedError, UnavailableError, UntrustedError, UserError
from prime_core.ids import Digest
from prime_core.run import RunDefinition

VARIABLE = "PRIME_DATASETS"
MAX_BYTES = 8 << 30
SLOWEST = 32 << 10  # bytes per second; a server that is slower is given up
_CHUNK = 1 << 20
SUFFIXES = (".jsonl", ".parquet")
DATASETS_FOLDER = "datasets"
"""Folder for datasets within the folder of policies, which a node's agent mounts for its worker."""


def datasets_folder() -> Path:
    """Folder of fetched datasets."""
    return Path(os.environ.get(VARIABLE) or "~/.cache/prime-open/datasets").expanduser()


def file_digest(path: Path) -> Digest:
    """SHA-256 of a file. Raises UserError if it cannot be read."""
    hasher = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                hasher.update(chunk)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    return Digest("0x" + hasher.hexdigest())


def locate(
    sha256: str,
    *,
    path: str = "",
    url: str = "",
    folder: Path | None = None,
    public_only: bool = False,
) -> Path:
    """Finds the file with that digest: at `path`, among the fetched files, or by fetching `url`
    now, with `public_only` from public addresses only.

    Raises UntrustedError if a file is not the pinned one (naming both digests), UnavailableError if
    it cannot be fetched, UserError if there is no location.
    """
    if not (len(sha256) == 66 and sha256.startswith("0x") and _is_hex(sha256[2:])):
        raise UserError(
            f"{sha256!r} is not a SHA-256 digest; expected 0x and 64 hexadecimal digits",
            hint="sha256sum FILE",
        )
    try:
        # a device or a pipe would never end
        if path and (there := Path(path).expanduser()).is_file():
            return checked(there, sha256)
    except (OSError, RuntimeError) as error:  # the name is too long; there is no such user
        raise UserError(f"{path[:200]!r} cannot be opened: {error}"[:500]) from error
    folder = folder or datasets_folder()
    for suffix in SUFFIXES:
        kept = folder / f"{sha256[2:].lower()}{suffix}"
        if kept.exists():
            return checked(kept, sha256)
    if not url:
        there_not = f"{path} is no file, " if path else ""
        raise UserError(
            f"{there_not}the file {sha256} is not under {folder}, and nothing says where to "
            "fetch it",
            hint="name its `url` or `path` in the run, or put the file there",
        )
    return fetch(url, sha256, folder, public_only=public_only)


def checked(path: Path, sha256: str) -> Path:
    """Returns `path` if its digest is `sha256`. Raises UntrustedError."""
    found = file_digest(path)
    if found != sha256.lower():
        raise UntrustedError(f"{path} has digest {found}, but the run pins {sha256}")
    return path


def bring_files(
    run: RunDefinition, folder: Path, *, public_only: bool = False, allow_path: bool = True
) -> list[Path]:
    """Puts the run's datasets and corpus, if any, into `folder` (see `bring`)."""
    corpus = None if run.conversation is None else run.conversation.corpus
    named = [*run.environment.all_arguments(), {} if corpus is None else corpus.model_dump()]
    brought = [bring(one, folder, public_only=public_only, allow_path=allow_path) for one in named]
    return [path for path in brought if path is not None]


def bring(
    arguments: Mapping[str, int | str],
    folder: Path,
    *,
    public_only: bool = False,
    allow_path: bool = True,
) -> Path | None:
    """Puts an environment's dataset into `folder` for a worker without network, readable by every
    user. Returns None if the environment names no dataset. Raises the same errors as `locate`, and
    without `allow_path` UntrustedError if it names a path on this machine."""
    if arguments.get("path") and not allow_path:
        raise UntrustedError(
            f"the run names the local file {str(arguments['path'])[:200]!r}, which is not opened "
            "for another's pool"
        )
    sha256 = str(arguments.get("sha256", "")).lower()
    if not sha256:
        return None
    found = locate(
        sha256, path=str(arguments.get("path", "")), url=str(arguments.get("url", "")),
        folder=folder, public_only=public_only,
    )  # fmt: skip
    target = folder / f"{sha256[2:]}{found.suffix}"
    with _kept_in(folder):
        if found != target:
            folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=folder, suffix=".part")
            os.close(handle)
            shutil.copyfile(found, name)
            Path(name).replace(target)
        folder.chmod(0o755)
        target.chmod(0o644)
    return target


def fetch(
    url: str, sha256: str, folder: Path, *, limit: int = MAX_BYTES, public_only: bool = False
) -> Path:
    """Downloads `url` into `folder` under its digest, atomically. Follows a few redirects;
    with `public_only`, each leads to a public address. Raises UnavailableError
    (unreachable), UntrustedError (wrong bytes, private address), MalformedError (too long),
    UserError (unsupported address)."""
    import httpx

    from prime_core.transport.paced import opened, paced_client

    try:
        parts = urlsplit(url)
        suffix = Path(parts.path).suffix
        fit = parts.scheme in ("http", "https") and suffix in SUFFIXES and httpx.URL(url).host
    except (ValueError, httpx.InvalidURL):
        fit = False
    if not fit:
        raise UserError(f"{url} is not an http(s) address of a .jsonl or .parquet file")
    hasher = hashlib.sha256()
    size = 0
    with _kept_in(folder):
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, suffix=".part")
    part = Path(name)
    try:
        with (
            os.fdopen(handle, "wb") as file,
            paced_client(60.0, seconds=60.0, rate=SLOWEST) as client,
            opened(client, url, public_only=public_only) as answer,
        ):
            if answer.status_code != 200:
                raise UnavailableError(f"{url} answers {answer.status_code}")
            for chunk in answer.iter_raw(_CHUNK):
                size += len(chunk)
                if size > limit:
                    raise MalformedError(f"{url} is longer than {limit} bytes")
                hasher.update(chunk)
                file.write(chunk)
        found = "0x" + hasher.hexdigest()
        if found != sha256.lower():
            raise UntrustedError(f"{url} has digest {found}, but the run pins {sha256}")
        target = folder / f"{found[2:]}{suffix}"
        part.replace(target)
    except httpx.HTTPError as error:
        raise UnavailableError(f"{url} cannot be fetched: {error}") from error
    except OSError as error:
        raise UnavailableError(f"{url} cannot be kept in {folder}: {error.strerror}") from error
    except (ValueError, httpx.InvalidURL) as error:
        raise UnavailableError(f"{url} redirects to an invalid URL: {error}"[:500]) from error
    finally:
        part.unlink(missing_ok=True)
    return target


@contextmanager
def _kept_in(folder: Path) -> Iterator[None]:
    """Raises UnavailableError if the block cannot write to the disk."""
    try:
        yield
    except OSError as error:
        raise UnavailableError(f"a dataset cannot be kept in {folder}: {error.strerror}") from error


def _is_hex(text: str) -> bool:
    return all(c in "0123456789abcdefABCDEF" for c in text)
