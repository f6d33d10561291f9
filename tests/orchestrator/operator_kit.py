"""An operator's files and processes on a real chain, and what a node does over HTTP."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import judges
import pytest
from orchestrator_world import run_definition
from served import until as until

from devnet.deployed import TEST_PERIODS, Deployed, pool_config
from prime_chain.keystore import save_keystore
from prime_core.checkpoint import FileEntry, Manifest
from prime_core.deployment import Deployment
from prime_core.encoding import sha256
from prime_core.errors import ConflictError, UserError
from prime_core.ids import ZERO_DIGEST
from prime_core.messages import (
    AdmissionAnswer,
    AdmissionRequest,
    Challenge,
    ChallengeAnswer,
    LeaseAnswer,
    LeaseRequest,
    ReceiptAnswer,
    UploadAnswer,
    UploadRequest,
)
from prime_core.node import Hardware, NodeConsent
from prime_core.rollout import SignedSubmission, Submission
from prime_core.run import LengthBudgets
from prime_core.signing import LocalSigner
from prime_core.transport.client import OrchestratorClient
from prime_envs.registry import environment_ref
from prime_orchestrator.config import load
from prime_orchestrator.context import PoolContext
from prime_orchestrator.serve import run
from prime_orchestrator.store import Store
from prime_verify.proofs import hardware

PASSWORD = "a password"
NODE = LocalSigner(b"\x42" * 32)
STAKE = 10**18
BUDGETS = LengthBudgets(targets=(2,), penalty_micro=0)
RUN = run_definition(
    budgets=BUDGETS,
    environment=environment_ref("reverse", {}, BUDGETS, train_size=100, heldout_size=10),
    epoch_seconds=TEST_PERIODS.epoch_length,
    validity_seconds=TEST_PERIODS.validity,
    stake_per_seat=STAKE,
    root_seconds=1,
)


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
        return [sys.executable, "-m", "prime_orchestrator.cli.main", "serve", *words]

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
        data = Path(self.flags(**changes)["data"])
        assert json.loads(line) == json.loads((data / "serve.json").read_text())
        return child

    @property
    def url(self) -> str:
        return str(json.loads((self.data / "serve.json").read_text())["url"])

    def refused(self, **changes: str) -> str:
        """What the user reads when the process will not start."""
        with pytest.raises(UserError) as caught:
            run(load(self.flags(**changes)))
        assert caught.value.hint
        return str(caught.value)


@pytest.fixture
def operator(deployed: Deployed, tmp_path: Path) -> Iterator[Operator]:
    manager, trainer = deployed.accounts[1], deployed.accounts[2]
    pools = deployed.contracts.pools
    config = pool_config(trainer.address, RUN.digest(), STAKE, capacity=100)
    deployed.send(manager, pools.create(config))
    (tmp_path / "run.json").write_bytes(RUN.raw())
    (tmp_path / "password").write_text(PASSWORD)
    key = bytes(manager.account.key)
    save_keystore(tmp_path / "manager.json", key, PASSWORD, light=True)
    pool = next(n for n in range(1, 100) if pools.pool_of(n).run_digest == RUN.digest())
    made = Operator(tmp_path, deployed, pool)
    yield made
    for child in made.children:
        if child.poll() is None:
            child.kill()
        child.wait(120)
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
    deployed.send(owner, c.pools.allow(pool, True))
    deployed.anvil.mine(1)  # on a chain that stands still the stake would never be safe


def admit(client: OrchestratorClient) -> AdmissionAnswer:
    """Once the orchestrator has read of the node's provider: until then it refuses."""
    machine = Hardware(cpu_model="x", cpu_count=1, memory_mb=1, disk_mb=1, gpus=())
    request = AdmissionRequest(hardware=machine, task_runtime="process")
    given: list[Challenge] = []

    def challenged() -> bool:
        with contextlib.suppress(ConflictError):
            answer = client.post("/v1/admission/challenge", request, ChallengeAnswer)
            if answer.challenge is not None:
                given.append(answer.challenge)
        return bool(given)

    until(challenged)
    (challenge,) = given
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
    with OrchestratorClient(operator.url, trainer, "trainer") as signed_in:
        signed_in.send("POST", "/v1/policies", manifest.signed(trainer, client.domain("pools")))


def commit_draws(operator: Operator, store: Store) -> None:
    """As a validator does when it starts: no lease is given before."""
    context = PoolContext(Deployment.load(operator.deployed.path), operator.pool, NODE.address, RUN)
    judges.commit_draws(store, context, operator.deployed.accounts[3], time.time)


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
        node=NODE.address,
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


def without_unit(page: str) -> list[str]:
    """Metrics of a page that have no HELP, or no unit in name and HELP."""
    about = dict(re.findall(r"^# HELP (\S+) (.*)$", page, re.MULTILINE))
    names = re.findall(r"^# TYPE (\S+) ", page, re.MULTILINE)
    assert names
    return [
        name
        for name in names
        if not re.search(r"Unit: .+\.$", about.get(name, ""))
        and not (about.get(name) and re.search(r"_(seconds|bytes)(_total)?$", name))
    ]
