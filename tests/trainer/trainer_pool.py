"""A pool with a real orchestrator API over a real store, whose batches a test seals by hand."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import psutil
import trainer_kit as kit
from forks import Forked
from pools import deployment
from served import listen, serving
from served import until as until
from sqlalchemy import select
from stores import migrate

from prime_broadcast.manifest import build_manifest
from prime_chain.keystore import save_keystore
from prime_core.batch import BatchFile
from prime_core.checkpoint import SignedManifest
from prime_core.ids import Digest
from prime_core.rollout import Rollout
from prime_core.storage.base import put_object
from prime_core.storage.directory import DirectoryStore
from prime_orchestrator.api.app import create_app
from prime_orchestrator.api.backend import Backend
from prime_orchestrator.context import PoolContext
from prime_orchestrator.store import batches, open_store, policies, schema, sqlite_url
from prime_orchestrator.store.batches import BatchRow
from prime_trainer.config import Settings

PASSWORD = "correct horse"
REPOSITORY = Path(__file__).parents[2]
TRAINER = [sys.executable, "-m", "prime_trainer.cli"]


def base_digest(model: Path) -> Digest:
    """What a run names as its base model."""
    return build_manifest(model, pool=0, version=0, step=0).result_digest


class Pool:
    """The pool's public side at `url`, its store, and hands to seal batches with."""

    def __init__(self, root: Path, model: Path, url: str) -> None:
        self.root, self.model, self.url = root, model, url
        self.run = kit.run_definition(base_model=base_digest(model))
        self.store = open_store(sqlite_url(root / "orchestrator.sqlite"))
        migrate(self.store)
        self.backend = Backend(
            context=PoolContext(deployment(), kit.POOL, kit.MANAGER.address, self.run),
            store=self.store,
            objects=DirectoryStore(root / "objects", url, b"s" * 32),
            manager=kit.MANAGER,
            trainer=kit.TRAINER.address,
            audience=url,
        )
        self.wallet = root / "trainer.json"
        save_keystore(self.wallet, b"\x22" * 32, PASSWORD, light=True)
        self.password = root / "password"
        self.password.write_text(PASSWORD)

    def settings(self, data: Path, **changes: object) -> Settings:
        """The settings of this pool's trainer."""
        return kit.settings(
            self.model,
            data,
            orchestrator=self.url,
            wallet=self.wallet,
            password_file=self.password,
            **changes,
        )

    def seal(self, step: int, *parts: Sequence[Rollout]) -> None:
        """Seals batch `step` of whole files into store and objects."""
        objects = kit.Objects()
        files: list[BatchFile] = [
            kit.seal_file(objects, part, sorted({row.group for row in part}), step)
            for part in parts
        ]
        for data in objects.by_digest.values():
            put_object(self.backend.objects, data)
        domain = self.backend.context.deployment.domain("work")
        signed = kit.seal(files, step, self.run, domain=domain)
        with self.store.begin() as connection:
            batches.add(
                connection,
                BatchRow(
                    step=step,
                    digest=signed.manifest.digest(),
                    body=signed.model_dump_json(),
                    rows=signed.manifest.rows,
                    mean_reward_micro=0,
                    staleness_max=0,
                    sealed_at=time.time(),
                ),
            )

    def seal_random(self, step: int) -> None:
        """A batch of two files of random rows, one of them an older policy's."""
        size = self.run.samples_per_group
        older = max(0, step - 2)
        self.seal(
            step,
            kit.rows(2, size, seed=2 * step, version=step),
            kit.rows(1, size, seed=2 * step + 1, version=older),
        )

    def published(self) -> list[SignedManifest]:
        """Policies as the orchestrator took them, oldest first."""
        with self.store.read() as connection:
            return [row.signed() for row in policies.newest(connection, 100)][::-1]

    def relays(self) -> list[str]:
        """Announced origins and relays."""
        with self.store.read() as connection:
            return list(connection.execute(select(schema.relays.c.url)).scalars())

    def command(self, data: Path, *more: str) -> list[str]:
        """`trainer run` as an operator types it."""
        return [
            *TRAINER, "run",
            "--orchestrator", self.url,
            "--model", str(self.model),
            "--data", str(data),
            "--wallet", str(self.wallet),
            "--password-file", str(self.password),
            "--learning-rate", "1e-3",
            "--warmup-steps", "1",
            "--row-tokens", "64",
            *more,
        ]  # fmt: skip


@contextmanager
def pool_server(root: Path, model: Path) -> Iterator[Pool]:
    """Serves a pool's API on a free port, from a thread."""
    listener, url = listen()
    pool = Pool(root, model, url)
    with closing(pool.store), serving(create_app(pool.backend), listener):
        yield pool


def environment() -> dict[str, str]:
    """One thread, our repository, no settings of the machine's own."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PRIME_")}
    ours = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "PYTHONFAULTHANDLER": "1"}
    return kept | ours


@contextmanager
def started(command: list[str]) -> Iterator[subprocess.Popen[str] | Forked]:
    """The command as a child in a group of its own, which is gone afterwards. A `trainer` is a
    fork."""
    child: subprocess.Popen[str] | Forked
    if command[: len(TRAINER)] == TRAINER:
        child = Forked(command[len(TRAINER) :], environment())
    else:
        child = subprocess.Popen(
            command,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    try:
        yield child
    finally:
        if child.poll() is None:
            # torchrun's ranks have groups of their own, and would keep its output open
            ranks = psutil.Process(child.pid).children(recursive=True)
            child.kill()
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            for rank in ranks:
                with suppress(psutil.NoSuchProcess):
                    rank.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()


def asked_to_stop(
    child: subprocess.Popen[str] | Forked, number: int = signal.SIGTERM, seconds: float = 120.0
) -> tuple[int, str]:
    """The exit code of a child that `number` is sent to, and what it still said. Fails the test
    with where each of its threads stood if it does not end."""
    child.send_signal(number)
    try:
        said, _ = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGABRT)  # PYTHONFAULTHANDLER: it says so
        said, _ = child.communicate(timeout=seconds)
        raise AssertionError(f"it did not end within {seconds:g} s:\n{said}") from None
    return child.wait(), said


def finished(command: list[str], seconds: float = 280.0) -> subprocess.CompletedProcess[str]:
    """The command, to its end."""
    with started(command) as child:
        said, _ = child.communicate(timeout=seconds)
        return subprocess.CompletedProcess(command, child.wait(), said)
