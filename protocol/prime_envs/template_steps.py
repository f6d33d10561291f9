"""Counts what a chat template computes, and ends it at a limit.

The count depends on the template and its values only, never on time or the machine, so node,
validator and trainer refuse the same templates. A step is one node of the template's syntax tree
that is evaluated, one element of a list that is handled, or CHARACTERS of text that are handled. A
call of a function or filter takes CALL more. Operations whose result can be much larger than their
arguments ("x" * 10**9, center, replace …) are counted before they run.
"""

from __future__ import annotations

import re
import threading
from collections.abc import (
    Callable,
    ItemsView,
    Iterable,
    Iterator,
    KeysView,
    Mapping,
    Sequence,
    ValuesView,
)
from functools import wraps
from typing import Any

from jinja2 import nodes
from jinja2.runtime import BlockReference, Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

MAX_STEPS = 4_000_000
"""Steps of one rendering. A message takes some hundred, and one for each 16 characters of it."""
CHARACTERS, CALL = 16, 20
MAX_BITS = 4096
"""Bits of an integer in arithmetic."""
_GROWING = frozenset(
    (
        *("center", "ljust", "rjust", "zfill", "expandtabs", "replace", "join", "translate"),
        *("to_bytes", "format", "format_map", "indent", "wordwrap", "batch", "slice", "round"),
        *("tojson", "xmlattr", "urlize", "striptags", "sum", "%"),
    )
)
"""Methods, filters and operators whose time or result can be the product of their arguments."""
_QUADRATIC = frozenset({"striptags", "sum", "urlize", "wordwrap"})
_CONSTANT = frozenset(
    (
        *("length", "count", "default", "d", "first", "last", "safe", "attr"),
        *("get", "items", "keys", "values", "dict", "Namespace"),
    )
)
"""Methods and filters whose time does not grow with their arguments."""
_COMPARING = frozenset(
    (
        *("eq", "==", "equalto", "ne", "!=", "lt", "<", "lessthan", "le", "<=", "gt", ">"),
        *("greaterthan", "ge", ">=", "in", "lower", "upper"),
    )
)
"""Tests whose time grows with their arguments."""
_COUNT, _MADE, _CUT, _SEARCHED = " count", " made", " cut", " searched"
"""Names of our filters; a template cannot write them."""
_BODIES = ("body", "else_")


class TooManyStepsError(Exception):
    """A rendering took more than MAX_STEPS."""

    def __init__(self) -> None:
        super().__init__(f"takes more than {MAX_STEPS:,} steps")


class _Steps(threading.local):
    left = 0

    def take(self, steps: int) -> None:
        self.left -= steps
        if self.left < 0:
            raise TooManyStepsError

    def read(self, value: Any) -> Any:
        """Counts the text and the elements in a value; returns the value."""
        if type(value) is str:
            if len(value) >= CHARACTERS:
                self.take(len(value) // CHARACTERS)
        elif isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise TooManyStepsError
        elif value is not None:
            self.take(_characters(value, self.left) // CHARACTERS)
        return value


_steps = _Steps()


def _characters(value: Any, most: int, numbers: bool = False) -> int:
    """The characters of a value and of all in it, with CHARACTERS for each element. `numbers`
    counts a number as that many. Stops soon after `most` steps."""
    total, waiting = 0, [value]
    while waiting and total <= most * CHARACTERS:
        one = waiting.pop()
        if isinstance(one, str | bytes):
            total += len(one)
        elif isinstance(one, Context):
            continue
        elif isinstance(one, Mapping):
            total += 2 * CHARACTERS * len(one)
            waiting += [*one, *one.values()]
        elif isinstance(one, range | KeysView | ValuesView | ItemsView):
            total += CHARACTERS * len(one)
        elif isinstance(one, list | tuple | set | frozenset):
            total += CHARACTERS * len(one)
            waiting += one
        elif numbers and isinstance(one, int | float) and not isinstance(one, bool):
            total += int(min(abs(one), CHARACTERS * (MAX_STEPS + 1)))
        elif numbers and isinstance(one, Namespace):
            waiting.append(one._Namespace__attrs)
    return total


def _price(name: str, subject: Any, given: Sequence[Any]) -> int:
    """The characters that an operation on `subject` with the arguments `given` may handle."""
    left = _steps.left
    if name in _CONSTANT:
        return 0
    if name not in _GROWING:
        return sum(_characters(one, left) for one in (subject, *given))
    size, numbers, widest = _characters(subject, left), True, 1
    if name in ("%", "format", "format_map"):
        if not isinstance(subject, str):
            return size
        numbers = "*" in subject or re.search(r"\{[^{}]*\{", subject) is not None
        widest += max((int(digits[-9:]) if len(digits) < 10 else MAX_STEPS * CHARACTERS
                       for digits in re.findall("[0-9]+", subject)), default=0)  # fmt: skip
    elif name == "replace":
        given = given[1:]  # what it replaces does not add to the text
    elif name == "sum" and not any(isinstance(one, list | tuple) for one in given):
        return size
    if name in _QUADRATIC:
        widest += size
    return (size + 1) * (widest + sum(_characters(one, left, numbers) for one in given))


def _listed(given: Iterable[Any]) -> list[Any]:
    """Arguments with iterators as lists, so that they have a size."""
    return [list(one) if isinstance(one, Iterator) else one for one in given]


def _each(values: Iterator[Any]) -> Iterator[Any]:
    for one in values:
        _steps.take(1)
        yield one


def _counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or test that counts its arguments, and its result."""
    skipped = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def counted(*given: Any, **named: Any) -> Any:
        passed, given = given[:skipped], given[skipped:]
        if name in _GROWING:
            given = tuple(_listed(given))
        arguments = [*given[1:], *named.values()]
        if name == "tojson":
            arguments = [*given[2:3], named.get("indent")]
        price = _price(name, given[0] if given else None, arguments)
        _steps.take(CALL + price // CHARACTERS)
        result = function(*passed, *given, **named)
        if name in _CONSTANT:
            return result
        if isinstance(result, Iterator):
            return _each(result)
        return _steps.read(result)

    return counted


@pass_context
def _count(_: Context, steps: int) -> bool:
    _steps.take(steps)
    return True


@pass_context
def _made(_: Context, value: Any) -> Any:
    return _steps.read(value)


@pass_context
def _cut(_: Context, value: Any) -> Any:
    if isinstance(value, str):
        return _steps.read(value)
    if isinstance(value, list | tuple):
        _steps.take(len(value))
    return value


@pass_context
def _searched(_: Context, value: Any) -> Any:
    return value if isinstance(value, Mapping) else _steps.read(value)


def _filter(name: str, value: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)


def _cost(body: Sequence[nodes.Node]) -> int:
    """Steps of a body without the bodies in it."""
    total, waiting = 1, list(body)
    while waiting:
        node = waiting.pop()
        total += 1
        if isinstance(node, nodes.TemplateData):
            total += len(node.data) // CHARACTERS
        elif isinstance(node, nodes.Const) and isinstance(node.value, str):
            total += len(node.value) // CHARACTERS
        waiting += node.iter_child_nodes(exclude=_BODIES)
    return total


class _Counting(NodeTransformer):
    """Adds the counting to a template's syntax tree."""

    def generic_visit(self, node: nodes.Node, *args: Any, **named: Any) -> nodes.Node:
        bodies = {
            field: _cost(found)
            for field in _BODIES
            if isinstance(found := getattr(node, field, None), list) and (found or field == "body")
        }
        node = super().generic_visit(node, *args, **named)
        for field, cost in bodies.items():
            counting = _filter(_COUNT, nodes.Const(cost, lineno=node.lineno))
            getattr(node, field).insert(0, nodes.ExprStmt(counting, lineno=node.lineno))
        if isinstance(node, nodes.For) and node.test is not None:
            each = _filter(_COUNT, nodes.Const(_cost([node.test]), lineno=node.lineno))
            node.test = nodes.And(each, node.test, lineno=node.lineno)
        if isinstance(node, nodes.Output):
            node.nodes = [
                one if isinstance(one, nodes.TemplateData) else _filter(_MADE, one)
                for one in node.nodes
            ]
        if isinstance(node, nodes.Compare):
            self._compare(node)
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            return _filter(_CUT, node)
        if isinstance(node, nodes.Concat | nodes.Dict | nodes.List) or (
            isinstance(node, nodes.Tuple) and node.ctx == "load"
        ):
            return _filter(_MADE, node)
        return node

    def _compare(self, node: nodes.Compare) -> None:
        """Counts what is compared; with a constant, only the constant's length matters."""
        searched = any(one.op in ("in", "notin") for one in node.ops)
        parts = [node.expr, *(one.expr for one in node.ops)]
        if len(parts) == 2 and not searched and any(isinstance(x, nodes.Const) for x in parts):
            return
        node.expr = _filter(_MADE, node.expr)
        for one in node.ops:
            name = _SEARCHED if one.op in ("in", "notin") else _MADE
            one.expr = _filter(name, one.expr)


class CountingEnvironment(ImmutableSandboxedEnvironment):
    """jinja2's immutable sandbox, whose templates count their steps. Render them in `counted`."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "**", "%"))

    def __init__(self, filters: Mapping[str, Callable[..., Any]], **options: Any) -> None:
        super().__init__(optimized=False, **options)  # constants are computed, and counted, late
        self.filters |= filters
        self.filters = {name: _counted(name, one) for name, one in self.filters.items()}
        self.filters |= {_COUNT: _count, _MADE: _made, _CUT: _cut, _SEARCHED: _searched}
        tests: dict[str, Any] = self.tests
        self.tests = tests | {name: _counted(name, tests[name]) for name in _COMPARING}

    def _generate(
        self,
        source: nodes.Template,
        name: str | None,
        filename: str | None,
        *args: Any,
        **rest: Any,
    ) -> str:
        return super()._generate(_Counting().visit(source), name, filename, *args, **rest)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        if isinstance(function, Macro | LoopContext | BlockReference):
            _steps.take(CALL)
            return _steps.read(super().call(context, function, *args, **kwargs))
        name = getattr(function, "__name__", "")
        method = getattr(function, "__wrapped__", function)
        if name in _GROWING:
            args = tuple(_listed(args))
        price = _price(name, getattr(method, "__self__", None), [*args, *kwargs.values()])
        _steps.take(CALL + price // CHARACTERS)
        result = super().call(context, function, *args, **kwargs)
        return result if name in _CONSTANT and name != "dict" else _steps.read(result)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * (max(right, 1) if operator == "**" else 1)
            if max(bits, right.bit_length()) > MAX_BITS:
                raise TooManyStepsError
        elif operator == "%":
            _steps.take(_price("%", left, [right]) // CHARACTERS)
        elif operator == "*":
            count = next((one for one in (left, right) if isinstance(one, int)), 0)
            size = sum(_characters(one, _steps.left) for one in (left, right))
            _steps.take(max(count, 0) * size // CHARACTERS)
        return _steps.read(super().call_binop(context, operator, left, right))


def counted(render: Callable[[], str]) -> str:
    """Calls `render`, which renders a template of a CountingEnvironment. Raises TooManyStepsError
    as soon as it has taken MAX_STEPS."""
    _steps.left = MAX_STEPS
    return render()


def steps_taken() -> int:
    """Steps of this thread's last rendering."""
    return MAX_STEPS - _steps.left
