"""The environment interface: a numbered list of problems, their prompts, and the grading of
answers.

Everything here is a pure function of the run definition, so that a validator that regrades a row
gets exactly the same reward: scores are whole millionths, combined in integer arithmetic.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from prime_core import encoding
from prime_core.errors import MalformedError, PolicyError, PrimeError, UserError
from prime_core.gateway import GatewayAnswer
from prime_core.ids import Digest
from prime_core.rollout import model_ranges
from prime_core.run import MICRO, Chat, Conversation, LengthBudgets
from prime_core.verdict import MAX_REWARD_MICRO
from prime_core.waiting import StoppedError
from prime_envs import tools
from prime_envs.chat import THINK, prompt_of, prompt_tokens, reply_tokens, thinking_tokens
from prime_envs.lengths import length_reward
from prime_envs.search import SearchIndex
from prime_envs.tasks import MAX_ID, Task
from prime_envs.tools import Observation, ToolCall

log = logging.getLogger(__name__)

OF_THIS_MACHINE = (PrimeError, StoppedError, MemoryError, OSError)
"""Exceptions in an environment's code that are a fault of this machine, not of the row."""
MAX_OUTPUT_CHARACTERS = 1 << 20
"""Longer answers are truncated to this length before grading."""
UNASKED = "unasked"
"""The id of a problem that its environment could not ask, in a mixture after the part's label."""
_UNASKED_PROMPT = "?"


class Tokenizer(Protocol):
    """The parts of a Hugging Face tokenizer that an environment uses."""

    def encode(
        self, text: str, *, add_special_tokens: bool, split_special_tokens: bool = False
    ) -> list[int]: ...

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        clean_up_tokenization_spaces: bool,
    ) -> str: ...

    @property
    def chat_template(self) -> Any: ...

    @property
    def special_tokens_map(self) -> Mapping[str, Any]: ...

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]: ...


@dataclass(frozen=True)
class Problem:
    """One task. `prompt` excludes the length instruction; `answer` is the gold solution. `unasked`:
    why a plugin could not ask it (see Environment.ask)."""

    problem_id: str
    index: int
    prompt: str
    answer: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    unasked: str = ""


@dataclass(frozen=True)
class TaskScore:
    """A grader's result: correctness in millionths, and the length that the budget applies to
    (None: all generated tokens)."""

    task_micro: int
    reason: str
    actual_length: int | None = None
    uncertain: bool = False
    parts: Mapping[str, int] = field(default_factory=dict)
    """Components of the score, as the grader counts them (tests passed, rules kept …)."""


@dataclass(frozen=True)
class Grade:
    """The run's reward of one row, in millionths, with its parts and a one-sentence reason.

    `uncertain`: a time or memory limit decided, not the answer, so no validator may reject the
    claim. `given_up_micro`: the reward claimed by a machine whose grader gave up on this row (see
    `refutes`). `ungraded`: the code of a plugin raised, so there is no reward: the row is claimed
    with 0, paid, and not trained on. `by_plugin`: that may happen on another machine only.
    """

    reward_micro: int
    parts: Mapping[str, int]
    reason: str
    uncertain: bool = False
    given_up_micro: int | None = None
    ungraded: bool = False
    by_plugin: bool = False

    def refutes(self, claimed: float) -> bool:
        """Whether a claimed reward is provably wrong. False if this grade is uncertain, or if the
        claim is what a grader reports that gave up or raised: that happens on slow machines and
        benefits no one."""
        if self.uncertain or self.ungraded:
            return False
        known = {self.reward_micro, self.given_up_micro, 0 if self.by_plugin else None} - {None}
        return all(abs(claimed * MICRO - micro) > 0.5 for micro in known if micro is not None)

    @property
    def score(self) -> float:
        """The reward as a float. For comparisons use `reward_micro`."""
        return self.reward_micro / MICRO


@dataclass(frozen=True)
class Reply:
    """The environment's tokens after a turn; empty if the row ends. For the other fields see
    tools.Observation."""

    tokens: tuple[int, ...] = ()
    exact: bool = True
    near_limit: bool = False
    """On a slower machine a call may end by its limit."""
    answer: GatewayAnswer | None = None
    """The gateway's answer in it."""
    unanswered: bool = False
    """A call ended by its limit, the gateway gave no answer to it, or the environment's code
    raised. This ends the row as `tool_limit`."""


class Environment(ABC):
    """A task family with pinned data. Subclasses provide problems, prompt text and `check`."""

    name: str
    version: int
    """Incremented manually with every change that can affect a problem, a prompt or a score."""
    may_give_up: bool = False
    """Whether grading may end at a time or memory limit, in a process or a sandbox."""
    chat: Chat | None = None
    """The run's chat format (registry.environment_for). None: prompts are `prompt_text`."""
    conversation: Conversation | None = None
    """The run's conversation settings. None: rows are single-turn."""
    index: SearchIndex | None = None
    """The index of the run's corpus, for the tool search-1."""
    plugin: bool = False
    """Whether it, or a grader of its rows, was loaded from an entry point."""

    @property
    def tools_may_give_up(self) -> bool:
        """Whether an answer to a turn may be missing on one machine only: a tool's call may end by
        a limit of the machine, a plugin's `observe` may raise."""
        if self.conversation is None:
            return False
        raises = self.plugin and type(self).observe is not Environment.observe
        return raises or bool({"python-1", "python-2"}.intersection(self.conversation.tools))

    def __init__(self, arguments: Mapping[str, int | str], budgets: LengthBudgets) -> None:
        self.arguments = dict(arguments)
        self.budgets = budgets

    def members(self) -> Sequence[Environment]:
        """The environment and those that it is made of."""
        return (self,)

    def firsts(self) -> Sequence[int]:
        """The first problem of each environment that this one is made of."""
        return (0,)

    @abstractmethod
    def data_digest(self) -> Digest:
        """SHA-256 of everything outside this code that problems or scores depend on."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of problems, training plus held-out."""

    @abstractmethod
    def problem(self, index: int) -> Problem:
        """Problem number `index`. Raises MalformedError outside [0, len)."""

    @abstractmethod
    def prompt_text(self, problem: Problem, target_length: int) -> str:
        """The complete prompt for a base model, including the length instruction."""

    @abstractmethod
    def check(self, problem: Problem, output_text: str, output_tokens: int) -> TaskScore:
        """Correctness of one answer. Bounded in time; deterministic unless `uncertain`."""

    def question(self, problem: Problem) -> str:
        """The question for a chat model, without the length instruction."""
        return problem.prompt

    def check_turns(self, problem: Problem, turns: Sequence[str], output_tokens: int) -> TaskScore:
        """Correctness of a row's model turns; by default, that of the last one. Like `check`."""
        return self.check(problem, turns[-1], output_tokens)

    def require(self, conversation: Conversation | None) -> None:  # noqa: B027 - most need nothing
        """Raises UserError if the environment cannot be used with a run's conversation settings."""

    def observe(self, problem: Problem, turns: Sequence[str]) -> Observation | None:
        """Returns the environment's message after the last of the model's `turns`; None ends the
        row. A pure function of its arguments. By default, the run's tools answer calls."""
        if self.conversation is None:
            return None
        return tools.answer(turns, self.conversation, self.index)

    def turn_rewards(self, problem: Problem, turns: Sequence[str]) -> Sequence[int]:
        """Rewards of the model's turns, in millionths; the row's reward is their sum plus that of
        the answer. Empty: only the answer counts. A pure function of its arguments."""
        return ()

    def observation_text(self, said: str) -> str:
        """The text of an `observe` message for a base model, without a chat template."""
        return f"{said}\n"

    def as_task(self, index: int) -> Task | None:
        """Problem `index` as a dataset row that the environment `tasks` (or our own kind) grades
        identically; None if there is no such row. Raises MalformedError outside [0, len)."""
        self._require_index(index)
        return None

    def digest(self) -> Digest:
        """SHA-256 over name, code version, arguments and data; pinned by the run definition."""
        return encoding.sha256(
            encoding.canonical_json(
                {
                    "name": self.name,
                    "version": self.version,
                    "arguments": self.arguments,
                    "data": self.data_digest(),
                }
            )
        )

    def prompt_tokens(
        self, problem: Problem, target_length: int, tokenizer: Tokenizer
    ) -> list[int]:
        """Token ids of the prompt, built with the run's chat template or from the plain text. Only
        the template's own special tokens are parsed: those in a problem's text are ordinary text.
        Raises the same errors as chat.prompt_around."""

        if self.chat is None:
            text = self.prompt_text(problem, target_length)
            return tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        return prompt_tokens(self.chat, self.question(problem), target_length, tokenizer)

    def ask(
        self, index: int, target_length: int, tokenizer: Tokenizer
    ) -> tuple[Problem, tuple[int, ...]]:
        """Problem number `index` and the tokens of its prompt.

        If the code of a plugin raises, that is logged, and the problem is UNASKED: its prompt is
        one character, and its answers are not graded. Lack of memory and errors of the system are
        raised, like those of environments built in, and those of prompt_tokens. Raises PolicyError
        if the tokenizer hides the calls of the run's tools (tools.hidden_mark).
        """
        if self.conversation is not None:
            added = tokenizer.added_tokens_decoder.values()
            special = [token.content for token in added if token.special]
            if hidden := tools.hidden_mark(self.conversation, special):
                why = tools.hidden_calls(hidden, self.conversation)
                raise PolicyError(f"the policy cannot be used: {why}")
        try:
            problem = self.problem(index)
            if not (isinstance(problem.problem_id, str) and len(problem.problem_id) <= MAX_ID):
                raise ValueError(f"a problem_id that is no text of at most {MAX_ID} characters")
            problem.problem_id.encode()
            return problem, tuple(self.prompt_tokens(problem, target_length, tokenizer))
        except OF_THIS_MACHINE:
            raise
        except Exception as error:
            if not self.plugin:
                raise
            why = f"the environment {self.name} raised {error!r} when problem {index} was asked"
            log.warning("%s; its rows are not trained on", why)
            prompt = tokenizer.encode(_UNASKED_PROMPT, add_special_tokens=False)
            return Problem(UNASKED, index, _UNASKED_PROMPT, "", unasked=why), tuple(prompt)

    def reply(
        self,
        problem: Problem,
        target_length: int,
        output_tokens: Sequence[int],
        spans: Sequence[int],
        tokenizer: Tokenizer,
        ask: Callable[[ToolCall], GatewayAnswer | None] | None = None,
    ) -> Reply:
        """Returns the environment's tokens after a model span that ended with an end token. The
        message of `observe` is truncated to the run's limit, and special tokens in it are not
        parsed. If the `observe` of a plugin raises, that is logged, and there is no answer; lack of
        memory and errors of the system are raised, like those of environments built in.

        `output_tokens` ends with that end token; `spans` are the span lengths, model first and
        last; `ask` gets calls of the gateway's tools. Raises the same errors as chat.reply_around,
        and those of `ask`.
        """
        if self.conversation is None or problem.unasked:
            return Reply()
        turns = texts_of(tokenizer, output_tokens, spans)[::2]
        try:
            said = self.observe(problem, turns)
            if said is not None and not (
                isinstance(said, Observation) and isinstance(said.text, str)
            ):
                raise TypeError(f"observe returned {type(said).__name__}, no Observation of text")
        except OF_THIS_MACHINE:
            raise
        except Exception as error:
            if not self.tools_may_give_up:
                raise
            log.warning(
                "problem %s, turn %d: the environment %s raised %r, so the row ends as tool_limit",
                problem.problem_id, len(turns) - 1, self.name, error,
            )  # fmt: skip
            return Reply(exact=False, unanswered=True)
        if said is None:
            return Reply()
        ended_by = output_tokens[-1]
        if said.call is not None:
            answer = None if ask is None else ask(said.call)
            if answer is None:
                return Reply(unanswered=True)
            return Reply(self._said(answer.text, ended_by, tokenizer), answer=answer)
        if said.limit == "reached":
            log.warning(
                "problem %s, turn %d: the call reached a limit of its tool, so the row ends as "
                "tool_limit", problem.problem_id, len(turns) - 1,
            )  # fmt: skip
            return Reply(exact=said.exact, unanswered=True)
        words = self._said(said.text, ended_by, tokenizer)
        return Reply(words, said.exact, near_limit=said.limit == "near")

    def _said(self, text: str, ended_by: int, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Tokens of an environment message, including the template's text around it."""
        assert self.conversation is not None
        text = tools.cut(text, self.conversation)
        if self.chat is None:
            said = self.observation_text(text)
            plain = tokenizer.encode(said, add_special_tokens=False, split_special_tokens=True)
            return tuple(plain)
        end_text = tokenizer.decode(
            [ended_by], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return reply_tokens(self.chat, self.conversation.role, text, end_text, tokenizer)

    def _prompt(self, problem: Problem, target_length: int, tokenizer: Tokenizer) -> str:
        if self.chat is None:
            return self.prompt_text(problem, target_length)
        return prompt_of(self.chat, self.question(problem), target_length, tokenizer)

    def grade_output(
        self,
        problem: Problem,
        target_length: int,
        output_tokens: Sequence[int],
        tokenizer: Tokenizer,
        spans: Sequence[int] = (),
    ) -> Grade:
        """The run's reward of generated tokens, including the end token; used by node, validator
        and trainer. Thinking opened by the prompt counts as part of the answer. In a conversation
        (`spans`, see prime_core.rollout.SCHEMAS), the last turn is the answer, and the length is
        that of all model turns; `turn_rewards` are added. Environment messages are not graded.

        If the code of a plugin raises, that is logged, and the row is ungraded, as is that of a
        problem that was not asked; lack of memory and errors of the system are raised, like those
        of environments built in."""
        if problem.unasked:
            return Grade(0, {}, problem.unasked, ungraded=True)
        ranges = model_ranges(spans, len(output_tokens))
        start, end = ranges[-1]
        text, thought = decode_output(tokenizer, output_tokens[start:end]), None
        generated = sum(end - start for start, end in ranges)
        said = texts_of(tokenizer, output_tokens, spans)[::2]
        earned: Sequence[int] = ()
        try:
            if self.chat is not None:
                opened = self._prompt(problem, target_length, tokenizer).rstrip().endswith(THINK)
                if opened:
                    text = THINK + text
                if self.chat.length == "thinking":
                    thought = sum(
                        thinking_tokens(tokenizer, output_tokens[start:end], opened)
                        for start, end in ranges
                    )
            grade = self.grade(problem, target_length, text, generated, thought, said[:-1])
            if self.conversation is not None:
                earned = tuple(self.turn_rewards(problem, said))
            total = sum(earned)
            whole = grade.reward_micro + total
            for micro in (grade.reward_micro, *earned, whole) if self.plugin else ():
                if type(micro) is not int or abs(micro) > MAX_REWARD_MICRO:
                    raise ValueError(f"{micro!r} is no whole number of millionths up to 10^15")
        except OF_THIS_MACHINE:
            raise
        except Exception as error:
            if not self.plugin:
                raise
            why = f"the environment {self.name} raised {error!r}"
            log.warning(
                "problem %s, turn %d: %s when it graded the row, which is not trained on",
                problem.problem_id, len(ranges) - 1, why,
            )  # fmt: skip
            return Grade(0, {}, why, ungraded=True)
        grade = replace(grade, by_plugin=self.plugin)
        if self.conversation is None:
            return grade
        given_up = grade.given_up_micro
        return replace(
            grade,
            reward_micro=grade.reward_micro + total,
            given_up_micro=None if given_up is None else given_up + total,
            parts={
                **grade.parts,
                "turns": len(ranges),
                **{f"turn_{turn}_micro": micro for turn, micro in enumerate(earned)},
            },
        )

    def grade(
        self,
        problem: Problem,
        target_length: int,
        output_text: str,
        output_tokens: int,
        length: int | None = None,
        earlier: Sequence[str] = (),
    ) -> Grade:
        """The run's reward, combining correctness and length (see lengths.py).

        `output_text` is from `decode_output`; `output_tokens` includes the end token; `length` is
        the length that the budget applies to (None: the environment's count); `earlier` are the
        model's turns before the answer.
        """
        turns = (*earlier, output_text[:MAX_OUTPUT_CHARACTERS])
        score = self.check_turns(problem, turns, output_tokens)
        counted = output_tokens if score.actual_length is None else score.actual_length
        actual = counted if length is None else length
        reward, given_up = (
            length_reward(
                task_micro,
                target=target_length,
                actual=actual,
                penalty_micro=self.budgets.penalty_micro,
                form=self.budgets.form,
            )
            for task_micro in (score.task_micro, 0)
        )
        parts = {
            **score.parts,
            "task_micro": score.task_micro,
            "length": actual,
            "target": target_length,
        }
        return Grade(
            reward,
            parts,
            score.reason,
            score.uncertain,
            given_up if self.may_give_up else None,
        )

    def close(self) -> None:  # noqa: B027 - most environments start nothing
        """Ends child processes started by grading; grading again restarts them."""

    def _integers(self, **bounds: tuple[int, int, int]) -> list[int]:
        """The values of the arguments, which are whole numbers: name=(default, least, most). Raises
        UserError for another argument or value."""
        unknown = sorted(set(self.arguments) - set(bounds))
        if unknown:
            raise UserError(f"The {self.name} environment has no argument {unknown[0]!r}.")
        values = []
        for name, (default, least, most) in bounds.items():
            value = self.arguments.get(name, default)
            if not isinstance(value, int) or not least <= value <= most:
                raise UserError(f"The {self.name} environment takes `{name}`, {least} to {most}.")
            values.append(value)
        return values

    def _require_index(self, index: int) -> None:
        if not 0 <= index < len(self):
            raise MalformedError(f"problem {index} is not among the {len(self)} of {self.name!r}")


def texts_of(tokenizer: Tokenizer, output_tokens: Sequence[int], spans: Sequence[int]) -> list[str]:
    """The text of each span, alternating between model and environment, without special tokens."""
    found, at = [], 0
    for length in spans or (len(output_tokens),):
        found.append(decode_output(tokenizer, output_tokens[at : at + length]))
        at += length
    return found


def decode_output(tokenizer: Tokenizer, output_tokens: Sequence[int]) -> str:
    """The text of generated tokens, without special tokens."""
    return tokenizer.decode(
        list(output_tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
