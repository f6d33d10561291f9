"""Imports reasoning-gym, filters the answers its scorers see, and adds the checks they lack.

Some of its scorers pass the answer to Python's `eval` (as does sympy's `parse_expr`), which would
let the answer's author run arbitrary code on the grading machine. Those scorers only see answers
that are data or arithmetic. In addition, every scorer runs in a process that can only compute
(grading_child.py), because the task's own row, which it evaluates too, is also untrusted.

A few scorers pay for no work: `score` adds the missing checks, or the family is refused (UNFIT). A
test gives every family the same free answers.

reasoning-gym requires pycosat for one family (`zebra_puzzles`), and pycosat is available only as C
source. On a machine without a compiler, only that family is refused.
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
"""Families whose scorer evaluates the answer as Python (a test searches the package for them)."""
NUMBERS_ONLY = frozenset({"countdown", "puzzle24"})
"""Families whose answers are expressions of the given numbers. Variables are not allowed (`x/x +
x/x` would make any number from nothing), nor are powers, factorials, or `2.9` from a 2 and a 9."""
INTEGRALS = frozenset({"simple_integration", "intermediate_integration"})
"""Families in which the question itself, an unevaluated integral, is not an accepted answer."""
NO_NAN = frozenset({"complex_arithmetic", "number_sorting"})
"""Families whose scorers treat NaN as equal to any number."""
COIN_TOLERANCE = 1e-4
"""Tolerance of coin_flip's own scorer; beyond it, that scorer pays in full for `0`, the first digit
of most answers."""
UNFIT = {"propositional_logic": "its scorer pays in full for a premise said again"}
"""Families unfit for training → the reason."""
SIZES = {"acre": 10_000}
"""Families that generate all of their entries before the first one is available."""
_FUNCTIONS = frozenset({
    "sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "sinh", "cosh", "tanh", "exp",
    "log", "ln", "sqrt", "Abs", "Integral", "pi",
})  # fmt: skip
REHEARSED = 3
_OTHER_KINDS = ("17", "[1, 2, 3]", "sqrt(x) + log(x)/x + C")
START_SECONDS = 180.0
"""Limit for a child's warm-up, which takes some seconds of CPU time on a possibly busy machine."""
_NAME = re.compile(r"[A-Za-z_]\d{0,2}|[A-Z]+")
"""A variable, a board's mark, or a row of capitals: nothing that Python or sympy would execute."""
_NUMBER = re.compile(r"[-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?")
_SUM = re.compile(r"(?!.*(?:\*\*|//))[0-9+\-*/()\s]+", re.S)
_NODES = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.List, ast.Tuple,
    ast.expr_context,
)  # fmt: skip


def only_data(family: str, answer: str) -> bool:
    """Whether `family`'s scorer may see `answer`: always, if it evaluates nothing; else only
    numbers, short names, lists of them, arithmetic and its usual functions."""
    if family not in EVALUATED:
        return True
    if family in NUMBERS_ONLY and not _SUM.fullmatch(answer):
        return False
    if family in INTEGRALS and "Integral" in answer:
        return False
    try:
        tree = ast.parse(answer.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # Not Python, but sympy accepts a little more ("5!"). Require harmless names only, and no
        # strings, which could spell a name with escapes.
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
    """Whether a constant is a number, or text of numbers and short names. Text is restricted
    because sympy's functions evaluate it, as in `exp("…")`."""
    if not isinstance(value, str):
        return not isinstance(value, bytes)
    return all(_NUMBER.fullmatch(word) or _harmless(word) for word in value.split())


def score(
    family: str,
    scorer: Callable[[str, Mapping[str, Any]], float],
    answer: str,
    entry: Mapping[str, Any],
) -> int:
    """Score in millionths: the family's own scorer, after the checks that it lacks. Runs in the
    child."""
    if not _keeps_to_the_question(family, answer, entry):
        return 0
    if family == "game_of_life_halting":  # its scorer accepts any text
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
            scored, gold = (
                float(Fraction(text.replace(",", "")))
                for text in (answer.strip(), str(entry["answer"]))
            )
        except (ValueError, ZeroDivisionError, OverflowError):
            return False
        return abs(scored - gold) <= COIN_TOLERANCE
    return family not in NO_NAN or "nan" not in answer.lower()


def require_fit(family: str) -> None:
    """Raises UserError if a family is unfit for training."""
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
    """Loads the families before a grading child's first fork, and the parts of sympy that their
    scorers load only when scoring, because a confined fork cannot import."""
    gym = reasoning_gym()
    for family in sorted(EVALUATED):
        rehearse(gym.create_dataset(family, seed=1, size=REHEARSED))


def rehearse(dataset: Any) -> None:
    """Scores a family's first gold answers, and answers of other kinds."""
    for index in range(REHEARSED):
        entry = dataset[index]
        for answer in (str(entry["answer"]), *_OTHER_KINDS):
            with contextlib.suppress(Exception):  # it raises the same error when grading
                dataset.score_answer(answer, entry)


def reasoning_gym() -> ModuleType:
    """The package `reasoning_gym`; the first call takes about a second.

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
