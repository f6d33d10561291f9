"""Memory that a process no longer uses."""

from __future__ import annotations

import ctypes


def release() -> None:
    """Returns freed blocks of the heap to the system. glibc keeps those of up to 32 MiB, in each
    thread's own arena, where other threads cannot use them: 0.9 GB between two steps of a trainer
    of 135M parameters. Does nothing with another C library."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
