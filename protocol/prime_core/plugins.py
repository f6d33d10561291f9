"""Loading of plugins by entry point."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

from prime_core.errors import PrimeError, UserError


def loaded(entry: EntryPoint) -> Any:
    """What a plugin's entry point names. Raises UserError if its module cannot be imported or has
    no such name."""
    try:
        return entry.load()
    except (PrimeError, MemoryError):
        raise
    except Exception as error:  # a module may raise anything
        raise UserError(
            f"the plugin {entry.name!r} ({entry.value}) cannot be loaded: {error!r}",
            hint="correct or uninstall the package that provides it",
        ) from error
