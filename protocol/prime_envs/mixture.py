"""Several environments in one run, in fixed proportions: `name = "mixture"` with parts.

Problem i belongs to the part that the weights give to slot i: of each W consecutive slots, where W
is the sum of the weights, a part with weight w gets w, spread evenly. Its problems follow one
another within the part, so training and held-out problems never overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from prime_core import encoding
from prime_core.errors import UserError
from prime_core.gateway import GatewayAnswer
from prime_core.ids import Digest
from prime_core.run import Conversation, LengthBudgets
from prime_envs.base import Environment, Grade, Problem, Reply, TaskScore, Tokenizer
from prime_envs.tasks import MAX_ID, Task
from prime_envs.tools import ToolCall


class Mixture(Environment):
    """`parts` are (label, weight, environment), with different labels. A problem's id begins with
    its part's label and a slash; if it would be too long, the SHA-256 of the part's id follows."""

    name = "mixture"
    version = 1

    def __init__(
        self, parts: Sequence[tuple[str, int, Environment]], budgets: LengthBudgets
    ) -> None:
        super().__init__({}, budgets)
        self._labels = [label for label, _, _ in parts]
        self._weights = [weight for _, weight, _ in parts]
        self._parts = [environment for _, _, environment in parts]
        self._cycle = spread(self._weights)
        earlier = [0] * len(parts)
        self._earlier: list[int] = []
        """Slots of the same part before each slot of the cycle."""
        for part in self._cycle:
            self._earlier.append(earlier[part])
            earlier[part] += 1
        self._size = min(map(self._first_missing, range(len(parts))))
        self.may_give_up = any(part.may_give_up for part in self._parts)

    @property
    def tools_may_give_up(self) -> bool:
        return any(part.tools_may_give_up for part in self._parts)

    def members(self) -> Sequence[Environment]:
        return (self, *self._parts)

    def firsts(self) -> Sequence[int]:
        return [self._cycle.index(part) for part in range(len(self._parts))]

    def data_digest(self) -> Digest:
        """Covers labels, weights, and the digests of the parts."""
        digests = [part.digest() for part in self._parts]
        stated = [list(one) for one in zip(self._labels, self._weights, digests, strict=True)]
        return encoding.sha256(encoding.canonical_json(stated))

    def __len__(self) -> int:
        """Slots before the first one whose part has no problem left."""
        return self._size

    def problem(self, index: int) -> Problem:
        self._require_index(index)
        part, number = self._place(index)
        return self._as_ours(part, self._parts[part].problem(number), index)

    def ask(
        self, index: int, target_length: int, tokenizer: Tokenizer
    ) -> tuple[Problem, tuple[int, ...]]:
        self._require_index(index)
        part, number = self._place(index)
        found, prompt = self._parts[part].ask(number, target_length, tokenizer)
        return self._as_ours(part, found, index), prompt

    def _as_ours(self, part: int, found: Problem, index: int) -> Problem:
        """A part's problem as problem `index` of the mixture."""
        label = self._labels[part]
        return replace(
            found,
            problem_id=self._named(part, found.problem_id),
            index=index,
            metadata={**found.metadata, "environment": label, "own_id": found.problem_id},
        )

    def prompt_text(self, problem: Problem, target_length: int) -> str:
        part, own = self._own(problem)
        return part.prompt_text(own, target_length)

    def question(self, problem: Problem) -> str:
        part, own = self._own(problem)
        return part.question(own)

    def check(self, problem: Problem, output_text: str, output_tokens: int) -> TaskScore:
        part, own = self._own(problem)
        return part.check(own, output_text, output_tokens)

    def prompt_tokens(
        self, problem: Problem, target_length: int, tokenizer: Tokenizer
    ) -> list[int]:
        part, own = self._own(problem)
        return part.prompt_tokens(own, target_length, tokenizer)

    def reply(
        self,
        problem: Problem,
        target_length: int,
        output_tokens: Sequence[int],
        spans: Sequence[int],
        tokenizer: Tokenizer,
        ask: Callable[[ToolCall], GatewayAnswer | None] | None = None,
    ) -> Reply:
        part, own = self._own(problem)
        return part.reply(own, target_length, output_tokens, spans, tokenizer, ask)

    def grade_output(
        self,
        problem: Problem,
        target_length: int,
        output_tokens: Sequence[int],
        tokenizer: Tokenizer,
        spans: Sequence[int] = (),
    ) -> Grade:
        part, own = self._own(problem)
        return part.grade_output(own, target_length, output_tokens, tokenizer, spans)

    def require(self, conversation: Conversation | None) -> None:
        """Raises UserError, naming the part, if one cannot be used with these settings."""
        for label, part in zip(self._labels, self._parts, strict=True):
            try:
                part.require(conversation)
            except UserError as error:
                raise UserError(f"part {label!r}: {error}", hint=error.hint) from error

    def as_task(self, index: int) -> Task | None:
        self._require_index(index)
        part, number = self._place(index)
        task = self._parts[part].as_task(number)
        if task is None:
            return None
        return replace(task, problem_id=self._named(part, task.problem_id))

    def close(self) -> None:
        """Ends the parts' child processes."""
        for part in self._parts:
            part.close()

    def _place(self, index: int) -> tuple[int, int]:
        """Slot `index` as a part and a problem of it."""
        cycles, slot = divmod(index, len(self._cycle))
        part = self._cycle[slot]
        return part, cycles * self._weights[part] + self._earlier[slot]

    def _named(self, part: int, name: str) -> str:
        """The id in the mixture of a part's problem."""
        whole = f"{self._labels[part]}/{name}"
        if len(whole) <= MAX_ID:
            return whole
        return f"{self._labels[part]}/{encoding.sha256(name.encode())}"

    def _own(self, problem: Problem) -> tuple[Environment, Problem]:
        """A problem's part, and the problem as that part made it."""
        part, number = self._place(problem.index)
        name = problem.metadata["own_id"]
        return self._parts[part], replace(problem, problem_id=name, index=number)

    def _first_missing(self, part: int) -> int:
        """The first slot for which a part has no problem left."""
        cycles, over = divmod(len(self._parts[part]), self._weights[part])
        slots = [slot for slot, of in enumerate(self._cycle) if of == part]
        return cycles * len(self._cycle) + slots[over]


def spread(weights: Sequence[int]) -> list[int]:
    """One cycle of part numbers in which part i occurs `weights[i]` times, spread evenly (smooth
    weighted round-robin, as in nginx's upstream balancer)."""
    total, credit, cycle = sum(weights), [0] * len(weights), []
    for _ in range(total):
        credit = [have + weight for have, weight in zip(credit, weights, strict=True)]
        chosen = max(range(len(weights)), key=lambda part: (credit[part], -part))
        credit[chosen] -= total
        cycle.append(chosen)
    return cycle
