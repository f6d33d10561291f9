"""Objectives by name: built-in ones, and plugins under the entry point below."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from prime_core.errors import UserError
from prime_core.plugins import loaded
from prime_trainer.objectives.base import Objective
from prime_trainer.objectives.built_in import REGISTRY as REGISTRY

if TYPE_CHECKING:  # its settings need pydantic, which may not be installed
    from prime_trainer.config import ObjectiveSettings

ENTRY_POINT_GROUP = "prime_open.objectives"
"""A plugin names its Objective here, e.g. `mine = "my_package:OBJECTIVE"`."""


def with_defaults(settings: ObjectiveSettings) -> ObjectiveSettings:
    """The settings with all parameters of their objective. Raises UserError if the objective is not
    registered or has no such parameter."""
    known = objective_of(settings.name).parameters
    unknown = sorted(set(settings.parameters) - set(known))
    if unknown:
        raise UserError(
            f"the objective {settings.name!r} has no parameter {unknown[0]!r}",
            hint=f"its parameters: {', '.join(sorted(known)) or 'none'}",
        )
    return settings.model_copy(update={"parameters": {**known, **settings.parameters}})


def objective_of(name: str) -> Objective:
    """The objective called `name`. Raises UserError if it is not registered, or is a plugin that
    cannot be loaded."""
    if name in REGISTRY:
        return REGISTRY[name]
    plugins = entry_points(group=ENTRY_POINT_GROUP)
    if name in plugins.names:
        found = loaded(plugins[name])
        if not isinstance(found, Objective):
            raise UserError(f"the plugin registered as the objective {name!r} is not an Objective")
        return found
    known = sorted({*REGISTRY, *plugins.names})
    raise UserError(
        f"the objective is {name!r}, which this trainer does not know",
        hint=f"known are {', '.join(known)}; install its plugin, or bring the trainer up to date",
    )
