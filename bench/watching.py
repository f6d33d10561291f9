"""What watchers and idle parties see and cost.

`watchers`: connections to /v1/events of two API processes that got the newest status within two
seconds of a change, the fewest of several changes. `node_death_s`: from a node's last heartbeat to
its ejection from scheduling, next to nodes that go on beating. `rpc_calls_min_idle`: requests of an
idle `orchestrator serve` to its RPC endpoint, on a chain with a block every two seconds and with
the pauses that are the default on Base. `rpc_calls_min_node`: those of a node that works, after its
first accepted file. Epochs take an hour, as on a public chain.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

import sqlalchemy as sa

from bench import seats
from bench.form import Row
from bench.servers import Database, connect, open_sessions, request_bytes, serving, signed_post
from devnet.faulty import FaultyRpc
from devnet.network import Network
from devnet.plan import NodePlan, Plan
from devnet.processes import Child
from prime_chain.networks import BASE
from prime_core.deployment import Periods
from prime_core.messages import Heartbeat
from prime_envs.definition import DEATH_SECONDS
from prime_orchestrator.store import schema

WATCHERS = 500
WITHIN_SECONDS = 2.0
BEAT_SECONDS = 10.0
BLOCK_SECONDS = 2
IDLE_SECONDS = 60.0
QUIET_SECONDS = 75.0
"""Time after which the events of the start no longer count as recent."""
FIRST_FILE_SECONDS = 300.0


class _Watcher(asyncio.Protocol):
    """One event stream; the newest policy version that it has announced."""

    def __init__(self) -> None:
        self._tail = b""
        self.version = -1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(request_bytes("GET", "/v1/events", b"", {}))

    def data_received(self, data: bytes) -> None:
        found = (self._tail + data).rpartition(b'"latest_version":')[2]
        digits, comma, _ = found.partition(b",")
        if comma and digits.isdigit():
            self.version = int(digits)
        self._tail = data[-64:]


def watcher_rows(quick: bool, database: Database) -> list[Row]:
    """The row `watchers`; empties the database."""
    count = 50 if quick else WATCHERS
    with serving(database) as servers:
        pool = servers.pool
        pool.seat(500, honest=True)

        async def watch() -> int:
            loop = asyncio.get_running_loop()
            watchers = []
            for at in range(count):
                port = servers.ports[at % len(servers.ports)]
                _, watcher = await loop.create_connection(_Watcher, "127.0.0.1", port)
                watchers.append(watcher)
            await asyncio.sleep(5.0)
            served = []
            for version in range(1, 6):
                pool.publish(version)
                await asyncio.sleep(WITHIN_SECONDS)
                served.append(sum(one.version == version for one in watchers))
                await asyncio.sleep(1.0)
            return min(served)

        served = asyncio.run(watch())
    return [
        Row("watchers", served, f"of {count} watchers saw a change within {WITHIN_SECONDS:g} s",
            bar=None if quick else WATCHERS, better="higher")
    ]  # fmt: skip


def death_rows(quick: bool, database: Database) -> list[Row]:
    """The row `node_death_s` by a new run's time, or a shorter one if `quick`."""
    run = seats.definition().model_copy(update={"death_seconds": DEATH_SECONDS})
    if quick:
        run = run.model_copy(update={"heartbeat_seconds": 2, "death_seconds": 5})
    beat = min(BEAT_SECONDS, run.heartbeat_seconds)
    with serving(database, run) as servers:
        pool, now = servers.pool, int(time.time())
        pool.clock[0] = now
        pool.seat(20, honest=True)
        keys = open_sessions(pool.backend.store, pool.honest, "node", now)
        table = schema.nodes.c
        silent = sa.select(table.address).where(table.status == "silent")
        body = Heartbeat(policy_version=0, heard_at=now).model_dump_json().encode()

        async def live() -> tuple[float, int]:
            clients = await connect(servers.ports, len(keys))

            async def say(first: int) -> None:
                for client, key in zip(clients[first:], keys[first:], strict=True):
                    await client.ask(signed_post(key, "/v1/heartbeat", body))

            await say(0)
            since = said = time.monotonic()
            while True:
                await asyncio.sleep(0.1)
                with pool.backend.store.read() as connection:
                    found = set(connection.execute(silent).scalars())
                if pool.honest[0] in found:
                    return time.monotonic() - since, len(found) - 1
                if time.monotonic() - said > beat:
                    said = time.monotonic()
                    await say(1)

        seconds, false = asyncio.run(live())
    return [
        Row("node_death_s", seconds, "s from the last heartbeat", bar=None if quick else 45),
        Row("node_false_deaths", false, "of 19 nodes that went on beating", bar=0),
    ]


class _Counted(Network):
    """A network whose programs reach the chain through proxies that count: the nodes through one of
    their own."""

    proxy: FaultyRpc
    of_nodes: FaultyRpc

    def start_node(self, node: NodePlan) -> Child:
        others, self.proxy = self.proxy, self.of_nodes
        try:
            return super().start_node(node)
        finally:
            self.proxy = others

    def accepted(self) -> int:
        """Files accepted so far."""
        return sum(node.accepted for node in self.status().nodes)

    def _chain_flags(self) -> tuple[str, ...]:
        return (*super()._chain_flags(), "--chain-idle-seconds", str(BASE.idle_seconds))

    def _rpc(self) -> tuple[str, ...]:
        return ("--rpc", self.proxy.url)


def rpc_rows(quick: bool) -> list[Row]:
    """The rows `rpc_calls_min_idle` and `rpc_calls_min_node`."""
    seconds = 24.0 if quick else IDLE_SECONDS
    node = NodePlan("honest-1")
    with tempfile.TemporaryDirectory(prefix="bench-idle-") as folder:
        network = _Counted(Plan(root=Path(folder), nodes=(node,), validators=1, periods=Periods()))
        try:
            network.start_chain()
            network.create_pool()
            network.anvil.mine_every(BLOCK_SECONDS)
            network.proxy = FaultyRpc(network.anvil.url)
            network.of_nodes = FaultyRpc(network.anvil.url)
            network.start_orchestrator()
            time.sleep(QUIET_SECONDS)
            idle = _asked(network.proxy, seconds)
            network.start_validators()
            network.start_trainer()
            network.start_relay()
            network.start_node(node)
            wait = network.supervisor.wait_for
            wait("the first accepted file", lambda: network.accepted() > 0, FIRST_FILE_SECONDS)
            before = network.accepted()
            working = _asked(network.of_nodes, seconds)
            wait("another file", lambda: network.accepted() > before, FIRST_FILE_SECONDS)
        finally:
            network.stop()
            network.proxy.close()
            network.of_nodes.close()
    return [
        Row("rpc_calls_min_idle", idle, "RPC requests a minute of an idle serve",
            bar=None if quick else 60),
        Row("rpc_calls_min_node", working,
            "RPC requests a minute of a node that works, between two reads of what is owed to it",
            bar=None if quick else 0),
    ]  # fmt: skip


def _asked(proxy: FaultyRpc, seconds: float) -> float:
    """Requests a minute that reach `proxy` within `seconds`."""
    before = proxy.asked.copy()
    time.sleep(seconds)
    return (proxy.asked - before).total() * 60 / seconds
