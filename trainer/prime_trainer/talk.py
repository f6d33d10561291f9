"""`trainer chat`: questions to a policy, asked as its run asks them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prime_core import encoding
from prime_core.errors import UserError
from prime_core.run import Chat, Conversation, RunDefinition
from prime_engine.base import Discard, Engine, GenerationRequest
from prime_envs import tools
from prime_envs.base import decode_output
from prime_envs.chat import (
    THINK,
    messages_of,
    render,
    reply_tokens,
    tokens_with_plain_words,
)
from prime_envs.samples import SpanKind
from prime_envs.search import SearchIndex


def chat_of(
    run: RunDefinition | None, engine: Engine, system: str | None, budget: int | None
) -> Chat:
    """The run's chat format, or the model's template with the default wording of the budget.
    `system` replaces the system prompt. Raises UserError if the model has no chat template,
    `system` is not Unicode text, or the run has no sentence for `budget`."""
    template = engine.tokenizer.chat_template
    if not isinstance(template, str):
        raise UserError(
            "the model has no chat template", hint="name an instruct model, or a policy of one"
        )
    try:
        (system or "").encode()
    except UnicodeEncodeError as error:
        raise UserError(
            "the system prompt is not text in UTF-8", hint="give --system as UTF-8"
        ) from error
    known = run.chat if run is not None else None
    chat = known or Chat(template=encoding.sha256(template.encode()))
    require_wording(chat, budget)
    return chat if system is None else chat.model_copy(update={"system": system})


def require_wording(chat: Chat, budget: int | None) -> None:
    """Raises UserError if a budget is asked for and the chat format has no sentence for it."""
    if budget is not None and not chat.budget:
        raise UserError(
            'the run has no sentence that asks for a budget ([chat] with budget = "")',
            hint="leave the budget out, or name another run by --run",
        )


def rendered_text(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """A conversation in the model's own template, up to where its answer begins. Raises UserError
    if the template cannot render it."""
    special = {
        name: str(token)
        for name, token in tokenizer.special_tokens_map.items()
        if not isinstance(token, list)
    }
    return render(tokenizer.chat_template, messages, special, tools)


def policy_in(place: Path) -> tuple[Path, Path | None]:
    """The policy that a user names by `place`: (its model folder, its run definition if there is
    one next to it).

    `place` is a model folder, the folder of a `trainer local` (finished, or its newest policy so
    far), or a folder of policies fetched from the broadcast, by version (the newest). Raises
    UserError if there is no policy.
    """
    named = [place, place / "model"]
    for parent in (place / "policies", place):
        children = parent.iterdir() if parent.is_dir() else ()
        versions = sorted((p for p in children if p.name.isdigit()), key=lambda p: int(p.name))
        named += reversed(versions)
    found = next((folder for folder in named if (folder / "config.json").is_file()), None)
    if found is None:
        if (place / "origin").is_dir():
            raise UserError(
                f"{place} is a trainer's folder, whose policies are stored in chunks",
                hint=f"write one as a model folder: trainer export --data {place} --out FOLDER",
            )
        raise UserError(
            f"{place} holds no policy",
            hint="name a Hugging Face folder, what `trainer local --out` wrote, or a folder of "
            "fetched policies",
        )
    run = place / "run.json"
    return found, run if run.is_file() else None


@dataclass(frozen=True)
class Answering:
    """How answers are sampled. `budget`: the target length in tokens that the prompt asks for; None
    leaves the sentence out. `max_tokens` bounds one answer. `seed` None: another one each time."""

    budget: int | None = None
    max_tokens: int = 512
    temperature: float = 1.0
    seed: int | None = None


@dataclass
class Talk:
    """One conversation with a policy. `conversation`: whose tools answer the model's calls;
    `index`: what tools.load_tools returned for it.

    The template renders the whole conversation for each question, so one that drops the thinking
    of earlier answers does so here. Between two questions, a tool's answer is added as training
    adds it: the tokens so far, then those of the message. Special tokens in the words of others are
    not parsed.
    """

    engine: Engine
    chat: Chat
    how: Answering = Answering()
    conversation: Conversation | None = None
    index: SearchIndex | None = None
    _said: list[tuple[str, str]] = field(default_factory=list, init=False)
    """Role and text of each message so far, without those before the first question."""
    _tokens: tuple[int, ...] = field(default=(), init=False)
    _ended: bool = field(default=True, init=False)
    """Whether the newest turn of the model ended with an end token."""

    def ask(self, question: str) -> Iterator[tuple[SpanKind, str]]:
        """Yields the turns that answer a question: the model's, and between them the tools'.
        Raises MalformedError if the conversation does not fit the model, and the same errors as
        chat.reply_around if it has tools, and as chat.tokens_with_plain_words."""
        conversation = self.conversation
        said = [*self._said, ("user", question)]
        self._tokens = self._rendered(said)
        turns: list[str] = []
        while True:
            opened = self._opened()
            text, ended = self._generate()
            turns.append(text)
            said.append(("assistant", opened + text))
            self._said = said
            yield "answer", text
            if conversation is None or not ended or len(turns) >= conversation.turns:
                return
            answer = tools.answer(turns, conversation, self.index)
            if answer is None:
                return
            reply = tools.cut(answer.text, conversation)
            self._append(conversation.role, reply)
            said.append((conversation.role, reply))
            yield "environment", reply

    def _rendered(self, said: Sequence[tuple[str, str]]) -> tuple[int, ...]:
        """The tokens of the whole conversation, up to where the next answer begins."""
        chat, tokenizer = self.chat, self.engine.tokenizer
        if self.how.budget is None:
            chat = chat.model_copy(update={"budget": ""})

        def written(mark: Callable[[str], str]) -> str:
            messages = messages_of(chat, mark(said[0][1]), self.how.budget or 0)
            messages += [{"role": role, "content": mark(text)} for role, text in said[1:]]
            return rendered_text(tokenizer, messages)

        return tokens_with_plain_words(written, tokenizer)

    def _opened(self) -> str:
        """The beginning of the next answer's thinking if the prompt contains it, else nothing."""
        end = self.engine.tokenizer.decode(
            list(self._tokens[-16:]), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        _, opening, rest = end.rpartition(THINK)
        return "" if rest.strip() else opening + rest

    def _append(self, role: str, text: str) -> None:
        """Adds a message between two turns of the model."""
        tokenizer, ended_by = self.engine.tokenizer, list(self._tokens[-1:]) if self._ended else []
        end_text = tokenizer.decode(
            ended_by, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        self._tokens += reply_tokens(self.chat, role, text, end_text, tokenizer)

    def _generate(self) -> tuple[str, bool]:
        """The model's next turn, and whether it ended with an end token."""
        seed = secrets.randbits(62) if self.how.seed is None else self.how.seed
        request = GenerationRequest(
            prompt_tokens=self._tokens,
            max_output_tokens=self.how.max_tokens,
            noise_seed=seed,
        )
        (made,) = self.engine.generate([request], self.how.temperature, Discard())
        self._tokens += made.output_tokens
        text = decode_output(self.engine.tokenizer, made.output_tokens)
        self._ended = made.finish_reason == "end"
        return text, self._ended


def answers(talk: Talk, questions: Iterable[str]) -> Iterator[list[tuple[SpanKind, str]]]:
    """The turns that answer each question that is not empty."""
    for question in questions:
        if question.strip():
            yield list(talk.ask(question.strip()))


def start(
    folder: Path,
    run: RunDefinition | None,
    loading: dict[str, Any],
    how: Answering = Answering(),
    system: str | None = None,
) -> Talk:
    """Loads the policy in `folder` for a conversation. `loading`: engine, dtype, device; `system`
    as in `chat_of`. Raises UserError, UnavailableError."""
    from prime_trainer.loading import require_model_folder
    from prime_verify.engines import load_engine

    require_model_folder(folder)
    conversation = None if run is None else run.conversation
    index = None if conversation is None else tools.load_tools(conversation)
    engine = load_engine(folder, **loading)
    chat = chat_of(run, engine, system, how.budget)
    return Talk(engine, chat, how, conversation, index)
