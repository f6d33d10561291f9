"""Extracts the answer from a model's text: exactly one, or none, so that hedging does not pay."""

from __future__ import annotations

import json
import re
import sys
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


_DECODER = json.JSONDecoder()
_TOO_LONG = f"(?<![0-9.eE+-])-?[0-9]{{{sys.get_int_max_str_digits() + 1},}}(?![0-9.eE])"
_TOKEN = re.compile(rf'"(?:[^"\\]|\\.)*"?|[{{}}\[\]]|{_TOO_LONG}', re.DOTALL)
"""A string (perhaps without its end), a bracket, or an integer too long to be read."""


def _failing(text: str, start: int, error: Exception) -> set[int]:
    """Returns where the objects begin that fail for the same reason as the one at `start`, which
    raised `error`: they contain the place of the error, or are nested as deeply. Skipping them
    avoids reading up to that place once for each."""
    end = start + error.pos if isinstance(error, json.JSONDecodeError) else len(text)
    levels = _levels() if isinstance(error, RecursionError) else len(text)
    failing, open_, deep = set(), list[int](), 0
    for token in _TOKEN.finditer(text, start, end):
        if token[0] in "{[":
            open_.append(token.start())
            if len(open_) - deep > levels:
                failing.add(open_[deep])
                deep += 1
        elif token[0] in "}]":
            open_.pop()
            if not open_:
                return failing
            deep = min(deep, len(open_))
        elif token[0][0] != '"':
            break
    return failing.union(open_)


def _levels() -> int:
    """Returns a number of levels that the decoder cannot read with what is left of the stack."""
    low, high = 1, MAX_JSON
    while low < high:
        middle = (low + high) // 2
        try:
            _DECODER.raw_decode("[" * middle)
        except RecursionError:
            high = middle
        except ValueError:
            low = middle + 1
    return low + 2


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
    found: list[dict[str, Any]] = []
    position, failing = 0, set[int]()
    while (start := body.find("{", position)) >= 0:
        if start in failing:
            position = start + 1
            continue
        try:
            value, length = _DECODER.raw_decode(body[start:])  # an error counts the lines before it
        except (ValueError, RecursionError) as error:
            failing |= _failing(body, start, error)
            position = start + 1
            continue
        found.append(value)
        position = start + length
    if len(found) != 1 or position != len(body):
        return None
    try:
        parsed = load_json(json.dumps(found[0]), "the answer")  # rejects NaN, infinities, depth
    except (MalformedError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None
