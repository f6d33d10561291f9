"""Tools that a model may call in a conversation, and the parsing of its calls.

A tool is a pure function of the row's calls so far and of what the run pins, so that a validator
can rerun it. The limits of an exact tool are counts of characters, operations and bits, never time.
Names carry a version; a change that can affect an answer gets a new version, and the old one stays.
Model text is quoted in ASCII, because which characters Python considers printable depends on its
version.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, TypeVar

from prime_core.errors import UserError
from prime_core.gateway import MAX_ARGUMENTS
from prime_core.run import Conversation
from prime_envs.search import SearchIndex, load_index

Arguments = Mapping[str, str]


@dataclass(frozen=True)
class Observation:
    """The environment's message after a turn.

    `exact`: every machine gets the same message, so a file with another one is rejected; if False,
    such a file is only not paid. `limit`: "reached" if a call ended by its limit, which ends the
    row as `tool_limit`; "near" if it may do so on a slower machine, which is also accepted.
    """

    text: str
    exact: bool = True
    limit: Literal["", "near", "reached"] = ""
    call: ToolCall | None = None
    """A call that only the pool's gateway can answer; `text` is then what is said without one."""


TOOL_ERROR = "error: "
"""Part of every answer to a call that failed."""
TOOL_ERRORS = (TOOL_ERROR, "Error executing tool ")
"""The same of all tools: those of verifiers tasksets answer as an MCP server does."""
Tool = Callable[[Sequence[Arguments]], Observation]
"""Arguments of the row's calls of this tool so far → the message after the last call."""

T = TypeVar("T")
MAX_ARGUMENT = 8192
"""Maximum characters of a call's arguments."""
MAX_BITS = 4096
"""Maximum bits of a number's numerator or denominator."""
MAX_DIGITS = 4300
"""Maximum digits before or after a number's point: Python reads no more (ValueError)."""
MAX_DEPTH = 64
MAX_NOTES = 64
MAX_FILES = 32
MAX_FILE_BYTES = 16_384
MAX_FILES_BYTES = 65_536
"""Maximum bytes of a row's files together."""
_FILE_CALL = re.compile(r"[ \t\n]*([^ \t\n]*)[ \t\n]*([^ \t\n]*)[ \t\n]?(.*)", re.DOTALL)
"""Action, name and text."""
_FILE_NAME = re.compile(r"[A-Za-z0-9._/-]{1,64}")
_FENCE = re.compile(r"```[a-zA-Z0-9]{0,16}[ ]*\n(.*?)```", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """One call. If it is invalid, `problem` says why, and nothing is run."""

    tool: str
    arguments: Mapping[str, str]
    problem: str = ""


def first_call(text: str, conversation: Conversation) -> ToolCall | None:
    """The first call in a model turn, or None. Text after it is ignored."""
    if conversation.calls == "hermes-1":
        return _hermes_call(text)
    if conversation.calls == "fence-1":
        return _fenced_call(text, tool_word(conversation.tools[0])) if conversation.tools else None
    return _tagged_call(text, [tool_word(name) for name in conversation.tools])


def hidden_mark(conversation: Conversation, special: Iterable[str]) -> str | None:
    """Returns the special token that a call of the run is written with; None if there is none.

    `special` are a tokenizer's special tokens. The text of a turn is decoded without them, so such
    a call would not be seen.
    """
    if conversation.calls == "hermes-1":
        marks = ["<tool_call>", "</tool_call>"]
    elif conversation.calls == "fence-1":
        marks = ["```"] if conversation.tools else []
    else:
        words = [tool_word(name) for name in conversation.tools]
        marks = [mark for word in words for mark in (f"<{word}>", f"</{word}>")]
    for one in filter(None, special):
        if any(one in mark or mark in one for mark in marks):
            return one
    return None


def hidden_calls(mark: str, conversation: Conversation) -> str:
    """What is wrong with a tokenizer for which `hidden_mark` returned `mark`."""
    return (
        f"its tokenizer marks {mark!r} as a special token, and calls of the kind "
        f"{conversation.calls} are read from text without special tokens, so none would be seen"
    )


def answer(
    turns: Sequence[str], conversation: Conversation, index: SearchIndex | None
) -> Observation | None:
    """The tools' answer to the last of the model's turns; None if it contains no call. `index` is
    what `load_tools` returned."""
    calls = [first_call(turn, conversation) for turn in turns]
    if calls[-1] is None:
        return None
    names = {tool_word(name): name for name in conversation.tools}
    last = calls[-1]
    problem = _problem(last, names)
    if problem:
        return Observation(TOOL_ERROR + problem)
    if conversation.gateway is not None and names[last.tool] in conversation.gateway.tools:
        return _for_gateway(ToolCall(names[last.tool], last.arguments))
    same = [
        call.arguments
        for call in calls
        if call is not None and call.tool == last.tool and not _problem(call, names)
    ]
    if names[last.tool] == SEARCH:
        assert index is not None
        query = last.arguments.get("query", last.arguments.get("input", ""))
        return Observation(index.search(query))
    return TOOLS[names[last.tool]](same)


def cut(text: str, conversation: Conversation) -> str:
    """An environment message truncated to the run's limit."""
    return text.encode("utf-8", "replace")[: conversation.observation_bytes].decode(
        "utf-8", "ignore"
    )


def _for_gateway(call: ToolCall) -> Observation:
    arguments = [*call.arguments, *call.arguments.values()]
    if sum(map(len, arguments)) > MAX_ARGUMENTS or len(call.arguments) > 16:
        return Observation(f"{TOOL_ERROR}a call has at most {MAX_ARGUMENTS} characters")
    if any("\ud800" <= letter <= "\udfff" for text in arguments for letter in text):
        return Observation(f"{TOOL_ERROR}a call has letters that are no text")
    return Observation(f"{TOOL_ERROR}no gateway is asked here", call=call)


def load_tools(conversation: Conversation) -> SearchIndex | None:
    """Loads what the run's tools need: the index of the corpus for search-1.

    Raises UserError for an unknown tool, a tool in two versions, or a corpus that is missing or
    not used, and the errors of search.load_index.
    """
    remote = () if conversation.gateway is None else conversation.gateway.tools
    known = sorted({*TOOLS, SEARCH, *remote})
    for name in remote:
        if name not in conversation.tools or name in {*TOOLS, SEARCH} or not tool_word(name):
            raise UserError(
                f"conversation.gateway.tools names {name!r}, which must be one of "
                "conversation.tools, have a version, and be no built-in tool",
                hint='tools = ["fetch-1"]',
            )
    unknown = [name for name in conversation.tools if name not in known]
    if unknown:
        raise UserError(
            f"there is no tool {unknown[0]!r}; known are {', '.join(known)}",
            hint="tools of the pool's gateway stand in [conversation.gateway], too",
        )
    if "python-1" in conversation.tools:
        from prime_envs.python_tool import require_monty

        require_monty()
    if "python-2" in conversation.tools:
        from prime_envs.python_wasm import require_python

        require_python()
    words = [tool_word(name) for name in conversation.tools]
    if len(set(words)) < len(words):
        raise UserError("conversation.tools names one tool in two versions")
    if (SEARCH in conversation.tools) != (conversation.corpus is not None):
        raise UserError(
            f"the tool {SEARCH} and conversation.corpus go together; one of them is missing",
            hint='corpus = { sha256 = "0x…", url = "https://…/corpus.jsonl" }',
        )
    return None if conversation.corpus is None else load_index(conversation.corpus)


def tool_word(name: str) -> str:
    """The tool name that the model writes, without the version."""
    return name.rpartition("-")[0]


def _problem(call: ToolCall, names: Mapping[str, str]) -> str:
    if call.problem:
        return call.problem
    if call.tool not in names:
        return f"there is no tool {call.tool[:64]!a}"
    if sum(map(len, call.arguments.values())) > MAX_ARGUMENT:
        return f"a call has at most {MAX_ARGUMENT} characters"
    return ""


def _tagged_call(text: str, words: Sequence[str]) -> ToolCall | None:
    if not words:
        return None
    opening = re.search("<(" + "|".join(map(re.escape, words)) + ")>", text)
    if opening is None:
        return None
    word = opening[1]
    argument, closing, _ = text[opening.end() :].partition(f"</{word}>")
    if not closing:
        return ToolCall(word, {}, f"the call has no </{word}>")
    return ToolCall(word, {"input": argument.strip()})


def _fenced_call(text: str, word: str) -> ToolCall | None:
    found = _FENCE.search(text)
    return None if found is None else ToolCall(word, {"input": found[1].strip()})


def _hermes_call(text: str) -> ToolCall | None:
    _, opening, rest = text.partition("<tool_call>")
    if not opening:
        return None
    body, closing, _ = rest.partition("</tool_call>")
    if not closing:
        return ToolCall("", {}, "the call has no </tool_call>")
    if len(body) > 2 * MAX_ARGUMENT:
        return ToolCall("", {}, f"a call has at most {MAX_ARGUMENT} characters")
    wrong = 'a call is {"name": …, "arguments": {…}} with texts or whole numbers as arguments'
    try:
        value = json.loads(body, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return ToolCall("", {}, wrong)
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return ToolCall("", {}, wrong)
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict) or not all(isinstance(v, str) for v in arguments.values()):
        return ToolCall("", {}, wrong)
    return ToolCall(value["name"], arguments)


class _ToolError(Exception):
    """An error made by the model, worded for the model."""


# ── calculator ───────────────────────────────────────────────────────────────────────────────────


_TOKEN = re.compile(r"\s*(?:([0-9]+(?:\.[0-9]+)?)|(\*\*|//|[-+*/%^()]))")


def calculator(calls: Sequence[Arguments]) -> Observation:
    """Exact arithmetic on integers and decimals: + - * / // % ** (or ^) and parentheses.

    Arguments: `input` or `expression`. The answer is an integer, or a decimal with at most 10
    digits after the point, rounded half to even.
    """
    text = calls[-1].get("expression", calls[-1].get("input", ""))
    try:
        return Observation(_shown(_Parser(_tokens(text)).whole()))
    except _ToolError as error:
        return Observation(f"{TOOL_ERROR}{error}")


def _tokens(text: str) -> list[str]:
    tokens: list[str] = []
    at = 0
    text = text.strip().replace("×", "*").replace("÷", "/").replace("−", "-")
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise _ToolError(f"{text[at:].strip()[:1]!a} is not arithmetic")
        tokens.append(found[1] or found[2])
        at = found.end()
    if not tokens:
        raise _ToolError("there is nothing to calculate")
    return tokens


class _Parser:
    """Recursive-descent parser for expression tokens, with Python's precedence."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._tokens = tokens
        self._at = 0
        self._depth = 0

    def whole(self) -> Fraction:
        value = self._sum()
        if self._at < len(self._tokens):
            raise _ToolError(f"{self._tokens[self._at]!r} is not expected there")
        return value

    def _next(self, *wanted: str) -> str | None:
        if self._at < len(self._tokens) and self._tokens[self._at] in wanted:
            self._at += 1
            return self._tokens[self._at - 1]
        return None

    def _sum(self) -> Fraction:
        value = self._product()
        while operator := self._next("+", "-"):
            other = self._product()
            value = _bounded(value + other if operator == "+" else value - other)
        return value

    def _product(self) -> Fraction:
        value = self._signed()
        while operator := self._next("*", "/", "//", "%"):
            other = self._signed()
            if operator == "*":
                value = _bounded(value * other)
                continue
            if other == 0:
                raise _ToolError("division by zero")
            if operator == "/":
                value = _bounded(value / other)
            else:
                value = _bounded(Fraction(value // other) if operator == "//" else value % other)
        return value

    def _signed(self) -> Fraction:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _ToolError("the expression is nested too deeply")
        if self._next("-"):
            value = -self._signed()
        elif self._next("+"):
            value = self._signed()
        else:
            value = self._power()
        self._depth -= 1
        return value

    def _power(self) -> Fraction:
        base = self._atom()
        if self._next("**", "^") is None:
            return base
        exponent = self._signed()
        if exponent.denominator != 1:
            raise _ToolError("an exponent must be a whole number")
        if base == 0 and exponent < 0:
            raise _ToolError("division by zero")
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if bits > 1 and abs(exponent) * (bits - 1) > MAX_BITS:
            raise _ToolError("the number is too large")
        return _bounded(base ** int(exponent % 2 if abs(base) == 1 else exponent))

    def _atom(self) -> Fraction:
        if self._next("("):
            value = self._sum()
            if self._next(")") is None:
                raise _ToolError("a parenthesis is not closed")
            return value
        if self._at < len(self._tokens) and self._tokens[self._at][0].isdigit():
            self._at += 1
            number = self._tokens[self._at - 1]
            if max(map(len, number.split("."))) > MAX_DIGITS:
                raise _ToolError("the number is too large")
            return _bounded(Fraction(number))
        raise _ToolError("a number is missing")


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise _ToolError("the number is too large")
    return value


def _shown(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    scaled = round(value * 10**10)
    whole, digits = divmod(abs(scaled), 10**10)
    shown = f"{whole}.{digits:010d}".rstrip("0").rstrip(".")
    return f"-{shown}" if scaled < 0 else shown


# ── notes ────────────────────────────────────────────────────────────────────────────────────────


def _replayed(
    call: Callable[[dict[str, T], Arguments], str], calls: Sequence[Arguments]
) -> Observation:
    """Makes every call of the row again, on a state that starts empty; returns the last answer."""
    kept: dict[str, T] = {}
    said = ""
    for arguments in calls:
        try:
            said = call(kept, arguments)
        except _ToolError as error:
            said = f"{TOOL_ERROR}{error}"
    return Observation(said)


def notes(calls: Sequence[Arguments]) -> Observation:
    """A scratchpad of named texts: `set NAME TEXT`, `get NAME`, `list`.

    Arguments: `input`, or `action` ("set", "get", "list") with `name` and `text`.
    """
    return _replayed(_note, calls)


def _note(kept: dict[str, str], arguments: Arguments) -> str:
    words = arguments.get("input", "").split(maxsplit=2)
    words += [""] * (3 - len(words))
    action, name, text = (
        arguments.get(key, word)
        for key, word in zip(("action", "name", "text"), words, strict=True)
    )
    if action == "list":
        return ", ".join(sorted(kept)) or "there are no notes"
    if action == "get":
        if name not in kept:
            raise _ToolError(f"there is no note {name[:64]!a}")
        return kept[name]
    if action != "set" or not name:
        raise _ToolError("the actions are: set NAME TEXT, get NAME, list")
    if name not in kept and len(kept) >= MAX_NOTES:
        raise _ToolError(f"there are {MAX_NOTES} notes already")
    kept[name] = text
    return "noted"


# ── files ────────────────────────────────────────────────────────────────────────────────────────


def files(calls: Sequence[Arguments]) -> Observation:
    """Text files that exist within the row: `write NAME TEXT`, `append NAME TEXT`, `read NAME`,
    `list`, `delete NAME`.

    Arguments: `input`, or `action` with `name` and `text`. In `input`, one space, tab or line break
    separates name and text; the text is kept as it is. Sizes are in bytes of UTF-8. A call that
    fails changes nothing.
    """
    return _replayed(_file, calls)


def _file(kept: dict[str, bytes], arguments: Arguments) -> str:
    words = _FILE_CALL.fullmatch(arguments.get("input", ""))
    assert words is not None
    action, name, text = (
        arguments.get(key, word)
        for key, word in zip(("action", "name", "text"), words.groups(), strict=True)
    )
    if action == "list":
        shown = [f"{one} ({len(content)} bytes)" for one, content in sorted(kept.items())]
        return "\n".join(shown) or "there are no files"
    if action not in ("write", "append", "read", "delete"):
        raise _ToolError(
            "the actions are: write NAME TEXT, append NAME TEXT, read NAME, list, delete NAME"
        )
    if not _FILE_NAME.fullmatch(name):
        raise _ToolError("a file's name has 1 to 64 of these characters: A-Z a-z 0-9 . _ / -")
    if action in ("write", "append"):
        before = kept.get(name, b"") if action == "append" else b""
        _store(kept, name, before + text.encode("utf-8", "surrogatepass"))
        return f"{name} has {len(kept[name])} bytes"
    if name not in kept:
        raise _ToolError(f"there is no file {name}")
    if action == "read":
        return kept[name].decode("utf-8", "surrogatepass")
    del kept[name]
    return "deleted"


def _store(kept: dict[str, bytes], name: str, content: bytes) -> None:
    if len(content) > MAX_FILE_BYTES:
        raise _ToolError(f"a file has at most {MAX_FILE_BYTES} bytes")
    if name not in kept and len(kept) >= MAX_FILES:
        raise _ToolError(f"there are {MAX_FILES} files already")
    others = sum(len(kept[one]) for one in kept if one != name)
    if others + len(content) > MAX_FILES_BYTES:
        raise _ToolError(f"all files together have at most {MAX_FILES_BYTES} bytes")
    kept[name] = content


def python(calls: Sequence[Arguments]) -> Observation:
    """See prime_envs.python_tool."""
    from prime_envs.python_tool import run

    return run(calls)


def cpython(calls: Sequence[Arguments]) -> Observation:
    """See prime_envs.python_wasm."""
    from prime_envs.python_wasm import run

    return run(calls)


def close() -> None:
    """Ends processes that tools started. The next call starts them again."""
    if "prime_envs.python_wasm" in sys.modules:
        from prime_envs import python_wasm

        python_wasm.close()


TOOLS: dict[str, Tool] = {
    "calculator-1": calculator, "notes-1": notes, "files-1": files, "python-1": python,
    "python-2": cpython,
}  # fmt: skip
SEARCH = "search-1"
"""The tool that needs more than the row's calls: the run's corpus."""
