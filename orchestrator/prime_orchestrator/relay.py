"""`orchestrator relay`: serves the pool's policies to nodes.

    once a second   ask the orchestrator which policies are published, and who serves them
    each new one    check the trainer's signature and fetch it: from --upstream if given, else from
                    the trainer's bucket or origin; every verified chunk is available at once
    on each change  (and every 30 s) announce the address and versions, signed, if there is a wallet

Anyone may run a relay. For nodes to learn of it, it needs a seat in the pool or the operator's
permission. Readers verify what it serves, so it needs no trust, but it needs bandwidth. Behind a
proxy or NAT, set --public-url to the URL at which others reach it: readers sign their requests for
that URL (prime_broadcast/access.py), unless --access is `anyone`.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from pydantic import TypeAdapter, ValidationError

from prime_broadcast.access import Passes, Rules, ephemeral_signer
from prime_broadcast.files import DiskError, write_whole
from prime_broadcast.manifest import Trust
from prime_broadcast.relay import KEEP, Relay, RelayEvent
from prime_broadcast.server import Limits, Serving
from prime_broadcast.sources import SourceBook, normal_url
from prime_chain.keystore import open_keystore
from prime_core import ids
from prime_core.checkpoint import SignedManifest
from prime_core.command_line import AllowPrivate, PasswordFd, PasswordFile, Quorum, command
from prime_core.deployment import Deployment
from prime_core.errors import MalformedError, PrimeError, UnavailableError, UserError
from prime_core.folders import held_alone, make_folder
from prime_core.ids import Address
from prime_core.messages import PolicyList, RelayAnnouncement, RelayInfo
from prime_core.transport.client import Empty, OrchestratorClient
from prime_core.waiting import (
    FIRST_ANSWER_HELP,
    FIRST_ANSWER_SECONDS,
    StoppedError,
    until_answered,
    until_stopped,
)

app = command()

ANNOUNCE_SECONDS = 30.0
MEMBERS_SECONDS = 10.0
LOOK_FOR_SOURCES_SECONDS = 5.0
_Answer = TypeVar("_Answer")
_RELAYS = TypeAdapter(list[RelayInfo])


class Access(StrEnum):
    """Who may read from a relay."""

    ANYONE = "anyone"
    SIGNED = "signed"
    MEMBERS = "members"


@app.command()
def relay(
    orchestrator: Annotated[
        str, typer.Option(envvar="PRIME_RELAY_ORCHESTRATOR", help="URL of the orchestrator.")
    ],
    data: Annotated[
        Path, typer.Option(envvar="PRIME_RELAY_DATA", help="Folder for policies.")
    ] = Path("var/relay"),
    host: Annotated[
        str, typer.Option(envvar="PRIME_RELAY_HOST", help="Address to listen on.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(envvar="PRIME_RELAY_PORT", help="Port; 0 takes a free one.")
    ] = 8480,
    public_url: Annotated[
        str | None,
        typer.Option(envvar="PRIME_RELAY_PUBLIC_URL", help="How nodes reach this relay."),
    ] = None,
    upstream: Annotated[
        list[str] | None, typer.Option(help="Relay to fetch policies from; repeat for more.")
    ] = None,
    wallet: Annotated[
        Path | None,
        typer.Option(envvar="PRIME_RELAY_WALLET", help="Keystore that announces this relay."),
    ] = None,
    password_file: PasswordFile = None,
    password_fd: PasswordFd = None,
    rpc: Annotated[
        list[str] | None,
        typer.Option(help="RPC endpoint, to read the trainer's address from the chain."),
    ] = None,
    rpc_quorum: Quorum = None,
    deployment: Annotated[Path | None, typer.Option(help="Deployment JSON, with --rpc.")] = None,
    trainer: Annotated[
        str | None, typer.Option(help="The trainer's address, if it is not read from the chain.")
    ] = None,
    keep: Annotated[int, typer.Option(help="Versions to keep.", min=1)] = KEEP,
    poll: Annotated[
        float, typer.Option(help="Seconds between two requests for new policies.", min=0.2)
    ] = 1.0,
    access: Annotated[
        Access,
        typer.Option(
            help="Who may read: anyone, signed requests, or members (the pool's nodes and --allow)."
        ),
    ] = Access.SIGNED,
    allow: Annotated[
        list[str] | None, typer.Option(help="Account that may read besides the pool's nodes.")
    ] = None,
    connections: Annotated[int, typer.Option(help="Most connections at once.", min=1)] = 1024,
    connections_each: Annotated[
        int, typer.Option(help="Most connections of one address at once; 0: unlimited.", min=0)
    ] = 256,
    max_rate: Annotated[
        float, typer.Option(help="Bytes per second to all readers together; 0: unlimited.", min=0)
    ] = 0.0,
    requests_per_second: Annotated[
        float,
        typer.Option(help="Requests per second of one reader, on average; 0: unlimited.", min=0),
    ] = 0.0,
    allow_private: AllowPrivate = None,
    first_answer_seconds: Annotated[
        float, typer.Option(help=FIRST_ANSWER_HELP, min=0)
    ] = FIRST_ANSWER_SECONDS,
) -> None:
    """Serve policies to nodes, from an origin or another relay, until SIGTERM."""
    stop = until_stopped()
    signer = None
    if wallet is not None:
        signer = open_keystore(wallet, password_file, password_fd)
    upstreams = [_source(url) for url in upstream or ()]
    limits = Limits(
        connections=connections,
        connections_per_address=connections_each,
        bytes_per_second=max_rate,
        requests_per_second=requests_per_second,
    )
    make_folder(data)
    with (
        held_alone(data, "relay"),
        OrchestratorClient(
            orchestrator, signer, "relay", allow_private=bool(allow_private)
        ) as client,
    ):
        known = data / "relay.json"
        give_up = None if known.exists() else first_answer_seconds
        try:
            trust = _trust(client, stop, tuple(rpc or ()), rpc_quorum, deployment, trainer, give_up)
        except StoppedError:
            return
        registry = client.domain("registry")
        members = Members(client, [ids.address(one) for one in allow or ()])
        rules = None if access is Access.ANYONE else Rules(registry)
        if access is Access.MEMBERS:
            rules = Rules(registry, members.known)
            members.refresh()
        server = Relay(
            data,
            trust,
            Serving(host, port, public_url, limits, rules),
            keep=keep,
            book=SourceBook(
                passes=Passes(signer or ephemeral_signer(), registry),
                public_only=not client.allows_private,
            ),
            on_event=_log_event,
        )
        with server:
            state = json.dumps({"url": server.url, "trainer": trust.trainer}).encode()
            try:
                write_whole(known, state)
            except DiskError as error:  # existing policies can still be served
                _log("trouble", detail=str(error))
            _log("serving", url=server.url, pool=trust.pool, trainer=trust.trainer)
            listing = members.refresh_now_and_then if access is Access.MEMBERS else lambda: None
            loop = Loop(client, server, upstreams, listing, announces=signer is not None)
            loop.run(stop, poll)


class Members:
    """Accounts allowed to read: the pool's nodes as listed by the orchestrator, and those of
    --allow. `known` is called from the server's thread and never blocks."""

    def __init__(self, client: OrchestratorClient, allowed: Sequence[Address]) -> None:
        self._client = client
        self._allowed = frozenset(allowed)
        self._nodes: frozenset[Address] = frozenset()
        self._at = float("-inf")

    def known(self) -> frozenset[Address]:
        """Returns the accounts that may read now."""
        return self._nodes | self._allowed

    def refresh(self) -> None:
        """Queries the orchestrator. Nodes that left or were ejected may no longer read."""
        self._nodes = frozenset(
            known.node for known in self._client.nodes() if known.status not in ("left", "ejected")
        )
        self._at = time.monotonic()

    def refresh_now_and_then(self) -> None:
        """Calls `refresh` if the list is older than MEMBERS_SECONDS."""
        if time.monotonic() - self._at >= MEMBERS_SECONDS:
            self.refresh()


class Loop:
    """Polls the orchestrator, with one `turn` per poll, as described at the top of this module."""

    def __init__(
        self,
        client: OrchestratorClient,
        server: Relay,
        upstreams: Sequence[str],
        before_turn: Callable[[], None] = lambda: None,
        *,
        announces: bool,
    ) -> None:
        self._client = client
        self._server = server
        self._upstreams = list(upstreams)
        self._announces = announces
        self._published: tuple[SignedManifest, ...] = ()
        self._tag: str | None = None
        self._sources: list[str] = []
        self._own: list[str] = []
        self._sources_at = float("-inf")
        self._announced: tuple[int, ...] | None = None
        self._announced_at = float("-inf")
        self._trouble = ""
        self._before_turn = before_turn

    def run(self, stop: threading.Event, poll: float) -> None:
        """Runs turns until `stop`. Logs errors when they begin, change and end."""
        while not stop.is_set():
            try:
                self._before_turn()
                self.turn()
                trouble = ""
            except PrimeError as error:
                trouble = str(error)
            if trouble != self._trouble:
                _log("trouble" if trouble else "recovered", detail=trouble or self._trouble)
                self._trouble = trouble
            stop.wait(poll)

    def turn(self) -> None:
        """Fetches published policies and their sources, offers them to the relay and announces
        changes."""
        changed = self._client.get_changed("/v1/policies", PolicyList, self._tag)
        if changed is not None:
            self._published, self._tag = changed[0].policies, changed[1]
        if time.monotonic() - self._sources_at >= LOOK_FOR_SOURCES_SECONDS:
            self._find_sources()
            self._sources_at = time.monotonic()
        groups = [self._upstreams, self._sources] if self._upstreams else [self._sources]
        self._server.offer(self._published, groups, self._own)
        self._announce()

    def _find_sources(self) -> None:
        raw = self._client.request("GET", "/v1/relays", b"", signed=False)
        try:
            found = _RELAYS.validate_json(raw)
        except ValidationError as error:
            raise MalformedError("the orchestrator's list of relays does not parse") from error
        self._sources = [info.url for info in found]
        self._own = [info.url for info in found if info.own]

    def _announce(self) -> None:
        if not self._announces:
            return
        versions = tuple(self._server.versions())
        fresh = time.monotonic() - self._announced_at < ANNOUNCE_SECONDS
        if fresh and versions == self._announced:
            return
        info = RelayAnnouncement(url=self._server.url, versions=versions)
        self._client.post("/v1/relays", info, Empty)
        self._announced, self._announced_at = versions, time.monotonic()


def _trust(
    client: OrchestratorClient,
    stop: threading.Event,
    rpc: tuple[str, ...],
    quorum: int | None,
    deployment: Path | None,
    trainer: str | None,
    give_up: float | None,
) -> Trust:
    """Returns whose signatures to trust: read from the chain if there is an RPC, else the given
    trainer, else the orchestrator's answer (which is logged). Waits for the answers; raises
    UnavailableError after `give_up` seconds (None: never), StoppedError if stopped."""
    pool = _until_answered(lambda: client.pool().pool, stop, give_up)
    domain = client.domain("pools")
    if rpc:
        if deployment is None:
            raise UserError("--rpc needs --deployment FILE", hint="or leave both out")
        from prime_chain.client import ChainClient
        from prime_chain.contracts import Pools

        known = Deployment.load(deployment)
        if known.domain("pools") != domain:
            raise UserError(
                f"the orchestrator at {client.base_url} works with other contracts than "
                f"{deployment} names",
                hint="check --orchestrator and --deployment",
            )
        chain = ChainClient(rpc, known.chain_id, quorum=quorum)
        try:
            address = _until_answered(
                lambda: Pools(chain, known).pool_of(pool).trainer, stop, give_up
            )
        finally:
            chain.close()
        if trainer is not None and ids.address(trainer) != address:
            raise UserError(f"on chain the trainer is {address}, not {trainer}")
        return Trust(address, domain, pool)
    if trainer is not None:
        return Trust(ids.address(trainer), domain, pool)
    _log("trusting", detail="the trainer's address is the orchestrator's word; --rpc checks it")
    return Trust(client.pool().trainer, domain, pool)


def _until_answered(
    ask: Callable[[], _Answer], stop: threading.Event, give_up: float | None
) -> _Answer:
    """Waits for `ask` to answer and returns the answer; logs once that it is waiting."""
    failures: list[str] = []

    def tell(error: UnavailableError, wait: float) -> None:
        if not failures:
            _log("waiting", detail=str(error))
        failures.append(str(error))

    return until_answered(ask, stop, tell, give_up=give_up, longest=1.0)


def _source(url: str) -> str:
    try:
        return normal_url(url)
    except MalformedError as error:
        raise UserError(str(error), hint="give --upstream http://HOST:PORT") from error


def _log_event(event: RelayEvent) -> None:
    _log(event.kind, version=event.version, detail=event.detail)


def _log(event: str, **facts: object) -> None:
    """Prints one JSON line per event on stdout."""
    print(json.dumps({"time": round(time.time(), 3), "event": event, **facts}), flush=True)
