"""Memory that a process no longer uses."""

from __future__ import annotations

import ctypes
import gc

_DEFAULT = gc.get_threshold()


def collect_rarely(objects: int = 10_000) -> None:
    """Lets Python's garbage collector run after `objects` new objects, less freed ones, instead of
    700. A program calls it before its imports: what they make is never garbage, and looking at it
    takes a tenth of a program's start, a sixth where it loads torch and transformers."""
    gc.set_threshold(objects, 20, 50)


def collect_as_usual() -> None:
    """Restores Python's own thresholds. A program calls it before it computes with large tensors,
    of which a cycle of objects may hold some."""
    gc.set_threshold(*_DEFAULT)


def release() -> None:
    """Returns freed blocks of the heap to the system. glibc keeps those of up to 32 MiB, in each
    thread's own arena, where other threads cannot use them: 0.9 GB between two steps of a trainer
    of 135M parameters. Does nothing with another C library."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
