"""Recorded HTTP traffic: an orchestrator whose requests are recorded, or replaced by recorded ones
while its answers are compared with the recorded answers. Import it by way of `recording`."""

from __future__ import annotations

import base64
import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import sqlalchemy as sa
from api_walk import VALIDATOR, walked
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from fastapi.testclient import TestClient
from httpx import Response
from judges import commit_draws
from orchestrator_world import (
    AUDIENCE,
    VERSIONED,
    Clock,
    Session,
    World,
    deployment,
    run_definition,
    signer,
)

from prime_core.encoding import sha256
from prime_core.ids import ZERO_DIGEST
from prime_core.messages import LeaseAnswer
from prime_core.storage.directory import DirectoryStore
from prime_orchestrator.api.app import create_app
from prime_orchestrator.api.backend import Backend
from prime_orchestrator.context import PoolContext
from prime_orchestrator.manager.draws import DrawBoard
from prime_orchestrator.store import leases, open_store, schema, sqlite_url

SENTENCES = {"detail", "hint"}
"""Text for people: it may be worded otherwise."""
OPAQUE = {"url", "file", "location", "retry_after_ms", "mmacs_per_second"}
"""Values that a client passes on or obeys without knowing what is in them."""
NO_BODY = {"GET /metrics"}
"""Its lines follow the machine; the status is what counts."""
GIVES_URLS = re.compile(r".*(/upload|/validators/objects|/batches/0)\Z")


class MismatchError(AssertionError):
    """Today's code says something else than what was recorded."""


@dataclass
class Tape:
    """Recorded exchanges by name. While `recording`, a name that is missing is added."""

    exchanges: dict[str, dict[str, Any]]
    recording: bool = False
    used: list[str] = field(default_factory=list)

    def find(self, name: str) -> dict[str, Any] | None:
        self.used.append(name)
        return self.exchanges.get(name)


def packed(data: bytes) -> str | dict[str, str]:
    """Bytes in a JSON file: as text where they are text."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def unpacked(value: str | dict[str, str]) -> bytes:
    return value.encode() if isinstance(value, str) else base64.b64decode(value["base64"])


def covers(recorded: Any, now: Any, path: str = "", *, shape: bool = False) -> None:
    """Raises MismatchError unless `now` holds all that was recorded; it may hold more. `shape`: of
    values only the type must be equal."""
    if isinstance(recorded, dict):
        if not isinstance(now, dict):
            raise MismatchError(f"{path} is no object any more: {now!r}")
        for name, value in recorded.items():
            if name not in now:
                raise MismatchError(f"{path}.{name} is missing")
            words = name == "reason" and isinstance(value, str)
            loose = shape or words or name in SENTENCES | OPAQUE or path.endswith(".urls")
            covers(value, now[name], f"{path}.{name}", shape=loose)
    elif isinstance(recorded, list):
        if not isinstance(now, list) or (len(now) != len(recorded) and not shape):
            raise MismatchError(f"{path} has {now!r} instead of {recorded!r}")
        for number, (one, other) in enumerate(zip(recorded, now, strict=False)):
            covers(one, other, f"{path}[{number}]", shape=shape)
    elif type(recorded) is not type(now) or (recorded != now and not shape):
        raise MismatchError(f"{path} is {now!r} instead of {recorded!r}")


@dataclass
class TapedWorld(World):
    """A world whose requests are recorded, or replaced by the recorded ones."""

    tape: Tape = field(default_factory=lambda: Tape({}))
    randomness: list[random.Random] = field(default_factory=list)
    _seen: Counter[str] = field(default_factory=Counter)

    def send(
        self,
        method: str,
        path: str,
        raw: bytes = b"",
        session: Session | None = None,
        **headers: str,
    ) -> Response:
        """Makes the request; while replaying, checks that it is the recorded one, sends that, and
        checks that its answer holds all that the recorded one does."""
        bare = re.sub(r"0x[0-9a-fA-F]{40,64}|[0-9a-f]{32}|store/[^?]*", "_", path.partition("?")[0])
        self._seen[f"{method} {bare}"] += 1
        name = f"{method} {bare} {self._seen[f'{method} {bare}']}"
        self.randomness[:] = [random.Random(name)]  # so that a call does not depend on others
        signed = self.signature(method, path, raw, session) if session else VERSIONED
        sent = {k.lower(): v for k, v in {**signed, **headers}.items()}
        sent.pop("user-agent", None)  # a test client adds it to the headers that it was made with
        made = {
            "at": self.clock(),
            "method": method,
            "target": path,
            "headers": sent,
            "body": packed(raw),
        }
        taped = self.tape.find(name)
        if taped is not None:
            self._require_same(name, taped["request"], made)
            made = {**taped["request"], "target": path if "_?" in name else made["target"]}
        now = self.http.request(
            method, made["target"], content=unpacked(made["body"]), headers=made["headers"]
        )
        answer = {"status": now.status_code, "headers": self._headers(now), "body": ""}
        if f"{method} {bare}" not in NO_BODY:
            answer["body"] = packed(now.content)
        if taped is None:
            if self.tape.recording:
                self.tape.exchanges[name] = {"request": made, "answer": answer}
            return now
        self._require_covered(name, taped["answer"], now)
        if f"{method} {bare}" == "POST /v1/leases" and now.status_code == 200:
            self._adopt(now.content, unpacked(taped["answer"]["body"]))
        if GIVES_URLS.match(bare):
            return now
        return Response(
            taped["answer"]["status"],
            headers=taped["answer"]["headers"],
            content=unpacked(taped["answer"]["body"]),
        )

    @staticmethod
    def _headers(answer: Response) -> dict[str, str]:
        kept = ("content-type", "prime-protocol", "location")
        return {name: answer.headers[name] for name in kept if name in answer.headers}

    def _require_same(self, name: str, taped: Mapping[str, Any], made: Mapping[str, Any]) -> None:
        for part in ("at", "method", "target", "headers", "body"):
            if part == "target" and "store" in made["target"]:
                continue
            if taped[part] != made[part]:
                raise MismatchError(f"{name}: {part} is {made[part]!r} instead of {taped[part]!r}")

    def _require_covered(self, name: str, taped: Mapping[str, Any], now: Response) -> None:
        if now.status_code != taped["status"]:
            raise MismatchError(
                f"{name}: {now.status_code} instead of {taped['status']}: {now.text}"
            )
        covers(taped["headers"], self._headers(now), name)
        body = unpacked(taped["body"])
        exact = "/run" in name  # a run is its bytes
        if "json" in taped["headers"].get("content-type", "") and not exact:
            lease = name.startswith("POST /v1/leases ")  # which one a node gets is no protocol
            covers(json.loads(body), now.json(), name, shape=lease)
        elif body and body != now.content:
            raise MismatchError(f"{name}: other bytes")

    def _adopt(self, now: bytes, taped: bytes) -> None:
        """Puts the recorded lease in place of the one that was given now."""
        given, recorded = (LeaseAnswer.model_validate_json(raw).lease for raw in (now, taped))
        assert given is not None
        assert recorded is not None
        with self.backend.store.begin() as connection:
            of = schema.leases.c.digest == self.lease_digest(given)
            connection.execute(sa.delete(schema.leases).where(of))
            row = leases.new_row(self.lease_digest(recorded), recorded, now=self.clock())
            leases.add(connection, [row])


class SessionKeys:
    """Stands for Ed25519PrivateKey: its keys are always the same, one after the other."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def generate(self) -> Ed25519PrivateKey:
        seed = sha256(b"session key %d" % next(self._numbers))
        return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(seed[2:]))


@contextmanager
def traffic(tape: Tape, folder: Path) -> Iterator[TapedWorld]:
    """Makes all requests of the walk, and some that are refused."""
    clock, manager, trainer = Clock(), signer(200), signer(201)
    store = open_store(sqlite_url(folder / "orchestrator.sqlite"))
    store.migrate()
    randomness = [random.Random("start")]

    def drawn(count: int) -> bytes:
        return randomness[0].randbytes(count)

    backend = Backend(
        context=PoolContext(deployment(), pool=1, manager=manager.address, run=run_definition()),
        store=store,
        objects=DirectoryStore(folder / "objects", AUDIENCE, b"s" * 32),
        manager=manager,
        trainer=trainer.address,
        audience=AUDIENCE,
        relay_accounts=frozenset({signer(5).address}),
        now=clock,
        random=drawn,
        draws=DrawBoard(random.Random("draws").randbytes),
    )
    with (
        mock.patch(f"{Ed25519PrivateKey.__module__}.Ed25519PrivateKey", SessionKeys()),
        mock.patch("prime_orchestrator.api.kept.EVERY_SECONDS", 0.0),
        TestClient(create_app(backend), base_url=AUDIENCE) as http,
    ):
        http.follow_redirects = False
        commit_draws(store, backend.context, VALIDATOR, clock)
        world = TapedWorld(backend, clock, http, manager, trainer, tape=tape, randomness=randomness)
        world.publish(0)
        with walked(world, folder) as walk:
            refusals(world)
            walk.cards()  # last: what came before is recorded with its keys and nonces
            walk.classes()  # and later than that
            walk.together()
            walk.evaluation()
            walk.memory()
            yield world
    store.close()


def refusals(world: World) -> None:
    """Requests that are refused, by problem documents."""
    node = world.member(40)
    world.send("POST", "/v1/heartbeat", b'{"policy_version":0,"added_later":1}', node)
    world.send("POST", "/v1/heartbeat", b'{"policy_version":0}')
    world.send("POST", "/v1/leases", b'{"policy_version":0}', world.login(signer(41)))
    world.send("GET", f"/v1/submissions/{ZERO_DIGEST}")
    world.send("GET", "/v1/policies/x")
    world.send("GET", "/v1/pool", **{"Prime-Protocol": "2"})
