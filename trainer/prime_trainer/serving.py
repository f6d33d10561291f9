"""`trainer serve`: a policy behind an OpenAI-compatible HTTP API, asked as its run asks it.

    POST /v1/chat/completions   messages, rendered with the run's template, system prompt and budget
    POST /v1/completions        raw text or tokens
    GET  /v1/models             the one policy that is served

The engine works in the main thread and the HTTP server in another one. All requests that wait when
the engine becomes free form one batch. Sampling is by temperature only, as in a run; a temperature
below LEAST_TEMPERATURE selects the most probable token.
"""

from __future__ import annotations

import asyncio
import json
import queue
import secrets
import socket
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from prime_core.errors import MalformedError, NotFoundError, PrimeError, UserError
from prime_core.run import Chat, Conversation, RunDefinition
from prime_core.waiting import StoppedError
from prime_engine.base import Engine, Generation, GenerationRequest
from prime_envs.base import decode_output
from prime_trainer.loading import require_model_folder
from prime_trainer.openai_requests import (
    SEEDS,
    ChatRequest,
    CompletionRequest,
    SamplingRequest,
    beginning,
    calls_in,
    chat_tokens,
)
from prime_trainer.talk import chat_of

LEAST_TEMPERATURE = 0.01
GRACE_SECONDS = 5
Calls = Callable[[str], list[Any]]
"""The text of an answer → the calls of tools in it, in OpenAI's format."""


@dataclass
class Job:
    """One row that the engine has to generate. `news` receives its tokens one by one, then its
    Generation, or the error that ended it; it is called in the engine's thread."""

    request: GenerationRequest
    temperature: float
    news: Callable[[int | Generation | Exception], object]


@dataclass
class Batcher:
    """Generates the jobs of many requests in batches, in the thread that calls `run`."""

    engine: Engine
    _waiting: queue.SimpleQueue[Job | None] = field(default_factory=queue.SimpleQueue)
    _stopped: threading.Event = field(default_factory=threading.Event)

    def submit(self, job: Job) -> None:
        """Adds a job. Raises StoppedError after `stop`."""
        if self._stopped.is_set():
            raise StoppedError("the server ends")
        self._waiting.put(job)

    def stop(self) -> None:
        """Ends `run` at the engine's next token; unfinished jobs get a StoppedError."""
        self._stopped.set()
        self._waiting.put(None)

    def run(self) -> None:
        """Generates until `stop` is called."""
        while jobs := self._next():
            by_temperature: dict[float, list[Job]] = defaultdict(list)
            for job in jobs:
                by_temperature[job.temperature].append(job)
            for temperature, some in by_temperature.items():
                self._generate(some, temperature)

    def _next(self) -> list[Job]:
        """Waits for a job and returns all that wait; none once stopped."""
        found = [self._waiting.get()]
        while not self._waiting.empty():
            found.append(self._waiting.get())
        jobs = [job for job in found if job is not None]
        if not self._stopped.is_set():
            return jobs
        for job in jobs:
            job.news(StoppedError("the server ends"))
        return []

    def _generate(self, jobs: Sequence[Job], temperature: float) -> None:
        try:
            made = self.engine.generate(
                [job.request for job in jobs], temperature, _Tokens(jobs, self._stopped)
            )
        except MalformedError as error:  # found before the first token: only that request fails
            if len(jobs) == 1:
                jobs[0].news(error)
                return
            for job in jobs:
                self._generate([job], temperature)
        except Exception as error:
            for job in jobs:
                job.news(error)
        else:
            for job, generation in zip(jobs, made, strict=True):
                job.news(generation)


class _Tokens:
    """A StateSink that passes on tokens as they are sampled."""

    def __init__(self, jobs: Sequence[Job], stopped: threading.Event) -> None:
        self._jobs, self._stopped = jobs, stopped
        self._passed = [0] * len(jobs)

    def step(self, rows: Sequence[int], places: Sequence[int], tokens: Any, states: Any) -> None:
        """See StateSink.step. Raises StoppedError when the server ends."""
        if self._stopped.is_set():
            raise StoppedError("the server ends")
        for row, place, token in zip(rows, places, tokens.tolist(), strict=True):
            if place == self._passed[row]:
                self._passed[row] += 1
                self._jobs[row].news(token)

    def end(self, rows: Sequence[int]) -> None:
        """See StateSink.end."""


@dataclass(frozen=True)
class Spoken:
    """A piece of an answer's text. The last piece has the finish reason. `tokens`: so far."""

    text: str
    tokens: int
    finish: str | None = None


@dataclass(frozen=True)
class Served:
    """The policy that is served and how it is asked. `chat` is None for a model without a chat
    template; `conversation` is the run's, whose tools the policy may know; `budget` None leaves the
    sentence about the budget out."""

    name: str
    engine: Engine
    batcher: Batcher
    chat: Chat | None = None
    budget: int | None = None
    max_tokens: int = 512
    conversation: Conversation | None = None

    def require(self, model: str | None) -> None:
        """Raises NotFoundError if a request names another model."""
        if model not in (None, "", self.name):
            raise NotFoundError(f"the model {model!r} is not served here; {self.name!r} is")

    def chat_prompt(self, asked: ChatRequest, begun: str = "") -> tuple[int, ...]:
        """The tokens that ask a conversation, and those of the text that its answer begins with;
        see openai_requests.chat_tokens. Raises its errors, and UserError for a model without a chat
        template."""
        if self.chat is None:
            raise UserError("the model has no chat template", hint="ask /v1/completions")
        budget = self.budget if asked.budget is None else asked.budget
        tokenizer = self.engine.tokenizer
        return (
            *chat_tokens(asked, self.chat, self.conversation, budget, tokenizer),
            *tokenizer.encode(begun, add_special_tokens=False),
        )

    def raw_prompts(self, asked: CompletionRequest) -> list[tuple[int, ...]]:
        """The tokens of raw prompts, without special tokens, as runs encode them."""
        encode = self.engine.tokenizer.encode
        return [
            tuple(encode(one, add_special_tokens=False) if isinstance(one, str) else one)
            for one in asked.prompts()
        ]

    def jobs(
        self, prompts: Sequence[tuple[int, ...]], asked: SamplingRequest, begun: str
    ) -> list[_Listener]:
        """Passes `n` rows per prompt to the engine; returns their listeners in order. `begun`: the
        text of the prompts that the answers begin with."""
        limit = asked.max_tokens or self.max_tokens
        greedy = asked.temperature < LEAST_TEMPERATURE
        first = secrets.randbelow(SEEDS) if asked.seed is None else asked.seed
        found = []
        for number, prompt in enumerate(p for p in prompts for _ in range(asked.n)):
            seed = None if greedy else (first + number) % SEEDS
            listener = _Listener(self.engine.tokenizer, asked.stops, begun)
            request = GenerationRequest(prompt, limit, seed)
            temperature = 1.0 if greedy else asked.temperature
            self.batcher.submit(Job(request, temperature, listener.receive))
            found.append(listener)
        return found


class _Listener:
    """Turns the tokens of one row into text, in the server's event loop."""

    def __init__(self, tokenizer: Any, stops: Sequence[str], begun: str) -> None:
        self._tokenizer, self._stops, self._begun = tokenizer, stops, begun
        self._loop = asyncio.get_running_loop()
        self._news: asyncio.Queue[int | Generation | Exception] = asyncio.Queue()

    def receive(self, news: int | Generation | Exception) -> None:
        """See Job.news."""
        self._loop.call_soon_threadsafe(self._news.put_nowait, news)

    async def pieces(self) -> AsyncIterator[Spoken]:
        """Yields the answer's text in pieces, up to the first stop string. Text that may become
        part of a stop string or of a character waits for the next token."""
        tokens: list[int] = []
        end: Generation | None = None
        said = 0
        while True:
            waiting = [await self._news.get()]
            while not self._news.empty():
                waiting.append(self._news.get_nowait())
            for one in waiting:
                if isinstance(one, Exception):
                    raise one
                if isinstance(one, Generation):
                    end, tokens = one, list(one.output_tokens)
                else:
                    tokens.append(one)
            text = self._begun + decode_output(self._tokenizer, tokens)
            cuts = [text.index(stop) for stop in self._stops if stop in text]
            if cuts:
                yield Spoken(text[said : min(cuts)], len(tokens), "stop")
                return
            if end is not None:
                finish = "stop" if end.finish_reason == "end" else "length"
                yield Spoken(text[said:], len(tokens), finish)
                return
            sure = len(text) - max((len(stop) - 1 for stop in self._stops), default=0)
            sure = len(text[: max(sure, 0)].rstrip("\ufffd"))
            if sure > said:
                yield Spoken(text[said:sure], len(tokens))
                said = sure

    async def whole(self) -> Spoken:
        """The whole answer. Raises the error that ended it."""
        pieces = [piece async for piece in self.pieces()]
        return Spoken("".join(piece.text for piece in pieces), pieces[-1].tokens, pieces[-1].finish)


def application(served: Served) -> FastAPI:
    """The HTTP API of a policy."""
    app = FastAPI(title="trainer serve", docs_url=None, redoc_url=None)
    created = int(time.time())

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        one = {"id": served.name, "object": "model", "created": created, "owned_by": "prime-open"}
        return {"object": "list", "data": [one]}

    @app.post("/v1/chat/completions")
    async def chat(asked: ChatRequest) -> Response:
        served.require(asked.model)
        asked.max_tokens = asked.max_completion_tokens or asked.max_tokens

        def calls(text: str) -> list[Any]:
            return calls_in(text, asked, served.conversation)

        begun = beginning(asked, served.conversation)
        prompt = served.chat_prompt(asked, begun)
        return await _answer(served, [prompt], asked, "chat.completion", calls, begun)

    @app.post("/v1/completions")
    async def completions(asked: CompletionRequest) -> Response:
        served.require(asked.model)
        return await _answer(served, served.raw_prompts(asked), asked, "text_completion")

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:])
        return _refusal(400, f"{where}: {first['msg']}" if where else first["msg"])

    @app.exception_handler(HTTPException)
    async def _no_such_page(request: Request, error: HTTPException) -> JSONResponse:
        return _refusal(error.status_code, str(error.detail))

    @app.exception_handler(PrimeError)
    async def _expected(request: Request, error: PrimeError) -> JSONResponse:
        return _refusal(_status(error), _sentence(error))

    @app.exception_handler(StoppedError)
    async def _ended(request: Request, error: StoppedError) -> JSONResponse:
        return _refusal(503, str(error))

    @app.exception_handler(Exception)
    async def _defect(request: Request, error: Exception) -> JSONResponse:
        return _refusal(500, "the server failed: its log says why")

    return app


def _status(error: PrimeError) -> int:
    if isinstance(error, NotFoundError):
        return 404
    return 400 if isinstance(error, MalformedError | UserError) else 503


def _sentence(error: Exception) -> str:
    hint = error.hint if isinstance(error, UserError) else ""
    return f"{error}; {hint}" if hint else str(error)


def _refusal(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": _error(status, message)}, status)


def _error(status: int, message: str) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"message": message, "type": kind, "param": None, "code": status}


async def _answer(
    served: Served,
    prompts: Sequence[tuple[int, ...]],
    asked: SamplingRequest,
    kind: str,
    calls: Calls = lambda _text: [],
    begun: str = "",
) -> Response:
    """The response to one request; `kind` is its `object`, `calls` finds the calls in an answer,
    `begun` is the text of the prompts that the answers begin with."""
    if asked.stream and len(prompts) * asked.n > 1:
        raise MalformedError("a stream has one answer: ask with n = 1 and one prompt")
    listeners = served.jobs(prompts, asked, begun)
    read = sum(map(len, prompts))
    head = {
        "id": f"cmpl-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": served.name,
    }
    if asked.stream:
        pieces = listeners[0].pieces()
        first = await anext(pieces)  # a refused request is an error status, not a stream
        usage = bool((asked.stream_options or {}).get("include_usage"))
        events = _events(first, pieces, head, read if usage else None, calls)
        return StreamingResponse(events, media_type="text/event-stream")
    spoken = await asyncio.gather(*(listener.whole() for listener in listeners))
    choices = [
        {"index": number, **_choice(kind, one, calls(one.text)), "logprobs": None}
        for number, one in enumerate(spoken)
    ]
    usage_of = _usage(read, sum(one.tokens for one in spoken))
    return JSONResponse({**head, "choices": choices, "usage": usage_of})


def _choice(kind: str, spoken: Spoken, calls: list[Any]) -> dict[str, Any]:
    """An answer, and why it ended."""
    if kind == "text_completion":
        return {"text": spoken.text, "finish_reason": spoken.finish}
    message = {"role": "assistant", "content": spoken.text}
    return {
        "message": {**message, **({"tool_calls": calls} if calls else {})},
        "finish_reason": _finish(spoken, calls),
    }


def _finish(spoken: Spoken, calls: list[Any]) -> str | None:
    return "tool_calls" if calls and spoken.finish == "stop" else spoken.finish


def _usage(read: int, written: int) -> dict[str, int]:
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
    }


async def _events(
    first: Spoken,
    rest: AsyncIterator[Spoken],
    head: dict[str, Any],
    read: int | None,
    calls: Calls,
) -> AsyncIterator[str]:
    """The server-sent events of a streamed answer; `read`: prompt tokens, if usage is wanted. Calls
    are in the last piece."""
    chat = head["object"] == "chat.completion"
    head = {**head, "object": "chat.completion.chunk" if chat else head["object"]}

    def event(choices: list[dict[str, Any]], **more: Any) -> str:
        return f"data: {json.dumps({**head, 'choices': choices, **more})}\n\n"

    said: list[str] = []

    def choice(piece: Spoken, role: dict[str, str]) -> list[dict[str, Any]]:
        said.append(piece.text)
        if not chat:
            return [{"index": 0, "text": piece.text, "finish_reason": piece.finish}]
        found = calls("".join(said)) if piece.finish is not None else []
        delta: dict[str, Any] = {**role, "content": piece.text}
        if found:
            delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(found)]
        return [{"index": 0, "delta": delta, "finish_reason": _finish(piece, found)}]

    last = first
    yield event(choice(first, {"role": "assistant"}))
    try:
        async for last in rest:
            yield event(choice(last, {}))
    except Exception as error:  # the status is sent already
        yield f"data: {json.dumps({'error': _error(500, _sentence(error))})}\n\n"
        return
    if read is not None:
        yield event([], usage=_usage(read, last.tokens))
    yield "data: [DONE]\n\n"


def bound(host: str, port: int) -> socket.socket:
    """A socket bound to `host` and `port` (0: any free one), not yet listening. Raises UserError
    if the address cannot be used."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP
        )[0]
        # asyncio sets TCP_NODELAY only if the protocol is named; without it, answers wait 40 ms.
        found = socket.socket(family, kind, protocol)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
        except OSError:
            found.close()
            raise
    except OSError as error:
        raise UserError(
            f"{host}:{port} cannot be served on: {error.strerror}",
            hint="name another --host or --port (0: any free one)",
        ) from error
    return found


@contextmanager
def listening(served: Served, address: socket.socket) -> Iterator[None]:
    """Serves the API at a bound socket, in a thread. Leave it after the batcher has stopped."""
    server = uvicorn.Server(
        uvicorn.Config(
            application(served), log_config=None, access_log=False, server_header=False,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
    )  # fmt: skip
    thread = threading.Thread(target=server.run, args=([address],), name="http", daemon=True)
    address.listen(2048)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()
        address.close()


def serve(
    folder: Path,
    run: RunDefinition | None,
    loading: dict[str, Any],
    stop: threading.Event,
    say: Callable[[str, Served], None],
    *,
    name: str,
    host: str,
    port: int,
    system: str | None,
    budget: int | None,
    max_tokens: int,
) -> None:
    """Serves the policy in `folder` until `stop` is set. Calls `say` with the base URL as soon as
    it answers. Raises UserError, UnavailableError."""
    from prime_verify.engines import load_engine

    require_model_folder(folder)
    with bound(host, port) as address:
        engine = load_engine(folder, **loading)
        try:
            template = engine.tokenizer.chat_template is not None
            chat = chat_of(run, engine, system, budget) if template else None
            talk = None if run is None else run.conversation
            served = Served(name, engine, Batcher(engine), chat, budget, max_tokens, talk)
            with listening(served, address):
                shown = f"[{host}]" if ":" in host else host
                say(f"http://{shown}:{address.getsockname()[1]}/v1", served)

                def end() -> None:
                    stop.wait()
                    served.batcher.stop()

                threading.Thread(target=end, name="end", daemon=True).start()
                served.batcher.run()
        finally:
            engine.close()
