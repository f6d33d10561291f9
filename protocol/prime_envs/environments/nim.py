"""A multi-turn game: Nim against a perfect opponent.

prompt  heaps A 1, B 2, C 7
model   C 4           environment  I take C 3: A 1, B 2, C 0
model   B 1           environment  I take A 1: A 0, B 1, C 0
model   B 1           (the last object: the row ends)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import product
from operator import xor

from prime_core import encoding
from prime_core.errors import UserError
from prime_core.ids import Digest
from prime_core.run import MICRO, Conversation, LengthBudgets
from prime_envs.base import Environment, Problem, TaskScore
from prime_envs.prompts import with_budget
from prime_envs.tools import Observation

_MOVE = re.compile(r"(?<![A-Za-z])([A-Z]) *([0-9]{1,2})(?![0-9])")
"""A heap and the number of objects taken from it."""
BEST, MISTAKE, ILLEGAL = "best_moves", "mistakes", "illegal_moves"


class Nim(Environment):
    """Arguments: `heaps` (default 3); `largest`, the most objects of a heap (default 7);
    `turn_micro`, the reward of each best move, in millionths (default 0).

    The players take one or more objects from one heap in turn; who takes the last object wins. A
    turn's move is the last one in it. After an illegal move the model moves again, in its next
    turn. The answer is correct if the model wins. Each problem is a position that the first player
    can win, and no two are equal. Without a mistake the model wins in at most `heaps` turns.
    Requires a run with [conversation], as many turns and no tools.
    """

    name = "nim"
    version = 1

    def __init__(self, arguments: Mapping[str, int | str], budgets: LengthBudgets) -> None:
        super().__init__(arguments, budgets)
        self._heaps, self._largest, self._turn_micro = self._integers(
            heaps=(3, 2, 4), largest=(7, 2, 15), turn_micro=(0, 0, MICRO)
        )
        sizes = range(1, self._largest + 1)
        won = [heaps for heaps in product(sizes, repeat=self._heaps) if reduce(xor, heaps)]
        self._positions = sorted(won, key=lambda heaps: encoding.sha256(bytes(heaps)))

    def require(self, conversation: Conversation | None) -> None:
        if conversation is None or conversation.tools or conversation.turns < self._heaps:
            raise UserError(
                f"the environment nim with {self._heaps} heaps needs a conversation of at least "
                f"{self._heaps} turns without tools",
                hint=f"[conversation] with turns = {self._heaps} or more, and tools = []",
            )

    def data_digest(self) -> Digest:
        return encoding.sha256(b"")

    def __len__(self) -> int:
        return len(self._positions)

    def problem(self, index: int) -> Problem:
        self._require_index(index)
        heaps = self._positions[index]
        prompt = (
            f"Nim: heaps {_shown(heaps)}. Take one or more objects from one heap. Then I do the "
            "same, and so on. Who takes the last object wins. Write only your move, as in A 1."
        )
        return Problem(f"nim-{index}", index, prompt, _written(_reply_to(heaps)), {"heaps": heaps})

    def prompt_text(self, problem: Problem, target_length: int) -> str:
        return f"{with_budget(problem.prompt, target_length)}\n"

    def observe(self, problem: Problem, turns: Sequence[str]) -> Observation | None:
        game = _Game.of(problem, turns)
        return Observation(game.said) if game.said else None

    def turn_rewards(self, problem: Problem, turns: Sequence[str]) -> Sequence[int]:
        if not self._turn_micro:
            return ()
        moves = _Game.of(problem, turns).moves
        return [self._turn_micro if move == BEST else 0 for move in moves]

    def check(self, problem: Problem, output_text: str, output_tokens: int) -> TaskScore:
        return self.check_turns(problem, [output_text], output_tokens)

    def check_turns(self, problem: Problem, turns: Sequence[str], output_tokens: int) -> TaskScore:
        game = _Game.of(problem, turns)
        reason = "won" if game.won else "not finished" if any(game.heaps) else "lost"
        parts = {kind: game.moves.count(kind) for kind in (BEST, MISTAKE, ILLEGAL)}
        return TaskScore(MICRO if game.won else 0, reason, parts=parts)


@dataclass
class _Game:
    """A game after some turns of the model and the answers to them."""

    heaps: list[int]
    moves: list[str] = field(default_factory=list)
    """What each turn's move was: BEST, MISTAKE or ILLEGAL."""
    said: str = ""
    """The answer to the last turn; empty if the game is over."""
    won: bool = False

    @classmethod
    def of(cls, problem: Problem, turns: Sequence[str]) -> _Game:
        game = cls(list(problem.metadata["heaps"]))
        for turn in turns:
            game._take_turn(turn)
        return game

    def _take_turn(self, text: str) -> None:
        found = _MOVE.findall(text)
        heap, count = (ord(found[-1][0]) - ord("A"), int(found[-1][1])) if found else (0, 0)
        if heap >= len(self.heaps) or not 1 <= count <= self.heaps[heap]:
            self.moves.append(ILLEGAL)
            self.said = f"illegal: {_shown(self.heaps)}"
            return
        self.heaps[heap] -= count
        self.moves.append(MISTAKE if reduce(xor, self.heaps) else BEST)
        if not any(self.heaps):
            self.won, self.said = True, ""
            return
        heap, count = answer = _reply_to(self.heaps)
        self.heaps[heap] -= count
        self.said = f"I take {_written(answer)}: {_shown(self.heaps)}" if any(self.heaps) else ""


def _reply_to(heaps: Sequence[int]) -> tuple[int, int]:
    """The opponent's move (heap, objects): the first one that leaves a position in which the sizes
    XOR to 0, from which the next player cannot win; in such a position, the whole largest heap."""
    total = reduce(xor, heaps)
    for heap, size in enumerate(heaps):
        if size ^ total < size:
            return heap, size - (size ^ total)
    largest = max(heaps)
    return heaps.index(largest), largest


def _written(move: tuple[int, int]) -> str:
    return f"{chr(ord('A') + move[0])} {move[1]}"


def _shown(heaps: Sequence[int]) -> str:
    return ", ".join(_written(one) for one in enumerate(heaps))
