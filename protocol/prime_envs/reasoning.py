"""How reasoning-gym is imported, which answers its scorers are shown, and what they forget to ask.

Some of its scorers hand the answer to Python's `eval` (sympy's `parse_expr` does, too): whoever
wrote the answer would run what they like on the machine that grades it. Those see only answers that
are data or arithmetic; and every scorer runs in a process that can do nothing but compute
(grading_child.py), since what it evaluates of the task's own row is foreign text as well.

A few pay for no work at all: `score` asks what they forget, or the family is refused (UNFIT). A
test gives every family the same free answers.

It requires pycosat for one family (`zebra_puzzles`), and pycosat comes as C source only. A machine
without a compiler has every other family: there, that one is refused by name.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import math
import re
import sys
from collections.abc import Callable, Mapping
from fractions import Fraction
from types import ModuleType
from typing import Any

from prime_core.errors import UserError
from prime_core.run import MICRO

EVALUATED = frozenset({
    "binary_matrix", "countdown", "intermediate_integration", "n_queens", "number_sorting",
    "polynomial_multiplication", "puzzle24", "simple_integration", "spiral_matrix",
    "string_insertion",
})  # fmt: skip
"""Families whose scorer evaluates the answer as Python (a test looks through the package)."""
NUMBERS_ONLY = frozenset({"countdown", "puzzle24"})
"""Whose answers are sums of the given numbers: `x/x + x/x` would be any number of none, and so
would a power, a factorial, or `2.9` of a 2 and a 9."""
INTEGRALS = frozenset({"simple_integration", "intermediate_integration"})
"""Whose question is no answer: an integral that is left to be worked out."""
NO_NAN = frozenset({"complex_arithmetic", "number_sorting"})
"""Whose scorers find NaN as close as anything to any number."""
COIN_TOLERANCE = 1e-4
"""That of coin_flip's own scorer; beyond it, it pays in full for `0`, the first digit of most."""
UNFIT = {"propositional_logic": "its scorer pays in full for a premise said again"}
"""Families that nobody can train on, and why."""
SIZES = {"acre": 10_000}
"""Families that make all of their entries before they give the first."""
_FUNCTIONS = frozenset({
    "sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "sinh", "cosh", "tanh", "exp",
    "log", "ln", "sqrt", "Abs", "Integral", "pi",
})  # fmt: skip
REHEARSED = 3
_OTHER_KINDS = ("17", "[1, 2, 3]", "sqrt(x) + log(x)/x + C")
START_SECONDS = 180.0
"""For a child's warm-up: some seconds of processor time on a machine that may be busy."""
_NAME = re.compile(r"[A-Za-z_]\d{0,2}|[A-Z]+")
"""A variable, a board's mark, a row of capitals: nothing that Python or sympy would run."""
_NUMBER = re.compile(r"[-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?")
_SUM = re.compile(r"(?!.*(?:\*\*|//))[0-9+\-*/()\s]+", re.S)
_NODES = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.List, ast.Tuple,
    ast.expr_context,
)  # fmt: skip


def only_data(family: str, answer: str) -> bool:
    """Whether `family`'s scorer may see `answer`: always, if it evaluates none; else only numbers,
    short names, lists of them, arithmetic and the usual functions of it."""
    if family not in EVALUATED:
        return True
    if family in NUMBERS_ONLY and not _SUM.fullmatch(answer):
        return False
    if family in INTEGRALS and "Integral" in answer:
        return False
    try:
        tree = ast.parse(answer.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # No Python, but sympy reads a little more ("5!"): then at least no name to do harm with,
        # and no text, which might spell one by escapes.
        names = re.findall(r"[^\W\d]\w*", answer)
        return not {"'", '"'} & set(answer) and all(map(_harmless, names))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            if not _harmless(node.id):
                return False
        elif isinstance(node, ast.Call):
            named = isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS
            if not named or node.keywords:
                return False
        elif isinstance(node, ast.Constant):
            if not _plain(node.value):
                return False
        elif not isinstance(node, _NODES):
            return False
    return True


def _harmless(name: str) -> bool:
    return name in _FUNCTIONS or _NAME.fullmatch(name) is not None


def _plain(value: object) -> bool:
    """A constant that is a number, or text of numbers and short names: sympy's functions evaluate
    what text they are given, as `exp("…")`."""
    if not isinstance(value, str):
        return not isinstance(value, bytes)
    return all(_NUMBER.fullmatch(word) or _harmless(word) for word in value.split())


def score(
    family: str,
    scorer: Callable[[str, Mapping[str, Any]], float],
    answer: str,
    entry: Mapping[str, Any],
) -> int:
    """Millionths: what the family's own scorer finds, once what it forgets to ask is asked. Where a
    grade is computed, in the child."""
    if not _keeps_to_the_question(family, answer, entry):
        return 0
    if family == "game_of_life_halting":  # its scorer takes any text for any other
        return MICRO
    found = float(scorer(answer, entry))
    return round(min(1.0, max(0.0, found)) * MICRO) if math.isfinite(found) else 0


def _keeps_to_the_question(family: str, answer: str, entry: Mapping[str, Any]) -> bool:
    if family == "puzzle24":
        given = sorted(map(str, entry["metadata"]["numbers"]))
        return sorted(re.findall(r"\d+", answer)) == given
    if family == "game_of_life_halting":
        return answer.strip().lower() == str(entry["answer"]).strip().lower()
    if family == "coin_flip":
        try:
            told, gold = (
                float(Fraction(text.replace(",", "")))
                for text in (answer.strip(), str(entry["answer"]))
            )
        except (ValueError, ZeroDivisionError, OverflowError):
            return False
        return abs(told - gold) <= COIN_TOLERANCE
    return family not in NO_NAN or "nan" not in answer.lower()


def require_fit(family: str) -> None:
    """Raises UserError if a family is one that nobody can train on."""
    if family in UNFIT:
        raise UserError(
            f"reasoning-gym's family {family} is refused: {UNFIT[family]}",
            hint="choose another family",
        )


def require_reasoning_gym() -> None:
    """Raises UserError if the package is not installed. Imports nothing."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise UserError(
            "This environment needs the package reasoning-gym.",
            hint="pip install 'prime-open[families]'",
        )


def warm_up() -> None:
    """Loads the families before a grading child's first fork, and what their scorers load of sympy
    only when they score: a confined fork loads nothing."""
    gym = reasoning_gym()
    for family in sorted(EVALUATED):
        rehearse(gym.create_dataset(family, seed=1, size=REHEARSED))


def rehearse(dataset: Any) -> None:
    """Scores the first gold answers of a family, and answers of other kinds."""
    for index in range(REHEARSED):
        entry = dataset[index]
        for answer in (str(entry["answer"]), *_OTHER_KINDS):
            with contextlib.suppress(Exception):  # what it raises here, it raises again when asked
                dataset.score_answer(answer, entry)


def reasoning_gym() -> ModuleType:
    """The package `reasoning_gym`, about a second at the first call.

    Raises UserError if it is not installed.
    """
    require_reasoning_gym()
    if "pycosat" not in sys.modules and importlib.util.find_spec("pycosat") is None:
        sys.modules["pycosat"] = _without_pycosat()
    return importlib.import_module("reasoning_gym")


def _without_pycosat() -> ModuleType:
    def itersolve(*_: Any, **__: Any) -> Any:
        raise UserError(
            "The family zebra_puzzles needs pycosat, which needs a C compiler to install.",
            hint="install a C compiler and Python's headers, then: pip install pycosat",
        )

    module = ModuleType("pycosat", "Stands for a package that this machine could not build.")
    vars(module)["itersolve"] = itersolve
    return module
