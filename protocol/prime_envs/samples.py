"""Displays a sample in readable form: prompt, thinking and answer, with its reward; or as messages
in OpenAI's format."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import typer

from prime_core.printing import printable
from prime_core.run import RunDefinition
from prime_envs.base import texts_of
from prime_envs.chat import END_OF_THOUGHT, THINK, messages_of, prompt_of, reply_around
from prime_envs.tools import first_call

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
    """The sample's text and how it ended, which is not known of an `ungraded` row. Untrusted text
    is escaped, so it cannot control the terminal."""
    shown = "".join(
        style(printable(text, keep="\n\t"), kind) for kind, text in spans(prompt, turns)
    )
    ended = "" if finish == "ungraded" else f", ended by {finish}"
    return f"{shown}\n{tokens} tokens{ended}"


def openai_messages(
    run: RunDefinition,
    tokenizer: Any,
    target_length: int,
    prompt_tokens: Sequence[int],
    output_tokens: Sequence[int],
    spans: Sequence[int],
) -> list[dict[str, Any]]:
    """A row as messages in OpenAI's format: what was asked, the model's turns with the calls that
    the run reads in them, and the replies, to a call by "tool", else by "user".

    The text of a turn also contains its call as the model wrote it. Without a chat template, and
    where a prompt is not the template's, it is one message. Raises the same errors as
    chat.prompt_of.
    """
    found = _asked(run, tokenizer, target_length, prompt_tokens)
    turns, at, call_id = texts_of(tokenizer, output_tokens, spans), 0, ""
    for number, text in enumerate(turns):
        end = at + (spans or (len(output_tokens),))[number]
        if number % 2 == 0:
            message: dict[str, Any] = {"role": "assistant", "content": text}
            call = None if run.conversation is None else first_call(text, run.conversation)
            call_id = "" if call is None or call.problem else f"call_{number // 2}"
            if call is not None and call_id:
                arguments = json.dumps(dict(call.arguments))
                function = {"name": call.tool, "arguments": arguments}
                message["tool_calls"] = [{"id": call_id, "type": "function", "function": function}]
        else:
            said = _decoded(tokenizer, output_tokens[at:end])
            if run.chat is not None and run.conversation is not None:
                ended_by = _decoded(tokenizer, output_tokens[at - 1 : at])
                frame = reply_around(run.chat, run.conversation.role, ended_by, tokenizer)
                said = said.removeprefix(frame[0]).removesuffix(frame[1])
            message = {"role": "tool" if call_id else "user", "content": said}
            if call_id:
                message["tool_call_id"] = call_id
        found.append(message)
        at = end
    return found


_QUESTION = "the-question-of-the-row"


def _asked(
    run: RunDefinition, tokenizer: Any, target_length: int, prompt_tokens: Sequence[int]
) -> list[dict[str, Any]]:
    prompt = _decoded(tokenizer, prompt_tokens)
    if run.chat is not None:
        whole = prompt_of(run.chat, _QUESTION, target_length, tokenizer)
        before, _, after = whole.partition(_QUESTION)
        if prompt.startswith(before) and prompt.endswith(after):
            question = prompt[len(before) : len(prompt) - len(after)]
            return [dict(one) for one in messages_of(run.chat, question, target_length)]
    return [{"role": "user", "content": prompt}]


def _decoded(tokenizer: Any, tokens: Sequence[int]) -> str:
    text: str = tokenizer.decode(
        list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return text


def reward_text(reward: float | None, parts: Mapping[str, int], reason: str) -> str:
    """`reward 1.000 (task_micro 1000000, length 8; right)`, or `ungraded` for None."""
    named = ", ".join(f"{name} {value}" for name, value in parts.items())
    within = printable("; ".join(filter(None, (named, reason))))
    said = "ungraded" if reward is None else f"reward {reward:.3f}"
    return said + (f" ({within})" if within else "")
