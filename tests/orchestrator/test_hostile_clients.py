"""What strangers and bad members try against the API: the pool goes on as if they had not."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from orchestrator_world import World, signer
from sqlalchemy import Connection, update

from prime_core.encoding import sha256
from prime_core.messages import AdmissionRequest
from prime_core.node import Hardware
from prime_core.rollout import MAX_PROMPT_TOKENS
from prime_orchestrator.api import leasing
from prime_orchestrator.api.routes import objects
from prime_orchestrator.store import intents, nodes, schema
from prime_orchestrator.store.intents import queue_intent
from prime_verify.rollout_file import FileMetadata, FileRow, write_rollout_file

MACHINE = Hardware(cpu_model="x", cpu_count=1, memory_mb=1, disk_mb=1, gpus=())


@pytest.mark.parametrize("field", ["policy_version", "tokens_per_second", "heard_at"])
def test_numbers_beyond_the_databases_are_malformed_and_no_defect(world: World, field: str) -> None:
    session = world.member(1)
    beat = {"policy_version": 0, field: 2**70}
    assert world.post("/v1/heartbeat", json.dumps(beat).encode(), session).status_code == 400


class Stalled:
    """An upload that sends all but its last byte, then nothing until it is let go."""

    def __init__(self, target: str, body: bytes) -> None:
        parts = urlsplit(target)
        self.body, self.statuses, self.go_on = body, list[int](), asyncio.Event()
        self.stalls = asyncio.Event()
        self.scope = {
            "type": "http", "http_version": "1.1", "method": "PUT", "path": parts.path,
            "raw_path": parts.path.encode(), "query_string": parts.query.encode(),
            "root_path": "", "scheme": "http", "client": ("127.0.0.1", 1),
            "server": ("testserver", 80), "headers": [(b"host", b"testserver")],
        }  # fmt: skip

    async def receive(self) -> dict[str, Any]:
        if self.body:
            body, self.body = self.body, b""
            return {"type": "http.request", "body": body, "more_body": True}
        self.stalls.set()
        await self.go_on.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.statuses.append(message["status"])
            self.stalls.set()


def target_of(world: World, data: bytes) -> str:
    session = world.member(1)
    lease = world.lease(session)
    body = b'{"sha256":"%s","size":%d}' % (sha256(data).encode(), len(data))
    path = f"/v1/leases/{world.lease_digest(lease)}/upload"
    return str(world.post(path, body, session).json()["url"])


def test_one_signed_url_fills_no_disk_by_many_uploads_at_once(world: World) -> None:
    data = b"x" * (1 << 19)
    url = target_of(world, data)
    root = world.backend.objects.root  # type: ignore[attr-defined]

    async def attack() -> tuple[int, list[int]]:
        uploads = [Stalled(url, data[:-1]) for _ in range(8)]
        tasks: list[asyncio.Task[None]] = [
            asyncio.create_task(world.http.app(one.scope, one.receive, one.send))  # type: ignore[arg-type]
            for one in uploads
        ]
        for one in uploads:
            await one.stalls.wait()
        lying = sum(path.stat().st_size for path in root.rglob(".tmp-*"))
        for one in uploads:
            one.go_on.set()
        await asyncio.gather(*tasks)
        return lying, [status for one in uploads for status in one.statuses]

    lying, statuses = asyncio.run(attack())
    assert lying <= objects.UPLOADS_AT_ONCE * len(data)
    assert statuses == [503] * 8
    assert not list(root.rglob(".tmp-*"))
    assert world.http.put(url, content=data).status_code == 204, "the honest one gets through"


def test_an_upload_that_drips_ends_with_its_url(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each piece comes in time, but the whole never does."""
    url = target_of(world, b"x" * 1000)
    monkeypatch.setattr(objects, "BODY_SECONDS", 0.2)
    world.clock.advance(60)  # the lease's deadline, and the URL's

    async def drip() -> int:
        one = Stalled(url, b"")

        async def receive() -> dict[str, Any]:
            await asyncio.sleep(0.01)
            return {"type": "http.request", "body": b"x", "more_body": True}

        await world.http.app(one.scope, receive, one.send)  # type: ignore[arg-type]
        return one.statuses[0]

    assert asyncio.run(drip()) == 503


def test_a_node_with_an_open_slash_does_not_leave_and_come_back_as_a_new_one(world: World) -> None:
    session = world.member(1)
    with world.backend.store.begin() as connection:
        connection.execute(
            schema.slashes.insert().values(
                submission_digest="0x" + "11" * 32, node=session.account.address,
                validator=signer(202).address, evidence="0x" + "22" * 32, reason=1, amount="1",
                status="proposed", created_at=world.clock(),
            )
        )  # fmt: skip
        nodes.set_status(connection, session.account.address, "left", last_heartbeat=0)
    wish = AdmissionRequest(hardware=MACHINE, task_runtime="process")
    answer = world.post("/v1/admission/challenge", wish, session)
    assert (answer.status_code, "slash" in answer.text) == (403, True)


def mark(connection: Connection, intent: str, status: str, now: float) -> None:
    table = schema.intents
    values = {"status": status, "updated_at": now}
    connection.execute(update(table).where(table.c.id == intent).values(**values))


def queue(world: World, kind: Any, name: str, status: str = "waiting") -> str:
    with world.backend.store.begin() as connection:
        found = queue_intent(connection, kind=kind, key=name, payload={}, now=world.clock())
        mark(connection, found, status, world.clock())
    return found


def test_a_flood_of_invites_holds_up_no_work_root(world: World) -> None:
    """A stranger gets invites for small challenges; their joins fail and are tried for an hour."""
    flood = [queue(world, "join", f"{n:04d}") for n in range(300)]
    world.clock.advance(1)
    root, honest = queue(world, "root", "r"), queue(world, "join", "honest")
    rounds = 0
    while True:
        with world.backend.store.begin() as connection:
            found = [row.id for row in intents.pending(connection)]
            assert found[0] == root
            assert len(found) == 1 + intents.MAX_JOINS
            world.clock.advance(1)
            for name in found[1:]:  # each fails, rests and is wanted again
                mark(connection, name, "waiting", world.clock())
        rounds += 1
        if honest in found:
            break
    assert rounds <= len(flood) // intents.MAX_JOINS + 1


def test_a_lease_takes_no_more_room_than_its_files_can_need(world: World) -> None:
    """A stranger's shadow lease costs nothing; 64 MiB for each would fill the disk."""
    run = world.backend.context.run
    rows = []
    for number in range(run.rows_per_lease):
        rng = np.random.default_rng(number)
        rows.append(
            FileRow(
                problem_id="\U0001f642" * 256, group=0, sample=number,
                prompt_tokens=tuple(rng.integers(1 << 31, size=MAX_PROMPT_TOKENS).tolist()),
                output_tokens=tuple(rng.integers(1 << 31, size=run.max_output_tokens).tolist()),
                logprobs=-rng.random(run.max_output_tokens).astype(np.float32),
                target_length=2, finish_reason="end", policy_version=0, reward=rng.random(),
                proofs=rng.bytes(260), sketch=rng.bytes(128),
            )
        )  # fmt: skip
    made = FileMetadata("0x" + "11" * 32, "plain/1", "float32", "cpu")
    largest = len(write_rollout_file(rows, made))
    assert largest < leasing.largest_file(run) < 2 * largest
    session = world.member(1)
    path = f"/v1/leases/{world.lease_digest(world.lease(session))}/upload"
    digest = sha256(b"x").encode()
    too_much = b'{"sha256":"%s","size":%d}' % (digest, leasing.largest_file(run) + 1)
    assert world.post(path, too_much, session).status_code == 403
    enough = b'{"sha256":"%s","size":%d}' % (digest, largest)
    assert world.post(path, enough, session).status_code == 200
