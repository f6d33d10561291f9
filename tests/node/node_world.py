"""What an agent meets: the real orchestrator's API over TCP, an origin with a tiny policy.

No chain: a test makes an admitted node a member by hand, as the indexer would.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pools
import sqlalchemy as sa
import uvicorn
from judges import commit_draws
from pools import deployment as deployment
from served import until as until
from stores import migrate

from devnet.ports import free_port
from prime_broadcast.publish import finalize, publish
from prime_broadcast.server import Origin
from prime_chain.keystore import save_keystore
from prime_core.checkpoint import SignedManifest
from prime_core.deployment import Deployment
from prime_core.ids import ZERO_DIGEST, Address
from prime_core.run import LengthBudgets, RunDefinition, SpeedClasses
from prime_core.signing import LocalSigner
from prime_core.storage.directory import DirectoryStore
from prime_engine.tiny import write_tiny_model
from prime_envs.registry import environment_ref
from prime_orchestrator.api.app import create_app
from prime_orchestrator.api.backend import Backend
from prime_orchestrator.context import PoolContext
from prime_orchestrator.store import Store, chain, nodes, open_store, policies, schema, sqlite_url

POOL = 3
MANAGER, TRAINER, NODE, VALIDATOR = (LocalSigner(bytes([n]) * 32) for n in range(0xA1, 0xA5))
PASSWORD = "correct horse"
WITHOUT_CHAIN = """
from prime_node import cli, config
config.Settings.need_rpc = lambda settings: settings.rpc
cli.main()
"""
"""`prime-node` that joins without an RPC too: here an orchestrator is served, mostly no chain."""


def run_definition(**changes: Any) -> RunDefinition:
    """2 groups of 2 samples a lease, from the reverse environment."""
    budgets = LengthBudgets(targets=(2, 6), penalty_micro=150_000)
    values: dict[str, Any] = {
        "name": "node-test",
        "environment": environment_ref("reverse", {}, budgets, train_size=100, heldout_size=10),
        "groups_per_batch": 4096,
        "budgets": budgets,
        "speed": SpeedClasses(challenge_size=64, challenge_rounds=1),
        "lease_seconds": 300,
        "heartbeat_seconds": 1,
        "death_seconds": 30,
    }
    return pools.run_definition(**(values | changes))


class ApiThread:
    """uvicorn in a thread on a fixed port, so that it can go away and come back."""

    def __init__(self, backend: Backend, listener: socket.socket) -> None:
        config = uvicorn.Config(create_app(backend), log_level="error", lifespan="on")
        self._server = uvicorn.Server(config)
        self._listener = listener
        self._thread = threading.Thread(target=self._server.run, args=([listener],), daemon=True)
        self._thread.start()
        until(lambda: self._server.started, "the API serves")

    def stop(self) -> None:
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join(20)
        self._listener.close()


@dataclass
class NodeWorld:
    """The pool as one node sees it."""

    backend: Backend
    store: Store
    folder: Path
    port: int
    keystore: Path
    password_file: Path
    api: ApiThread | None = None
    agents: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start_api(self) -> None:
        listener = socket.create_server(("127.0.0.1", self.port), reuse_port=False)
        self.api = ApiThread(self.backend, listener)

    def stop_api(self) -> None:
        if self.api is not None:
            self.api.stop()
            self.api = None

    def admit(self, account: Address = NODE.address) -> None:
        """Makes the node an active member, as the indexer does when the chain says so."""
        with self.backend.store.begin() as connection:
            now = self.backend.now()
            nodes.set_status(connection, account, "active", last_heartbeat=now)

    def node_status(self, account: Address = NODE.address) -> str | None:
        with self.backend.store.read() as connection:
            row = nodes.get(connection, account)
        return None if row is None else row.status

    def set_status(self, status: Any, account: Address = NODE.address) -> None:
        with self.backend.store.begin() as connection:
            nodes.set_status(connection, account, status, last_heartbeat=self.backend.now())

    def rows(self, table: sa.Table) -> list[Any]:
        with self.backend.store.read() as connection:
            return list(connection.execute(sa.select(table)).mappings())

    def submissions(self) -> list[Any]:
        return self.rows(schema.submissions)

    def leases(self) -> list[Any]:
        return self.rows(schema.leases)

    def join(self, *flags: str, name: str = "node", runtime: str = "process") -> subprocess.Popen:  # type: ignore[type-arg]
        """Starts `prime-node join` as a user would, but that it asks for no RPC."""
        command = [
            *(sys.executable, "-c", WITHOUT_CHAIN, "join", "--orchestrator", self.url),
            *("--wallet", str(self.keystore), "--password-file", str(self.password_file)),
            *("--data", str(self.folder / name), "--runtime", runtime, *flags),
        ]
        log = (self.folder / f"{name}.log").open("ab")
        agent = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        log.close()
        self.agents.append(agent)
        return agent

    def log(self, name: str = "node") -> str:
        return (self.folder / f"{name}.log").read_text()

    def worker_log(self, name: str = "node") -> str:
        path = self.folder / name / "logs" / "worker.log"
        return path.read_text() if path.exists() else ""


def publish_model(
    folder: Path, deployed: Deployment, pool: int, model: Path | None = None, version: int = 0
) -> SignedManifest:
    """Publishes a policy under `folder`/layout, a tiny one if no model is given; its manifest."""
    source = model or write_tiny_model(folder / f"model-{version}", seed=version)
    manifest = publish(source, folder / "layout", pool=pool, version=version, step=version)
    signed = manifest.signed(TRAINER, deployed.domain("pools"))
    finalize(folder / "layout", signed)
    return signed


def do_the_owners_part(store: Store, stake: int) -> None:
    """The node has a provider with stake, as far as the orchestrator has read the chain."""
    owner = {"provider": NODE.address}
    events = (("Deposited", {"amount": stake}), ("NodeAdded", {"node": NODE.address}))
    with store.begin() as connection:
        for number, (name, args) in enumerate(events):
            chain.add_event(
                connection, block_hash=ZERO_DIGEST, log_index=number, block=1, block_time=1,
                tx_hash=ZERO_DIGEST, name=name, args=owner | args,
            )  # fmt: skip


@contextmanager
def node_world(
    folder: Path,
    deployed: Deployment | None = None,
    pool: int = POOL,
    model: Path | None = None,
    **changes: Any,
) -> Iterator[NodeWorld]:
    """Serves it, and ends every process and thread afterwards. `deployed` and `pool`: a real
    chain's, where a test has one. `model`: policy 0's folder."""
    port = free_port()
    deployed = deployed or deployment()
    store = open_store(sqlite_url(folder / "orchestrator.sqlite"))
    migrate(store)
    url = f"http://127.0.0.1:{port}"
    backend = Backend(
        context=PoolContext(
            deployment=deployed, pool=pool, manager=MANAGER.address, run=run_definition(**changes)
        ),
        store=store,
        objects=DirectoryStore(folder / "objects", url, b"s" * 32),
        manager=MANAGER,
        trainer=TRAINER.address,
        audience=url,
    )
    commit_draws(store, backend.context, VALIDATOR, backend.now)
    keystore, password_file = folder / "node.json", folder / "pw"
    password_file.write_text(PASSWORD + "\n")
    save_keystore(keystore, NODE.account.key, PASSWORD, light=True)
    world = NodeWorld(backend, store, folder, port, keystore, password_file)
    do_the_owners_part(store, backend.context.run.stake_per_seat)
    signed = publish_model(folder, deployed, pool, model)
    with Origin(folder / "layout") as origin:
        with store.begin() as connection:
            policies.add(connection, signed, now=backend.now())
            policies.see_relay(
                connection, origin.url, TRAINER.address, (0,), now=backend.now() + 3600
            )
        world.start_api()
        try:
            yield world
        finally:
            for agent in world.agents:
                if agent.poll() is None:
                    agent.send_signal(signal.SIGKILL)
                agent.wait(120)
            world.stop_api()
            store.close()
