"""`validator run` as a process of its own: killed at work and started again, it loses and repeats
nothing; and it needs no store, no object folder and no user that could read them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'prime-open[torch]'")

import sqlalchemy as sa
from judges import appoint, judge_of
from judging_kit import read_policy, signed_policy, small_run
from money_kit import MANAGER, TRAINER, VALIDATOR, Clock, ManagerSide, key, open_manager
from served import listen, serving

from devnet.s3 import BUCKET, S3Server
from prime_chain.keystore import save_keystore
from prime_core.batch import BatchStatement
from prime_core.encoding import sha256
from prime_core.errors import UserError
from prime_core.ids import Digest
from prime_core.messages import (
    BatchAnswer,
    LeaseAnswer,
    LeaseRequest,
    ReceiptAnswer,
    UploadAnswer,
    UploadRequest,
)
from prime_core.rollout import SignedSubmission, Submission
from prime_core.run import MICRO
from prime_core.storage.base import ObjectStore, digest_key
from prime_core.storage.directory import DirectoryStore
from prime_core.transport.client import OrchestratorClient
from prime_engine.base import Engine
from prime_envs.lengths import length_reward
from prime_envs.registry import environment_for
from prime_orchestrator.api.app import create_app
from prime_orchestrator.manager.batches import seal_ready_batches
from prime_orchestrator.store import schema
from prime_trainer.data import BatchRules, assemble
from prime_trainer.feed import fetcher
from prime_validator.api import ValidatorApi
from prime_validator.doctor import examine, policies_loaded
from prime_validator.pool import find_pool
from prime_validator.settings import Settings
from prime_verify.build import build_rollout_file
from prime_verify.engines import load_engine

DEADLINE = 240.0
NODE = key(10)
OTHER_USER = 65534
ROOT = Path(__file__).resolve().parents[2]


class RealClock(Clock):
    """The machine's clock: claims have to run out."""

    def __call__(self) -> float:
        return time.time()


@dataclass
class Party:
    """A manager's API with its loop of verdicts, and what one validator has."""

    mgr: ManagerSide
    manager: Path
    folder: Path
    url: str

    def command(self) -> list[str]:
        return [
            *(sys.executable, "-m", "prime_validator.cli", "run", "--orchestrator", self.url),
            *("--rpc", "http://127.0.0.1:9", "--data", str(self.folder / "data")),
            *("--wallet", str(self.folder / "key.json"), "--threads", "1"),
            *("--password-file", str(self.folder / "password")),
        ]

    def environment(self) -> dict[str, str]:
        """Nothing that would name a store."""
        return {"PATH": os.environ["PATH"], "HOME": str(self.folder), "OMP_NUM_THREADS": "1"}

    def statuses(self) -> list[str]:
        with self.mgr.store.read() as connection:
            return list(connection.execute(sa.select(schema.submissions.c.status)).scalars())

    def parts(self) -> list[str]:
        """Statuses of the validator's assignments."""
        with self.mgr.store.read() as connection:
            return list(connection.execute(sa.select(schema.assignments.c.status)).scalars())

    @cached_property
    def engine(self) -> Engine:
        """The node's engine on policy 0."""
        return load_engine(self.folder / "data" / "policies" / "0")

    def submit(self, files: int) -> None:
        run, engine = self.mgr.context.run, self.engine
        environment = environment_for(run)
        for _ in range(files):
            self.mgr.submit(
                NODE,
                make=lambda lease, digest: build_rollout_file(
                    lease, digest, run, engine, environment
                ),
            )

    def hand_in(self, client: OrchestratorClient) -> Digest:
        """Lease, file, upload and submission over the API, as a node does; the file's digest."""
        run = self.mgr.context.run
        answer = client.post("/v1/leases", LeaseRequest(policy_version=0), LeaseAnswer)
        assert answer.lease is not None, answer.reason
        lease = answer.lease.lease
        digest = lease.digest(client.domain("work"))
        data = build_rollout_file(answer.lease, digest, run, self.engine, environment_for(run))
        name = sha256(data)
        request = UploadRequest(sha256=name, size=len(data))
        client.upload(client.post(f"/v1/leases/{digest}/upload", request, UploadAnswer), data)
        claim = Submission(
            pool=lease.pool,
            lease_digest=digest,
            node=lease.node,
            step=lease.step,
            policy_digest=lease.policy_digest,
            sha256=name,
            size=len(data),
            rows=run.rows_per_lease,
            valid_until=lease.deadline,
        )
        signed = SignedSubmission(
            submission=claim, node=lease.node, signature=NODE.sign(claim, client.domain("work"))
        )
        client.post("/v1/submissions", signed, ReceiptAnswer, signed=False)
        return name

    def wait_for(self, holds: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
        """Decides on opinions, as the manager's loop does, until `holds`."""
        deadline = time.monotonic() + DEADLINE
        judge = judge_of(self.mgr.backend)
        while not holds():
            assert process.poll() is None, "the validator ended by itself"
            assert time.monotonic() < deadline
            judge.tick()
            time.sleep(0.02)


@contextmanager
def parties(tmp_path: Path, objects: Callable[[str], ObjectStore] | None = None) -> Iterator[Party]:
    """The manager's folders and the validator's, side by side; they share nothing. `objects` opens
    another object store than a folder, for the API at a URL."""
    manager, folder = tmp_path / "manager", tmp_path / "validator"
    for one in (manager, folder):
        one.mkdir()
    listener, url = listen()
    detailed = small_run().model_copy(update={"detailed_tables": True, "schema_version": 6})
    mgr = open_manager(manager, run=detailed)
    mgr.now = RealClock()
    mgr.audience = url
    folder_of_objects = DirectoryStore(manager / "objects", url, b"s" * 32)
    mgr.objects = objects(url) if objects else folder_of_objects  # type: ignore[assignment]
    context = mgr.context

    policies = signed_policy(folder / "data" / "policies")
    pool = {  # as an earlier start found it on chain
        "deployment": context.deployment.model_dump(mode="json"),
        "pool": 1,
        "manager": MANAGER.address,
        "trainer": TRAINER.address,
        "run": context.run.raw().decode(),
    }
    (folder / "data" / "pool.json").write_text(json.dumps(pool))
    save_keystore(folder / "key.json", (0x1003).to_bytes(32, "big"), "secret", light=True)
    (folder / "password").write_text("secret")

    mgr.add_policy(read_policy(policies))
    mgr.admit(NODE)
    appoint(mgr.store, 1, VALIDATOR.address)
    with closing(mgr.store), serving(create_app(mgr.backend), listener):
        yield Party(mgr, manager, folder, url)


def interpreter_of_others() -> tuple[str, dict[str, str]]:
    """A Python that another user may start, and the environment that finds our packages with it.

    The tests' own interpreter may lie in a folder that is closed to others. The system's Python of
    the same version serves then, if there is one.
    """
    own = {"user": OTHER_USER, "group": OTHER_USER, "extra_groups": []}
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    paths = [path for path in sys.path if path]
    paths += [str(ROOT / room) for room in ("protocol", "orchestrator", "validator", "node")]
    environment = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    for candidate in (sys.executable, f"/usr/bin/{version}"):
        probe = [candidate, "-c", "import torch, prime_validator.cli"]
        try:
            subprocess.run(probe, check=True, capture_output=True, cwd="/", env=environment, **own)
        except (OSError, subprocess.CalledProcessError):
            continue
        return candidate, environment
    pytest.skip(f"only root, and a {version} that other users may start, can run this")


def test_a_folder_of_another_pool_and_one_that_takes_no_files_are_named(tmp_path: Path) -> None:
    with parties(tmp_path) as party, OrchestratorClient(party.url) as client:
        api, data = ValidatorApi(client, "a test"), party.folder / "data"
        assert find_pool(api, Settings(), data).number == 1
        kept = json.loads((data / "pool.json").read_text())
        (data / "pool.json").write_text(json.dumps(kept | {"pool": 2}))
        with pytest.raises(UserError, match="belongs to pool 2 on chain") as caught:
            find_pool(api, Settings(), data)
        assert "--data DIR" in caught.value.hint
        blocked = Settings(orchestrator=party.url, data=party.folder / "password" / "data")
        (folder,) = [one for one in examine(blocked) if one.name == "folder"]
        assert folder.outcome == "failed"
        assert "a file is in the way" in folder.found


def test_the_doctor_says_how_many_policies_stay_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with parties(tmp_path) as party, OrchestratorClient(party.url) as client:
        api = ValidatorApi(client, "a test")
        newest = api.pool().latest_version
        assert newest is not None
        files = [one for one in api.policy(newest).manifest.files if "safetensors" in one.name]
        size = 2 * sum(one.size for one in files)
        assert size > 0
        for free, stay in ((9 * size, "3 stay loaded"), (1.3 * size, "1 stays loaded")):
            monkeypatch.setattr("prime_core.memory.available", lambda free=free: int(free))
            words = policies_loaded(api, Settings())
            assert words.endswith(stay)
            assert f"{size / 1e9:.2f} GB on cpu" in words
        monkeypatch.setattr("prime_core.memory.available", lambda: size)
        words = policies_loaded(api, Settings())
        assert words.startswith("warning: ")
        assert "fine if this validator runs already" in words
        assert "only the one in use" in policies_loaded(api, Settings(policy_memory_mb=1))


def committed(party: Party) -> bool:
    with party.mgr.store.read() as connection:
        return bool(connection.execute(sa.select(schema.draw_commitments)).first())


@pytest.mark.slow
def test_a_killed_validator_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = 6
    monkeypatch.setattr("prime_orchestrator.api.validators.CLAIM_SECONDS", 12.0)
    with parties(tmp_path) as party:
        first = subprocess.Popen(party.command(), env=party.environment(), cwd=ROOT)
        try:
            party.wait_for(lambda: committed(party), first)
            monkeypatch.setattr("prime_validator.draws.Draws.prepare", lambda _: None)
            party.submit(files)
            party.wait_for(
                lambda: "accepted" in party.statuses() and "claimed" in party.parts(), first
            )
        finally:
            first.kill()
            first.wait()
        assert 0 < party.statuses().count("submitted") < files
        second = subprocess.Popen(party.command(), env=party.environment(), cwd=ROOT)
        try:
            party.wait_for(lambda: party.statuses() == ["accepted"] * files, second)
            second.send_signal(signal.SIGTERM)
            assert second.wait(120) == 0, "SIGTERM ends it cleanly"
        finally:
            second.kill()
            second.wait()
        with party.mgr.store.read() as connection:
            credits = connection.execute(sa.select(schema.credits)).all()
            opinions = connection.execute(sa.select(schema.opinions)).all()
        assert len(credits) == len(opinions) == files


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_validator_judges_as_another_user_who_cannot_read_the_managers_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python, environment = interpreter_of_others()
    with parties(tmp_path) as party:
        for folder in (tmp_path, *tmp_path.parents):
            if folder.stat().st_mode & 0o1 == 0:
                folder.chmod(folder.stat().st_mode | 0o011)
        party.manager.chmod(0o700)
        for path in (party.folder, *party.folder.rglob("*")):
            os.chown(path, OTHER_USER, OTHER_USER)
        who = {"user": OTHER_USER, "group": OTHER_USER, "extra_groups": []}
        look = [python, "-c", f"import os; os.listdir({str(party.manager)!r})"]
        refused = subprocess.run(look, capture_output=True, check=False, **who)
        assert b"PermissionError" in refused.stderr, "the test itself has to hold"
        command = [python, *party.command()[1:]]
        process = subprocess.Popen(
            command, env={**party.environment(), **environment}, cwd="/", **who
        )
        try:
            party.wait_for(lambda: committed(party), process)
            monkeypatch.setattr("prime_validator.draws.Draws.prepare", lambda _: None)
            party.submit(1)
            party.wait_for(lambda: party.statuses() == ["accepted"], process)
            process.send_signal(signal.SIGTERM)
            assert process.wait(120) == 0
        finally:
            process.kill()
            process.wait()
        assert (party.folder / "data" / "validator.sqlite").stat().st_uid == OTHER_USER


@pytest.mark.slow
def test_a_lease_becomes_a_sealed_batch_whose_bytes_pass_by_the_api(
    tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On S3: node, validator and trainer exchange files with the bucket by presigned URLs."""
    from prime_core.storage.s3 import S3Store

    carried: list[str] = []
    for name in ("chunks", "get"):  # how this process would read an object
        real = getattr(S3Store, name)

        def seen(store: S3Store, key: str, *rest: object, real: Any = real) -> object:
            carried.append(key)
            return real(store, key, *rest)

        monkeypatch.setattr(S3Store, name, seen)
    bucket = S3Store(BUCKET, prefix="31337/flow/1", endpoint=s3.url)
    with ExitStack() as stack:
        party = stack.enter_context(parties(tmp_path, lambda _: bucket))
        process = subprocess.Popen(party.command(), env=party.environment(), cwd=ROOT)
        stack.callback(process.wait)
        stack.callback(process.kill)
        party.wait_for(lambda: committed(party), process)
        node = stack.enter_context(OrchestratorClient(party.url, NODE))
        mgr, files = party.mgr, [party.hand_in(node)]
        while not seal_ready_batches(mgr.store, bucket, MANAGER, mgr.context, mgr.now):
            files.append(party.hand_in(node))  # until three groups have unequal rewards
            assert len(files) < 12
            party.wait_for(lambda: party.statuses() == ["accepted"] * len(files), process)
        trainer = stack.enter_context(OrchestratorClient(party.url, TRAINER, "trainer"))
        answer = trainer.get("/v1/batches/0", BatchAnswer, signed=True)
        assert {urlsplit(url).netloc for url in answer.urls.values()} == {urlsplit(s3.url).netloc}
        rules = BatchRules(
            run=mgr.context.run,
            pool=1,
            manager=MANAGER.address,
            domain=mgr.context.domain(BatchStatement),
            vocabulary=1 << 16,
        )
        fetch = fetcher(trainer, answer.urls, threading.Event())
        batch = assemble(answer.batch, 0, rules, fetch)
        assert len(batch.keys) == mgr.context.run.groups_per_batch
        assert {key[0] for key in batch.keys} <= set(files)
        budgets = mgr.context.run.budgets
        given = {"task_micro", "length", "target"}
        assert all(given <= {*row.parts} for row in batch.rollouts)
        for row in batch.rollouts:
            reward = length_reward(
                row.parts["task_micro"], target=row.parts["target"], actual=row.parts["length"],
                penalty_micro=budgets.penalty_micro, form=budgets.form,
            )  # fmt: skip
            assert reward == pytest.approx(row.reward * MICRO, abs=0.5)
    assert carried, "it reads tables and lists of draws"
    assert not {digest_key(name) for name in files} & set(carried), "and no file"
    assert not any(key.startswith("uploads/") for key in carried)
    assert list(bucket.keys("uploads/")) == []
