"""Answers calls of the gateway: checks the caller, gets the text, signs and records the answer.

1. The lease is the manager's and open, and its node signed the request.
2. The place (group, sample, turn) is within the run's bounds. The first call takes the place;
   a different call in the same place voids the row.
3. The text is that of an equal request of this step, or else the tool's answer now.
4. The answer is signed for lease, group, sample, turn, prefix and request, and recorded.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from anyio import CapacityLimiter, to_thread
from prometheus_client import (
    CONTENT_TYPE_PLAIN_0_0_4,
    CollectorRegistry,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client import Counter as Count
from pydantic import Field
from pydantic_settings import SettingsConfigDict
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from prime_broadcast.http1 import RateLimit
from prime_chain.keystore import open_keystore
from prime_chain.networks import LOCAL
from prime_core.clock import Clock
from prime_core.errors import (
    ConflictError,
    PolicyError,
    PrimeError,
    UnavailableError,
    UntrustedError,
    UserError,
)
from prime_core.folders import held_alone, make_folder
from prime_core.gateway import (
    MAX_ANSWERS_BYTES,
    MAX_TEXT,
    GatewayAnswer,
    GatewayCall,
    GatewayRequest,
    encode_answers,
)
from prime_core.ids import Address, Digest
from prime_core.logs import log_to_stderr, set_process_fields
from prime_core.run import Conversation, RunDefinition
from prime_core.settings import BaseSettings, Urls, UserPath, needed
from prime_core.signing import Domain, Signer
from prime_core.task import shadow_pool
from prime_core.transport.client import OrchestratorClient, run_bytes
from prime_core.version import HEADER, SPOKEN, agree
from prime_core.waiting import FIRST_ANSWER_SECONDS, StoppedError, until_answered
from prime_envs.tools import TOOL_ERROR
from prime_orchestrator.api.connections import Proxies
from prime_orchestrator.api.routes.http import answer, parse, problem, read_body, refusal
from prime_orchestrator.gateway.upstreams import (
    SettingsError,
    ToolSettings,
    Upstream,
    Web,
    answer_of,
    make,
)
from prime_orchestrator.store.engine import open_store, sqlite_url
from prime_orchestrator.store.gateway_records import Records

log = logging.getLogger(__name__)

MAX_REQUEST = 64 << 10
MAX_RUNS = 64
MOST_AT_ONCE_OF_LEASE, MOST_AT_ONCE_OF_TOOL = 2, 8
"""Calls answered at a time, so that no lease and no site takes all threads of the server."""
SPARE_THREADS = 16
"""Threads besides those that slow tools can hold."""
OUTAGE_SECONDS = 10.0
"""A request without an answer is not made again for so long in its step."""
MAX_OUTAGES = 4096
LOCKS = 256
PRUNE_SECONDS = 3600.0
MAX_TURNS, MOST_OF_ERROR = 64, 512
"""Turns of a row, and more bytes than an answer without room takes in a rollout file."""


class Settings(BaseSettings):
    """Settings of `orchestrator gateway`; the tools are tables of the TOML file."""

    model_config = SettingsConfigDict(env_prefix="PRIME_GATEWAY_")

    orchestrator: str = ""
    """URL of the pool's orchestrator, from which manager and run definitions are read."""
    wallet: UserPath | None = None
    """Keystore with the key that the run pins as `conversation.gateway.key`."""
    password_file: UserPath | None = None
    password_fd: int | None = None
    host: str = "127.0.0.1"
    port: int = Field(default=8490, ge=0, le=65_535)
    data: UserPath = Path("var/gateway").absolute()
    tools: dict[str, ToolSettings] = Field(default_factory=dict)
    calls_per_lease: int = Field(default=1024, ge=1)
    """Answers of one lease; every further call is answered with an error."""
    calls_per_second: int = Field(default=20, ge=1)
    """Requests of one lease on average; a node waits and repeats what is refused."""
    keep_days: int = Field(default=30, ge=1)
    """Records older than this are deleted. Nothing depends on them: a file carries its answers."""
    trusted_proxies: Urls = ()

    @property
    def database(self) -> Path:
        """The file that holds the records."""
        return self.data / "gateway.sqlite"


@dataclass(frozen=True)
class Pool:
    """The pool that calls are checked against. `run` finds one of its run definitions by digest; it
    raises NotFoundError or UnavailableError."""

    number: int
    manager: Address
    work: Domain
    run: Callable[[Digest], RunDefinition]


class CallMetrics:
    """What Prometheus reads of a gateway. Counts start at 0 with the process."""

    def __init__(self) -> None:
        # Metrics of when a count began would have the count's HELP and unit.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.calls = Count(
            "prime_gateway_calls",
            "Calls by tool and outcome: answered; error (the answer reports one); busy (the node "
            "asks again); outage (the tool gave no answer); settings (it gives none until the "
            "operator corrects the tool's settings); conflict (a second call in one place); "
            "refused. Unit: calls.",
            ["tool", "outcome"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "prime_gateway_tool_seconds",
            "Seconds that a tool took to answer, or to fail.",
            ["tool"],
            buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
            registry=self.registry,
        )

    @contextmanager
    def counted(self, tool: str) -> Iterator[Callable[[str], None]]:
        """Counts one call of `tool` by how the block ends; it passes the answer's text on."""
        outcome = "refused"

        def answered(text: str) -> None:
            nonlocal outcome
            outcome = "error" if text.startswith(TOOL_ERROR) else "answered"

        try:
            yield answered
        except TooManyError:
            outcome = "busy"
            raise
        except ConflictError:
            outcome = "conflict"
            raise
        except SettingsError:
            outcome = "settings"
            raise
        except UnavailableError:
            outcome = "outage"
            raise
        finally:
            self.calls.labels(tool, outcome).inc()


class CallService:
    """Answers calls. Thread-safe."""

    def __init__(
        self,
        pool: Pool,
        signer: Signer,
        records: Records,
        tools: Mapping[str, Upstream],
        settings: Settings,
        clock: Clock = Clock(),
    ) -> None:
        self._pool, self._signer, self._records = pool, signer, records
        self._tools, self._settings, self._clock = tools, settings, clock
        self._locks = [threading.Lock() for _ in range(LOCKS)]
        self._limits_lock = threading.Lock()  # of the three below
        self._rates = RateLimit(settings.calls_per_second, clock.monotonic, keys=4096)
        self._at_once: Counter[str] = Counter()
        """Calls being answered, by lease and by tool."""
        self._outages: OrderedDict[
            tuple[int, Digest], tuple[float, type[UnavailableError], str]
        ] = OrderedDict()
        """By step and request: until when there is no answer, and the error's kind and words."""
        self.metrics = CallMetrics()
        self.threads = MOST_AT_ONCE_OF_TOOL * len(tools) + SPARE_THREADS
        """Threads that may call `answer` at once: enough that slow tools do not block others."""

    def answer(self, asked: GatewayRequest) -> GatewayAnswer:
        """The signed answer to a call.

        Raises UntrustedError and PolicyError for a call that is not this pool's, ConflictError for
        a row that made two calls in one place, TooManyError if its lease or its tool is busy,
        UnavailableError if there is no answer now, SettingsError if there is none until the
        operator corrects the tool's settings.
        """
        tool = asked.call.tool if asked.call.tool in self._tools else "other"
        with self.metrics.counted(tool) as answered:
            found = self._answer(asked)
            answered(found.text)
        return found

    def _answer(self, asked: GatewayRequest) -> GatewayAnswer:
        lease = asked.lease.lease
        lease_digest = lease.digest(self._pool.work)
        conversation = self._check(asked, lease_digest)
        self._limit_rate(lease_digest)
        call = asked.call
        with self._slot(lease_digest, call.tool), self._lock(call.request()):
            found = self._records.claim(lease_digest, lease.step, call, self._clock.now())
            if found is not None:
                return found
            if self._records.answered(lease_digest) >= self._settings.calls_per_lease:
                text = f"{TOOL_ERROR}there are no more calls"
            else:
                text = self._text(asked, min(MAX_TEXT, conversation.observation_bytes))
            signed = call.answered(lease_digest, text, self._signer)
            if not self._has_room(lease_digest, signed, call):
                text = f"{TOOL_ERROR}there is no room for more answers"
                signed = call.answered(lease_digest, text, self._signer)
            self._records.keep_answer(lease_digest, call, signed)
        return signed

    def _has_room(self, lease: Digest, answer: GatewayAnswer, call: GatewayCall) -> bool:
        """Whether a rollout file may hold the answer with the earlier ones of its row, and errors
        for all turns after it."""
        earlier = self._records.of_row(lease, call)
        size = len(encode_answers([*earlier, answer]).encode())
        return size <= MAX_ANSWERS_BYTES - MAX_TURNS * MOST_OF_ERROR

    def _text(self, asked: GatewayRequest, most: int) -> str:
        call, step = asked.call, asked.lease.lease.step
        known = self._records.text(step, call.request())
        if known is not None:
            return known
        upstream = self._tools.get(call.tool)
        if upstream is None:
            raise UnavailableError(f"the gateway's settings have no tool {call.tool}")
        key = step, call.request()
        with self._limits_lock:
            until, kind, why = self._outages.get(key, (0.0, UnavailableError, ""))
        if self._clock.monotonic() < until:
            raise kind(why)
        try:
            with self.metrics.seconds.labels(call.tool).time():
                text = answer_of(upstream, call.arguments, most)
        except UnavailableError as error:
            if isinstance(error, SettingsError):
                log.error(
                    "the tool %s gives no answers, correct its settings: %s", call.tool, error
                )
            with self._limits_lock:
                self._outages.pop(key, None)
                until = self._clock.monotonic() + OUTAGE_SECONDS
                self._outages[key] = until, type(error), str(error)
                if len(self._outages) > MAX_OUTAGES:
                    self._outages.popitem(last=False)
            raise
        self._records.keep_text(step, call, text, self._clock.now())
        return text

    def _check(self, asked: GatewayRequest, lease_digest: Digest) -> Conversation:
        """Returns the `[conversation]` of the call's run."""
        lease, call, pool = asked.lease.lease, asked.call, self._pool
        if lease.pool not in (pool.number, shadow_pool(pool.number)):
            raise PolicyError("the lease is of another pool")
        if lease.recover(pool.work, asked.lease.signature) != pool.manager:
            raise UntrustedError("the pool's manager did not sign the lease")
        empty = call.statement(lease_digest, "")
        if empty.recover(pool.work, asked.signature) != lease.node:
            raise UntrustedError("the lease's node did not sign the call")
        if lease.deadline < self._clock.now():
            raise PolicyError("the lease has run out")
        run = pool.run(lease.run_digest)
        conversation = run.conversation
        if conversation is None or conversation.gateway is None:
            raise PolicyError("the lease's run has no gateway")
        if conversation.gateway.key != self._signer.address:
            raise PolicyError(
                f"the lease's run pins the gateway key {conversation.gateway.key}, not "
                f"{self._signer.address}"
            )
        if (
            call.tool not in conversation.gateway.tools
            or call.group >= run.groups_per_lease
            or call.sample >= run.samples_per_group
            or call.turn >= conversation.turns - 1
        ):
            raise PolicyError("the lease's run has no such tool, row or turn")
        return conversation

    def _limit_rate(self, lease: Digest) -> None:
        with self._limits_lock:
            if not self._rates.admits(lease):
                raise TooManyError("too many calls of this lease: slow down")

    @contextmanager
    def _slot(self, lease: Digest, tool: str) -> Iterator[None]:
        """Counts a call while it is answered. Raises TooManyError if there are too many."""
        bounds = {f"lease {lease}": MOST_AT_ONCE_OF_LEASE, f"tool {tool}": MOST_AT_ONCE_OF_TOOL}
        with self._limits_lock:
            for name, most in bounds.items():
                if self._at_once[name] >= most:
                    raise TooManyError(f"too many calls of {name} at once: ask again")
            self._at_once.update(bounds.keys())
        try:
            yield
        finally:
            with self._limits_lock:
                self._at_once.subtract(bounds.keys())
                self._at_once = +self._at_once  # without zeros

    def _lock(self, request: Digest) -> threading.Lock:
        """One lock for equal requests, so that only the first goes to the server."""
        return self._locks[int(request, 16) % LOCKS]


class TooManyError(UnavailableError):
    """Refused by the rate limit or while busy; the caller may repeat it after a pause."""


def create_app(service: CallService) -> Starlette:
    """The ASGI application: POST /v1/call, GET /healthz, GET /readyz (the same)
    and GET /metrics."""

    limiter = CapacityLimiter(service.threads)

    async def call(request: Request) -> Response:
        try:
            agree(request.headers.get(HEADER))
            asked = parse(GatewayRequest, await read_body(request, MAX_REQUEST))
            found = answer(await to_thread.run_sync(service.answer, asked, limiter=limiter))
        except TooManyError as error:
            return problem(error, code=429)
        except PrimeError as error:
            return refusal(error)
        found.headers[HEADER] = str(SPOKEN[-1])
        return found

    async def healthz(_: Request) -> Response:
        return Response("ok\n", media_type="text/plain")

    async def metrics(_: Request) -> Response:
        found = generate_latest(service.metrics.registry)
        return Response(found, media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return Starlette(
        routes=[
            Route("/v1/call", call, methods=["POST"]),
            Route("/healthz", healthz, methods=["GET"]),
            Route("/readyz", healthz, methods=["GET"]),
            Route("/metrics", metrics, methods=["GET"]),
        ]
    )


class Runs:
    """The pool's run definitions by digest, from the orchestrator."""

    def __init__(self, client: OrchestratorClient) -> None:
        self._client, self._lock = client, threading.Lock()
        self._known: OrderedDict[Digest, RunDefinition] = OrderedDict()

    def get(self, digest: Digest) -> RunDefinition:
        """See Pool.run."""
        with self._lock:
            known = self._known.get(digest)
        if known is None:  # fetched outside the lock: calls of known runs do not wait
            known = RunDefinition.parse(run_bytes(self._client, digest))
            with self._lock:
                self._known[digest] = known
                if len(self._known) > MAX_RUNS:
                    self._known.popitem(last=False)
        return known


def serve(settings: Settings) -> None:
    """Serves until SIGTERM or SIGINT. Raises UserError for settings that do not fit the run."""
    from prime_orchestrator import serve as serving

    log_to_stderr("info")
    signer = open_keystore(needed(settings, "wallet"), settings.password_file, settings.password_fd)
    make_folder(settings.data)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with (
        held_alone(settings.data, "orchestrator gateway"),
        OrchestratorClient(needed(settings, "orchestrator")) as client,
    ):
        try:
            pool, run = until_answered(
                lambda: _read_pool(client),
                stop,
                lambda error, wait: log.warning("%s; trying again in %.0f s", error, wait),
                give_up=None if settings.database.exists() else FIRST_ANSWER_SECONDS,
            )
        except StoppedError:
            return
        set_process_fields(pool=pool.number)
        _check_run(run, signer.address, settings)
        store = open_store(sqlite_url(settings.database))
        records = Records(store)
        web = Web(loopback=pool.work.chain_id == LOCAL.chain_id)
        tools = {name: make(one, web) for name, one in settings.tools.items()}
        service = CallService(pool, signer, records, tools, settings)
        listener = serving.bind(settings.host, settings.port)
        server = serving.make_server(create_app(service), Proxies(settings.trusted_proxies))
        pruner = threading.Thread(target=_prune, args=(records, settings, stop), daemon=True)
        pruner.start()
        try:
            asyncio.run(_until(stop, server, listener, settings.data / "gateway.json"))
        finally:
            stop.set()
            pruner.join(10)
            store.close()
            listener.close()


def _read_pool(client: OrchestratorClient) -> tuple[Pool, RunDefinition]:
    facts, runs = client.pool(), Runs(client)
    pool = Pool(facts.pool, facts.manager, client.domain("work"), runs.get)
    return pool, runs.get(facts.run_digest)


def _check_run(run: RunDefinition, key: Address, settings: Settings) -> None:
    """Raises UserError if the run's gateway, which no revision changes, has another key, or a tool
    that the settings lack."""
    gateway = None if run.conversation is None else run.conversation.gateway
    if gateway is None:
        log.warning("the pool's run has no [conversation.gateway], so no node will ask this one")
        return
    if gateway.key != key:
        raise UserError(
            f"the pool's run pins the gateway key {gateway.key}, and the wallet holds {key}",
            hint="name the keystore of that key by --wallet",
        )
    missing = [name for name in gateway.tools if name not in settings.tools]
    if missing:
        raise UserError(
            f"the run's gateway answers {missing[0]!r}, for which there are no settings",
            hint=f"add [tools.{missing[0]}] to the file that --config names",
        )


def _prune(records: Records, settings: Settings, stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            gone = records.prune(time.time() - settings.keep_days * 86_400)
            if gone:
                log.info("deleted %d records older than %d days", gone, settings.keep_days)
        except UnavailableError as error:
            log.warning("old records stay for now: %s", error)
        stop.wait(PRUNE_SECONDS)


async def _until(
    stop: threading.Event, server: object, listener: socket.socket, file: Path
) -> None:
    from prime_orchestrator import serve as serving

    assert isinstance(server, serving.Server)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    while not (server.started or running.done()):
        await asyncio.sleep(0.01)
    if server.started:
        url = serving.address_of(listener)
        serving.announce(file, url, listener.getsockname()[1])
        log.info("answering calls at %s", url)
    while not (stop.is_set() or running.done()):
        await asyncio.sleep(0.1)
    server.should_exit = True
    await running
    file.unlink(missing_ok=True)
