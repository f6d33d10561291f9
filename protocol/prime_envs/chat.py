"""Chat templates: renders a problem as a conversation for a chat model.

The template comes from the model folder and is pinned by the run (prime_core.run.Chat). It is
rendered like in transformers: the same extensions in jinja2's immutable sandbox. Node, validator
and trainer must get the same text at any time and on any machine, so templates that use the date,
randomness or memory addresses are rejected.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, UndefinedError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import ValidationError

from prime_core import encoding
from prime_core.errors import PolicyError, UserError
from prime_core.run import Chat, Conversation

TEMPLATE_FILE = "chat_template.jinja"
SETTINGS_FILE = "tokenizer_config.json"
OTHER_TEMPLATES = ("chat_template.json", "additional_chat_templates")
"""Where a model folder may hold templates that transformers' tokenizers do not take by default: the
first is a processor's, the second holds templates by name."""
THINK, END_OF_THOUGHT = "<think>", "</think>"
MAX_TEMPLATE = 1 << 20
_CHANGING = frozenset({"random", "lipsum"})
"""Functions and filters of jinja2 whose result varies by call."""
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]{4,}")
_HINT = f'change {TEMPLATE_FILE} in the model folder, or say: prompts = "raw"'


class _Generation(Extension):
    """`{% generation %}` marks text written by an assistant, for training on examples. Here only
    the text inside matters."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@lru_cache(maxsize=8)
def _compiled(text: str) -> Template:
    """Compiles a template. Raises UserError if it is invalid or not deterministic."""
    if len(text) > MAX_TEMPLATE:
        raise UserError(f"a chat template of {len(text)} characters is too long", hint=_HINT)
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    try:
        for line, kind, value in environment.lex(text):
            named = value.strip("'\"") if kind == "string" else value
            if kind in ("name", "string") and named in _CHANGING:
                raise UserError(
                    f"the chat template uses {named} in line {line}: its prompts would differ from "
                    "one time to the next",
                    hint=_HINT,
                )
        return environment.from_string(text)
    except TemplateError as error:
        raise UserError(f"the chat template cannot be parsed: {error}", hint=_HINT) from error


def render(
    text: str,
    messages: Sequence[Mapping[str, Any]],
    special: Mapping[str, str],
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """Renders the conversation as text, up to where the model's answer begins.

    `text` is the template; `special` the tokenizer's special tokens by name (bos_token …); `tools`
    are schemas in OpenAI's format. `strftime_now` is undefined: a template that needs the date
    cannot be rendered, one that has another text for its absence can. Raises UserError if the
    template is not deterministic or cannot render these messages.
    """
    try:
        return _compiled(text).render(
            **special, messages=messages, tools=tools, documents=None, add_generation_prompt=True
        )
    except UserError:
        raise
    except Exception as error:  # a template may raise anything
        if isinstance(error, UndefinedError) and "strftime_now" in str(error):
            raise UserError(
                "the chat template writes the date (strftime_now): its prompts would differ from "
                "one day to the next",
                hint=_HINT,
            ) from error
        raise UserError(f"the chat template cannot be rendered: {error}", hint=_HINT) from error


def messages_of(chat: Chat, question: str, target_length: int) -> list[dict[str, str]]:
    """The conversation that asks `question` with a target length."""
    budget = chat.budget.replace("{tokens}", str(target_length))
    parts = {"system": [chat.system], "user": [question]}
    parts[chat.budget_in].append(budget)
    texts = {role: "\n\n".join(filter(None, some)) for role, some in parts.items()}
    return [{"role": role, "content": text} for role, text in texts.items() if text]


def prompt_of(chat: Chat, question: str, target_length: int, tokenizer: Any) -> str:
    """Renders the prompt of `question` with the tokenizer's chat template. Raises PolicyError if
    that is not the template that the run pins, UserError if it cannot be rendered."""
    text, special = _pinned(chat, tokenizer)
    return render(text, messages_of(chat, question, target_length), special)


_QUESTION = "the-question-of-the-row"


def prompt_around(
    chat: Chat, question: str, target_length: int, tokenizer: Any
) -> tuple[str, str, str]:
    """(before, asked, after): the prompt of `question`, split around the question as the template
    writes it. Raises the same errors as prompt_of, and UserError if the text around the question
    depends on it."""
    whole = prompt_of(chat, question, target_length, tokenizer)
    before, _, after = prompt_of(chat, _QUESTION, target_length, tokenizer).partition(_QUESTION)
    end = len(whole) - len(after)
    if whole[: len(before)] != before or whole[end:] != after or end < len(before):
        raise UserError("the chat template's text around a question depends on it", hint=_HINT)
    return before, whole[len(before) : end], after


def _pinned(chat: Chat, tokenizer: Any) -> tuple[str, dict[str, str]]:
    """The tokenizer's template and its special tokens. Raises PolicyError if the template is not
    the one that the run pins."""
    text = _only(tokenizer.chat_template)
    if text is None or encoding.sha256(text.encode()) != chat.template:
        found = "none" if text is None else encoding.sha256(text.encode())
        raise PolicyError(
            f"the policy's chat template has digest {found}, but the run pins {chat.template}"
        )
    return text, _special(tokenizer)


def _special(tokenizer: Any) -> dict[str, str]:
    """The tokenizer's special tokens by name."""
    return {
        name: str(token)
        for name, token in tokenizer.special_tokens_map.items()
        if not isinstance(token, list)
    }


def prompt_tokens(chat: Chat, question: str, target_length: int, tokenizer: Any) -> list[int]:
    """The tokens of the prompt of `question`. Only the template's own special tokens are parsed:
    those in the question are ordinary text. Raises the same errors as prompt_around."""
    if _plain(tokenizer, question) == tokenizer.encode(question, add_special_tokens=False):
        text = prompt_of(chat, question, target_length, tokenizer)
        return list(tokenizer.encode(text, add_special_tokens=False))
    before, asked, after = prompt_around(chat, question, target_length, tokenizer)
    return [
        *tokenizer.encode(before, add_special_tokens=False),
        *_plain(tokenizer, asked),
        *tokenizer.encode(after, add_special_tokens=False),
    ]


_BEGIN, _END = "\ufdd0", "\ufdd1"
"""Code points that Unicode keeps out of texts."""


def _plain(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text in which neither special tokens nor other marks of messages are
    parsed."""
    tokens: list[int] = []
    marks, begin = _marks_in(text, tokenizer), 0
    cuts = re.finditer(f"(?={'|'.join(map(re.escape, marks))})", text) if marks else ()
    for end in [*(found.start() + 1 for found in cuts), len(text)]:  # within each mark
        piece = text[begin:end]
        tokens += tokenizer.encode(piece, add_special_tokens=False, split_special_tokens=True)
        begin = end
    return tokens


def _marks_in(text: str, tokenizer: Any) -> list[str]:
    """The tokens in a text by which the tokenizer's template marks messages, and which the
    tokenizer does not call special, as DeepSeek's for the user. Thinking is no message."""
    template = _only(tokenizer.chat_template)
    if template is None:
        return []
    added = {
        token.content for token in tokenizer.added_tokens_decoder.values() if not token.special
    }
    found = [one for one in added - {THINK, END_OF_THOUGHT} if one.strip() and one in text]
    if not found:
        return []
    written = _around_messages(template, tuple(sorted(_special(tokenizer).items())))
    return sorted(one for one in found if one in written)


@lru_cache(maxsize=8)
def _around_messages(text: str, special: tuple[tuple[str, str], ...]) -> str:
    """What the template `text` writes around messages of each role that it can render."""
    written = []
    for roles in (("system", "user"), ("user", "assistant", "user"), ("user", "assistant", "tool")):
        messages = [{"role": role, "content": _BEGIN} for role in roles]
        with contextlib.suppress(UserError):
            written.append(render(text, messages, dict(special)))
    return "\n".join(written)


_NO_CHARACTER = re.compile(f"[\ud800-\udfff{_BEGIN}{_END}]")
_MARKED = re.compile(f"[^{_BEGIN}{_END}]*(?:{_BEGIN}[^{_BEGIN}{_END}]*{_END}[^{_BEGIN}{_END}]*)*")


def tokens_with_plain_words(
    written: Callable[[Callable[[str], str]], str], tokenizer: Any
) -> tuple[int, ...]:
    """The tokens of a text that contains words of others, whose special tokens are not parsed.

    `written(mark)` is the text, in which `mark` was applied to all words of others. Raises
    UserError if they contain a code point that is no character, or if the text around words with
    special tokens depends on them (other than by trimming).
    """

    def checked(words: str) -> str:
        if _NO_CHARACTER.search(words):
            raise UserError("a text has a code point that is no character")
        return words

    def marked(words: str) -> str:
        parsed = tokenizer.encode(words, add_special_tokens=False)
        return words if _plain(tokenizer, words) == parsed else f"{_BEGIN}{words}{_END}"

    whole = written(checked)
    for mark in (marked, lambda words: marked(words.strip())):
        pieces = re.split(f"[{_BEGIN}{_END}]", text := written(mark))
        if "".join(pieces) == whole and _MARKED.fullmatch(text):
            return tuple(
                token
                for number, piece in enumerate(pieces)
                for token in (
                    _plain(tokenizer, piece)
                    if number % 2
                    else tokenizer.encode(piece, add_special_tokens=False)
                )
            )
    raise UserError("the chat template's text around a message depends on it", hint=_HINT)


_ANSWER, _OBSERVATION = "the-answer-of-the-model", "the-words-of-the-environment"
_THOUGHT = "seven, as ever"
_ASKED = "How many days has a week?"
_PLAIN: Mapping[str, str] = {"role": "assistant", "content": _ANSWER}
_THINKING: Sequence[Mapping[str, str]] = (
    {**_PLAIN, "content": f"{THINK}\n{_THOUGHT}\n{END_OF_THOUGHT}\n\n{_ANSWER}"},
    {**_PLAIN, "reasoning_content": _THOUGHT},
)
"""The two ways in which templates take a message with thinking."""


@dataclass(frozen=True)
class _Turn:
    """What a template makes of a model's `message`: the text `written` by the model after its
    prompt, and the texts `before` and `after` the words of the reply that follows."""

    message: Mapping[str, str]
    written: str
    before: str
    after: str


def _turn(
    text: str, role: str, special: Mapping[str, str], message: Mapping[str, str]
) -> _Turn | None:
    """Returns None if the next prompt does not begin with the last one and the answer, or, of an
    answer without thinking, a second exchange changes the text before it."""
    asked = [{"role": "user", "content": _ASKED}]
    exchange = [message, {"role": role, "content": _OBSERVATION}]
    prompt = render(text, asked, special)
    once = render(text, [*asked, *exchange], special)
    added = once.removeprefix(prompt)
    if message is _PLAIN and render(text, [*asked, *exchange, *exchange], special) != once + added:
        return None
    thought, answered, rest = added.partition(_ANSWER)
    frame = rest.split(_OBSERVATION)
    if not once.startswith(prompt) or not answered or len(frame) != 2:
        return None
    return _Turn(message, thought + answered, frame[0], frame[1])


@lru_cache(maxsize=8)
def _turns(
    text: str, role: str, special: tuple[tuple[str, str], ...]
) -> tuple[_Turn | None, _Turn | None]:
    """Returns an answer without thinking and one with it; None for one that the template does not
    keep. A template may write an empty thought before an answer without thinking."""
    named = dict(special)
    plain = _turn(text, role, named, _PLAIN)
    if plain and plain.written != _ANSWER and END_OF_THOUGHT not in plain.written:
        plain = None
    tried = (_turn(text, role, named, message) for message in _THINKING)
    return plain, next((one for one in tried if one and _THOUGHT in one.written), None)


def _unstable(why: str) -> UserError:
    return UserError(
        f"the chat template is not prefix-stable: {why}",
        hint=f"change {TEMPLATE_FILE} in the model folder, or conversation.role",
    )


def reply_frame(text: str, role: str, special: tuple[tuple[str, str], ...]) -> tuple[str, str]:
    """Returns the text that the template `text` puts before and after a message of `role` that
    follows a model answer: from the end of that answer to the start of the next one.

    Raises UserError if the template is not prefix-stable: if a second exchange changes the text
    before it, or the next prompt does not begin with the last one and its answer.
    """
    for one in _turns(text, role, special):
        if one is not None:
            return one.before, one.after
    raise _unstable(f"it changes earlier turns, or leaves out the role {role!r}")


def require_stable(
    chat: Chat, text: str, conversation: Conversation, special: Mapping[str, str]
) -> None:
    """Raises UserError unless the template `text` renders each conversation of the run's length as
    its prompt and, for each turn, the answer and the texts of `reply_frame` around the reply.

    Answers are tried with and without thinking; with it only where the prompt begins it, without
    it only where the prompt ends it. What a template makes of particular words, like trimming
    spaces, is not tried.
    """
    named = tuple(sorted(special.items()))
    before, after = reply_frame(text, conversation.role, named)
    plain, thinking = _turns(text, conversation.role, named)
    asked = messages_of(chat, _ASKED, 100)
    prompt = render(text, asked, special)
    tried = []
    if not prompt.rstrip().endswith(THINK):
        tried.append(("", plain))
    if not prompt.rstrip().endswith(END_OF_THOUGHT):
        tried.append((" with thinking", thinking))
    for what, turn in tried:
        if turn is None:
            raise _unstable(f"it changes earlier turns{what}")
        messages: list[Mapping[str, str]] = [*asked]
        expected = prompt
        for number in range(1, conversation.turns):
            messages += [turn.message, {"role": conversation.role, "content": _OBSERVATION}]
            expected += turn.written + before + _OBSERVATION + after
            if render(text, messages, special) != expected:
                raise _unstable(f"after turn {number} it changes earlier turns{what}")


def reply_around(chat: Chat, role: str, end_text: str, tokenizer: Any) -> tuple[str, str]:
    """(before, after): the text around an environment message between two model turns.

    `end_text` is the text of the end token that ended the turn, which the template may also write.
    Raises the same errors as prompt_of and reply_frame.
    """
    text, special = _pinned(chat, tokenizer)
    before, after = reply_frame(text, role, tuple(sorted(special.items())))
    return before.removeprefix(end_text), after


def reply_tokens(
    chat: Chat, role: str, text: str, end_text: str, tokenizer: Any
) -> tuple[int, ...]:
    """The tokens of a message between two model turns, including the template's text around it.
    Special tokens in the message are not parsed. `end_text` and errors as for reply_around."""
    before, after = reply_around(chat, role, end_text, tokenizer)
    return (
        *tokenizer.encode(before, add_special_tokens=False),
        *_plain(tokenizer, text),
        *tokenizer.encode(after, add_special_tokens=False),
    )


def thinking_tokens(tokenizer: Any, output_tokens: Sequence[int], opened: bool) -> int:
    """Number of thinking tokens in an answer: up to the end of the first `</think>`; all tokens if
    the thinking does not end; 0 if there is none. `opened`: the prompt ends with `<think>`."""

    def text(count: int) -> str:
        decoded: str = tokenizer.decode(
            list(output_tokens[:count]),
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )
        return decoded

    whole = text(len(output_tokens))
    if END_OF_THOUGHT not in whole:
        return len(output_tokens) if opened or THINK in whole else 0
    low, high = 1, len(output_tokens)
    while low < high:
        middle = (low + high) // 2
        if END_OF_THOUGHT in text(middle):
            high = middle
        else:
            low = middle + 1
    return low


# ── a new run ────────────────────────────────────────────────────────────────────────────────────


def chat_from(
    values: Mapping[str, Any] | None, folder: Path, conversation: Conversation | None = None
) -> Chat | None:
    """Builds a Chat from a TOML's `[chat]` for the model in `folder`; None for raw prompts.

    `conversation` is the run's; the template must be prefix-stable for it. `prompts` is "template"
    (the default within the table) or "raw"; the rest are fields of Chat. Raises UserError if the
    model has a template and the TOML does not say whether to use it, if it requests a template that
    the model lacks or keeps where tokenizers take no default from, and for a template that fails or
    is not deterministic.
    """
    text, special, elsewhere = _template_in(folder)
    if elsewhere and (values is None or values.get("prompts") != "raw"):
        raise UserError(
            f"{folder} has a chat template in {elsewhere}, but none that a tokenizer takes by "
            "default",
            hint=f"write it into {TEMPLATE_FILE} in the model folder, or add a table [chat] "
            'with prompts = "raw"',
        )
    if values is None:
        if text is None:
            return None
        raise UserError(
            f"{folder} is a chat model, and the run does not say whether its template is used",
            hint='add a table [chat] with prompts = "template" or prompts = "raw"',
        )
    given = dict(values)
    prompts = given.pop("prompts", "template")
    if prompts == "raw":
        if given:
            raise UserError(f"chat: raw prompts have no {sorted(given)[0]}")
        return None
    if prompts != "template":
        raise UserError(f'chat.prompts is {prompts!r}, not "template" or "raw"')
    if text is None:
        raise UserError(
            f"{folder} has no chat template",
            hint='name an instruct model, or say [chat] prompts = "raw"',
        )
    try:
        chat = Chat.model_validate({**given, "template": encoding.sha256(text.encode())})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in ("chat", *first["loc"]))
        raise UserError(f"{where}: {first['msg']}") from error
    shown = render(text, messages_of(chat, _ASKED, 100), special)
    if _ADDRESS.search(shown):
        raise UserError("the chat template writes addresses of memory", hint=_HINT)
    missing = [part for part in (chat.system.strip(), _ASKED) if part not in shown]
    if missing:
        raise UserError(f"the chat template leaves out {missing[0]!r}", hint=_HINT)
    if conversation is not None:
        require_stable(chat, text, conversation, special)
    return chat


def _template_in(folder: Path) -> tuple[str | None, dict[str, str], str]:
    """A model folder's template and special tokens, read without transformers; and, if it has no
    template that a tokenizer takes by default, the file or folder that holds others ("": none has).
    Raises UserError."""
    config: dict[str, Any] = {}
    try:
        if (folder / SETTINGS_FILE).is_file():
            config = json.loads((folder / SETTINGS_FILE).read_text(encoding="utf-8"))
        special = {
            name: token["content"] if isinstance(token, dict) else str(token)
            for name, token in config.items()
            if name.endswith("_token") and isinstance(token, str | dict)
        }
        if (folder / TEMPLATE_FILE).is_file():
            return (folder / TEMPLATE_FILE).read_text(encoding="utf-8"), special, ""
        text = _only(config.get("chat_template"))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"the tokenizer's settings in {folder} cannot be read: {error}") from error
    if text is not None:
        return text, special, ""
    others = [name for name in OTHER_TEMPLATES if (folder / name).exists()]
    if config.get("chat_template"):
        others.insert(0, SETTINGS_FILE)
    return None, special, others[0] if others else ""


def special_tokens_in(folder: Path) -> set[str]:
    """The special tokens of a model folder's tokenizer, read without transformers. Raises UserError
    if a file of the tokenizer cannot be read."""
    found: list[Any] = []
    try:
        for name in (SETTINGS_FILE, "tokenizer.json", "special_tokens_map.json"):
            if not (folder / name).is_file():
                continue
            config = json.loads((folder / name).read_text(encoding="utf-8"))
            added = [
                *config.get("added_tokens", ()),
                *config.get("added_tokens_decoder", {}).values(),
            ]
            found += [token for token in added if token.get("special")]
            found += [token for key, token in config.items() if key.endswith("_token")]
            for key in ("additional_special_tokens", "extra_special_tokens"):
                more = config.get(key) or ()
                found += more.values() if isinstance(more, dict) else more
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise UserError(f"the tokenizer's settings in {folder} cannot be read: {error}") from error
    texts = (token.get("content") if isinstance(token, dict) else token for token in found)
    return {text for text in texts if isinstance(text, str)}


def _only(found: Any) -> str | None:
    """Selects one template: the one named "default" if there are several."""
    if isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found}
    if isinstance(found, dict):
        found = found.get("default")
    return found if isinstance(found, str) else None
