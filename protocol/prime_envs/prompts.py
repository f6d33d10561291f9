"""The wording of a length budget in prompts, defined only here."""

from __future__ import annotations

from prime_core.run import BUDGET_WORDING


def think_for(target_length: int) -> str:
    """The sentence that asks for `target_length` tokens of thought (INTELLECT-2's wording)."""
    return BUDGET_WORDING.replace("{tokens}", str(target_length))


def with_budget(prompt: str, target_length: int) -> str:
    """A task's prompt followed by its length budget."""
    return f"{prompt}\n\n{think_for(target_length)}"
