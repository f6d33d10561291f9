"""Extracts the answer from a model's text: exactly one, or none, so that hedging does not pay."""

from __future__ import annotations

import json
import re
from typing import Any

from prime_core.errors import MalformedError
from prime_envs.tasks import load_json

MAX_JSON = 1 << 16
_BOX = re.compile(r"\\(?:boxed|fbox)\s*")


def final_section(text: str) -> str:
    """The text after the thinking: after the last `</think>`; nothing if thinking was opened and
    never closed; everything if there are no such tags."""
    _, closed, tail = text.rpartition("</think>")
    if closed:
        return "" if "<think>" in tail else tail
    return "" if "<think>" in text else text


def boxed(text: str) -> list[str]:
    r"""The contents of every outermost \boxed{…} and \fbox{…}, in order. An unclosed one counts as
    empty, so that it cannot hide a second answer."""
    found = []
    position = 0
    while (match := _BOX.search(text, position)) is not None:
        start = match.end()
        if text[start : start + 1] != "{":
            found.append("")
            position = start
            continue
        depth, end = 0, start
        for end in range(start, len(text)):
            depth += (text[end] == "{") - (text[end] == "}")
            if depth == 0:
                break
        found.append(text[start + 1 : end] if depth == 0 else "")
        position = end + 1
    return found


def python_code(text: str) -> str | None:
    """The last fenced block that is marked as Python or unmarked; None if there is none. Unclosed
    blocks do not count."""
    found: str | None = None
    block: list[str] | None = None
    language = ""
    for line in text.splitlines():
        mark = line.strip()
        if block is None and mark.startswith("```"):
            block, language = [], mark[3:].strip().lower()
        elif block is not None and mark == "```":
            if language in ("", "python", "python3", "py"):
                found = "\n".join(block) + "\n"
            block = None
        elif block is not None:
            block.append(line)
    return found


def last_json_object(text: str) -> dict[str, Any] | None:
    """The single JSON object at the end of the text, fenced or not; prose may precede it.

    None if there is none, or if another object precedes it (two answers count as none).
    """
    body = text.strip()
    if body.endswith("```"):
        body = body[:-3].rstrip()
    if not body.endswith("}") or len(body) > MAX_JSON:
        body = body[-MAX_JSON:]
        if not body.endswith("}"):
            return None
    decoder = json.JSONDecoder()
    found: list[dict[str, Any]] = []
    position = 0
    while (start := body.find("{", position)) >= 0:
        try:
            value, end = decoder.raw_decode(body, start)
        except (ValueError, RecursionError):
            position = start + 1
            continue
        found.append(value)
        position = end
        if end == len(body):
            break
    if len(found) != 1 or position != len(body):
        return None
    try:
        parsed = load_json(json.dumps(found[0]), "the answer")  # rejects NaN, infinities, depth
    except (MalformedError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None
