"""Objectives by name: built-in ones, and plugins under the entry point below."""

from __future__ import annotations

from importlib.metadata import entry_points

from prime_core.errors import UserError
from prime_trainer.objectives.base import Objective
from prime_trainer.objectives.built_in import REGISTRY as REGISTRY

ENTRY_POINT_GROUP = "prime_open.objectives"
"""A plugin names its Objective here, e.g. `mine = "my_package:OBJECTIVE"`."""


def objective_of(name: str) -> Objective:
    """The objective called `name`. Raises UserError if it is not registered."""
    if name in REGISTRY:
        return REGISTRY[name]
    plugins = entry_points(group=ENTRY_POINT_GROUP)
    if name in plugins.names:
        loaded = plugins[name].load()
        if not isinstance(loaded, Objective):
            raise UserError(f"the plugin registered as the objective {name!r} is not an Objective")
        return loaded
    known = sorted({*REGISTRY, *plugins.names})
    raise UserError(
        f"the objective is {name!r}, which this trainer does not know",
        hint=f"known are {', '.join(known)}; install its plugin, or bring the trainer up to date",
    )
