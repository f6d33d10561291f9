"""Environments with several turns, for tests and benchmarks: each asks for the same word again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from prime_envs.base import Problem
from prime_envs.environments.reverse import Reverse
from prime_envs.registry import BUILT_IN
from prime_envs.tools import Observation


class Words(Reverse):
    """Asks for the word again after each turn, in the words of the prompt."""

    name = "words"
    exact = True
    limit: Literal["", "near", "reached"] = ""

    def observe(self, problem: Problem, turns: Sequence[str]) -> Observation | None:
        return Observation(self.prompt_text(problem, 2 * len(turns)), self.exact, self.limit)

    def observation_text(self, said: str) -> str:
        return said


class Searches(Words):
    """Searches the run's corpus for each answer; the last hit ends with the next prompt."""

    name = "searches"

    def observe(self, problem: Problem, turns: Sequence[str]) -> Observation | None:
        return Reverse.observe(self, problem, [f"<search>{turn}</search>" for turn in turns])


class Writes(Words):
    """Appends the next prompt to a file after each turn; the answer is the whole file."""

    name = "writes"

    def observe(self, problem: Problem, turns: Sequence[str]) -> Observation | None:
        prompts = [self.prompt_text(problem, 2 * turn) for turn in range(1, len(turns) + 1)]
        calls = [f"<files>append words.txt {prompt}</files>" for prompt in prompts]
        return Reverse.observe(self, problem, [*calls, "<files>read words.txt</files>"])


class Computes(Words):
    """Runs a program for each answer, which prints the next prompt."""

    name = "computes"

    def observe(self, problem: Problem, turns: Sequence[str]) -> Observation | None:
        prompt = self.prompt_text(problem, 2 * len(turns))
        return Reverse.observe(self, problem, [f"```\nprint({prompt!r})\n```" for _ in turns])


class Calls(Words):
    """Calls a tool after each turn: in turn a program that computes and prints the next prompt, and
    a file to which that is written, and which is read."""

    name = "calls"

    def observe(self, problem: Problem, turns: Sequence[str]) -> Observation | None:
        calls: list[str] = []
        for turn in range(1, len(turns) + 1):
            prompt = self.prompt_text(problem, 2 * turn)
            if turn % 2:
                work = "total = sum([i * i for i in range(1000)])"
                calls.append(f"<python>{work}\nprint({prompt!r})</python>")
            else:
                calls += [f"<files>write {turn} {prompt}</files>", f"<files>read {turn}</files>"]
        return Reverse.observe(self, problem, calls)


@contextmanager
def registered() -> Iterator[None]:
    """Makes runs find these environments by name, for a block, if they do not already."""
    all_of_them = (Words, Searches, Writes, Computes, Calls)
    own = {found.name: __name__ for found in all_of_them if found.name not in BUILT_IN}
    BUILT_IN.update(own)
    try:
        yield
    finally:
        for name in own:
            del BUILT_IN[name]
