"""The registry of objectives. To add one, add a file here and a line below."""

from __future__ import annotations

from prime_core.errors import UserError
from prime_trainer.objectives import dr_grpo, grpo, grpo_token_mean, one_sided
from prime_trainer.objectives.base import Form

REGISTRY: dict[str, Form] = {
    "grpo": grpo.FORM,
    "grpo_token_mean": grpo_token_mean.FORM,
    "dr_grpo": dr_grpo.FORM,
    "one_sided": one_sided.FORM,
}


def form_of(name: str) -> Form:
    """The objective called `name`. Raises UserError if it is not registered."""
    if name not in REGISTRY:
        raise UserError(
            f"the objective is {name!r}, which this trainer does not know",
            hint=f"known are {', '.join(sorted(REGISTRY))}; bring the trainer up to date",
        )
    return REGISTRY[name]
