"""Proof passes by another engine than the one that judges: vLLM's, for files that vLLM made.

    judging engine (plain) ── statistics of the drawn rows
    `Provers` (vLLM) ──────── proof passes of the same rows, if the lease names this machine's class

It needs an interpreter that has vLLM; without it such files are judged by statistics alone.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, get_args

from prime_core.errors import UnavailableError, UserError
from prime_core.ids import Digest
from prime_engine.base import Dtype, Engine
from prime_engine.exact import NumericClass
from prime_engine.sizing import Cards
from prime_verify.engines import FolderEngines, load_engine

log = logging.getLogger("prime.verify.provers")
MEMORY_SHARE = 0.4
"""Share of a card's memory that vLLM takes, so that the judging engine fits next to it."""


_ONE = threading.Lock()
"""Held by the `Provers` whose engine is in use: a process runs one vLLM engine at a time."""


def has_vllm() -> bool:
    """Whether this interpreter has vLLM."""
    return find_spec("vllm") is not None


class Provers:
    """vLLM engines of the policies in `root` (see FolderEngines), on `device`, by
    `load(folder, dtype=…)`; all in `dtype`, if one is given. Thread-safe; one engine at a time in
    all of the process. Raises UserError if this interpreter has no vLLM."""

    _holder: ClassVar[Provers | None] = None
    """Whose engine is loaded. Changed while `_ONE` is held."""

    def __init__(
        self,
        root: Path,
        *,
        device: str = "cpu",
        threads: int | None = None,
        dtype: str = "",
        load: Callable[..., Engine] | None = None,
    ) -> None:
        if load is None and not has_vllm():
            raise UserError(
                "proof passes of vLLM are repeated only by an interpreter that has vLLM: start "
                "this program with it (docs/verification.md)"
            )
        cards = Cards(memory_share=MEMORY_SHARE)
        self._load = load or partial(
            load_engine, engine="vllm", device=device, threads=threads, cards=cards
        )
        self._root = root
        self._device = device
        self._only = dtype
        self._dtype = ""
        self._engines: FolderEngines | None = None
        self._classes: dict[tuple[int, Digest, str], Digest] = {}
        """Digest of the class of each version, policy and dtype that was measured."""
        self._keys: dict[str, Digest] = {}
        """Key of the class in each dtype that was measured; it is the same for all policies."""

    @contextmanager
    def using(self, version: int, policy_digest: Digest, dtype: str) -> Iterator[Engine]:
        """Loads a policy in `dtype` and keeps it while the block runs; other callers wait. Raises
        UnavailableError if it cannot be loaded, MemoryError if there is no memory for it."""
        with _ONE:
            yield self._engine(version, policy_digest, self._only or dtype)

    @contextmanager
    def of_class(
        self,
        named: str,
        version: int,
        policy_digest: Digest,
        dtype: str,
        longest: int,
        known: NumericClass | None = None,
    ) -> Iterator[Engine | None]:
        """The engine whose exact class with this policy has the digest `named`, while the block
        runs; other callers wait. `dtype` is tried first; if the class is `known`, only its own.
        None if this machine is not of the class, or has no memory for it or for rows of `longest`
        tokens. If memory runs out in the block, the block ends there, without an error."""
        with _ONE:
            try:
                yield self._find(named, version, policy_digest, dtype, longest, known)
            except MemoryError as error:
                self._give_up(error)

    def _find(
        self,
        named: str,
        version: int,
        policy_digest: Digest,
        dtype: str,
        longest: int,
        known: NumericClass | None,
    ) -> Engine | None:
        for one in [self._only] if self._only else dict.fromkeys((dtype, *get_args(Dtype))):
            policy = version, policy_digest, one
            if self._classes.get(policy, named) != named:
                continue  # without loading it again
            if known is not None and (
                known.dtype != one or self._keys.get(one, known.key) != known.key
            ):
                continue
            try:
                engine = self._engine(*policy)
                found = engine.numeric_class()
                self._classes[policy], self._keys[one] = found.digest(), found.key
            except (UnavailableError, UserError):  # vLLM refuses a model that does not fit
                continue
            except MemoryError as error:
                self._give_up(error)
                continue
            if self._classes[policy] == named:
                return engine if longest <= engine.positions else None
        return None

    def _engine(self, version: int, policy_digest: Digest, dtype: str) -> Engine:
        if Provers._holder is not None and Provers._holder is not self:
            Provers._holder._close()
        Provers._holder = self
        if self._engines is None or self._dtype != dtype:
            self._close()
            load = partial(self._load, dtype=dtype)
            self._engines = FolderEngines(self._root, load, keep=1, device=self._device)
            self._dtype = dtype
        return self._engines.engine(version, policy_digest)

    def _give_up(self, error: MemoryError) -> None:
        """Frees the engine, which may have lost other ranks, too."""
        log.warning("no proof pass is repeated: %s", error or "no memory is left")
        self._close()

    def _close(self) -> None:
        if self._engines is not None:
            self._engines.close()
        self._engines = None

    def close(self) -> None:
        """Frees the engine's memory."""
        with _ONE:
            self._close()
            if Provers._holder is self:
                Provers._holder = None


def provers_here(root: Path, *, device: str, threads: int | None = None) -> Provers | None:
    """Returns `Provers` for an auditor; None if this interpreter has no vLLM."""
    return Provers(root, device=device, threads=threads) if has_vllm() else None
