"""The registry of objectives, and plugins under the entry point below."""

from __future__ import annotations

from importlib.metadata import entry_points

from prime_core.errors import UserError
from prime_trainer.objectives import cispo, dr_grpo, grpo, grpo_token_mean, gspo, one_sided
from prime_trainer.objectives.base import Form

REGISTRY: dict[str, Form] = {
    "grpo": grpo.FORM,
    "grpo_token_mean": grpo_token_mean.FORM,
    "dr_grpo": dr_grpo.FORM,
    "gspo": gspo.FORM,
    "cispo": cispo.FORM,
    "one_sided": one_sided.FORM,
}
ENTRY_POINT_GROUP = "prime_open.objectives"
"""A plugin names its Form here, e.g. `mine = "my_package:FORM"`."""


def form_of(name: str) -> Form:
    """The objective called `name`. Raises UserError if it is not registered."""
    if name in REGISTRY:
        return REGISTRY[name]
    plugins = entry_points(group=ENTRY_POINT_GROUP)
    if name in plugins.names:
        loaded = plugins[name].load()
        if not isinstance(loaded, Form):
            raise UserError(f"the plugin registered as the objective {name!r} is not a Form")
        return loaded
    known = sorted({*REGISTRY, *plugins.names})
    raise UserError(
        f"the objective is {name!r}, which this trainer does not know",
        hint=f"known are {', '.join(known)}; install its plugin, or bring the trainer up to date",
    )
