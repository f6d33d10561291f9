"""What one address may hold, at the routes themselves, and who that is behind a reverse proxy."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import httpx
import pytest
from orchestrator_world import AUDIENCE, Session, World
from starlette.types import ASGIApp

from prime_broadcast.http1 import RateLimit
from prime_core.errors import UserError
from prime_core.ids import ZERO_DIGEST
from prime_core.messages import AdmissionRequest, ChallengeAnswer
from prime_core.node import Hardware
from prime_core.transport import copies
from prime_orchestrator.api.app import create_app
from prime_orchestrator.api.connections import Proxies, behind
from prime_orchestrator.api.routes import http, objects, watch
from prime_orchestrator.config import load
from prime_orchestrator.serve import make_server

MACHINE = Hardware(cpu_model="x", cpu_count=1, memory_mb=1, disk_mb=1, gpus=())
SLOW, NEWCOMER, PROXY = "203.0.113.7", "198.51.100.4", "10.1.2.3"


class Exchange:
    """One request of `host` straight into the application. `status` is set once the answer has
    begun; `asked` once its body was wanted, which comes only after `release`."""

    def __init__(self, app: ASGIApp, host: str, path: str, headers: dict[str, str]) -> None:
        self._app = app
        self._release = asyncio.Event()
        self.begun, self.status, self.asked = asyncio.Event(), 0, False
        given = {"host": AUDIENCE.removeprefix("http://"), **headers}
        self._scope = {
            "type": "http", "http_version": "1.1", "path": path, "raw_path": path.encode(),
            "method": "POST" if "signature" in {name.lower() for name in given} else "GET",
            "query_string": b"", "root_path": "", "scheme": "http",
            "client": (host, 1), "server": ("testserver", 80),
            "headers": [(k.lower().encode(), v.encode()) for k, v in given.items()],
        }  # fmt: skip

    async def _receive(self) -> dict[str, Any]:
        self.asked = True
        self.begun.set()
        await self._release.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.begun.set()

    @asynccontextmanager
    async def held(self) -> Any:
        """Under way for as long as the block runs: its body wanted, or its answer begun."""
        task = asyncio.create_task(self._app(self._scope, self._receive, self._send))  # type: ignore[arg-type]
        try:
            await self.begun.wait()
            yield self
        finally:
            self._release.set()
            await task


def solution_of(world: World, session: Session) -> tuple[str, Any]:
    """The path of an awaited solution, and signed headers for one request to it after another."""
    wish = AdmissionRequest(hardware=MACHINE, task_runtime="process")
    answer = world.post("/v1/admission/challenge", wish, session)
    challenge = ChallengeAnswer.model_validate_json(answer.content).challenge
    assert challenge is not None
    path = f"/v1/admission/solution/{challenge.id}"
    return path, lambda: world.signature("POST", path, b"x", session)


@pytest.mark.parametrize(
    ("peer", "reported"),
    [
        (lambda host: host, lambda host: {}),
        (lambda host: PROXY, lambda host: {"x-forwarded-for": host}),
        # a stranger may add entries, but the proxy's comes last
        (lambda host: PROXY, lambda host: {"x-forwarded-for": f"{NEWCOMER}, {PROXY}, {host}"}),
        (lambda host: host, lambda host: {"x-forwarded-for": NEWCOMER}),
    ],
    ids=["direct", "behind a proxy", "forged before the proxy", "forged to us"],
)
def test_slow_bodies_of_one_address_leave_room_for_a_newcomers(
    world: World, peer: Any, reported: Any
) -> None:
    """Two places each of eight: who drips sixteen MiB holds up no one else's admission."""
    app = create_app(world.backend, proxies=Proxies(["10.1.0.0/16"]))
    path, headers = solution_of(world, world.newcomer(1))

    def ask(host: str) -> Exchange:
        return Exchange(app, peer(host), path, headers() | reported(host))

    async def attack() -> None:
        async with AsyncExitStack() as held:
            for _ in range(http.LARGE_BODIES_EACH):
                assert (await held.enter_async_context(ask(SLOW).held())).asked
            async with ask(SLOW).held() as beyond:
                assert (beyond.status, beyond.asked) == (503, False)
            async with ask(NEWCOMER).held() as newcomer:
                assert newcomer.asked
        async with ask(SLOW).held() as again:
            assert again.asked, "its places are free again"

    asyncio.run(attack())


def test_copies_for_one_address_leave_room_for_a_newcomer(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, end = threading.Semaphore(0), threading.Event()

    def slow(*_: object) -> bytes:
        begun.release()
        end.wait(20)
        return b"[]\n"

    monkeypatch.setattr(copies, "pack", slow)
    app = create_app(world.backend)

    async def ask(host: str) -> int:
        transport = httpx.ASGITransport(app, client=(host, 1))
        async with httpx.AsyncClient(transport=transport, base_url=AUDIENCE) as client:
            return (await client.get(f"/v1/copies?names=objects/{ZERO_DIGEST}")).status_code

    async def attack() -> None:
        hosts = [SLOW] * objects.COPIES_EACH + [NEWCOMER]
        held = [asyncio.create_task(ask(host)) for host in hosts]
        for _ in held:
            assert await asyncio.to_thread(begun.acquire, timeout=20)
        assert await ask(SLOW) == 503
        end.set()
        assert await asyncio.gather(*held) == [200] * len(hosts)
        assert await ask(SLOW) == 200, "its places are free again"

    asyncio.run(attack())


@pytest.mark.slow
def test_watchers_of_one_address_leave_room_for_a_newcomer(world: World) -> None:
    app = create_app(world.backend)

    def ask(host: str) -> Exchange:
        return Exchange(app, host, "/v1/events", {})

    async def attack() -> None:
        async with AsyncExitStack() as held:
            for _ in range(watch.WATCHERS_EACH):
                assert (await held.enter_async_context(ask(SLOW).held())).status == 200
            async with ask(SLOW).held() as beyond:
                assert beyond.status == 503
            async with ask(NEWCOMER).held() as newcomer:
                assert newcomer.status == 200
        async with ask(SLOW).held() as again:
            assert again.status == 200, "its places are free again"

    asyncio.run(attack())


def test_a_network_of_ipv6_asks_as_often_as_one_address_may(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder of a /64 has more addresses than there are buckets."""
    frozen = partial(RateLimit, clock=lambda: 100.0)
    monkeypatch.setattr("prime_orchestrator.api.app.RateLimit", frozen)
    app = create_app(world.backend, requests_per_second=2)

    async def statuses(*hosts: str) -> list[int]:
        found = []
        for host in hosts:
            async with Exchange(app, host, "/healthz", {}).held() as asked:
                found.append(asked.status)
        return found

    within = [f"2001:db8:0:1::{n:x}" for n in range(4)]
    assert asyncio.run(statuses(*within)) == [200] * 4
    assert asyncio.run(statuses("2001:db8:0:1::ffff", "2001:db8:0:2::1")) == [429, 200]


def test_who_asks_too_fast_is_answered_at_the_limit_and_the_oldest_key_is_forgotten() -> None:
    now = 0.0
    limit = RateLimit(2, lambda: now, keys=2)
    admitted = 0
    for tick in range(40):  # 4 requests a second
        now = tick / 4
        admitted += limit.admits("one")
    assert admitted == 4 + 19, "a full bucket, then two a second"
    while limit.admits("one"):
        pass
    assert limit.admits("two")
    assert not limit.admits("one")
    assert limit.admits("three")  # "two" is forgotten: "one" asked later
    assert not limit.admits("one")


@pytest.mark.parametrize(
    ("trusted", "peer", "forwarded", "who"),
    [
        ([], PROXY, [SLOW], PROXY),
        ([PROXY], SLOW, [NEWCOMER], SLOW),
        ([PROXY], PROXY, [], PROXY),
        ([PROXY], PROXY, [SLOW], SLOW),
        ([PROXY], PROXY, [f"{NEWCOMER}, {SLOW}"], SLOW),
        ([PROXY], PROXY, [NEWCOMER, SLOW], SLOW),  # the header twice: one list
        ([PROXY], PROXY, [f"{NEWCOMER}, {PROXY}, {SLOW}"], SLOW),
        (["10.0.0.0/8"], PROXY, [f"{NEWCOMER}, {SLOW}, 10.9.9.9"], SLOW),  # through two proxies
        (["10.0.0.0/8"], PROXY, ["10.9.9.9"], "10.9.9.9"),
        ([PROXY], PROXY, [f"{SLOW}:4711"], SLOW),
        ([PROXY], PROXY, ["[2001:db8::5]:4711"], "2001:db8::5"),
        ([PROXY], PROXY, ["2001:db8::5"], "2001:db8::5"),
        ([PROXY], f"::ffff:{PROXY}", [SLOW], SLOW),
        (["2001:db8::/32"], "2001:db8::1", [SLOW], SLOW),
        ([PROXY], PROXY, ["unknown"], PROXY),
        ([PROXY], PROXY, [f"{SLOW}, nonsense"], PROXY),
        ([PROXY], PROXY, [""], PROXY),
    ],
)
def test_who_asks_is_the_last_that_no_trusted_proxy_vouches_for(
    trusted: list[str], peer: str, forwarded: list[str], who: str
) -> None:
    assert Proxies(trusted).client(peer, forwarded) == who


def test_no_proxy_is_trusted_unless_it_is_named() -> None:
    assert load({}).trusted_proxies == ()
    assert load({"trusted_proxies": (PROXY, "10.0.0.0/8")}).trusted_proxies == (PROXY, "10.0.0.0/8")


@pytest.mark.parametrize("wrong", ["0.0.0.0/0", "::/0", "*", "proxy.example", "10.0.0.1/8"])
def test_a_proxy_is_an_address_or_a_network_and_never_everybody(wrong: str) -> None:
    with pytest.raises(UserError, match="trusted_proxies"):
        load({"trusted_proxies": (wrong,)})


def test_a_trusted_proxys_connections_are_not_one_strangers() -> None:
    protocol = behind(Proxies([PROXY]))
    assert not protocol.is_bounded(PROXY)
    assert not protocol.is_bounded("127.0.0.1")
    assert protocol.is_bounded(SLOW)


@contextmanager
def served(world: World, *trusted: str) -> Iterator[str]:
    """The URL of the server that `orchestrator serve` makes."""
    proxies = Proxies(trusted)
    listener = socket.create_server(("127.0.0.1", 0))
    server = make_server(create_app(world.backend, proxies=proxies), proxies)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join(20)
        listener.close()


@pytest.mark.slow
def test_the_server_holds_more_than_a_thousand_connections(world: World) -> None:
    with served(world) as url, ExitStack() as stack:
        port = int(url.rsplit(":", 1)[1])
        held = []
        for _ in range(1_100):
            held.append(stack.enter_context(socket.create_connection(("127.0.0.1", port), 20)))
            held[-1].sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert held[-1].recv(12) == b"HTTP/1.1 200"
        held[0].sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b'{"status":"ok"}' in held[0].recv(4096), "the first one is still open"


def watches(held: ExitStack, url: str, forwarded: str) -> int:
    headers = {"X-Forwarded-For": forwarded}
    stream = httpx.stream("GET", f"{url}/v1/events", headers=headers, timeout=20)
    return held.enter_context(stream).status_code


@pytest.mark.slow
def test_the_servers_word_on_who_asks_is_ours_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uvicorn by itself believes this machine's programs, and whomever the environment names."""
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    with served(world) as url, ExitStack() as held:
        for _ in range(watch.WATCHERS_EACH + 1):
            assert watches(held, url, SLOW) == 200, "it is this machine that asks"
    with served(world, "127.0.0.1") as url, ExitStack() as held:
        for _ in range(watch.WATCHERS_EACH):
            assert watches(held, url, SLOW) == 200
        assert watches(held, url, SLOW) == 503
        assert watches(held, url, NEWCOMER) == 200
