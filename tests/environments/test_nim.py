"""The game nim: positions, moves, the opponent, and what a game earns."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_core.errors import UserError
from prime_core.run import Conversation, LengthBudgets
from prime_envs.environments.nim import Nim

BUDGETS = LengthBudgets(targets=(10,), penalty_micro=0)
GAME = Nim({"turn_micro": 1000}, BUDGETS)
Heaps = tuple[int, ...]
Move = tuple[int, int]


def after(heaps: Heaps, move: Move) -> Heaps:
    heap, count = move
    return (*heaps[:heap], heaps[heap] - count, *heaps[heap + 1 :])


def moves(heaps: Heaps) -> Iterator[Move]:
    for heap, size in enumerate(heaps):
        yield from ((heap, count) for count in range(1, size + 1))


@cache
def wins(heaps: Heaps) -> bool:
    """Whether the next player can win: by trying every move, not by the theory of Nim."""
    return any(not wins(after(heaps, move)) for move in moves(heaps))


def text(move: Move) -> str:
    return f"{'ABCD'[move[0]]} {move[1]}"


def sizes(said: str) -> Heaps:
    """The heaps that a message names."""
    return tuple(int(size) for size in re.findall(r"[A-D] ([0-9]+)", said.partition(": ")[2]))


def test_problems_are_all_positions_that_the_first_player_can_win_each_once() -> None:
    found = [GAME.problem(index).metadata["heaps"] for index in range(len(GAME))]
    assert sorted(found) == [heaps for heaps in product(range(1, 8), repeat=3) if wins(heaps)]
    assert found != sorted(found)
    problem = GAME.problem(0)
    assert problem.prompt.startswith("Nim: heaps A ")
    heap, count = problem.answer.split()
    assert not wins(after(found[0], ("ABC".index(heap), int(count)))), "the answer is a best move"


@pytest.mark.parametrize("arguments", [{}, {"heaps": 2, "largest": 15}, {"heaps": 4, "largest": 3}])
def test_without_a_mistake_the_model_wins_in_as_many_turns_as_heaps(
    arguments: dict[str, int | str],
) -> None:
    game = Nim(arguments, BUDGETS)
    for index in range(len(game)):
        problem = game.problem(index)
        heaps, turns = problem.metadata["heaps"], []
        while any(heaps):
            move = next(move for move in moves(heaps) if not wins(after(heaps, move)))
            turns.append(text(move))
            said = game.observe(problem, turns)
            heaps = after(heaps, move)
            assert (said is None) == (not any(heaps))
            if said is not None:
                answered = sizes(said.text)
                assert answered in [after(heaps, reply) for reply in moves(heaps)]
                heaps = answered
        assert len(turns) <= len(heaps)
        score = game.check_turns(problem, turns, 1)
        assert (score.task_micro, score.reason) == (1_000_000, "won")
        assert score.parts == {"best_moves": len(turns), "mistakes": 0, "illegal_moves": 0}


def test_the_words_of_a_game() -> None:
    at = next(i for i in range(len(GAME)) if GAME.problem(i).metadata["heaps"] == (1, 2, 7))
    problem = GAME.problem(at)
    turns: list[str] = []

    def say(turn: str) -> str | None:
        turns.append(turn)
        said = GAME.observe(problem, turns)
        return None if said is None else said.text

    assert say("I think of A 1, but take C 4") == "I take C 3: A 1, B 2, C 0"
    for illegal in ("", "B 3", "C 1", "B 0", "D 1", "b 1", "B 11", "B 111", "SUB 1", "Z 1"):
        assert say(illegal) == "illegal: A 1, B 2, C 0"
    assert GAME.check_turns(problem, turns, 1).reason == "not finished"
    assert say("B1") == "I take A 1: A 0, B 1, C 0"
    assert say("B 1") is None
    assert GAME.check_turns(problem, turns, 1).parts == {
        "best_moves": 3, "mistakes": 0, "illegal_moves": 10,
    }  # fmt: skip
    assert GAME.turn_rewards(problem, turns) == [1000, *[0] * 10, 1000, 1000]
    lost = ["C 7", "A 1"]
    assert [said and said.text for said in (GAME.observe(problem, lost[:n]) for n in (1, 2))] == [
        "I take B 1: A 1, B 1, C 0", None,
    ]  # fmt: skip
    score = GAME.check_turns(problem, lost, 1)
    assert (score.task_micro, score.reason, score.parts["mistakes"]) == (0, "lost", 2)
    assert GAME.turn_rewards(problem, lost) == [0, 0]
    assert not Nim({}, BUDGETS).turn_rewards(problem, lost)


@given(st.integers(0, len(GAME) - 1), st.data())
def test_a_game_is_won_only_without_a_mistake(index: int, data: st.DataObject) -> None:
    problem = GAME.problem(index)
    heaps, turns, mistakes, wrong = problem.metadata["heaps"], [], 0, 0
    won = False
    for _ in range(8):
        move = data.draw(st.one_of(st.sampled_from([*moves(heaps)]), st.just((0, 0))))
        turns.append(text(move))
        said = GAME.observe(problem, turns)
        if move == (0, 0):
            wrong += 1
        else:
            heaps = after(heaps, move)
            mistakes += wins(heaps)
            won = not any(heaps)
        if said is None:
            break
        heaps, before = sizes(said.text), heaps
        assert heaps == before if move == (0, 0) else wins(heaps) != wins(before)
    score = GAME.check_turns(problem, turns, 1)
    assert score.task_micro == (1_000_000 if won and not mistakes else 0)
    assert won <= (not mistakes), "the opponent makes no mistake, so one of the model's loses"
    assert score.parts == {
        "best_moves": len(turns) - mistakes - wrong, "mistakes": mistakes, "illegal_moves": wrong,
    }  # fmt: skip


@given(st.lists(st.text(max_size=30), min_size=1, max_size=5))
def test_no_text_makes_the_game_raise(turns: list[str]) -> None:
    problem = GAME.problem(0)
    GAME.observe(problem, turns)
    assert GAME.check_turns(problem, turns, 1).task_micro in (0, 1_000_000)


def test_what_nim_cannot_be_used_with_is_refused() -> None:
    GAME.require(Conversation(turns=3))
    for conversation in (
        None, Conversation(turns=2), Conversation(turns=3, tools=("notes-1",)),
    ):  # fmt: skip
        with pytest.raises(UserError, match="at least 3 turns without tools"):
            GAME.require(conversation)
    for wrong in ({"heaps": 5}, {"largest": 1}, {"turn_micro": -1}, {"players": 2}):
        with pytest.raises(UserError, match="The nim environment"):
            Nim(wrong, BUDGETS)
