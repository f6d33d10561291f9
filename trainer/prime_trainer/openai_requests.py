"""Requests of OpenAI's API, the tokens that ask them, and calls of tools in the answers.

A client's words are ordinary text: special tokens in them are not parsed. Calls are read as in the
conversations of runs (prime_envs/tools.py). A client that offers tools of the served policy's run
gets its syntax, one call a turn, and the policy is asked as in training, without schemas. Tools of
the client are shown by the chat template, and their calls are JSON in `<tool_call>` tags. The
content of an answer has the calls as the model wrote them. Where the client wants a call, the
answer is begun with one; nothing forces the model to complete it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from prime_core.errors import MalformedError, UserError
from prime_core.run import Chat, Conversation
from prime_envs.chat import messages_of, tokens_with_plain_words
from prime_envs.tools import ToolCall, first_call, tool_word
from prime_trainer.talk import rendered_text, require_wording

SEEDS = 1 << 62
MOST_TOOLS = 128
DEEPEST = 32
"""Levels of a schema or of a call's arguments."""
CLIENTS = Conversation(turns=2, calls="hermes-1")
"""How calls of a client's own tools are read."""
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
_NEUTRAL: dict[str, Any] = {
    "top_p": 1, "top_k": -1, "min_p": 0, "frequency_penalty": 0, "presence_penalty": 0,
    "repetition_penalty": 1, "logit_bias": {}, "logprobs": False, "echo": False, "best_of": 1,
    "suffix": "", "tools": [], "functions": [], "response_format": {"type": "text"},
}  # fmt: skip
"""Parameters of the API that are not supported, and the value that asks for nothing."""


class SamplingRequest(BaseModel):
    """Parameters that both kinds of completion have. Unknown parameters are ignored, but a known
    one that would change the answer is refused."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0, le=100)
    seed: int | None = Field(default=None, ge=0, lt=SEEDS)
    n: int = Field(default=1, ge=1, le=128)
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: dict[str, bool] | None = None

    @model_validator(mode="after")
    def _supported(self) -> SamplingRequest:
        for name, value in (self.model_extra or {}).items():
            if name in _NEUTRAL and value is not None and value != _NEUTRAL[name]:
                raise ValueError(f"{name} is not supported: sampling is by temperature only")
        return self

    @property
    def stops(self) -> list[str]:
        """The stop strings that are not empty."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [text for text in given if text]


class Part(BaseModel):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class CalledFunction(BaseModel):
    """The function of a call; `arguments` is JSON of an object."""

    name: Name
    arguments: str

    def values(self) -> dict[str, Any]:
        """The arguments. Raises MalformedError if they are not JSON of an object."""
        try:
            found = json.loads(self.arguments)
        except (ValueError, RecursionError) as error:
            raise MalformedError(f"arguments of {self.name} are not JSON: {error}") from error
        if not isinstance(found, dict):
            raise MalformedError(f"arguments of {self.name} are not a JSON object")
        return found


class Call(BaseModel):
    """A call in an earlier answer."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(BaseModel):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    tool_calls: list[Call] | None = Field(default=None, max_length=MOST_TOOLS)
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and not self.tool_calls:
            raise ValueError("a message needs a content")
        return self

    @property
    def text(self) -> str:
        """The content as one text."""
        parts = self.content or ""
        return parts if isinstance(parts, str) else "".join(part.text for part in parts)


class FunctionSchema(BaseModel):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolSchema(BaseModel):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionSchema

    def shown(self) -> dict[str, Any]:
        """As the chat template gets it."""
        given = {name: value for name, value in self.function if value is not None}
        return {"type": self.type, "function": given}


class NamedFunction(BaseModel):
    """The function of a NamedTool."""

    name: Name


class NamedTool(BaseModel):
    """The tool that the model has to call."""

    type: Literal["function"]
    function: NamedFunction


class ChatRequest(SamplingRequest):
    """Body of /v1/chat/completions. `budget` is an extension: tokens of thinking to ask for."""

    messages: list[Message] = Field(min_length=1)
    tools: list[ToolSchema] | None = Field(default=None, max_length=MOST_TOOLS)
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True
    max_completion_tokens: int | None = Field(default=None, ge=1)
    budget: int | None = Field(default=None, ge=0)

    @property
    def offered(self) -> frozenset[str]:
        """Names of the tools that the model may call."""
        if self.tool_choice == "none":
            return frozenset()
        return frozenset(tool.function.name for tool in self.tools or ())

    @property
    def required(self) -> str | None:
        """The tool that the model has to call; "" if it may choose one, None if it need not call.
        Raises MalformedError if that tool is not offered."""
        if self.tool_choice in (None, "auto", "none"):
            return None
        name = ""
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
        if name not in self.offered | {""} or not self.offered:
            raise MalformedError(
                f"tool_choice wants a call of {name or 'a tool'}, which is not in tools"
            )
        return name


class CompletionRequest(SamplingRequest):
    """Body of /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]

    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts, each as text or tokens. Raises MalformedError if there are none."""
        given = self.prompt
        if not given:
            raise MalformedError("the prompt is empty")
        if isinstance(given, str):
            return [given]
        return [given] if isinstance(given[0], int) else given


def call_syntax(asked: ChatRequest, conversation: Conversation | None) -> Conversation | None:
    """How calls are read in the answers: as in the run's `conversation`, if the client offers tools
    of it, else CLIENTS; None without tools."""
    if not asked.offered:
        return None
    known = () if conversation is None else conversation.tools
    return conversation if asked.offered <= {*map(tool_word, known)} else CLIENTS


def calls_in(text: str, asked: ChatRequest, conversation: Conversation | None) -> list[Any]:
    """The valid calls of offered tools in an answer, in OpenAI's format: of a client's own tools
    up to MOST_TOOLS, unless it wants one."""
    syntax = call_syntax(asked, conversation)
    if syntax is None:
        return []
    most = MOST_TOOLS if syntax is CLIENTS and asked.parallel_tool_calls else 1
    wanted = {asked.required} if asked.required else asked.offered
    return [
        {
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {
                "name": call.tool,
                "arguments": json.dumps(dict(call.arguments), ensure_ascii=False),
            },
        }
        for call in islice(_calls(text, syntax), most)
        if not call.problem and call.tool in wanted
    ]


def _calls(text: str, syntax: Conversation) -> Iterator[ToolCall]:
    """The calls in an answer, one after another; of another syntax than CLIENTS only the first."""
    while (call := first_call(text, syntax)) is not None:
        yield call
        if syntax is not CLIENTS:
            return
        text = text.partition("<tool_call>")[2].partition("</tool_call>")[2]


def beginning(asked: ChatRequest, conversation: Conversation | None) -> str:
    """The text with which the answer begins: that of a call if the client wants one, else none.
    Raises MalformedError for a call of a tool that is not offered, or for one of several tools if
    the run's syntax begins a call with the tool's name."""
    syntax, name = call_syntax(asked, conversation), asked.required
    if name is None:
        return ""
    assert syntax is not None
    if syntax.calls == "hermes-1":
        return "<tool_call>\n" + (f'{{"name": "{name}", "arguments": ' if name else "")
    if syntax.calls == "fence-1":
        return "```\n"
    if not name and len(asked.offered) > 1:
        raise MalformedError(
            "a call of this run's tools begins with the tool's name: name it in tool_choice"
        )
    return f"<{name or min(asked.offered)}>"


def chat_tokens(
    asked: ChatRequest,
    chat: Chat,
    conversation: Conversation | None,
    budget: int | None,
    tokenizer: Any,
) -> tuple[int, ...]:
    """The tokens that ask a conversation, in the run's format `chat`; `conversation` is the run's.
    A system message replaces the run's system prompt; the sentence about `budget` is added to
    either, unless it is None.

    Raises MalformedError for messages in a wrong order, calls without their text or with wrong
    arguments; UserError if the chat template cannot render them or does not show tools, or the run
    has no sentence for the budget.
    """
    require_wording(chat, budget)
    syntax = call_syntax(asked, conversation)
    tools: list[Any] | None = None
    if syntax is CLIENTS:
        tools = [tool.shown() for tool in asked.tools or ()]
    reads = syntax or conversation or CLIENTS

    def written(mark: Callable[[str], str], shown: Sequence[Any] | None = tools) -> str:
        messages = _messages(asked.messages, chat, budget, reads, mark)
        return rendered_text(tokenizer, messages, shown and _marked(shown, mark))

    if tools and written(str) == written(str, None):
        raise UserError(
            "the model's chat template does not show tools",
            hint="describe them in a message, and read the calls in the answer's text",
        )
    return tokens_with_plain_words(written, tokenizer)


def _messages(
    given: Sequence[Message],
    chat: Chat,
    budget: int | None,
    reads: Conversation,
    mark: Callable[[str], str],
) -> list[dict[str, Any]]:
    """The messages as the template gets them."""
    rest = list(given)
    if rest[0].role in ("system", "developer"):
        chat = chat.model_copy(update={"system": mark(rest.pop(0).text)})
    if not rest or rest[0].role != "user":
        raise MalformedError("a conversation begins with a system or a user message")
    if budget is None:
        chat = chat.model_copy(update={"budget": ""})
    first: list[dict[str, Any]] = [*messages_of(chat, mark(rest[0].text), budget or 0)]
    return first + [_message(message, reads, mark) for message in rest[1:]]


def _message(message: Message, reads: Conversation, mark: Callable[[str], str]) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message.role, "content": mark(message.text)}
    if message.role == "developer":
        found["role"] = "system"
    elif message.role == "tool":
        found["role"] = reads.role
        found["tool_call_id"] = mark(message.tool_call_id or "")
    elif message.tool_calls and first_call(message.text, reads) is None:
        if reads is not CLIENTS:
            raise MalformedError(
                "a message with tool_calls needs the content that it had as an answer, in which "
                "the model wrote the call"
            )
        found["tool_calls"] = [
            {
                "id": mark(call.id),
                "type": call.type,
                "function": {
                    "name": mark(call.function.name),
                    "arguments": _marked(call.function.values(), mark),
                },
            }
            for call in message.tool_calls
        ]
    return found


def _marked(value: Any, mark: Callable[[str], str], depth: int = 0) -> Any:
    """A JSON value with every text in it marked. Raises MalformedError if it is nested too deep."""
    if depth > DEEPEST:
        raise MalformedError(f"tools and arguments have at most {DEEPEST} levels")
    if isinstance(value, str):
        return mark(value)
    if isinstance(value, dict):
        return {mark(key): _marked(one, mark, depth + 1) for key, one in value.items()}
    if isinstance(value, list):
        return [_marked(one, mark, depth + 1) for one in value]
    return value
