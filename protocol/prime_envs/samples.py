"""Displays a sample in readable form: prompt, thinking and answer, with its reward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import typer

from prime_core.printing import printable
from prime_envs.chat import END_OF_THOUGHT, THINK

SpanKind = Literal["prompt", "thinking", "answer", "environment"]
Style = Callable[[str, SpanKind], str]
"""Colors a text by its kind; the result is printed unchanged."""


def styled(text: str, kind: SpanKind) -> str:
    """A text in its color: prompts dim, thinking cyan, the environment green. `typer.echo` strips
    colors if the output is not a terminal."""
    if kind == "answer":
        return text
    if kind == "prompt":
        return typer.style(text, dim=True)
    return typer.style(text, fg="cyan" if kind == "thinking" else "green")


def spans(prompt: str, turns: Sequence[str]) -> list[tuple[SpanKind, str]]:
    """Splits the sample's text into parts, in order. `turns` are the texts of model and
    environment, alternating, model first."""
    found: list[tuple[SpanKind, str]] = [("prompt", prompt)]
    for number, text in enumerate(turns):
        found += [("environment", text)] if number % 2 else _thinking(found[-1][1], text)
    return found


def _thinking(before: str, output: str) -> list[tuple[SpanKind, str]]:
    """Splits one model turn into parts. Thinking goes from `<think>`, or from the beginning if the
    text `before` ends with it, to the end of `</think>` (or of the turn), including the tags."""
    found: list[tuple[SpanKind, str]] = []
    thinking = before.rstrip().endswith(THINK)
    while output:
        tag = END_OF_THOUGHT if thinking else THINK
        at = output.find(tag)
        cut = len(output) if at < 0 else at + len(tag) if thinking else at
        if cut:
            found.append(("thinking" if thinking else "answer", output[:cut]))
        output, thinking = output[cut:], not thinking
    return found


def sample_text(
    prompt: str, turns: Sequence[str], *, tokens: int, finish: str, style: Style
) -> str:
    """The sample's text and how it ended. Untrusted text is escaped, so it cannot control the
    terminal."""
    shown = "".join(
        style(printable(text, keep="\n\t"), kind) for kind, text in spans(prompt, turns)
    )
    return f"{shown}\n{tokens} tokens, ended by {finish}"


def reward_text(reward: float, parts: Mapping[str, int], reason: str) -> str:
    """`reward 1.000 (task_micro 1000000, length 8; right)`."""
    named = ", ".join(f"{name} {value}" for name, value in parts.items())
    within = printable("; ".join(filter(None, (named, reason))))
    return f"reward {reward:.3f}" + (f" ({within})" if within else "")
