"""Engines by policy: the interface that verification uses, and an implementation over a folder.

Importing this module does not load torch; loading an engine does.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from prime_core import memory
from prime_core.checkpoint import SignedManifest
from prime_core.errors import PrimeError, UnavailableError
from prime_core.ids import Digest
from prime_engine.base import Engine, PolicyReplacing

log = logging.getLogger("prime.verify.engines")
Key = tuple[int, Digest]
"""Version and digest of a policy."""
MANIFEST = "manifest.json"
ENGINES = ("plain", "vllm")
"""Engine names as used in commands."""


class EngineProvider(Protocol):
    """Provides the engine of a policy that has been verified against its digest."""

    def engine(self, version: int, policy_digest: Digest) -> Engine:
        """Raises UnavailableError if the policy is not available or does not load, MemoryError if
        this machine has no memory for it."""
        ...

    def earlier(self, version: int) -> Iterator[tuple[int, Engine]]:
        """Yields engines of available versions before `version`, newest first; may yield none. Only
        used to report which policy a rejected file was made with."""
        ...


def load_engine(
    folder: Path,
    *,
    engine: str = "plain",
    dtype: str = "float32",
    device: str = "cpu",
    threads: int | None = None,
    **options: Any,
) -> Engine:
    """Loads an engine with the policy in `folder` and connects the seeded noise.

    `device`: cpu, cuda, cuda:N, several of them with commas between them, or all (every card). The
    plain engine then divides the model's layers over them and only replays. `options` go to the
    engine's constructor (`batch_rows`, `prepare` or `cards`). `threads` sets torch's thread count.
    Raises UnavailableError if the engine is unknown or cannot run the model
    in the folder.
    """
    if engine not in ENGINES:
        known = " and ".join(ENGINES)
        raise UnavailableError(f"there is no engine {engine!r} here; known are {known}")
    try:
        import torch

        from prime_verify.proofs.sampling_torch import gumbel

        loader: Callable[..., Engine]
        if engine == "vllm":
            from prime_engine.vllm import VllmEngine

            loader = VllmEngine
        else:
            from prime_engine.plain import PlainEngine

            loader = PlainEngine
    except ImportError as error:
        raise UnavailableError(
            f"the {engine} engine needs torch and transformers ({error}): "
            "pip install 'prime-open[torch]'"
        ) from error
    device = _devices(device, torch.cuda.device_count() if torch.cuda.is_available() else 0)
    if threads is not None:
        torch.set_num_threads(threads)
    return loader(folder, noise=gumbel, dtype=dtype, device=device, **options)


def _devices(device: str, cards: int) -> str:
    """Returns `device` with the names of all `cards` CUDA devices in place of "all". Raises
    UnavailableError if one is unknown or not here."""
    names = [f"cuda:{i}" for i in range(cards)] if device == "all" else device.split(",")
    for name in names:
        kind, _, number = name.strip().partition(":")
        if kind not in ("cpu", "cuda") or not (number.isdigit() or number == ""):
            raise UnavailableError(f"{name!r} is not a device here; known are cpu, cuda and all")
        if kind == "cuda" and int(number or 0) >= cards:
            raise UnavailableError(f"there is no {name} here: choose --device cpu")
    if not names:
        raise UnavailableError("there is no card here: choose --device cpu")
    return ",".join(name.strip() for name in names)


EXPANSION = 2
"""Memory of a policy loaded in float32 relative to its bfloat16 files. Replays in bfloat16 use the
same weights; on cards the weights stay as they are in the files."""
POLICY_SHARE = 0.8
"""Share of the free memory for policies by default. The rest holds one layer in another dtype and
the states of a prefill."""


def policy_bytes(weights: int, device: str = "cpu") -> int:
    """Returns the memory of a loaded policy on `device`, from the size of its weight files."""
    return EXPANSION * weights if device.startswith("cpu") else weights


def loaded_bytes(folder: Path, device: str = "cpu") -> int:
    """Returns `policy_bytes` of the policy in `folder`."""
    return policy_bytes(sum(path.stat().st_size for path in folder.glob("*.safetensors")), device)


def policy_room(device: str) -> int | None:
    """Returns the bytes that loaded policies may take on `device` (see load_engine) by default:
    POLICY_SHARE of what is free now; of several cards, as if each had only what the fullest has.
    None if that cannot be read. Raises UnavailableError if the device is not here."""
    if device.startswith("cpu"):
        free = memory.available()
    else:
        import torch

        cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
        names = _devices(device, cards).split(",")
        free = len(names) * min(torch.cuda.mem_get_info(name)[0] for name in names)
    return None if free is None else int(free * POLICY_SHARE)


class FolderEngines:
    """Policies in `root`/<version>/, each with its manifest.json. Recently used engines stay
    loaded: at most `keep`, and at most `max_bytes` on `device` in total (by `loaded_bytes`), but
    always the one in use. If there is no room, a policy is loaded in place of the one that was used
    least recently, where its engine can; so a caller of `engine` must have finished with those
    that it got before.

    Folders are trusted: prime_broadcast verified them when it placed them. This class only compares
    the manifest's digest.
    """

    def __init__(
        self,
        root: Path,
        load: Callable[[Path], Engine] = load_engine,
        *,
        keep: int = 3,
        max_bytes: int | None = None,
        device: str = "cpu",
        look_back: int = 4,
    ) -> None:
        self._root = root
        self._load = load
        self._keep = keep
        self._max_bytes = max_bytes
        self._device = device
        self._look_back = look_back
        self._loaded: OrderedDict[Key, Engine] = OrderedDict()
        self._bytes: dict[Key, int] = {}

    def engine(self, version: int, policy_digest: Digest) -> Engine:
        """See EngineProvider."""
        found = self.digest(version)
        if found != policy_digest:
            raise UnavailableError(f"policy {version} here is {found}, the lease asks another")
        return self._get((version, found))

    def earlier(self, version: int) -> Iterator[tuple[int, Engine]]:
        """See EngineProvider. Yields none if there is no room for two policies, because the caller
        still holds the engine of `version`."""
        if self._keep < 2:
            return
        held = next((key for key in self._loaded if key[0] == version), None)
        for number in range(version - 1, max(-1, version - 1 - self._look_back), -1):
            try:
                yield number, self._get((number, self.digest(number)), held, in_place=False)
            except (UnavailableError, MemoryError):
                continue

    def newest(self) -> tuple[int, Digest] | None:
        """Newest version with a manifest and its policy digest, or None."""
        folders = self._root.iterdir() if self._root.is_dir() else ()
        versions = [int(one.name) for one in folders if one.name.isascii() and one.name.isdigit()]
        for version in sorted(versions, reverse=True):
            with contextlib.suppress(UnavailableError):
                return version, self.digest(version)
        return None

    def digest(self, version: int) -> Digest:
        """Policy digest of the manifest in the folder. Raises UnavailableError if there is none."""
        path = self._root / str(version) / MANIFEST
        try:
            return SignedManifest.model_validate_json(path.read_bytes()).manifest.digest()
        except OSError as error:
            raise UnavailableError(f"policy {version} is not at {path.parent}") from error
        except ValueError as error:
            raise UnavailableError(f"{path} is not a manifest: {error}") from error

    def _room_for(self, size: int, without: Key | None = None) -> bool:
        """Whether a policy of `size` bytes fits, if `without` is dropped before."""
        others = [taken for key, taken in self._bytes.items() if key != without]
        fits = self._max_bytes is None or sum(others) + size <= self._max_bytes
        return fits and len(others) < self._keep

    def _get(self, key: Key, held: Key | None = None, *, in_place: bool = True) -> Engine:
        """Returns the engine of a policy, loading it if necessary. The policy `held` stays loaded:
        raises UnavailableError if there is no room next to it. `in_place`: no engine but the one
        that is returned is used any more."""
        if key not in self._loaded:
            folder = self._root / str(key[0])
            size = loaded_bytes(folder, self._device)
            while self._loaded and not self._room_for(size):  # before loading: both may not fit
                oldest = next((one for one in self._loaded if one != held), None)
                if oldest is None:
                    raise UnavailableError(f"policy {key[0]} does not fit next to the one in use")
                last = len(self._loaded) == 1 or self._room_for(size, without=oldest)
                if in_place and last and self._replace(oldest, key, folder):
                    break
                self._drop(oldest)
            if key not in self._loaded:
                self._loaded[key] = self._load(folder)
            self._bytes[key] = size
        self._loaded.move_to_end(key)
        return self._loaded[key]

    def _replace(self, old: Key, key: Key, folder: Path) -> bool:
        """Loads a policy in place of `old`. Returns whether it did. If not, that engine may hold
        parts of both policies, and the caller closes it."""
        engine = self._loaded[old]
        if not isinstance(engine, PolicyReplacing):
            return False
        try:
            if not engine.replace_policy(folder):
                return False
        except UnavailableError as error:
            log.warning("policy %d takes a new engine: %s", key[0], error)
            return False
        except BaseException:
            self._drop(old)
            raise
        self._loaded[key] = self._loaded.pop(old)
        del self._bytes[old]
        return True

    def close(self) -> None:
        """Closes all engines and frees their memory."""
        while self._loaded:
            self._drop(next(iter(self._loaded)))

    def _drop(self, key: Key) -> None:
        """Closes an engine and frees its memory."""
        del self._bytes[key]
        self._loaded.pop(key).close()
        gc.collect()  # modules that were changed (prime_engine.linears) refer to themselves
        memory.release()


class FetchedEngines(FolderEngines):
    """Engines of policies that `ensure` brings into `root` when they are asked for."""

    def __init__(
        self,
        root: Path,
        ensure: Callable[[int, Digest], object],
        load: Callable[[Path], Engine] = load_engine,
        *,
        device: str = "cpu",
    ) -> None:
        super().__init__(root, load, keep=2, max_bytes=policy_room(device), device=device)
        self._ensure = ensure

    def engine(self, version: int, policy_digest: Digest) -> Engine:
        """See EngineProvider."""
        try:
            self._ensure(version, policy_digest)
        except PrimeError as error:
            raise UnavailableError(f"policy {version} cannot be fetched: {error}") from error
        return super().engine(version, policy_digest)
