"""Grades Python programs with unit tests: standard input and output, or function calls.

Each test is one program run in the sandbox. The expected answer never enters the sandbox, so there
is nothing to read, patch or compare with; the output is compared here as plain text or plain JSON.
The score is 1 if all tests pass, else 0; testing stops at the first failure.

Three test formats are read: SYNTHETIC-1's `test_cases` (a list of {type, input, output, fn_name}),
INTELLECT-2's `test_cases` (JSON text of {inputs, outputs, fn_name}), and the latter's fields
directly in verification_info.
"""

from __future__ import annotations

import ast
import builtins
import json
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from prime_core.errors import MalformedError, UnavailableError
from prime_core.run import MICRO
from prime_envs.base import TaskScore
from prime_envs.graders.answers import final_section, python_code
from prime_envs.graders.base import Grader
from prime_envs.sandbox.client import Program, ProgramLimits, ProgramOutcome, Sandbox
from prime_envs.tasks import Task, load_json

MAX_TESTS = 32
"""More tests are thinned out evenly, keeping the first and the last."""
MAX_SOURCE = 1 << 16
MAX_TEST_BYTES = 8 << 20
PRELUDE = "from typing import *\n"
"""Datasets with functions expect the harness to provide these imports (`List[int]` in a
signature)."""
ENDINGS = {
    "cpu": "ran out of processor time",
    "wall": "ran out of time",
    "idle": "waited too long",
    "output": "wrote without end",
    "threads": "started too many threads",
}
"""What ended a program, by the sandbox's status."""
_UNSTEADY_MODULES = frozenset({
    "time", "timeit", "threading", "queue", "gc", "os", "signal", "inspect", "weakref", "resource",
    "traceback", "warnings",
})  # fmt: skip
_UNSTEADY_NAMES = frozenset({
    "id", "hash", "object", "eval", "exec", "compile", "globals", "locals", "vars", "dir",
    "__import__", "getattr", "repr", "memoryview", "Random", "SystemRandom", "urandom", "seed",
    "now", "today", "utcnow", "monotonic", "perf_counter",
})  # fmt: skip
_DEFINITION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_NONE_BY_ADDRESS = sys.version_info < (3, 12)
"""Whether None's place in a set depends on its address."""
_CALLABLE = frozenset(name for name, value in vars(builtins).items() if callable(value))
_TAKE_FUNCTIONS = frozenset({
    "accumulate", "cmp_to_key", "defaultdict", "filter", "groupby", "isinstance", "issubclass",
    "iter", "map", "partial", "reduce", "starmap",
})  # fmt: skip
"""Functions that call their arguments, or compare with them."""


@dataclass(frozen=True)
class Test:
    """One test: a program's standard input and output, or a function's arguments and result."""

    stdin: str = ""
    expected: Any = ""
    function: str | None = None
    arguments: tuple[Any, ...] = ()


class PythonCode(Grader):
    """See the module's docstring. The sandbox defines the isolation level (sandbox/client.py)."""

    version = 1

    def __init__(
        self,
        sandbox: Sandbox | None = None,
        limits: ProgramLimits | None = None,
    ) -> None:
        self._sandbox = sandbox or Sandbox()
        self._limits = limits or ProgramLimits()

    def close(self) -> None:
        self._sandbox.close()

    def pins(self) -> dict[str, str]:
        return {"python": ".".join(platform.python_version_tuple()[:2])}

    def require(self, task: Task) -> None:
        unit_tests(task)

    def gold(self, task: Task) -> str | None:
        solution = task.gold_standard_solution
        if solution is None or "```" in solution:
            return solution
        return f"```python\n{solution}\n```"

    def grade(self, task: Task, output_text: str) -> TaskScore:
        tests = unit_tests(task)
        counted = {"tests": len(tests), "passed": 0}
        source = python_code(final_section(output_text))
        if source is None:
            return TaskScore(0, "no fenced block of Python after the thinking", parts=counted)
        if len(source) > MAX_SOURCE:
            return TaskScore(0, f"a program of {len(source)} characters", parts=counted)
        nulls = any("null" in json.dumps(test.arguments) for test in tests)
        unsteady = may_vary(source, nulls=nulls)
        slow = False
        for number, test in enumerate(tests, start=1):
            try:
                outcome = self._run(source, test)
            except UnavailableError as error:
                return TaskScore(0, f"test {number}: {error}", uncertain=True, parts=counted)
            slow = slow or outcome.uncertain(self._limits)
            failure = failure_of(test, outcome, same_output, same_value)
            if failure:
                return TaskScore(
                    0, f"test {number} of {len(tests)}: {failure}",
                    uncertain=slow or unsteady, parts=counted,
                )  # fmt: skip
            counted = {**counted, "passed": number}
        return TaskScore(
            MICRO, f"all {len(tests)} tests passed", uncertain=slow or unsteady, parts=counted
        )

    def _run(self, source: str, test: Test) -> ProgramOutcome:
        program = Program(
            source=source,
            stdin=test.stdin,
            function=test.function,
            arguments=test.arguments,
            prelude=PRELUDE if test.function else "",
        )
        return self._sandbox.run(program, self._limits)


def failure_of(
    test: Test,
    outcome: ProgramOutcome,
    same_output: Callable[[str, str], bool],
    same_value: Callable[[Any, Any], bool],
) -> str:
    """Returns what is wrong with a run; "" if it passed. `same_output` compares the output with the
    expected one, `same_value` a function's result. The text never contains the expected output,
    because attackers could learn the tests from it."""
    if outcome.status in ENDINGS:
        return ENDINGS[outcome.status]
    if outcome.status == "failed":
        last = outcome.error.strip().splitlines()[-1:] or [f"exit code {outcome.code}"]
        return f"it failed: {last[0][:120]}"
    if test.function is None:
        return "" if same_output(outcome.output, test.expected) else "another output"
    try:
        result = load_json(outcome.result, "the result")
    except MalformedError:
        return "it returned nothing that can be compared"
    return "" if same_value(result, test.expected) else "another result"


def same_output(output: str, expected: str) -> bool:
    """Whether the lines are equal, ignoring blanks around them and empty lines at the end; where
    the expected output has decimals, numbers may differ by a millionth."""
    if _lines(output) == _lines(expected):
        return True
    if "." not in expected:
        return False
    found, wanted = output.split(), expected.split()
    return len(found) == len(wanted) and all(
        a == b or ("." in b and _close(a, b)) for a, b in zip(found, wanted, strict=True)
    )


def same_value(result: Any, expected: Any) -> bool:
    """Equality as JSON; decimals may differ by a millionth. True does not equal 1."""
    if isinstance(expected, list):
        return (
            isinstance(result, list)
            and len(result) == len(expected)
            and all(same_value(a, b) for a, b in zip(result, expected, strict=True))
        )
    if isinstance(expected, dict):
        return (
            isinstance(result, dict)
            and result.keys() == expected.keys()
            and all(same_value(result[key], value) for key, value in expected.items())
        )
    if isinstance(expected, bool) or isinstance(result, bool):
        return result is expected
    if isinstance(expected, int | float) and isinstance(result, int | float):
        if isinstance(expected, int) and isinstance(result, int):
            return result == expected
        try:
            return abs(result - expected) <= 1e-6 * max(1.0, abs(expected))
        except OverflowError:
            return False
    return type(result) is type(expected) and bool(result == expected)


def _lines(text: str) -> list[str]:
    lines = [line.strip() for line in text.strip().split("\n")]
    return [line for line in lines if line or len(lines) == 1]


def _close(found: str, wanted: str) -> bool:
    # float() also reads "nan", "inf", "1_0" and other alphabets' digits: plain decimals only
    if not found.isascii() or not set(found) <= set("0123456789.eE+-"):
        return False
    try:
        return abs(float(found) - float(wanted)) <= 1e-6 * max(1.0, abs(float(wanted)))
    except ValueError:
        return False


def may_vary(source: str, but: frozenset[str] = frozenset(), *, nulls: bool = False) -> bool:
    """Whether a program might behave differently from run to run: it uses clocks, addresses or
    threads, may have a set whose order follows from addresses, or accesses names in ways that could
    hide this. Errs on the side of True. The modules `but` do not count. `nulls`: the program gets
    None as an argument, or in one."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False  # it fails to compile everywhere
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                names.append(node.module or "")
            if any(name.partition(".")[0] in _UNSTEADY_MODULES - but for name in names):
                return True
            if _UNSTEADY_NAMES & set(names):
                return True
        name = getattr(node, "id", None) or getattr(node, "attr", None)
        if isinstance(name, str) and (
            name in _UNSTEADY_NAMES
            or (name.startswith("__") and name not in ("__name__", "__init__"))
            or (name.startswith("_") and isinstance(node, ast.Attribute) and name != "_replace")
        ):
            return True
    return _may_have_set_by_address(list(ast.walk(tree)), nulls)


def _may_have_set_by_address(nodes: Sequence[ast.AST], nulls: bool) -> bool:
    """Whether a program makes sets, and has values that are ordered by their addresses in them:
    objects of its own classes other than to call a method of them at once, as in
    `Solution().solve()`; functions, types, and None (before Python 3.12) in any place from which
    they could get into a set."""
    if not any(
        isinstance(node, ast.Set | ast.SetComp)
        or (isinstance(node, ast.Name) and node.id in ("set", "frozenset"))
        for node in nodes
    ):
        return False
    if nulls and _NONE_BY_ADDRESS:
        return True
    classes = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
    assigned = {
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    assigned |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    own = {node.name for node in nodes if isinstance(node, _DEFINITION)}
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
            own |= {one.id for one in node.targets if isinstance(one, ast.Name)}
    known = own | (_CALLABLE - assigned)

    def by_address(node: ast.AST) -> bool:
        match node:
            case ast.Call(func=ast.Name(id="map" | "defaultdict"), args=[ast.Name(id=name), *_]):
                return name in classes
            case ast.Call(func=ast.Name(id=name)):
                return name in classes
            case ast.Constant(value=None):
                return _NONE_BY_ADDRESS
            case ast.Name(id=name, ctx=ast.Load()):
                return name in known
            case ast.Attribute(attr=name, ctx=ast.Load()):
                return name in own
        return isinstance(node, ast.Lambda)

    elsewhere = {id(one) for node in nodes for one in _never_in_a_set(node)}
    return any(by_address(node) for node in nodes if id(node) not in elsewhere)


def _never_in_a_set(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the parts of `node` whose values cannot get into a set through it: what is called or
    compared, what it takes an attribute or an item of, bases, decorators, annotations, errors,
    `key=len`, and arguments of functions that call them or compare with them."""
    match node:
        case ast.Call(func=func, args=args, keywords=keywords):
            yield func
            yield from (one.value for one in keywords if one.arg in ("key", "default_factory"))
            if (getattr(func, "id", None) or getattr(func, "attr", None)) in _TAKE_FUNCTIONS:
                yield from _parts(args)
        case ast.Compare(left=left, comparators=others):
            yield from _parts([left, *others])
        case ast.Attribute(value=value) | ast.Subscript(value=value):
            yield value
        case ast.ClassDef(bases=bases, decorator_list=decorators):
            yield from (*bases, *(one for found in decorators for one in ast.walk(found)))
        case (
            ast.FunctionDef(decorator_list=found, returns=returns)
            | ast.AsyncFunctionDef(decorator_list=found, returns=returns)
        ):
            for one in (*found, *filter(None, [returns])):
                yield from ast.walk(one)
        case ast.arg(annotation=ast.AST() as found) | ast.AnnAssign(annotation=found):
            yield from ast.walk(found)
        case ast.ExceptHandler(type=ast.AST() as found) | ast.Raise(exc=ast.AST() as found):
            yield from _parts([found])
        case ast.Assign(value=ast.Lambda() as found):
            yield found


def _parts(nodes: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """Yields the nodes, and the elements of those that are tuples."""
    for node in nodes:
        yield node
        yield from node.elts if isinstance(node, ast.Tuple) else ()


# --- reading tests -------------------------------------------------------------------------------


def unit_tests(task: Task) -> list[Test]:
    """The task's tests, thinned out to MAX_TESTS. Raises MalformedError with file and row."""
    info = dict(task.verification_info)
    language = info.get("language")
    if language not in (None, "", "python", "python3"):
        raise MalformedError(f"{task.where}: programs in {language!r} cannot be graded")
    cases = info.get("test_cases", info if "inputs" in info else None)
    if isinstance(cases, str):
        cases = load_json(cases, f"{task.where}: test_cases")
    if isinstance(cases, dict):
        tests = _from_columns(cases, info.get("fn_name"), task.where)
    elif isinstance(cases, list):
        tests = [_from_case(case, task.where) for case in cases]
    else:
        raise MalformedError(f"{task.where}: test_cases are missing: the task has no answer")
    if not tests:
        raise MalformedError(f"{task.where}: there is no test, so every program would pass")
    return thinned(tests)


def thinned(tests: Sequence[Test], most: int = MAX_TESTS) -> list[Test]:
    """At most `most` (two or more) of them, evenly spaced."""
    if len(tests) <= most:
        return list(tests)
    last = len(tests) - 1
    return [tests[index * last // (most - 1)] for index in range(most)]


def _from_case(case: Any, where: str) -> Test:
    if not isinstance(case, dict) or "output" not in case:
        raise MalformedError(f"{where}: a test case has no output")
    function = case.get("fn_name")
    if case.get("type") == "function_call" or function:
        return _call(function, case.get("input"), case["output"], where)
    return _stdin(case.get("input", ""), case["output"], where)


def _from_columns(cases: dict[str, Any], name: Any, where: str) -> list[Test]:
    inputs, outputs = cases.get("inputs"), cases.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise MalformedError(f"{where}: inputs and outputs are not lists of the same length")
    function = cases.get("fn_name") or name
    if not function:
        return [_stdin(i, o, where) for i, o in zip(inputs, outputs, strict=True)]
    return [_call(function, i, _unwrapped(o), where) for i, o in zip(inputs, outputs, strict=True)]


def _unwrapped(output: Any) -> Any:
    """APPS wraps a function's result in a one-element list."""
    return output[0] if isinstance(output, list) and len(output) == 1 else output


def _stdin(given: Any, expected: Any, where: str) -> Test:
    texts = ["\n".join(map(str, v)) if isinstance(v, list) else v for v in (given, expected)]
    if not all(isinstance(text, str) for text in texts):
        raise MalformedError(f"{where}: a test's input or output is not text")
    _bounded(texts, where)
    return Test(stdin=texts[0], expected=texts[1])


def _call(function: Any, given: Any, expected: Any, where: str) -> Test:
    if not isinstance(function, str) or not function.isidentifier():
        raise MalformedError(f"{where}: fn_name {function!r} is not a function's name")
    if isinstance(given, str):  # one JSON value per line
        given = [_json_or_text(line) for line in given.splitlines() if line.strip()]
    if isinstance(expected, str):
        expected = _json_or_text(expected)
    if not isinstance(given, list):
        raise MalformedError(f"{where}: a test's arguments are not a list")
    _bounded([given, expected], where)
    return Test(function=function, arguments=tuple(given), expected=expected)


def _json_or_text(text: str) -> Any:
    try:
        return load_json(text, "")
    except MalformedError:
        return text


def _bounded(values: Any, where: str) -> None:
    if len(json.dumps(values)) > MAX_TEST_BYTES:
        raise MalformedError(f"{where}: a test of more than {MAX_TEST_BYTES >> 20} MiB")
