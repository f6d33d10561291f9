r"""Mathematics: one boxed answer after the thinking, compared with the gold answer.

    plain number   exact comparison, without an algebra system. If the gold answer is one, the
                   answer must be one too: `\boxed{17 \cdot 23}` repeats the question, and
                   `\boxed{\max(3,5)}` and `\boxed{3 \text{ or } 5}` hedge
    plain words    the same words
    anything else  math-verify (Apache-2.0) in a process with a time limit, and only if the answer
                   is of the gold's kind (a set for a set, an interval for an interval …)

No box, two boxes (even if equal), a box that hedges ("3 or 5", "\pm", a list where one value is
asked, a chain of equations) or leaves the work to the reader (an integral, a sum, max) scores 0.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction
from importlib.metadata import version as installed_version
from typing import Any

from prime_core.errors import MalformedError
from prime_core.run import MICRO
from prime_envs.base import TaskScore
from prime_envs.graders.answers import boxed, final_section
from prime_envs.graders.base import Grader
from prime_envs.subprocess_grader import (
    GraderLimits,
    GradingCrashError,
    GradingTimeoutError,
    SubprocessGrader,
)
from prime_envs.tasks import Task

MAX_ANSWER = 512
CPU_SECONDS = 4.0
SLACK = 8
"""A comparison that took more than 1/SLACK of the limit may fail on a machine that is SLACK times
slower."""
_SAME_SIGNS = str.maketrans({
    "−": "-", "×": r"\times ", "·": r"\cdot ", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ",
    "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "°": r"^{\circ}",
    "²": "^{2}", "³": "^{3}", "√": r"\sqrt ", "ℝ": r"\mathbb{R}", "θ": r"\theta ", "α": r"\alpha ",
    "β": r"\beta ", "λ": r"\lambda ", "\u00a0": " ", "\u2009": " ",
})  # fmt: skip
_WORDS = re.compile(r"[A-Za-z][A-Za-z '\-.]*")
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf|textrm|mbox)\s*\{([^{}]*)\}")
_HEDGES = re.compile(
    r"\b(?:or|either|maybe|possibly|perhaps|not|no|wait|unsure)\b|\\(?:lor|vee|neg|lnot)\b|\?", re.I
)
_LEFT_TO_DO = re.compile(
    r"\\(?:int|iint|oint|sum|prod|lim|max|min|sup|inf|gcd|lcm|bmod|pmod|mod|binom|dbinom|partial)\b"
    r"|\\operatorname|!|\\frac\s*\{\s*d\b"
)
_TOWER = re.compile(r"\^\s*\{?[^{}^]*\^\s*\{?[^{}^]*\^|\^\s*\{?\s*-?\s*\(?\d{5}")
"""Towers of three powers, and five-digit exponents, which occur only in attacks."""
_CHOICE = re.compile(r"\(?([A-Ja-j])\)?\.?")
MAX_DIGITS = 400
MAX_EXPONENT = 400
_DIGITS = r"(?:\d{1,3}(?:(?:,|\{,\}|\\,|\\!,?)\d{3})+|\d+)"
_DECIMAL = rf"{_DIGITS}?\.\d+|{_DIGITS}\.?"
_NUMBER = re.compile(
    rf"(?P<sign>[+-]*)\s*(?:"
    rf"(?:(?P<whole>\d+)\s*)?\\[dt]?frac\s*\{{\s*(?P<nsign>-?)(?P<num>\d+)\s*\}}\s*\{{\s*(?P<den>\d+)\s*\}}"
    rf"|\\[dt]?frac\s*(?P<num1>\d)(?P<den1>\d)"
    rf"|(?P<snum>\d+)\s*(?:/|:)\s*(?P<sden>\d+)"
    rf"|(?P<base>{_DECIMAL})\s*(?:(?:\\times|\\cdot|\*|×|·)\s*10\s*\^\s*(?:\{{\s*(?P<exp>-?\d+)\s*\}}|(?P<exp1>-?\d)))?"
    rf")\s*(?P<percent>\\?%)?"
)  # fmt: skip
_UNIT = re.compile(
    r"(?:\\(?:text|mathrm|textrm|mbox)\s*\{([^{}\\]{0,32})\}|\^\s*(?:\\circ|\{\s*\\circ\s*\})|°)"
)
_HEDGE = re.compile(
    r"\b(?:or|and|not|either|maybe|approximately|approx|about|between|to)\b|\d|[,;]", re.I
)
_CURRENCY = re.compile(r"^\\?\$")
_NAMED = re.compile(r"^\s*[A-Za-z](?:_\{?\w{1,4}\}?)?(?:\([A-Za-z]\))?\s*=(?!=)")
_SPACE = re.compile(r"\\[,;:! ]|\\q?quad\b|~")


@dataclass(frozen=True)
class Numeral:
    """A number as written. `exact` is its value; `decimal` says whether it has a decimal point."""

    exact: Fraction
    decimal: bool
    percent: bool


def read_numeral(text: str) -> Numeral | None:
    """Parses `text` if it is exactly one plain number: with a sign, thousands separators, a
    fraction, a power of ten, percent, a unit, or `x =` before it. Otherwise returns None. Only
    ASCII digits count."""
    if len(text) > 2 * MAX_DIGITS or any(c.isdigit() and not c.isascii() for c in text):
        return None
    body = text.strip().strip("$").strip()
    body = body.replace("\\left", "").replace("\\right", "").replace("−", "-")
    body = _NAMED.sub("", body, count=1).strip()
    body = _CURRENCY.sub("", body).strip()
    units = _UNIT.findall(body)
    if any(_HEDGE.search(unit) for unit in units) or len(units) > 2:
        return None
    body = _UNIT.sub("", body)
    spaced = re.sub(r"(?<=\d)\\[,!](?=\d{3})", ",", body)
    spaced = _SPACE.sub(" ", spaced).strip()
    match = _NUMBER.fullmatch(spaced)
    if match is None:
        return None
    return _value(match)


def _value(match: re.Match[str]) -> Numeral | None:
    part = match.groupdict()
    sign = -1 if (part["sign"] or "").count("-") % 2 else 1
    numerator, denominator = part["num"] or part["num1"], part["den"] or part["den1"]
    decimal = False
    try:
        if part["snum"] is not None:
            value = Fraction(int(part["snum"]), int(part["sden"]))
        elif numerator is not None:
            value = Fraction(int(numerator), int(denominator))
            if part["nsign"]:
                value = -value
            if part["whole"] is not None:
                value += int(part["whole"])
        else:
            plain = re.sub(r"[^\d.]", "", part["base"])
            if not plain.strip("."):
                return None
            exponent = int(part["exp"] or part["exp1"] or 0)
            if abs(exponent) > MAX_EXPONENT:
                return None
            decimal = "." in plain.rstrip(".")
            value = Fraction(plain.rstrip(".")) * Fraction(10) ** exponent
    except (ValueError, ZeroDivisionError):
        return None
    percent = bool(part["percent"])
    return Numeral(sign * value / (100 if percent else 1), decimal, percent)


def same_number(gold: Numeral, found: Numeral) -> bool:
    """Whether two numbers are equal. If the gold answer is not an integer, a decimal may round it
    (six decimals and six digits must agree). A gold answer in percent may be given without the
    sign."""
    candidates = [gold.exact] + ([gold.exact * 100] if gold.percent and not found.percent else [])
    for value in candidates:
        if value == found.exact:
            return True
        close = abs(value - found.exact)
        rounded = gold.decimal or (found.decimal and value.denominator != 1)
        if rounded and close * 2_000_000 < 1 and close * 1_000_000 <= abs(value):
            return True
    return False


class Mathematics(Grader):
    """verification_info: `ground_truth`, the answer in LaTeX (or a JSON number)."""

    version = 1

    def __init__(self, cpu_seconds: float = CPU_SECONDS) -> None:
        here = "prime_envs.graders.mathematics"
        self._cpu_seconds = cpu_seconds
        self._algebra = SubprocessGrader(
            f"{here}:compare_in_child",
            GraderLimits(cpu_seconds),
            fork=True,
            warm=(f"{here}:warm_up",),
        )

    def close(self) -> None:
        self._algebra.close()

    def pins(self) -> dict[str, str]:
        names = ("math-verify", "latex2sympy2_extended", "sympy")
        return {name: installed_version(name) for name in names}

    def require(self, task: Task) -> None:
        gold = task.verification_info.get("ground_truth")
        if isinstance(gold, bool) or not isinstance(gold, str | int) or not str(gold).strip():
            raise MalformedError(
                f"{task.where}: verification_info.ground_truth is missing: the task has no answer"
            )
        if len(str(gold)) > 4 * MAX_ANSWER:
            raise MalformedError(f"{task.where}: ground_truth has {len(str(gold))} characters")

    def gold(self, task: Task) -> str:
        return f"\\boxed{{{_gold_text(task)}}}"

    def grade(self, task: Task, output_text: str) -> TaskScore:
        answers = boxed(final_section(output_text))
        parts = {"boxes": len(answers)}
        if len(answers) != 1:
            count = "no" if not answers else str(len(answers))
            return TaskScore(0, f"{count} boxed answers after the thinking", parts=parts)
        answer, gold = _plain(answers[0]), _plain(_gold_text(task))
        refused = _refused(answer, gold)
        if refused:
            return TaskScore(0, refused, parts=parts)
        number = read_numeral(gold)
        if number is not None:
            found = read_numeral(answer)
            if found is None:
                return TaskScore(0, f"{_short(answer)} is not a plain number", parts=parts)
            return _scored(same_number(number, found), answer, gold, parts)
        if _words(gold):
            return _scored(_words(answer) == _words(gold), answer, gold, parts)
        return self._compared(answer, gold, parts)

    def _compared(self, answer: str, gold: str, parts: dict[str, int]) -> TaskScore:
        if _squeezed(answer) == _squeezed(gold):
            return _scored(True, answer, gold, parts)
        try:
            reply = self._algebra.ask({"gold": gold, "answer": answer})
        except GradingTimeoutError:
            return TaskScore(0, "the comparison ran out of time", uncertain=True, parts=parts)
        except GradingCrashError as error:
            return TaskScore(0, f"the comparison failed: {error}", uncertain=True, parts=parts)
        score = _scored(reply.value, answer, gold, parts)
        slow = reply.cpu_seconds * SLACK > self._cpu_seconds
        return TaskScore(score.task_micro, score.reason, uncertain=slow, parts=parts)


def _gold_text(task: Task) -> str:
    """The gold answer, without a surrounding box."""
    gold = str(task.verification_info["ground_truth"])
    inner = boxed(gold)
    return inner[-1] if inner else gold


def _plain(text: str) -> str:
    body = text.translate(_SAME_SIGNS).strip()
    for mark in ("$$", "$"):
        if len(body) > 2 * len(mark) and body.startswith(mark) and body.endswith(mark):
            body = body[len(mark) : -len(mark)].strip()
    return body


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:40] + "…")


def _scored(same: bool, answer: str, gold: str, parts: dict[str, int]) -> TaskScore:
    if same:
        return TaskScore(MICRO, f"{_short(answer)} is the answer", parts=parts)
    return TaskScore(0, f"{_short(answer)}, expected {_short(gold)}", parts=parts)


def _refused(answer: str, gold: str) -> str:
    """Why an answer is rejected without comparison; "" if it is compared."""
    if not answer:
        return "the box is empty"
    if len(answer) > max(MAX_ANSWER, 2 * len(gold)):
        return f"a boxed answer of {len(answer)} characters"
    strange = sorted({c for c in answer if not c.isascii() or unicodedata.category(c) == "Cc"})
    if strange and not set(strange) <= set(gold):
        return f"the answer holds {strange[0]!r}; digits and signs are written in ASCII and LaTeX"
    for pattern, what in ((_HEDGES, "hedges"), (_LEFT_TO_DO, "leaves the work to the reader"),
                          (_TOWER, "is a power too large to compute")):  # fmt: skip
        if pattern.search(answer) and not pattern.search(gold):
            return f"{_short(answer)} {what}"
    for mark, what in (("\\pm", "gives two values"), ("\\mp", "gives two values"),
                       ("\\approx", "approximates"), ("\\boxed", "boxes twice")):  # fmt: skip
        if mark in answer and mark not in gold:
            return f"{_short(answer)} {what}"
    if answer.count("=") > max(1, gold.count("=")):
        return f"{_short(answer)} is a chain of equations"
    return ""


def _words(text: str) -> str:
    """Lower-cased words if the text consists only of words (a choice, a name, yes or no), else
    ""."""
    bare = _TEXT.sub(r" \1 ", text).strip()
    choice = _CHOICE.fullmatch(bare)
    if choice:
        return choice[1].lower()
    return " ".join(bare.lower().rstrip(".").split()) if _WORDS.fullmatch(bare) else ""


def _squeezed(text: str) -> str:
    return re.sub(r"\\left|\\right|\\[,;:! ]|\s", "", text).replace("\\dfrac", "\\frac")


# --- in the child --------------------------------------------------------------------------------


_WARM = (
    ("\\frac{x^2-1}{2}", "\\{x, \\sqrt{2}\\}"),
    ("x^2-1", "(x-1)(x+1)"),
    ("\\sqrt{8}", "2\\sqrt{2}"),
    ("\\frac{n(n+1)}{2}", "\\frac{n^2+n}{2}"),
    ("(-\\infty, 3]", "[1, 2) \\cup (4, 5]"),
    ("\\frac{\\pi}{2}", "\\sin(x)^2 + \\cos(x)^2"),
    ("y = 2x + 1", "x \\ge 3"),
    ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "(1, 2, 3)"),
    ("e^{i\\pi} + \\ln 2", "a_{1} + \\log_2 b"),
)


def warm_up() -> None:
    """Loads parser and algebra, and lets the parser build its grammar, before the first fork:
    reduces a comparison from 0.2 s to 0.05 s."""
    for gold, answer in _WARM:
        compare_in_child({"gold": gold, "answer": answer})


def compare_in_child(request: dict[str, str]) -> bool:
    """{gold, answer} in LaTeX → whether they are equal and of the same kind."""
    import logging

    from math_verify import parse, verify
    from math_verify.parser import LatexExtractionConfig

    logging.disable(logging.CRITICAL)
    # The caller enforces the time limit. Only LaTeX is read: the plain reader evaluates Python.
    reading = [LatexExtractionConfig(boxed_match_priority=0)]
    gold, answer = (
        parse(f"\\boxed{{{request[name]}}}", extraction_config=reading, parsing_timeout=None)
        for name in ("gold", "answer")
    )
    if not gold or not answer or not _same_kind(gold[0], answer[0]):
        return False
    return bool(verify(gold, answer, timeout_seconds=None))


def _same_kind(gold: Any, answer: Any) -> bool:
    wanted, found = _kind(gold), _kind(answer)
    if wanted == "expression" and found == "equation":
        return bool(answer.lhs.is_Symbol) and _kind(answer.rhs) == "expression"
    if wanted == "equation" and found == "expression":
        return bool(gold.lhs.is_Symbol)
    return wanted == found


def _kind(value: Any) -> str:
    import sympy
    from sympy.core.relational import Relational
    from sympy.logic.boolalg import Boolean
    from sympy.matrices import MatrixBase

    if isinstance(value, str):
        return "text"
    if isinstance(value, MatrixBase):
        return "matrix"
    if isinstance(value, sympy.Eq):
        return "equation"
    if isinstance(value, Relational | Boolean):
        return "relation"
    if isinstance(value, sympy.Interval | sympy.Union | sympy.Intersection | sympy.Complement):
        return "interval"
    if isinstance(value, sympy.Set):
        return "set"
    if isinstance(value, sympy.Tuple):
        return "tuple"
    return "expression"
