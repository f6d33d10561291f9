"""Translates errors of torch and vLLM: MemoryError if memory ran out, FatalError if a card
failed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from prime_core.errors import FatalError

P = ParamSpec("P")
T = TypeVar("T")
_SHORT = (
    "out of memory",  # CUDA, its driver, NCCL
    "can't allocate memory",  # torch's allocator of main memory
    "cannot allocate memory",
    "_alloc_failed",  # cuBLAS, cuDNN
    "no available memory for the cache",  # vLLM
    "available kv cache memory",
    "free memory on device",
)
"""Words of torch, of the CUDA libraries and of vLLM, in lower case."""
_FAILED = ("cuda error", "cuda driver error", "nccl error")


def fault(error: BaseException) -> MemoryError | FatalError | None:
    """Returns the translation of an error of torch or vLLM, with a one-line message: MemoryError if
    a card or the machine ran out of memory, FatalError if a card failed and the process must end.
    Returns None for any other error."""
    if not isinstance(error, RuntimeError | ValueError | MemoryError):
        return None
    line = str(error).strip().partition("\n")[0][:300]
    said = str(error).lower()
    short = isinstance(error, MemoryError | torch.OutOfMemoryError)
    if short or any(sign in said for sign in _SHORT):
        return MemoryError(line)
    if any(sign in said for sign in _FAILED):
        return FatalError(f"a card failed while the engine used it: {line}")
    return None


def naming_faults(call: Callable[P, T]) -> Callable[P, T]:
    """Decorates an engine's function so that it raises the error that `fault` returns. Before it
    raises MemoryError, it releases the memory that the failed call had allocated."""

    @functools.wraps(call)
    def named(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except (RuntimeError, MemoryError) as error:
            found = fault(error)
            if found is None:
                raise
        # Outside of the handler: `error`, and the tensors that its frames hold, are gone.
        if isinstance(found, MemoryError) and torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        raise found

    return named
