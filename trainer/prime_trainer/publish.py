"""A trained policy becomes a published one: exported, judged fit, signed, served, announced.

    weights (bf16, finite, shaped as the base) → folder → manifest and deltas → trainer's signature
      → the origin's layout, by one rename → POST /v1/policies (the outbox puts it on chain)

Every step may be repeated: the same checkpoint gives the same bytes, and what is already there is
left alone. Relays fetch from the origin, a thread of this process (`prime_broadcast/server.py`),
newest first, while the next step trains; a publication is over once the first of them has begun.
The origin keeps every policy: the newest and an anchor at intervals whole, those between as deltas.
Nothing that is not finite gets past `export`.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from prime_broadcast import layout
from prime_broadcast.content import DirectoryContent, Resource
from prime_broadcast.files import write_whole
from prime_broadcast.publish import finalize, publish
from prime_broadcast.server import Limits, Server
from prime_core.checkpoint import Manifest, SignedManifest
from prime_core.errors import (
    ConflictError,
    FatalError,
    PrimeError,
    UnavailableError,
    UserError,
)
from prime_core.ids import Digest
from prime_core.messages import PolicyList, RelayAnnouncement
from prime_core.signing import Domain, Signer
from prime_core.transport.client import Empty, OrchestratorClient
from prime_trainer.config import TRAINING_FILE
from prime_trainer.disk import writing
from prime_trainer.model import require_finite

log = logging.getLogger(__name__)

WEIGHTS = "model.safetensors"
ANNOUNCE_SECONDS = 30.0
FIRST_RELAY_SECONDS = 3.0


def sidecars(base: Path) -> list[Path]:
    """Everything in a model folder but its weights: config, tokenizer, generation settings."""
    return [
        path
        for path in sorted(base.iterdir())
        if path.is_file() and not path.name.startswith(".") and "safetensors" not in path.name
    ]


def export(state: dict[str, Tensor], base: Path, folder: Path, training: str = "") -> None:
    """Writes `state` (whole, on CPU) as a Hugging Face folder in bf16 with the base's sidecars and
    `training`, the configuration that made it (prime_trainer/config.py).

    A tensor that shares its memory with an earlier one (tied embeddings) is written once, as the
    base has it. Raises FatalError, and writes nothing, if a weight is missing, has another shape
    than in the base, or is not finite in bf16; UnavailableError, and leaves no folder, if the disk
    refuses.
    """
    rounded: dict[str, Tensor] = {}
    for name, shape in _tensor_shapes(base).items():
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


def _tensor_shapes(base: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each weight of a model folder, from its files' headers. Raises UserError."""
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(base.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in names}
    if not shapes:
        raise UserError(f"{base} holds no safetensors weights")
    return shapes


class Publisher:
    """Signs and serves policies of one pool from `<data>/origin`; belongs to one thread."""

    def __init__(
        self,
        root: Path,
        *,
        pool: int,
        base_model: Digest,
        signer: Signer,
        domain: Domain,
        client: OrchestratorClient,
        delta_from: int,
    ) -> None:
        self.root = root
        self._pool = pool
        self._base_model = base_model
        self._signer = signer
        self._domain = domain
        self._client = client
        self._delta_from = delta_from

    def published(self) -> int | None:
        """The newest version that lies whole in the origin."""
        return max(layout.versions(self.root), default=None)

    def publish(self, folder: Path, version: int) -> SignedManifest:
        """Signs `folder` as policy `version`, serves it, and hands it to the orchestrator.

        Raises FatalError if that version was published with other bytes, UserError if version 0 is
        not the run's base model, UnavailableError if orchestrator or disk refuse (try again).
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
        if version == 0 and manifest.result_digest != self._base_model:
            raise UserError(
                f"the model in {folder} has digest {manifest.result_digest}, but the run's base "
                f"model is {self._base_model}",
                hint="name the folder that the run was defined with",
            )
        signed = self._sign(manifest)
        finalize(self.root, signed)
        self.hand_in(version)
        thinned = layout.thin(
            self.root,
            keep_whole=max(layout.KEEP_WHOLE, self._delta_from + 1),
            anchor_every=layout.ANCHOR_EVERY,
        )
        if thinned:
            log.info("the origin keeps policies %s as deltas", thinned)
        return signed

    def hand_in(self, version: int) -> None:
        """Tells the orchestrator of a version that lies in the origin; harmless if it knows."""
        signed = layout.manifest_of(self.root, version)
        try:
            self._client.post("/v1/policies", signed, Empty)
        except ConflictError as error:
            listed = self._client.get("/v1/policies", PolicyList).policies
            known = {s.manifest.version: s.manifest.digest() for s in listed}
            if known.get(version) != signed.manifest.digest():
                raise FatalError(f"the orchestrator refuses policy {version}: {error}") from error

    def _sign(self, manifest: Manifest) -> SignedManifest:
        unsigned = SignedManifest.model_construct(manifest=manifest)
        signature = self._signer.sign(unsigned.statement(), self._domain)
        return SignedManifest(manifest=manifest, signature=signature)


class _Asked(DirectoryContent):
    """A layout that remembers the newest version that anybody began to fetch: what is not there
    counts for nothing, or any stranger's number would end every wait to come."""

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
        """Whether somebody asked for `version` or a later one, waiting for it if anybody ever
        asked for any."""
        with self._change:
            if self._newest < 0:
                return False
            return self._change.wait_for(lambda: self._newest >= version, seconds)


class Origin:
    """Serves `root` over HTTP and keeps the orchestrator told of its address, until stopped."""

    def __init__(
        self,
        root: Path,
        host: str,
        port: int,
        public_url: str | None,
        new_client: Callable[[], OrchestratorClient],
        limits: Limits | None = None,
    ) -> None:
        self._root = root
        self._new_client = new_client
        self._asked = _Asked(root)
        self._server = Server(self._asked, host, port, limits=limits, public_url=public_url)
        self._wake = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._announce, name="origin-announce", daemon=True)

    @property
    def url(self) -> str:
        """Where relays find it."""
        return self._server.url

    def __enter__(self) -> Origin:
        layout.write_index(self._root)
        self._server.start()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self, grace: float = 0.0) -> None:
        """Ends announcing and serving; for `grace` seconds at most, answers under way are finished
        first. May be called twice."""
        self._stopped.set()
        self._wake.set()
        self._thread.join()
        self._server.stop(grace)

    def announce(self) -> None:
        """Tells the orchestrator now instead of at the next turn (a new version is there)."""
        self._wake.set()

    def wait_taken(self, version: int) -> bool:
        """Returns once a relay has begun to fetch `version`, so that publications do not run ahead
        of whoever shall carry them: True; False after FIRST_RELAY_SECONDS, or at once if no relay
        ever came."""
        return self._asked.wait(version, FIRST_RELAY_SECONDS)

    def _announce(self) -> None:
        with self._new_client() as client:
            told = False
            while not self._stopped.is_set():
                versions = tuple(layout.versions(self._root))[-64:]
                try:
                    said = RelayAnnouncement(url=self.url, versions=versions)
                    client.post("/v1/relays", said, Empty)
                    if not told:
                        log.info("the orchestrator lists this origin at %s", self.url)
                    told = True
                except PrimeError as error:
                    log.warning("could not announce the origin: %s", error)
                    told = False
                self._wake.wait(ANNOUNCE_SECONDS)
                self._wake.clear()


def publish_state(
    publisher: Publisher,
    weights: dict[str, Tensor],
    version: int,
    base: Path,
    data: Path,
    training: str,
    insist: Callable[[Callable[[], SignedManifest]], object],
) -> None:
    """Publishes `weights` (rank 0's whole state, on CPU), made under the configuration `training`,
    as `version`; version 0 is the base model as it is. `insist` repeats what is refused for now."""
    folder = base
    if version:
        folder = data / "export"
        export(weights, base, folder, training)
    insist(lambda: publisher.publish(folder, version))
    shutil.rmtree(data / "export", ignore_errors=True)


def write_address(data: Path, url: str) -> None:
    """Notes the origin's address in `<data>/origin.url`, for whoever starts a relay."""
    write_whole(data / "origin.url", url.encode() + b"\n")
