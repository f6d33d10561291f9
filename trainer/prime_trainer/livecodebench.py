"""Scores programs by LiveCodeBench's rules, in this project's sandbox.

The rules are those of its harness (lcb_runner): which block is the program, how it is run, and what
counts as equal. A program passes if it passes all tests, public and private; testing stops at the
first failure. A problem whose metadata has `func_name` is tested by calls, any other by standard
input and output.

Here each test runs in a process of its own, and its 6 s are processor time. The harness runs all
tests in one process and measures elapsed time.
"""

from __future__ import annotations

import ast
import base64
import binascii
import io
import pickle
import zlib
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from prime_core.errors import MalformedError, UnavailableError
from prime_core.run import MICRO
from prime_envs.base import TaskScore
from prime_envs.graders.code import MAX_SOURCE, MAX_TEST_BYTES, Test, failure_of
from prime_envs.sandbox.client import Program, ProgramLimits, Sandbox
from prime_envs.tasks import load_json

RULES = "1"
"""Incremented with every change that can affect a score."""
MAX_TESTS_BYTES = 512 << 20
"""Unpacked tests of one problem."""
LIMITS = ProgramLimits(
    cpu_seconds=6.0, idle_seconds=6.0, memory_mb=4096, output_bytes=MAX_TEST_BYTES
)
"""Of one test."""
_STARRED = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random",
    "statistics", "itertools", "functools", "operator", "io", "sys", "json", "builtins", "typing",
)  # fmt: skip
PRELUDE = "".join(
    [
        *(f"from {name} import *\n" for name in _STARRED),
        *(f"import {name}\n" for name in _STARRED),
        "sys.setrecursionlimit(50_000)\n",
        "sys.set_int_max_str_digits(50_000)\n",
        "__name__ = 'solution'\n",
    ]
)
"""The names that the harness makes available to every program, and its limits. A program is no main
module there."""
_MAIN = "__name__ == '__main__'"
_WHOLE, _CALL = "whole_program", "call_of_the_test"
_CALLER = """
def {call}(*arguments):
    def described(value):
        if value is None or isinstance(value, bool):
            return value
        for kind in (int, float, str):
            if isinstance(value, kind):
                return kind(value)
        if isinstance(value, list):
            return [described(one) for one in value]
        if isinstance(value, dict):
            return {{"pairs": [[described(key), described(one)] for key, one in value.items()]}}
        return {{"other": type(value).__name__}}

    found = {owner}.{function}(*arguments) if {owned} else {function}(*arguments)
    return described(list(found) if isinstance(found, tuple) else found)
"""
"""Calls a program's function and describes its result in JSON, which has no tuples and only text as
keys."""


class Harness:
    """Runs programs in one sandbox. `close` ends its processes."""

    def __init__(self) -> None:
        self._sandbox = Sandbox()

    def close(self) -> None:
        self._sandbox.close()

    def score(self, tests: Sequence[Test], response: str) -> TaskScore:
        """1 if the response's program passes all tests, else 0. Where the sandbox failed, the
        program counts as `ungraded`."""
        counted = {"tests": len(tests), "passed": 0}
        source = program_in(response)
        if not source.strip():
            return TaskScore(0, "no program between the last two fences", parts=counted)
        if len(source) > MAX_SOURCE:
            return TaskScore(0, f"a program of {len(source)} characters", parts=counted)
        try:
            runnable = _runnable(source, tests[0].function)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return TaskScore(0, f"no program in Python: {type(error).__name__}", parts=counted)
        for number, test in enumerate(tests, start=1):
            program = Program(
                runnable, test.stdin, test.function and _CALL, test.arguments, PRELUDE
            )
            try:
                outcome = self._sandbox.run(program, LIMITS)
            except UnavailableError as error:
                parts = {**counted, "ungraded": 1}
                return TaskScore(0, f"test {number}: {error}", uncertain=True, parts=parts)
            if failure := failure_of(test, outcome, same_output, same_result):
                why = f"test {number} of {len(tests)}: {failure}"
                return TaskScore(0, why, uncertain=outcome.uncertain(LIMITS), parts=counted)
            counted["passed"] = number
        return TaskScore(MICRO, f"all {len(tests)} tests passed", parts=counted)


def program_in(response: str) -> str:
    """The lines between the last two that contain a fence (```), in any language; "" if there are
    fewer than two."""
    lines = response.split("\n")
    fences = [number for number, line in enumerate(lines) if "```" in line]
    return "" if len(fences) < 2 else "\n".join(lines[fences[-2] + 1 : fences[-1]])


def _runnable(source: str, function: str | None) -> str:
    """The source that runs one test. Raises SyntaxError, ValueError, RecursionError or MemoryError
    for a text that is no Python."""
    tree = ast.parse(source)
    if function is not None:
        owned = "class Solution" in source
        owner = "Solution()" if owned else "None"
        return source + _CALLER.format(call=_CALL, owner=owner, owned=owned, function=function)
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.If) and ast.unparse(last.test) == _MAIN:
        tree.body[-1:] = last.body
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    others = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]
    whole = ast.parse(f"def {_WHOLE}(): pass\ntry:\n    {_WHOLE}()\nexcept SystemExit:\n    pass")
    assert isinstance(whole.body[0], ast.FunctionDef)
    whole.body[0].body = others or whole.body[0].body
    whole.body[:0] = imports
    return ast.unparse(whole)


def same_output(found: str, expected: str) -> bool:
    """Whether the texts have equally many lines, without blanks around the text and around each
    line, and each pair of lines is equal as text or number by number."""
    mine, wanted = (
        [line.strip() for line in text.strip().split("\n")] for text in (found, expected)
    )
    return len(mine) == len(wanted) and all(map(_same_line, mine, wanted))


def _same_line(found: str, expected: str) -> bool:
    if found == expected:
        return True
    try:
        return [Decimal(one) for one in found.split()] == [Decimal(one) for one in expected.split()]
    except InvalidOperation:
        return False


def same_result(found: Any, expected: Any) -> bool:
    """Whether a result, as _CALLER describes it, is equal to the expected one as Python compares:
    a tuple inside is no list, 1 equals 1.0 and True, and decimals have no tolerance."""
    if isinstance(expected, list):
        return (
            isinstance(found, list)
            and len(found) == len(expected)
            and all(map(same_result, found, expected))
        )
    if isinstance(expected, dict):
        pairs = found.get("pairs") if isinstance(found, dict) else None
        return (
            isinstance(pairs, list)
            and len(pairs) == len(expected)
            and all(
                isinstance(key, str) and key in expected and same_result(value, expected[key])
                for key, value in pairs
            )
        )
    return not isinstance(found, list | dict) and bool(found == expected)


# --- reading tests -------------------------------------------------------------------------------


def tests_of(row: Mapping[str, Any], where: str) -> list[Test]:
    """All tests of a row: of `public_test_cases`, then of `private_test_cases`. Raises
    MalformedError, which begins with `where`."""
    about = row["metadata"]
    if isinstance(about, str):
        about = load_json(about, f"{where}: metadata") if about.strip() else {}
    function = about.get("func_name") if isinstance(about, dict) else None
    if function is not None and not (isinstance(function, str) and function.isidentifier()):
        raise MalformedError(f"{where}: func_name {str(function)[:80]!r} is not a function's name")
    found = [
        _test(one, function, where)
        for name in ("public_test_cases", "private_test_cases")
        for one in _cases(row[name], f"{where}: {name}")
    ]
    if not found:
        raise MalformedError(f"{where}: there is no test, so every program would pass")
    return found


def _test(value: Any, function: str | None, where: str) -> Test:
    texts = [value.get(name) if isinstance(value, dict) else None for name in ("input", "output")]
    given, expected = texts
    if not isinstance(given, str) or not isinstance(expected, str):
        raise MalformedError(f"{where}: a test has no text as input and output")
    if len(given) + len(expected) > MAX_TEST_BYTES:
        raise MalformedError(f"{where}: a test of more than {MAX_TEST_BYTES >> 20} MiB")
    kind = value.get("testtype", "stdin")
    if kind not in ("stdin", "functional"):
        raise MalformedError(f"{where}: a test of type {str(kind)[:40]!r}")
    if function is None:
        if kind == "functional":
            raise MalformedError(f"{where}: a test is a call, and metadata has no func_name")
        return Test(given, expected)
    what = f"{where}: a test's"
    lines = [line for line in given.split("\n") if line.strip()]
    arguments = tuple(load_json(line, f"{what} argument") for line in lines)
    return Test("", load_json(expected, f"{what} output"), function, arguments)


def _cases(value: Any, where: str) -> list[Any]:
    """A list of tests, its JSON text, or that text in the dataset's packing. Raises
    MalformedError."""
    if isinstance(value, str) and value.strip():
        plain = value.lstrip().startswith(("[", "{"))
        value = load_json(value if plain else _unpacked(value, where), where)
    if value in (None, ""):
        return []
    if not isinstance(value, list):
        raise MalformedError(f"{where} is not a list of tests")
    return value


class _TextOnly(pickle.Unpickler):
    """Unpickles plain values: classes and functions, which can run code, are refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _unpacked(text: str, where: str) -> str:
    """The JSON text in the dataset's packing: base64, zlib, pickle. Raises MalformedError."""
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b64decode(text, validate=True), MAX_TESTS_BYTES)
        if not unpacker.eof:
            raise MalformedError(f"{where} is cut off, or unpacks to more than 512 MiB")
        found = _TextOnly(io.BytesIO(data)).load()
    except MalformedError:
        raise
    except (binascii.Error, zlib.error, pickle.UnpicklingError, EOFError, ValueError) as error:
        raise MalformedError(f"{where} cannot be unpacked: {error}") from error
    except Exception as error:  # a broken pickle may raise anything
        raise MalformedError(f"{where} cannot be unpacked: {type(error).__name__}") from error
    if not isinstance(found, str):
        raise MalformedError(f"{where} unpacks to no text")
    return found
