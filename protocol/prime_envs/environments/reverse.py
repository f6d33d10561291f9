"""The demo's task: think for the requested number of dots, then write the word backwards.

Prompt `06|tate>`, good answer `......=etat` and the end token (a newline in the demo's tokenizer).
The words are reasoning-gym's `spell_backward` list. The digits request the number of dots; the
length reward counts dots, not all tokens. Correct means the exact reversed word.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from prime_core import encoding
from prime_core.errors import UserError
from prime_core.ids import Digest
from prime_core.run import MICRO, LengthBudgets
from prime_envs.base import Environment, Problem, TaskScore

DATA_FILE = "words3to10.txt"
_OUTPUT = re.compile(r"(\.{0,4096})=([a-z]{1,64})\n?")


def _argument(arguments: Mapping[str, int | str], name: str, default: int) -> int:
    value = arguments.get(name, default)
    if not isinstance(value, int) or not 1 <= value <= 32:
        raise UserError(f"The reverse environment's {name} is {value!r}; expected 1 to 32.")
    return value


@lru_cache(maxsize=4)
def word_list(shortest: int, longest: int) -> tuple[str, ...]:
    """Distinct lowercase words of that length, ordered by the SHA-256 of each word, so that the
    held-out words (the tail) are a fair sample and disjoint from the training words.

    Reads the data file without importing reasoning-gym (0.9 s of imports).
    """
    package = importlib.util.find_spec("reasoning_gym")
    if package is None or not package.submodule_search_locations:
        raise UserError(
            "the environment reverse needs reasoning-gym's word list",
            hint="pip install 'prime-open[families]'",
        )
    path = Path(package.submodule_search_locations[0]) / "data" / DATA_FILE
    lines = path.read_text(encoding="utf-8").split()
    words = {w for w in lines if shortest <= len(w) <= longest and re.fullmatch("[a-z]+", w)}
    return tuple(sorted(words, key=lambda word: hashlib.sha256(word.encode()).digest()))


class Reverse(Environment):
    """Arguments: `shortest`, `longest` (letters per word)."""

    name = "reverse"
    version = 1

    def __init__(self, arguments: Mapping[str, int | str], budgets: LengthBudgets) -> None:
        super().__init__(arguments, budgets)
        unknown = set(arguments) - {"shortest", "longest"}
        if unknown:
            raise UserError(f"The reverse environment has no argument {sorted(unknown)[0]!r}.")
        self._words = word_list(
            _argument(arguments, "shortest", 3), _argument(arguments, "longest", 5)
        )

    def data_digest(self) -> Digest:
        return encoding.sha256("\n".join(self._words).encode())

    def __len__(self) -> int:
        return len(self._words)

    def problem(self, index: int) -> Problem:
        self._require_index(index)
        word = self._words[index]
        return Problem(f"reverse-{index}", index, word, word[::-1])

    def prompt_text(self, problem: Problem, target_length: int) -> str:
        return f"{target_length:02d}|{problem.prompt}>"

    def check(self, problem: Problem, output_text: str, output_tokens: int) -> TaskScore:
        match = _OUTPUT.fullmatch(output_text)
        if match is None:
            return TaskScore(0, "not of the form dots = word", output_text.count("."))
        dots, word = len(match[1]), match[2]
        correct = word == problem.answer
        reason = "reversed" if correct else f"wrote {word!r}, expected {problem.answer!r}"
        return TaskScore(MICRO if correct else 0, reason, dots)
