"""What given and refused leases cost with 10,000 live nodes.

`lease_given_us`: CPU time of two API processes and PostgreSQL per lease, one request at a time,
until enough work is under way. `lease_refused_us`: the same per refused lease from then on, at the
500 requests a second that so many idle nodes make together. `lease_refused_most_us`: the same where
all connections always wait for an answer, so that the servers gather more requests in a
transaction. Requests are signed before the clock starts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import sqlalchemy as sa

from bench.form import Row
from bench.heartbeats import CONNECTIONS, seat
from bench.servers import Client, Database, Servers, connect, serving, signed_post
from bench.work import definition
from prime_core.errors import FatalError
from prime_core.messages import LeaseAnswer, LeaseRequest
from prime_core.transport.signatures import SessionKey
from prime_orchestrator import scheduler
from prime_orchestrator.store import schema

RATE = 500.0
"""Requests a second."""
GROUPS = 100
"""Groups of a batch: some 200 leases are enough work."""


def rows(quick: bool, database: Database) -> list[Row]:
    """The rows of refused leases; empties the database."""
    run = definition().model_copy(update={"groups_per_batch": GROUPS, "death_seconds": 3600})
    with serving(database, run) as servers:
        nodes = seat(servers.pool, 500 if quick else 10_000)
        with servers.pool.backend.store.begin() as connection:
            change = sa.update(schema.nodes)
            connection.execute(change.values(kept=10.0, challenge_rate=1000.0))
        return asyncio.run(_measure(servers, nodes, 400 if quick else 4_000))


async def _measure(servers: Servers, nodes: Sequence[SessionKey], count: int) -> list[Row]:
    first = await connect(servers.ports, 1)
    given, before = 0, servers.cpu_seconds()
    while _answer((await _ask(first, [nodes[given]], 0.0))[0]).lease is not None:
        given += 1
    after = servers.cpu_seconds()
    api, database = (1e6 * (late - early) / given
                     for early, late in zip(before, after, strict=True))  # fmt: skip
    found = [
        Row("lease_given_us", api + database,
            f"µs of CPU, one after the other, {given} leases, {len(nodes):,} nodes"),
        Row("lease_given_postgres_us", database, "µs of it in PostgreSQL"),
    ]  # fmt: skip
    clients = await connect(servers.ports, min(CONNECTIONS, count))  # now: idle ones are closed
    for name, rate in (("lease_refused", RATE), ("lease_refused_most", 0.0)):
        before = servers.cpu_seconds()
        answers = await _ask(clients, nodes[-count:], rate)
        after = servers.cpu_seconds()
        for one in map(_answer, answers):
            if one.lease is not None or one.reason != scheduler.ENOUGH:
                raise FatalError(f"a request was not refused as expected: {one.reason}")
        api, database = (1e6 * (late - early) / count
                         for early, late in zip(before, after, strict=True))  # fmt: skip
        load = f"at {rate:.0f} requests a second" if rate else f"over {len(clients):,} connections"
        found += [
            Row(f"{name}_us", api + database, f"µs of CPU {load}, {len(nodes):,} nodes"),
            Row(f"{name}_postgres_us", database, "µs of it in PostgreSQL"),
        ]
    for client in (*first, *clients):
        client.close()
    return found


def _answer(raw: bytes) -> LeaseAnswer:
    return LeaseAnswer.model_validate_json(raw)


async def _ask(clients: Sequence[Client], nodes: Sequence[SessionKey], rate: float) -> list[bytes]:
    """Answers to a request of each node, at `rate` a second; 0: each as soon as its connection is
    free."""
    body = LeaseRequest(policy_version=0).model_dump_json().encode()
    requests = [signed_post(key, "/v1/leases", body) for key in nodes]
    start = time.monotonic()

    async def one(at: int) -> bytes:
        if rate:
            await asyncio.sleep(start + at / rate - time.monotonic())
        return await clients[at % len(clients)].ask(requests[at])

    return await asyncio.gather(*(one(at) for at in range(len(requests))))
