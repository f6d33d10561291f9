"""Publishes a trained policy: export, check, sign, serve, announce.

    weights (bf16, finite, shaped as the base) → parts → manifest and deltas → trainer's signature
      → the origin's layout, by one rename → POST /v1/policies (the orchestrator puts it on chain)

Ranks write, hash and delta-encode their own parts of the weights (prime_trainer/snapshot.py,
prime_broadcast/sharded.py); rank 0 signs. All ranks need the same data folder: one machine, or a
shared disk.

Every step is idempotent: the same checkpoint gives the same bytes, and existing files are left
alone. Relays fetch from the origin, a thread of this process (`prime_broadcast/server.py`), newest
first, while the next step trains; a publication ends when the first relay has started. The origin
keeps every policy, unless `policies_kept_days` is set: the newest ones and periodic anchors in
full, those between as deltas. Weights that are not finite are rejected.
"""

from __future__ import annotations

import logging
import math
import shutil
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from prime_broadcast import layout
from prime_broadcast.content import DirectoryContent, Resource
from prime_broadcast.files import write_whole
from prime_broadcast.publish import finalize, publish
from prime_broadcast.server import Server, Serving
from prime_broadcast.sharded import Part, publish_part
from prime_core.checkpoint import Manifest, SignedManifest
from prime_core.errors import (
    ConflictError,
    FatalError,
    PrimeError,
    UnavailableError,
    UserError,
)
from prime_core.messages import MAX_EVALUATIONS, PolicyList, RelayAnnouncement, Status
from prime_core.signing import Signer
from prime_core.transport.client import Empty, OrchestratorClient
from prime_trainer import snapshot
from prime_trainer.bucket import Bucket
from prime_trainer.config import TRAINING_FILE, Settings
from prime_trainer.disk import writing
from prime_trainer.feed import PoolFacts
from prime_trainer.lora import merge_scale
from prime_trainer.model import Policy, require_finite
from prime_trainer.parallel import World
from prime_trainer.snapshot import WEIGHTS, tensor_shapes

log = logging.getLogger(__name__)

ORIGIN = "origin"
"""Folder of the published policies in the data folder."""
DAY_SECONDS = 86_400
ANNOUNCE_SECONDS = 30.0
FIRST_RELAY_SECONDS = 3.0


def sidecars(base: Path) -> list[Path]:
    """All files of a model folder except its weights: config, tokenizer, generation settings."""
    return [
        path
        for path in sorted(base.iterdir())
        if path.is_file() and not path.name.startswith(".") and "safetensors" not in path.name
    ]


def export(state: dict[str, Tensor], base: Path, folder: Path, training: str = "") -> None:
    """Writes `state` (complete, on CPU) as a Hugging Face folder in bf16, with the base's sidecars
    and `training`, the configuration that made it (prime_trainer/config.py).

    Tied weights (embeddings) are written once, as in the base. Raises FatalError, and writes
    nothing, if a weight is missing, has another shape than in the base, or is not finite in bf16;
    UnavailableError, and leaves no folder, on a disk error.
    """
    rounded: dict[str, Tensor] = {}
    for name, shape in tensor_shapes(base).items():
        tensor = state.get(name)
        if tensor is None:
            raise FatalError(f"the trained model lacks the base's weight {name}")
        if tuple(tensor.shape) != shape:
            raise FatalError(f"the trained {name} is {tuple(tensor.shape)}, the base's is {shape}")
        rounded[name] = tensor.to(torch.bfloat16).contiguous()
    require_finite(rounded)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        with writing("the policy to publish", folder):
            folder.mkdir(parents=True)
            for path in sidecars(base):
                shutil.copyfile(path, folder / path.name)
            if training:
                (folder / TRAINING_FILE).write_text(training)
            save_file(rounded, folder / WEIGHTS, metadata={"format": "pt"})
    except UnavailableError:
        shutil.rmtree(folder, ignore_errors=True)
        raise


class Publisher:
    """Signs and serves policies of one pool from `<data>/origin`. Not thread-safe."""

    def __init__(
        self,
        settings: Settings,
        facts: PoolFacts,
        signer: Signer,
        client: OrchestratorClient,
        bucket: Bucket | None = None,
    ) -> None:
        self.root = settings.data / ORIGIN
        self._bucket = bucket
        self._pool = facts.info.pool
        self._base_model = facts.run.base_model
        self._signer = signer
        self._domain = facts.domain("pools")
        self._client = client
        self._delta_from = settings.delta_from
        self._kept_days = settings.policies_kept_days
        self._max_staleness = facts.run.max_staleness

    def published(self) -> int | None:
        """The newest version that is complete in the origin."""
        return max(layout.versions(self.root), default=None)

    def publish(self, folder: Path, version: int) -> SignedManifest:
        """Signs `folder` as policy `version`, serves it, and submits it to the orchestrator.

        Raises FatalError if that version was published with other bytes, UserError if version 0 is
        not the run's base model, UnavailableError on an orchestrator or disk error (retry).
        """
        try:
            manifest = publish(
                folder,
                self.root,
                pool=self._pool,
                version=version,
                step=version,
                delta_from=self._delta_from,
            )
        except ConflictError as error:
            raise FatalError(str(error)) from error
        return self.serve(manifest, folder)

    def serve(self, manifest: Manifest, folder: Path | None = None) -> SignedManifest:
        """Signs a prepared policy (made of `folder`), serves it, and submits it to the
        orchestrator. Raises as `publish` does."""
        version = manifest.version
        if version == 0 and manifest.result_digest != self._base_model:
            raise UserError(
                f"the model in {folder} has digest {manifest.result_digest}, but the run's base "
                f"model is {self._base_model}",
                hint="name the folder that the run was defined with",
            )
        signed = manifest.signed(self._signer, self._domain)
        finalize(self.root, signed)
        self.hand_in(version)
        newest = max(layout.KEEP_WHOLE, self._delta_from + 1)
        thinned = layout.thin(self.root, keep_whole=newest, anchor_every=layout.ANCHOR_EVERY)
        if thinned:
            log.info("the origin keeps policies %s as deltas", thinned)
        if self._kept_days is not None:
            try:
                self._remove_old(time.time() - self._kept_days * DAY_SECONDS, newest)
            except (PrimeError, OSError) as error:
                log.warning("could not remove old policies, will retry: %s", error)
        return signed

    def _remove_old(self, before: float, keep: int) -> None:
        """Removes the versions that are out of use since `before` (Unix seconds), but not the
        newest `keep`, and none that an evaluation names which goes on or ended since."""

        def expired(named: Collection[int] = ()) -> list[int]:
            later = self._max_staleness + 1
            return layout.expired(self.root, before, keep=keep, later=later, named=named)

        if not expired():
            return
        listed = self._client.get("/v1/status", Status).evaluations
        if sum(one.ended_at is None for one in listed) >= MAX_EVALUATIONS:
            log.warning("no old policy is removed: perhaps not every evaluation is listed")
            return
        versions = expired(
            {one.policy_version for one in listed if (one.ended_at or math.inf) >= before}
        )
        if self._bucket is None:
            layout.remove(self.root, versions)
        else:
            self._bucket.remove(versions)
        log.info("old policies are removed: %s", versions)

    def hand_in(self, version: int) -> None:
        """Puts a version in the origin into the bucket, if that answers, and submits it to the
        orchestrator; no effect if it is already known. Earlier versions that the orchestrator
        lacks, as after the restore of a backup, are submitted first."""
        if self._bucket is not None:
            self._bucket.keep_up()
        signed = layout.manifest_of(self.root, version)
        try:
            self._client.post("/v1/policies", signed, Empty)
        except ConflictError as error:
            listed = self._client.get("/v1/policies", PolicyList).policies
            known = {s.manifest.version: s.manifest.digest() for s in listed}
            if known.get(version) == signed.manifest.digest():
                return
            lacking = range(max(known, default=-1) + 1, version)
            if not lacking or not set(lacking) <= set(layout.versions(self.root)):
                raise FatalError(f"the orchestrator refuses policy {version}: {error}") from error
            log.warning(
                "the orchestrator lacks policies %d to %d: they are submitted again",
                lacking[0],
                lacking[-1],
            )
            for earlier in lacking:
                self._client.post("/v1/policies", layout.manifest_of(self.root, earlier), Empty)
            self._client.post("/v1/policies", signed, Empty)


class _Asked(DirectoryContent):
    """A layout that records the newest version that any reader started to fetch. Requests for
    missing versions do not count, because any stranger's number would otherwise end all later
    waits."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._newest = -1
        self._change = threading.Condition()

    def find(self, path: str) -> Resource | None:
        found = super().find(path)
        named = layout.parse_address(path) if found is not None else None
        if named is not None and named.version is not None and named.version > self._newest:
            with self._change:
                self._newest = named.version
                self._change.notify_all()
        return found

    def wait(self, version: int, seconds: float) -> bool:
        """Waits until a reader has asked for `version` or a later one; returns whether one has.
        Returns False at once if no reader ever asked for any version."""
        with self._change:
            if self._newest < 0:
                return False
            return self._change.wait_for(lambda: self._newest >= version, seconds)


class TrainerOrigin:
    """Serves `root` over HTTP and announces its address, and that of the bucket that mirrors it, to
    the orchestrator until stopped."""

    def __init__(
        self,
        root: Path,
        serving: Serving,
        new_client: Callable[[], OrchestratorClient],
        bucket: Bucket | None = None,
    ) -> None:
        self._root = root
        self._bucket = bucket
        self._new_client = new_client
        self._asked = _Asked(root)
        self._server = Server(self._asked, serving)
        self._wake = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._announce, name="origin-announce", daemon=True)

    @property
    def url(self) -> str:
        """The URL for relays."""
        return self._server.url

    def __enter__(self) -> TrainerOrigin:
        layout.write_index(self._root)
        self._server.start()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self, grace: float = 0.0) -> None:
        """Stops announcing and serving; responses in progress get at most `grace` seconds to
        finish. Idempotent."""
        self._stopped.set()
        self._wake.set()
        self._thread.join()
        self._server.stop(grace)

    def announce(self) -> None:
        """Announces immediately instead of at the next interval (a new version is available)."""
        self._wake.set()

    def wait_taken(self, version: int) -> bool:
        """Waits until a relay has started to fetch `version`, so that publications do not outrun
        the relays: True then; False after FIRST_RELAY_SECONDS, or at once if no relay ever came."""
        return self._asked.wait(version, FIRST_RELAY_SECONDS)

    def _announce(self) -> None:
        with self._new_client() as client:
            reported = False
            while not self._stopped.is_set():
                served = {self.url: tuple(layout.versions(self._root))}
                if self._bucket is not None and self._bucket.versions:
                    served[self._bucket.url] = self._bucket.versions
                try:
                    for url, versions in served.items():
                        said = RelayAnnouncement(url=url, versions=versions[-64:])
                        client.post("/v1/relays", said, Empty)
                    if not reported:
                        log.info("the orchestrator lists this origin at %s", ", ".join(served))
                    reported = True
                except PrimeError as error:
                    log.warning("could not announce the origin: %s", error)
                    reported = False
                self._wake.wait(ANNOUNCE_SECONDS)
                self._wake.clear()


def other_files(base: Path, training: str) -> dict[str, Path | bytes]:
    """The files of a policy other than its weights: the base's, and the configuration `training`
    that made it (prime_trainer/config.py)."""
    found: dict[str, Path | bytes] = {path.name: path for path in sidecars(base)}
    if training:
        found[TRAINING_FILE] = training.encode()
    return found


@dataclass(frozen=True)
class Publishing:
    """What a trainer publishes with: `publisher` signs policies and submits them, `origin` serves
    them."""

    publisher: Publisher
    origin: TrainerOrigin


def take_part(policy: Policy, world: World, base: Path, training: str) -> Part:
    """This rank's part of the weights that a node loads, in bf16 on CPU, adapters merged; a
    collective operation. Raises FatalError, on every rank, if a weight is missing, has another
    shape than in `base`, or is not finite in bf16."""
    files = other_files(base, training).values()
    others = sum(len(f) if isinstance(f, bytes) else f.stat().st_size for f in files)
    return snapshot.take(
        policy.lm.state_dict(),
        tensor_shapes(base),
        world,
        other_bytes=others,
        lora_scale=merge_scale(policy.lm),
    )


def publish_state(
    publisher: Publisher | None,
    part: Part | None,
    facts: PoolFacts,
    settings: Settings,
    world: World,
    version: int,
    training: str,
    insist: Callable[[Callable[[], SignedManifest]], object],
) -> None:
    """Publishes `version` from every rank's `part` (see `take_part`); version 0 is the unmodified
    base model. A collective operation; only rank 0 has a `publisher`. `insist` repeats the
    submission after temporary failures. Raises UnavailableError on a disk error of any rank."""
    base: Path = settings.need("model")
    if part is None:
        if publisher is not None:
            insist(lambda: publisher.publish(base, 0))
        return
    try:
        manifest = publish_part(
            part,
            other_files(base, training),
            settings.data / ORIGIN,
            world.exchange,
            pool=facts.info.pool,
            version=version,
            step=version,
            delta_from=settings.delta_from,
        )
    except ConflictError as error:
        raise FatalError(str(error)) from error
    if publisher is not None:
        insist(lambda: publisher.serve(manifest))


def write_address(data: Path, url: str) -> None:
    """Writes the origin's address to `<data>/origin.url`, for starting relays."""
    write_whole(data / "origin.url", url.encode() + b"\n")
