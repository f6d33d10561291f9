"""The prompt's wording of a length budget: here and nowhere else."""

from __future__ import annotations


def think_for(target_length: int) -> str:
    """The sentence that asks for `target_length` tokens of thought (INTELLECT-2's wording)."""
    return f"Think for {target_length} tokens before giving a response."


def with_budget(prompt: str, target_length: int) -> str:
    """A task's prompt followed by its length budget."""
    return f"{prompt}\n\n{think_for(target_length)}"
