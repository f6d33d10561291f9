"""A multi-turn game: find a secret number from the answers "higher" and "lower".

prompt  guess a number from 0 to 99
model   50            environment  higher
model   75            environment  lower
model   62            (right: the row ends)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from prime_core import encoding
from prime_core.ids import Digest
from prime_core.run import MICRO, LengthBudgets
from prime_envs.base import Environment, Problem, TaskScore
from prime_envs.prompts import with_budget
from prime_envs.tools import Observation

SIZE = 1_000_000
_NUMBER = re.compile(r"[0-9]{1,7}")


class Guess(Environment):
    """Arguments: `largest`, the largest secret (default 99); `turn_micro`, the reward of each turn
    whose guess the answers so far allow, in millionths (default 0). A turn's guess is the last
    number in it. The answer is correct if the last turn guesses the secret. Requires a run with
    [conversation] and no tools."""

    name = "guess"
    version = 2

    def __init__(self, arguments: Mapping[str, int | str], budgets: LengthBudgets) -> None:
        super().__init__(arguments, budgets)
        self._largest, self._turn_micro = self._integers(
            largest=(99, 1, 999_999), turn_micro=(0, 0, MICRO)
        )

    def data_digest(self) -> Digest:
        return encoding.sha256(b"")

    def __len__(self) -> int:
        return SIZE

    def problem(self, index: int) -> Problem:
        self._require_index(index)
        drawn = encoding.sha256(b"prime/guess/v1" + index.to_bytes(8, "big"))
        secret = int(drawn, 16) % (self._largest + 1)
        return Problem(
            f"guess-{index}", index, f"guess a number from 0 to {self._largest}", str(secret)
        )

    def prompt_text(self, problem: Problem, target_length: int) -> str:
        return f"{with_budget(problem.prompt, target_length)}\n"

    def question(self, problem: Problem) -> str:
        return f"Guess a number from 0 to {self._largest}. Write only the number."

    def observe(self, problem: Problem, turns: Sequence[str]) -> Observation | None:
        guess = _guess(turns[-1])
        if guess is None:
            return Observation("say a number")
        secret = int(problem.answer)
        if guess == secret:
            return None
        return Observation("higher" if secret > guess else "lower")

    def turn_rewards(self, problem: Problem, turns: Sequence[str]) -> Sequence[int]:
        if not self._turn_micro:
            return ()
        least, most, secret = 0, self._largest, int(problem.answer)
        earned = []
        for guess in map(_guess, turns):
            if guess is None or not least <= guess <= most:
                earned.append(0)
                continue
            earned.append(self._turn_micro)
            least = guess + 1 if guess < secret else least
            most = guess - 1 if guess > secret else most
        return earned

    def check(self, problem: Problem, output_text: str, output_tokens: int) -> TaskScore:
        guess = _guess(output_text)
        if guess is None:
            return TaskScore(0, "no number")
        right = guess == int(problem.answer)
        return TaskScore(MICRO if right else 0, "found" if right else f"guessed {guess}")


def _guess(text: str) -> int | None:
    numbers = _NUMBER.findall(text)
    return int(numbers[-1]) if numbers else None
