"""`bench strangers`: what parties without stake cost an orchestrator and a fetch.

tarpit      eight relays that drip their headers, next to an origin that serves the policy
turned      the same, and a relay that delivered before drips too
revocation  strangers revoke sessions that they never had
shadow      strangers are admitted as shadow nodes, take a lease and go silent
pages, work list, sessions, flood   bench/pages.py
half-open   connections that never finish the head of their request, against the real server
hosts       requests and session grants that were signed for another orchestrator's name
"""

from __future__ import annotations

import json
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import numpy as np
import sqlalchemy as sa

from bench import pages, seats
from bench.form import Row
from prime_broadcast.client import fetch
from prime_broadcast.publish import finalize, publish
from prime_broadcast.server import Origin
from prime_broadcast.sources import SourceBook
from prime_core import version
from prime_core.checkpoint import SignedManifest
from prime_core.errors import UnavailableError
from prime_core.ids import ZERO_ADDRESS
from prime_core.messages import AdmissionRequest, LeaseRequest, RevokeRequest, SessionRequest
from prime_core.node import Hardware, SessionGrant, SessionRevocation
from prime_core.signing import Domain, LocalSigner
from prime_core.transport.signatures import SessionKey, sign_headers
from prime_orchestrator.api import admission, auth, leasing
from prime_orchestrator.api.app import create_app
from prime_orchestrator.api.connections import Proxies
from prime_orchestrator.api.liveness import LifeTicks
from prime_orchestrator.serve import bind, make_server
from prime_orchestrator.store import Store, schema
from prime_verify.proofs import hardware

PACKAGES = ("httpx", "sqlalchemy", "uvicorn")
TARPITS = 8
FETCHES = 3
POLICY_BYTES = 16 << 20
SMALL_BYTES = 64 << 10
"""A policy of one chunk."""
HALF_OPEN = 1_050
HONEST = 50
"""Requests of an honest client while half-open connections are held."""
HOSTS = ("evil.example", "127.0.0.1.evil.example", "evil.example:443", "localhost", "127.0.0.1:9")
DOMAIN = Domain(chain_id=31337, contract=ZERO_ADDRESS)


def run(quick: bool) -> list[Row]:
    """All rows."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        rows = [
            _tarpits(root / "tarpits", POLICY_BYTES, "tarpit_fetch_extra_s"),
            _tarpits(root / "small", SMALL_BYTES, "tarpit_small_fetch_extra_s"),
            *_turned(root / "turned"),
        ]
        rows += _revocations(_pool(root / "revocations"), 100 if quick else 2_000)
        rows.append(_shadows(_pool(root / "shadows"), 20 if quick else 200))
        rows += pages.shadow_pages(_pool(root / "pages"))
        rows.append(pages.revoked_sessions(_pool(root / "sessions")))
        with _serving(_pool(root / "served")) as (pool, port):
            rows += _half_open(port)
            rows.append(_foreign_hosts(pool, port))
            rows += pages.flood(pool, port, 100 if quick else 2_000)
            rows += pages.work_lists(pool, port, root)
        return rows


def _pool(folder: Path) -> seats.Pool:
    folder.mkdir()
    return seats.Pool.make(folder)


def _signer(number: int) -> LocalSigner:
    return LocalSigner(number.to_bytes(32, "big"))


# ── relays ───────────────────────────────────────────────────────────────────────────────────────


class _Drips:
    """A server that sends a header's next letter ten times a second, forever. While `gate` leads
    elsewhere, it passes connections on to that port, as a source does until it turns."""

    def __init__(self) -> None:
        self.gate: int | None = None
        self._over = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._over.set()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                serve = self._drip if self.gate is None else self._pass_on
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

    def _drip(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
            while not self._over.wait(0.1):
                connection.sendall(b"a")

    def _pass_on(self, connection: socket.socket) -> None:
        assert self.gate is not None
        with connection, socket.create_connection(("127.0.0.1", self.gate)) as other:
            back = threading.Thread(target=_copy, args=(other, connection), daemon=True)
            back.start()
            _copy(connection, other)
            back.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 20):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


@contextmanager
def _dripping(count: int) -> Iterator[list[str]]:
    """URLs of `count` servers that drip."""
    servers = [_Drips() for _ in range(count)]
    try:
        yield [one.url for one in servers]
    finally:
        for one in servers:
            one.close()


def _policy(root: Path, size: int) -> tuple[SignedManifest, Path]:
    """A signed policy of `size` bytes, and the layout that serves it."""
    checkpoint, layout = root / "checkpoint", root / "layout"
    checkpoint.mkdir(parents=True)
    data = np.random.default_rng(0).bytes(size)
    header = json.dumps(
        {"w": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}
    ).encode()
    body = len(header).to_bytes(8, "little") + header + data
    (checkpoint / "model.safetensors").write_bytes(body)
    manifest = publish(checkpoint, layout, pool=1, version=0, step=0)
    signed = manifest.signed(_signer(1), DOMAIN)
    finalize(layout, signed)
    return signed, layout


def _seconds(signed: SignedManifest, urls: list[str], dest: Path, book: SourceBook) -> float:
    began = time.monotonic()
    fetch(signed, urls, dest, book=book)
    return time.monotonic() - began


def _tarpits(root: Path, size: int, row: str) -> Row:
    """The longest first fetch with tarpits among its sources, less the median one without."""
    signed, layout = _policy(root, size)
    with Origin(layout) as origin, _dripping(TARPITS) as urls:
        alone, among = (
            [_seconds(signed, [*more, origin.url], root / f"{len(more)}-{at}", SourceBook())
             for at in range(FETCHES)]
            for more in ([], urls)
        )  # fmt: skip
    extra = max(0.0, max(among) - statistics.median(alone))
    return Row(row, extra, f"s more with {TARPITS} tarpits, {size >> 10} KiB", 2.0)


def _turned(root: Path) -> list[Row]:
    """Small fetches by a node whose proven relay begins to drip, with tarpits announced too. The
    origin has not served it before."""
    signed, layout = _policy(root, SMALL_BYTES)
    relay, book = _Drips(), SourceBook()
    with Origin(layout) as origin, _dripping(TARPITS) as tarpits:
        relay.gate = int(origin.url.rsplit(":", 1)[1])
        urls = [relay.url, *tarpits, origin.url]
        try:
            book.get(relay.url).role = "relay"
            _seconds(signed, [relay.url], root / "proven", book)
            relay.gate = None
            took = [_seconds(signed, urls, root / f"{at}", book) for at in range(5)]
        finally:
            relay.close()
    return [
        Row(
            "turned_fetch_s", max(took), "s, slowest of 5 small fetches, a proven relay drips", 2.0
        ),
        Row("turned_last_fetch_s", took[-1], "s, the fifth"),
    ]


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────


def _count(store: Store) -> int:
    """Rows of all tables, but for the manager's own secrets, one an epoch."""
    with store.read() as connection:
        return sum(
            connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()
            for table in schema.metadata.sorted_tables
            if table is not schema.second_secrets
        )


def _revocations(pool: seats.Pool, count: int) -> list[Row]:
    backend, before = pool.backend, _count(pool.backend.store)
    requests = []
    for number in range(1, count + 1):
        stranger = _signer(1000 + number)
        end = SessionRevocation(
            account=stranger.address,
            orchestrator=backend.audience,
            revoked_before=int(pool.clock[0]),
        )
        signature = stranger.sign(end, backend.context.domain(end))
        requests.append(RevokeRequest(revocation=end, signature=signature))
    began = time.process_time()
    for request in requests:
        auth.revoke(backend, request)
    took = time.process_time() - began
    left = _count(backend.store) - before
    return [
        Row("revocation_rows_left", left, f"rows after {count} revocations by strangers", 0),
        Row("revocation_cpu_ms", 1e3 * took / count, "CPU ms each"),
    ]


def _shadows(pool: seats.Pool, count: int) -> Row:
    """Rows that silent shadow nodes leave. Each comes from an address of its own, so no share of an
    address stops it."""
    backend, before = pool.backend, _count(pool.backend.store)
    machine = Hardware(cpu_model="x", cpu_count=1, memory_mb=1, disk_mb=1, gpus=())
    wish = AdmissionRequest(hardware=machine, task_runtime="process", shadow=True)
    for number in range(count):
        account, address = _signer(1000 + number).address, f"2001:db8:{number:x}::1"
        challenge = admission.challenge(backend, account, wish, address).challenge
        if challenge is None:
            raise UnavailableError("a stranger was not challenged")
        solved = hardware.solve(challenge.seed, challenge.size, challenge.rounds)
        body = hardware.encode_solution(solved)
        admission.solution(backend, account, challenge.id, body, arrived_at=pool.clock[0] + 1)
        leasing.lease(backend, account, LeaseRequest(policy_version=0), address)
    life = LifeTicks(backend)
    for _ in range(6):  # hours
        pool.clock[0] += 3600
        life.tick()
    left = _count(backend.store) - before
    # The newest lease of each step stays, since its number seeds rows: one step was leased.
    return Row("shadow_rows_left", left, f"rows after {count} silent shadow nodes", 1)


# ── requests ─────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def _serving(pool: seats.Pool) -> Iterator[tuple[seats.Pool, int]]:
    """The pool's API on a port of its own, with the limits of `orchestrator serve`."""
    pool.clock[0] = time.time()
    server = make_server(create_app(pool.backend), Proxies())
    listener = bind("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        end = time.monotonic() + 60
        while not server.started:
            if time.monotonic() > end:
                raise UnavailableError("the API did not start")
            time.sleep(0.01)
        yield pool, int(listener.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join()


def _half_open(port: int) -> list[Row]:
    """Honest requests, each on a connection of its own, while half-open ones are held. Loopback
    addresses have no share of their own: to the server these are many strangers."""
    refused, slowest = 0, 0.0
    with ExitStack() as stack:
        for _ in range(HALF_OPEN):
            one = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
            with suppress(OSError):  # the oldest are closed
                one.sendall(b"GET /healthz HTTP/1.1\r\nHost: x")
        for _ in range(HONEST):
            began = time.monotonic()
            try:
                answer = httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=20)
                refused += answer.status_code != 200
            except httpx.TransportError:
                refused += 1
            slowest = max(slowest, time.monotonic() - began)
    return [
        Row("half_open_refused", refused, f"of {HONEST} honest requests", 0),
        Row("half_open_slowest_ms", 1e3 * slowest, f"ms with {HALF_OPEN} half-open connections"),
    ]


def _foreign_hosts(pool: seats.Pool, port: int) -> Row:
    """A man in the middle passes on what a client signed for his name, under it and under ours."""
    account, now = _signer(77), time.time()
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20)

    def opens(name: str) -> SessionKey | None:
        key = SessionKey.generate()
        grant = SessionGrant(
            account=account.address, session_key=key.key_id, orchestrator=name, scope="node",
            issued_at=int(now), expiry=int(now) + 3600,
        )  # fmt: skip
        signature = account.sign(grant, pool.backend.context.domain(grant))
        body = SessionRequest(grant=grant, signature=signature).model_dump_json()
        answer = client.post("/v1/sessions", content=body, headers=_VERSIONED | {"host": own})
        return key if answer.status_code == 200 else None

    def passes(key: SessionKey, signed_for: str, sent_to: str, number: int) -> bool:
        path, body = "/v1/leases", b'{"policy_version":0}'
        head = sign_headers(
            key, "POST", f"http://{signed_for}{path}", body, now=now, nonce=f"nonce-{number:012d}"
        )
        head = _VERSIONED | head | {"host": sent_to}
        return client.post(path, content=body, headers=head).status_code not in (400, 401, 421)

    own = httpx.URL(pool.backend.audience).netloc.decode()
    with client:
        key = opens(pool.backend.audience)
        if key is None or not passes(key, own, own, 0):
            raise UnavailableError("an honest request was refused")
        accepted, tries = 0, 0
        for at, host in enumerate(HOSTS):
            for sent_to in (host, own):
                tries += 1
                accepted += passes(key, host, sent_to, 2 * at + 1 + (sent_to == own))
            tries += 1
            accepted += opens(f"http://{host}") is not None
    return Row("foreign_hosts_accepted", accepted, f"of {tries} requests for another name", 0)


_VERSIONED = {version.HEADER: str(version.SPOKEN[-1])}
