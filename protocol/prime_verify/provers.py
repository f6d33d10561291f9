"""Proof passes by another engine than the one that judges: vLLM's, for files that vLLM made.

    judging engine (plain) ── statistics of the drawn rows
    `Provers` (vLLM) ──────── proof passes of the same rows, if the lease names this machine's class

It needs an interpreter that has vLLM; without it such files are judged by statistics alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from prime_core.errors import UserError
from prime_core.ids import Digest
from prime_engine.base import Engine
from prime_engine.sizing import Cards
from prime_verify.engines import FolderEngines, load_engine

MEMORY_SHARE = 0.4
"""Share of a card's memory that vLLM takes, so that the judging engine fits next to it."""


def has_vllm() -> bool:
    """Whether this interpreter has vLLM."""
    return find_spec("vllm") is not None


class Provers:
    """vLLM engines of the policies in `root` (see FolderEngines), one at a time, on `device`, by
    `load(folder, dtype=…)`; all in `dtype`, if one is given. Thread-safe. Raises UserError if this
    interpreter has no vLLM."""

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
        self._in_use = threading.Lock()
        self._dtype = ""
        self._engines: FolderEngines | None = None

    @contextmanager
    def using(self, version: int, policy_digest: Digest, dtype: str) -> Iterator[Engine]:
        """Loads a policy in `dtype` and keeps it while the block runs; other callers wait. Raises
        UnavailableError if it cannot be loaded, MemoryError if there is no memory for it."""
        dtype = self._only or dtype
        with self._in_use:
            if self._engines is None or self._dtype != dtype:
                self._close()
                load = partial(self._load, dtype=dtype)
                self._engines = FolderEngines(self._root, load, keep=1, device=self._device)
                self._dtype = dtype
            yield self._engines.engine(version, policy_digest)

    def _close(self) -> None:
        if self._engines is not None:
            self._engines.close()
        self._engines = None

    def close(self) -> None:
        """Frees the engine's memory."""
        with self._in_use:
            self._close()


def provers_here(root: Path, *, device: str, threads: int | None = None) -> Provers | None:
    """Returns `Provers` for an auditor; None if this interpreter has no vLLM."""
    return Provers(root, device=device, threads=threads) if has_vllm() else None
