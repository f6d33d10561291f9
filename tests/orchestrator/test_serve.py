"""`orchestrator serve` as a process: starts, joins a node on a real local chain, survives kills."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from orchestrator_world import run_definition

from devnet.deployed import TEST_PERIODS, Deployed
from orchestrator.config import load
from orchestrator.context import PoolContext
from orchestrator.draws import DrawSecrets
from orchestrator.serve import Loops, address_of, bind, run
from orchestrator.store import Store, jobs, meta, open_store, policies, sqlite_url
from protocol.chain.deployment import Deployment
from protocol.chain.keystore import save_keystore
from protocol.core.checkpoint import FileEntry, Manifest, SignedManifest
from protocol.core.encoding import sha256
from protocol.core.errors import PrimeError, UnavailableError, UserError
from protocol.core.ids import ZERO_DIGEST
from protocol.core.messages import (
    AdmissionAnswer,
    AdmissionRequest,
    Challenge,
    Heartbeat,
    HeartbeatAnswer,
    LeaseAnswer,
    LeaseRequest,
    ReceiptAnswer,
    Status,
    SubmissionInfo,
    UploadAnswer,
    UploadRequest,
)
from protocol.core.node import Hardware, NodeConsent
from protocol.core.rollout import SignedSubmission, Submission
from protocol.core.signing import LocalSigner
from protocol.proofs import hardware
from protocol.storage.base import digest_key
from protocol.storage.directory import DirectoryStore
from protocol.storage.signing import load_secret
from protocol.transport.client import OrchestratorClient

PASSWORD = "a password"
NODE = LocalSigner(b"\x42" * 32)
STAKE = 10**18
RUN = run_definition(
    epoch_seconds=TEST_PERIODS.epoch_length,
    validity_seconds=TEST_PERIODS.validity,
    stake_per_class=STAKE,
    root_seconds=1,
)


def eventually(what: Callable[[], bool], seconds: float = 30.0) -> None:
    """Polls until `what()` holds. Fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.05)


@dataclass
class Operator:
    """Files and flags of one operator; every process it starts is ended with the test."""

    folder: Path
    deployed: Deployed
    pool: int
    children: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def flags(self, **changes: str) -> dict[str, str]:
        return {
            "host": "127.0.0.1",
            "port": "0",
            "data": str(self.data),
            "deployment": str(self.deployed.path),
            "rpc": self.deployed.url,
            "pool": str(self.pool),
            "run": str(self.folder / "run.json"),
            "wallet": str(self.folder / "manager.json"),
            "password_file": str(self.folder / "password"),
        } | changes

    def arguments(self, **changes: str) -> list[str]:
        flags = self.flags(**changes).items()
        words = [w for name, value in flags for w in (f"--{name.replace('_', '-')}", value)]
        return [sys.executable, "-m", "orchestrator.cli", "serve", *words]

    def serve(self, **changes: str) -> subprocess.Popen[str]:
        """Starts the process and returns once it says where it is."""
        log = (self.folder / "serve.log").open("a")
        child = subprocess.Popen(
            self.arguments(**changes), stdout=subprocess.PIPE, stderr=log, text=True
        )
        log.close()
        self.children.append(child)
        assert child.stdout is not None
        line = child.stdout.readline()
        assert line, (self.folder / "serve.log").read_text()
        assert json.loads(line) == json.loads((self.data / "serve.json").read_text())
        return child

    @property
    def url(self) -> str:
        return str(json.loads((self.data / "serve.json").read_text())["url"])

    def refused(self, **changes: str) -> str:
        """What the user is told when the process will not start."""
        with pytest.raises(UserError) as caught:
            run(load(self.flags(**changes)))
        assert caught.value.hint
        return str(caught.value)


@pytest.fixture
def operator(deployed: Deployed, tmp_path: Path) -> Iterator[Operator]:
    manager, trainer = deployed.accounts[1], deployed.accounts[2]
    pools = deployed.contracts.pools
    deployed.send(manager, pools.create(trainer.address, RUN.digest(), STAKE, 100, manager.address))
    (tmp_path / "run.json").write_bytes(RUN.canonical())
    (tmp_path / "password").write_text(PASSWORD)
    key = bytes(manager.account.key)
    save_keystore(tmp_path / "manager.json", key, PASSWORD, light=True)
    pool = next(n for n in range(1, 100) if pools.pool_of(n).run_digest == RUN.digest())
    made = Operator(tmp_path, deployed, pool)
    yield made
    for child in made.children:
        if child.poll() is None:
            child.kill()
        child.wait(20)
        assert child.stdout is not None
        child.stdout.close()


def register(deployed: Deployed, pool: int) -> None:
    """A staked provider (anvil's account 3) that owns the node."""
    owner, c = deployed.accounts[3], deployed.contracts
    deployed.send(owner, c.token.faucet())
    deployed.send(owner, c.token.approve(c.vault.address, STAKE))
    deployed.send(owner, c.registry.register_provider(owner.address))
    deployed.send(owner, c.vault.deposit(STAKE))
    consent = NodeConsent(
        provider=owner.address,
        node=NODE.address,
        salt=sha256(b"salt"),
        deadline=deployed.now() + 600,
    )
    signature = NODE.sign(consent, deployed.deployment.domain_of(consent))
    deployed.send(owner, c.registry.add_node(consent, signature))
    deployed.send(owner, c.pools.allow(pool, 1))
    deployed.anvil.mine(1)  # on a chain that stands still the stake would never be safe


def admit(client: OrchestratorClient) -> AdmissionAnswer:
    machine = Hardware(cpu_model="x", cpu_count=1, memory_mb=1, disk_mb=1, gpus=())
    request = AdmissionRequest(hardware=machine, task_runtime="process")
    challenge = client.post("/v1/admission/challenge", request, Challenge)
    products = hardware.solve(challenge.seed, challenge.size, challenge.rounds)
    return client.post(
        f"/v1/admission/solution/{challenge.id}",
        hardware.encode_solution(products),
        AdmissionAnswer,
    )


def publish(operator: Operator, client: OrchestratorClient) -> None:
    """The trainer's policy 0, made up."""
    name = sha256(b"weights")
    manifest = Manifest(
        pool=operator.pool,
        version=0,
        step=0,
        chunk_size=1 << 16,
        files=(FileEntry(name="model.safetensors", size=1, digest=name, chunks=(name,)),),
        result_digest=ZERO_DIGEST,
    )
    trainer = operator.deployed.accounts[2]
    draft = SignedManifest(manifest=manifest, signature="0x" + "00" * 65)  # type: ignore[arg-type]
    signature = trainer.sign(draft.statement(), client.domain("pools"))
    with OrchestratorClient(operator.url, trainer, "trainer") as signed_in:
        signed_in.send(
            "POST", "/v1/policies", SignedManifest(manifest=manifest, signature=signature)
        )


def commit_draws(operator: Operator, store: Store) -> None:
    """As `orchestrator validate` does when it starts: no lease is given before."""
    context = PoolContext(Deployment.load(operator.deployed.path), operator.pool, NODE.address, RUN)
    objects = DirectoryStore(operator.data / "objects")
    validator = operator.deployed.accounts[3]
    DrawSecrets(
        store, objects, context, validator, random=secrets.token_bytes, now=time.time
    ).prepare()


def hand_in(client: OrchestratorClient, data: bytes) -> tuple[SignedSubmission, ReceiptAnswer]:
    answer = client.post("/v1/leases", LeaseRequest(policy_version=0), LeaseAnswer)
    assert answer.lease is not None, answer.reason
    lease = answer.lease.lease
    digest = lease.digest(client.domain("work"))
    target = client.post(
        f"/v1/leases/{digest}/upload",
        UploadRequest(sha256=sha256(data), size=len(data)),
        UploadAnswer,
    )
    client.upload(target, data)
    submission = Submission(
        pool=lease.pool,
        lease_digest=digest,
        step=lease.step,
        policy_digest=lease.policy_digest,
        sha256=sha256(data),
        size=len(data),
        rows=RUN.rows_per_lease,
        valid_until=int(time.time()) + 600,
    )
    signed = SignedSubmission(
        submission=submission,
        node=NODE.address,
        signature=NODE.sign(submission, client.domain("work")),
    )
    return signed, client.post("/v1/submissions", signed, ReceiptAnswer, signed=False)


def test_a_node_joins_on_chain_works_and_nothing_is_lost_by_a_kill(
    operator: Operator, empty_database: Store
) -> None:
    database = empty_database.engine.url.render_as_string(hide_password=False)
    register(operator.deployed, operator.pool)
    child = operator.serve(database=database)
    with OrchestratorClient(operator.url, NODE) as client:
        publish(operator, client)
        assert admit(client).invite.node == NODE.address
        beat = Heartbeat(policy_version=0)

        def works() -> bool:
            return client.post("/v1/heartbeat", beat, HeartbeatAnswer).directive == "work"

        eventually(works)
        pools = operator.deployed.contracts.pools
        assert pools.class_of(operator.pool, NODE.address) >= 1
        commit_draws(operator, empty_database)
        signed, receipt = hand_in(client, b"first file")

    child.kill()
    child.wait(20)
    child = operator.serve(database=database)
    with OrchestratorClient(operator.url, NODE) as client:
        again = client.post("/v1/submissions", signed, ReceiptAnswer, signed=False)
        assert again == receipt
        digest = receipt.receipt.submission_digest
        path = f"/v1/submissions/{digest}"
        eventually(lambda: client.get(path, SubmissionInfo).root is not None)
        status = client.get("/v1/status", Status)
        assert status.chain_reachable
        assert status.files == {"submitted": 1}
        eventually(lambda: pools.policy_digest(operator.pool, 0) is not None)
    child.send_signal(signal.SIGTERM)
    assert child.wait(20) == 0
    assert not (operator.data / "serve.json").exists()
    with empty_database.read() as connection:
        job = jobs.get(connection, digest)
        assert job is not None
        assert job.status == "ready"
        assert policies.latest_version(connection) == 0


def test_a_restart_needs_no_rpc_and_watchers_do_not_keep_it_alive(operator: Operator) -> None:
    child = operator.serve()
    child.send_signal(signal.SIGINT)
    assert child.wait(20) == 0
    child = operator.serve(rpc="http://127.0.0.1:9")
    with httpx.stream("GET", f"{operator.url}/v1/events", timeout=20) as events:
        line = next(events.iter_lines())
        status = Status.model_validate_json(line.removeprefix("data: "))
        assert status.latest_version is None
        child.send_signal(signal.SIGTERM)
        started = time.monotonic()
        assert child.wait(30) == 0
        assert time.monotonic() - started < 25


def test_what_does_not_fit_is_refused_before_anything_is_written(operator: Operator) -> None:
    folder = operator.folder
    (folder / "wrong").write_text("wrong password")
    (folder / "other.json").write_bytes(
        run_definition(epoch_seconds=10, validity_seconds=30, name="another").canonical()
    )
    (folder / "long.json").write_bytes(run_definition().canonical())
    key = bytes(operator.deployed.accounts[5].account.key)
    save_keystore(folder / "stranger.json", key, PASSWORD, light=True)
    for changes, complaint in (
        ({"password_file": str(folder / "wrong")}, "password does not open"),
        ({"deployment": str(folder / "none.json")}, "deployment file"),
        ({"run": str(folder / "none.json")}, "cannot be read"),
        ({"run": str(folder / "password")}, "no run definition"),
        ({"run": str(folder / "long.json")}, "epoch_seconds"),
        ({"run": str(folder / "other.json")}, "digest"),
        ({"wallet": str(folder / "stranger.json")}, "is managed by"),
        ({"pool": "77"}, "pool 77 is not on chain"),
    ):
        assert complaint in operator.refused(**changes)
    with pytest.raises(UnavailableError):
        run(load(operator.flags(rpc="http://127.0.0.1:9")))
    store = open_store(sqlite_url(operator.data / "orchestrator.sqlite"))
    with store.read() as connection:
        assert meta.get(connection, "serves") is None
    store.close()


def test_a_taken_port_and_a_second_server_are_said_in_one_sentence(operator: Operator) -> None:
    operator.serve()
    assert "another orchestrator is serving" in operator.refused()
    port = operator.url.rpartition(":")[2]
    second = operator.arguments(data=str(operator.folder / "other"), port=port)
    done = subprocess.run(second, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == UserError.exit_code
    [said] = done.stderr.strip().splitlines()
    assert said.startswith(f"orchestrator: cannot listen on 127.0.0.1:{port}: Address already")
    assert said.endswith("(0 takes a free port)")
    moved = load(operator.flags(pool="2"))
    with pytest.raises(UserError, match="another orchestrator"):
        run(moved)


def test_an_upload_that_breaks_off_leaves_nothing(operator: Operator) -> None:
    operator.serve()
    objects = DirectoryStore(
        operator.data / "objects", operator.url, load_secret(operator.data / "store.secret")
    )
    data = os.urandom(1 << 20)
    key, expires = digest_key(sha256(data)), int(time.time()) + 60
    target = objects.signed_put(key, len(data), sha256(data), expires)
    folder = operator.data / "objects" / "sha256"
    url = httpx.URL(target.url)
    with socket.create_connection((url.host, url.port or 0), timeout=20) as peer:
        head = f"PUT {url.raw_path.decode()} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}"
        peer.sendall(head.encode() + b"\r\n\r\n" + data[: 600 << 10])
        eventually(lambda: folder.is_dir() and any(folder.iterdir()))  # it is being written
        assert not objects.exists(key)
    eventually(lambda: not any(folder.iterdir()))
    assert httpx.put(target.url, content=data, headers=target.headers).status_code == 204
    assert httpx.get(objects.signed_get(key, expires)).content == data


# -- the parts, without a process ---------------------------------------------------------------


def test_a_taken_port_is_the_users_error() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert address_of(listener) == f"http://127.0.0.1:{port}"
        with pytest.raises(UserError, match="cannot listen") as caught:
            bind("127.0.0.1", port)
        assert "--port" in caught.value.hint


def test_a_socket_on_every_address_is_reached_at_this_machine() -> None:
    with socket.socket() as listener:
        listener.bind(("0.0.0.0", 0))
        assert address_of(listener).startswith("http://127.0.0.1:")


def test_a_loop_outlives_passing_trouble() -> None:
    calls: list[int] = []
    done = threading.Event()

    def tick() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise UnavailableError("the RPC does not answer")
        done.set()

    crashes: list[int] = []
    loops = Loops(on_crash=lambda: crashes.append(1))
    loops.start("test", tick, 0.01)
    assert done.wait(20)
    loops.stop()
    loops.raise_crash()
    assert crashes == []


def test_a_defect_in_a_loop_is_loud_and_ends_the_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ended = threading.Event()

    def tick() -> None:
        raise ZeroDivisionError("a defect")

    loops = Loops(on_crash=ended.set)
    loops.start("test", tick, 0.01)
    assert ended.wait(20)
    loops.stop()
    with pytest.raises(ZeroDivisionError):
        loops.raise_crash()
    assert "the test loop met a defect" in caplog.text
    assert not issubclass(ZeroDivisionError, PrimeError)
