"""Policies in a bucket, from which a CDN or anyone's client can serve them.

The objects lie under the keys of the broadcast's layout (prime_broadcast/layout.py), so the bucket
is a mirror: nodes prefer it to the trainer's own server, and check what it sends by digest.
Only the index changes after it is written. While the bucket does not answer,
training goes on, and a thread tries until it has everything.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from prime_broadcast import layout
from prime_broadcast.manifest import MANIFEST_NAME
from prime_core.errors import FatalError, NotFoundError, PrimeError, UnavailableError, UserError

if TYPE_CHECKING:
    from prime_core.storage.s3 import S3Store

log = logging.getLogger(__name__)
NO_CACHE = "no-cache"
FOR_EVER = "public, max-age=31536000, immutable"
RETRY_SECONDS = 30.0


class Bucket:
    """A bucket that holds what `root` holds. `url` is where anyone can read its objects.
    Thread-safe."""

    def __init__(self, root: Path, store: S3Store, url: str) -> None:
        self._root = root
        self._store = store
        self.url = url
        self.versions: tuple[int, ...] = ()
        """The versions that are complete in the bucket."""
        self._held: dict[int, set[str]] = {}
        """The files of each version as the last update left them in the bucket."""
        self._looked = False
        self._sent: set[str] = set()
        self._updating = threading.Lock()
        self._late: threading.Thread | None = None

    def check(self) -> None:
        """Raises UserError if the bucket cannot be used, UnavailableError if it does not answer."""
        self._store.check()

    def keep_up(self) -> None:
        """Updates the bucket. If it does not answer, a thread goes on until it does, or until the
        process ends. Raises FatalError as `update` does."""
        try:
            self.update()
        except (UnavailableError, OSError) as error:
            log.warning("could not upload the newest policy to the bucket, will retry: %s", error)
            if self._late is None or not self._late.is_alive():
                self._late = threading.Thread(target=self._go_on, name="bucket", daemon=True)
                self._late.start()

    def _go_on(self) -> None:
        pause = threading.Event()
        while not pause.wait(RETRY_SECONDS):
            try:
                self.update()
                return
            except (UnavailableError, OSError) as error:  # also a file thinned out meanwhile
                log.warning("could not upload to the bucket, will retry: %s", error)
            except PrimeError as error:
                log.error("the bucket is not updated: %s", error)
                return

    def update(self) -> None:
        """Uploads what is new in the layout, each version's manifest after its files and the index
        last, then removes the files of versions that the layout has thinned out. Versions that
        `root` does not have stay. The first call lists the whole bucket, later ones only versions
        that changed since.

        Raises FatalError if the bucket holds another policy of a version, UnavailableError if it
        does not answer; the next call goes on.
        """
        with self._updating:
            self._update()

    def remove(self, versions: Sequence[int]) -> None:
        """Removes versions from the bucket, then from `root`. Raises UnavailableError if the bucket
        does not answer; what is left is removed by the next call."""
        with self._updating:
            for version in versions:
                self._held.pop(version, None)
                manifest = _key(version, MANIFEST_NAME)
                keys = self._listed(_prefix(version))[version]
                for key in sorted(keys, key=lambda key: key != manifest):  # the manifest first
                    self._store.delete(key)
            layout.remove(self._root, versions)
            self._update()

    def _update(self) -> None:
        present = layout.versions(self._root)
        listed = None if self._held else self._listed(f"{layout.POLICIES}/")
        for version in present:
            folder = layout.version_folder(self._root, version)
            names = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
            if self._held.get(version) == names:
                continue
            there = self._listed(_prefix(version)) if listed is None else listed
            self._send(version, folder, names, there[version])
            self._held[version] = names
        if not present:
            return
        index = layout.policies_folder(self._root) / layout.INDEX_NAME
        self._store.put(
            f"{layout.POLICIES}/{layout.INDEX_NAME}", index.read_bytes(), cached=NO_CACHE
        )
        self.versions = tuple(present)
        if not self._looked:
            self._looked = True
            self._look(_key(present[-1], MANIFEST_NAME))

    def _send(self, version: int, folder: Path, names: set[str], there: set[str]) -> None:
        """Uploads the files `names` of a version that are not `there`, its manifest last, and
        removes those that `folder` has no longer."""
        manifest = _key(version, MANIFEST_NAME)
        if manifest in there and version not in self.versions:
            self._require_same(version, manifest, folder / MANIFEST_NAME)
        for name in sorted(names - {MANIFEST_NAME}):
            key = _key(version, name)
            # Without a manifest, what is there may be of a version that was made again.
            if key not in there or (manifest not in there and key not in self._sent):
                self._store.put_file(key, folder / name, cached=FOR_EVER)
                self._sent.add(key)
        if manifest not in there:
            self._store.put_file(manifest, folder / MANIFEST_NAME, cached=FOR_EVER)
            log.info("policy %d is in the bucket at %s", version, self.url)
        for key in sorted(there - {_key(version, name) for name in names}):
            self._store.delete(key)

    def _listed(self, prefix: str) -> dict[int, set[str]]:
        """The keys of each version's files in the bucket that begin with `prefix`."""
        found: dict[int, set[str]] = defaultdict(set)
        for key in self._store.keys(prefix):
            named = layout.parse_address(f"/{key}")
            if named is not None and named.version is not None:
                found[named.version].add(key)
        return found

    def _look(self, key: str) -> None:
        """Warns if readers cannot read an object. The trainer's own server serves it, too."""
        try:
            found = str(httpx.head(f"{self.url}/{key}", timeout=10.0).status_code)
        except httpx.HTTPError as error:
            found = type(error).__name__
        if found != "200":
            log.warning(
                "nodes cannot read the bucket at %s (%s): make it public, or correct "
                "--s3-public-url",
                self.url,
                found,
            )

    def _require_same(self, version: int, key: str, local: Path) -> None:
        ours = local.read_bytes()
        try:
            theirs = self._store.get(key, limit=max(len(ours), layout.MAX_INDEX_BYTES))
        except NotFoundError:
            return
        if theirs != ours:
            raise FatalError(
                f"{self._store!r} holds another policy {version}: use an empty bucket, or the "
                "trainer's earlier --data"
            )


def _prefix(version: int) -> str:
    return f"{layout.POLICIES}/{version}/"


def _key(version: int, name: str) -> str:
    return layout.address_of(version, name).lstrip("/")


def open_bucket(
    root: Path, *, bucket: str, place: str, endpoint: str, region: str, public_url: str
) -> Bucket:
    """The part of a bucket named `place` as a mirror of `root`, after testing access to it.
    `public_url` is the bucket's URL for readers; by default the endpoint's.

    Raises UserError if the settings do not fit or the bucket cannot be used, UnavailableError if
    the server does not answer.
    """
    from prime_core.storage.s3 import S3Store  # boto3 is an extra

    if not public_url and not endpoint:
        raise UserError(
            "a bucket on AWS needs --s3-public-url, where nodes read policies",
            hint="--s3-public-url https://BUCKET.s3.REGION.amazonaws.com, or that of a CDN",
        )
    if public_url and not public_url.startswith(("http://", "https://")):
        raise UserError(
            f"{public_url} is not the URL of a bucket",
            hint="--s3-public-url https://…, without the folder of the pool",
        )
    base = (public_url or f"{endpoint.rstrip('/')}/{bucket}").rstrip("/")
    store = S3Store(bucket, prefix=place, endpoint=endpoint, region=region)
    found = Bucket(root, store, f"{base}/{place}")
    found.check()
    return found
