"""A small pool for tests of the judging and money side: real store, objects and intake.

Files hold arbitrary bytes: what a verdict says of them is handed in, and what follows is tested.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import sqlalchemy as sa
from judges import Bench, bench, judge_of
from pools import deployment, run_definition
from stores import migrate

from prime_core import encoding
from prime_core.checkpoint import FileEntry, Manifest, SignedManifest
from prime_core.deployment import DEMO_PERIODS, Deployment
from prime_core.draws import SaltOpening
from prime_core.ids import Address, Digest
from prime_core.node import Hardware
from prime_core.rollout import SignedSubmission, Submission
from prime_core.run import LengthBudgets, RunDefinition
from prime_core.signing import LocalSigner
from prime_core.storage.base import put_object
from prime_core.storage.directory import DirectoryStore
from prime_core.task import Lease, SignedLease, shadow_pool
from prime_core.verdict import Reason, VerdictRow
from prime_orchestrator.api import intake
from prime_orchestrator.api.backend import Backend
from prime_orchestrator.context import PoolContext
from prime_orchestrator.manager import revisions
from prime_orchestrator.manager.draws import DrawBoard
from prime_orchestrator.store import leases, nodes, policies, submissions
from prime_orchestrator.store.engine import Store, open_store, sqlite_url
from prime_orchestrator.store.submissions import SubmissionRow

TOKEN = 10**18
HARDWARE = Hardware(cpu_model="test", cpu_count=1, memory_mb=1, disk_mb=1, gpus=())
SAMPLES = 2
GROUPS = 2


def key(number: int) -> LocalSigner:
    """A key of our own for tests."""
    return LocalSigner((0x1000 + number).to_bytes(32, "big"))


MANAGER, TRAINER, VALIDATOR = key(1), key(2), key(3)
NODE, OTHER = key(10), key(11)
RUN = run_definition(
    base_model=encoding.blake3_digest(b"base"),
    max_output_tokens=40,
    samples_per_group=SAMPLES,
    groups_per_lease=GROUPS,
    groups_per_batch=3,
    max_staleness=2,
    budgets=LengthBudgets(targets=(2, 6), penalty_micro=150_000),
    price_per_unit=TOKEN // 1000,
    stake_per_seat=100 * TOKEN,
    slash_amount=50 * TOKEN,
    epoch_seconds=DEMO_PERIODS.epoch_length,
    validity_seconds=DEMO_PERIODS.validity,
    lease_seconds=60,
    root_seconds=4,
    root_submissions=3,
)
FAKE_DEPLOYMENT = deployment(DEMO_PERIODS, block=1)


@dataclass
class Clock:
    """A clock that moves only when it is set."""

    time: float = 1_000_000.0

    def __call__(self) -> float:
        return self.time


@dataclass
class ManagerSide:
    """One pool's store and objects, and the shortest way to a judged file."""

    store: Store
    objects: DirectoryStore
    context: PoolContext
    now: Clock
    url: str
    folder: Path
    audience: str = "http://testserver"
    board: DrawBoard = field(default_factory=lambda: DrawBoard(random.Random(6).randbytes))
    _number: itertools.count[int] = field(default_factory=itertools.count)

    @cached_property
    def bench(self) -> Bench:
        """The validator, appointed and committed to its draws; it judges what tests say."""
        return bench(self.backend, VALIDATOR, self.folder)

    @property
    def backend(self) -> Backend:
        return Backend(
            context=self.context,
            store=self.store,
            objects=self.objects,
            manager=MANAGER,
            trainer=TRAINER.address,
            audience=self.audience,
            now=self.now,
            random=random.Random(5).randbytes,
            draws=self.board,
        )

    def admit(self, node: LocalSigner, status: str = "active") -> None:
        """A node in the store, as admission and the indexer leave it."""
        with self.store.begin() as connection:
            nodes.admit(
                connection,
                node.address,
                speed_class=1,
                hardware=HARDWARE,
                runtime="process",
                now=self.now(),
            )
            nodes.set_status(
                connection,
                node.address,
                status,  # type: ignore[arg-type]
                last_heartbeat=self.now(),
            )

    def publish(self, version: int) -> SignedManifest:
        """A policy of one small file, signed by the trainer, in the store."""
        signed = self.manifest(version)
        self.add_policy(signed)
        return signed

    def manifest(self, version: int) -> SignedManifest:
        """A policy of one small file, signed by the trainer."""
        content = f"policy {version}".encode()
        whole = encoding.blake3_digest(content)
        manifest = Manifest(
            pool=self.context.pool,
            version=version,
            step=version,
            chunk_size=1 << 16,
            files=(
                FileEntry(
                    name="model.safetensors", size=len(content), digest=whole, chunks=(whole,)
                ),
            ),
            result_digest=whole,
        )
        return manifest.signed(TRAINER, self.context.deployment.domain("pools"))

    def add_policy(self, signed: SignedManifest) -> None:
        """A published policy, as the API leaves it."""
        with self.store.begin() as connection:
            policies.add(connection, signed, now=self.now())

    def submit(
        self,
        node: LocalSigner,
        *,
        step: int = 0,
        version: int = 0,
        shadow: bool = False,
        numeric_class: Digest | None = None,
        make: Callable[[SignedLease, Digest], bytes] | None = None,
    ) -> SubmissionRow:
        """A lease, a file (by `make`, else arbitrary bytes) and its submission through the real
        intake."""
        number = next(self._number)
        with self.store.begin() as connection:
            policy = policies.get(connection, version)
            history = revisions.history(connection, self.context)
        assert policy is not None
        self.bench.draws.prepare()
        with self.store.begin() as connection:
            listed = self.board.current(connection, self.objects, self.context, self.now())
        assert listed is not None
        opening = SaltOpening(
            random=encoding.sha256(f"salt {number}".encode()),
            draws=listed,
            numeric_class=numeric_class,
        )
        lease = Lease(
            pool=shadow_pool(self.context.pool) if shadow else self.context.pool,
            step=step,
            node=node.address,
            index=number,
            policy_digest=policy.digest,
            run_digest=history.at(step).digest(),
            target=self.context.run.budgets.targets[number % len(self.context.run.budgets.targets)],
            salt=opening.salt(),
            deadline=int(self.now()) + 60,
        )
        signed_lease = SignedLease(
            lease=lease,
            signature=MANAGER.sign(lease, self.context.domain(lease)),
            policy_version=version,
            opening=opening,
        )
        lease_digest = lease.digest(self.context.domain(lease))
        content = f"file {number} of {node.address}".encode()
        if make is not None:
            content = make(signed_lease, lease_digest)
        claim = Submission(
            pool=lease.pool,
            lease_digest=lease_digest,
            node=node.address,
            step=step,
            policy_digest=lease.policy_digest,
            sha256=put_object(self.objects, content),
            size=len(content),
            rows=self.context.run.rows_per_lease,
            # Made-up files are never verified, and some tests root them late.
            valid_until=int(self.now()) + 86_400 if make is None else lease.deadline,
        )
        with self.store.begin() as connection:
            leases.add(connection, [leases.new_row(lease_digest, signed_lease, now=self.now())])
        self.now.time += 0.001  # files arrive one after another
        signature = node.sign(claim, self.context.domain(claim))
        intake.submit(
            self.backend,
            SignedSubmission(submission=claim, node=node.address, signature=signature),
        )
        return self.row(claim.digest(self.context.domain(claim)))

    def count(self, table: sa.Table) -> int:
        with self.store.read() as connection:
            query = sa.select(sa.func.count()).select_from(table)
            return int(connection.execute(query).scalar_one())

    def row(self, digest: Digest) -> SubmissionRow:
        with self.store.read() as connection:
            found = submissions.get(connection, digest)
        assert found is not None
        return found

    def table_rows(self, rewards: Sequence[int] = ()) -> tuple[VerdictRow, ...]:
        """Rows of an accepted file: 5 tokens each; `rewards` in millionths, one a row."""
        values = tuple(rewards) or (0, 1_000_000, 500_000, 1_000_000)
        assert len(values) == RUN.rows_per_lease
        return tuple(
            VerdictRow(
                problem_id=f"p{i // SAMPLES}",
                group=i // SAMPLES,
                sample=i % SAMPLES,
                reward_micro=value,
                prompt_tokens=3,
                output_tokens=5,
            )
            for i, value in enumerate(values)
        )

    def judge(
        self, row: SubmissionRow, reason: Reason = Reason.NONE, rewards: Sequence[int] = ()
    ) -> SubmissionRow:
        """The validator says this of the oldest file, which must be this one, and the manager
        decides; the row afterwards."""
        job = self.bench.claim()
        assert job is not None
        assert job.submission_digest == row.digest, "judge submissions in the order of arrival"
        self.bench.say(job, reason, self.table_rows(rewards) if reason is Reason.NONE else ())
        assert judge_of(self.backend).tick() == [row.digest]
        return self.row(row.digest)

    def node_status(self, node: Address) -> str:
        with self.store.read() as connection:
            row = nodes.get(connection, node)
        assert row is not None
        return row.status


def open_manager(
    folder: Path,
    deployment: Deployment = FAKE_DEPLOYMENT,
    pool: int = 1,
    run: RunDefinition = RUN,
    url: str | None = None,
) -> ManagerSide:
    """A new pool (or the one that lies in `folder`), its store at `url` or next to its objects."""
    url = url or sqlite_url(folder / "store.sqlite")
    store = open_store(url)
    migrate(store)
    return ManagerSide(
        store=store,
        objects=DirectoryStore(folder / "objects", "http://testserver", b"s" * 32),
        context=PoolContext(deployment, pool, MANAGER.address, run),
        now=Clock(),
        url=url,
        folder=folder,
    )
