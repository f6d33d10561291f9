"""Seats that take leases and drop them, against the orchestrator's own leasing, on a clock that the
simulation moves: accepted files before they come, in their first lease time, and after it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import sqlalchemy as sa

from devnet.chain import CHAIN_ID
from prime_core import encoding, ids
from prime_core.deployment import DEMO_PERIODS, Deployment
from prime_core.draws import DrawCommitment, SignedDrawCommitment
from prime_core.ids import ZERO_DIGEST, Address, Digest
from prime_core.messages import ContractAddresses, LeaseRequest
from prime_core.node import Hardware
from prime_core.run import EnvironmentRef, LengthBudgets, RunDefinition
from prime_core.signing import LocalSigner
from prime_core.storage.base import ObjectStore
from prime_core.storage.directory import DirectoryStore
from prime_core.task import Task
from prime_core.verdict import Outcome, Reason
from prime_orchestrator.api import leasing
from prime_orchestrator.api.backend import Backend
from prime_orchestrator.api.liveness import LifeTicks
from prime_orchestrator.context import PoolContext
from prime_orchestrator.manager import draws, standing
from prime_orchestrator.store import (
    Store,
    batches,
    chain,
    groups,
    leases,
    nodes,
    open_store,
    policies,
    schema,
    sqlite_url,
)

LIFE = 60
"""Seconds of a lease's life."""
STEP = 2
"""Seconds between two looks at the pool."""
WORK = 6
"""Seconds that an honest node needs for a file."""
TRAINING = 4
"""Seconds that the trainer needs for a batch."""
START = 1_800_000_000.0
_VALIDATOR = LocalSigner(b"\x02" * 32)
_HARDWARE = Hardware(cpu_model="x", cpu_count=1, memory_mb=1, disk_mb=1, gpus=())


def definition() -> RunDefinition:
    """4 groups a batch, 2 a lease: nine leases fill the three batches within reach."""
    return RunDefinition(
        name="seats",
        base_model=ZERO_DIGEST,
        environment=EnvironmentRef(
            name="reverse", digest=ZERO_DIGEST, train_size=100, heldout_size=10
        ),
        max_output_tokens=16,
        samples_per_group=2,
        groups_per_lease=2,
        groups_per_batch=4,
        budgets=LengthBudgets(targets=(2, 6), penalty_micro=0),
        task=Task(image="process"),
        price_per_unit=10,
        stake_per_seat=100,
        slash_amount=50,
        lease_seconds=LIFE,
    )


def made_up() -> Deployment:
    """Contracts at addresses where nothing is."""
    names = ContractAddresses.model_fields
    contracts = {name: ids.address(f"0x{at + 1:040x}") for at, name in enumerate(names)}
    return Deployment(
        chain_id=CHAIN_ID, contracts=ContractAddresses(**contracts), block=0, periods=DEMO_PERIODS
    )


def backend_on(store: Store, objects: ObjectStore, run: RunDefinition | None = None) -> Backend:
    """The services of a pool in this store. `run` None: `definition`."""
    manager = LocalSigner(b"\x01" * 32)
    return Backend(
        context=PoolContext(made_up(), 1, manager.address, run or definition()),
        store=store,
        objects=objects,
        manager=manager,
        trainer=manager.address,
        audience="http://127.0.0.1",
    )


@dataclass
class Pool:
    """A pool of honest nodes and seats that drop every lease, each of a provider of its own."""

    backend: Backend
    clock: list[float]
    honest: list[Address] = field(default_factory=list)
    droppers: list[Address] = field(default_factory=list)
    holds: dict[Address, tuple[Digest, float]] = field(default_factory=dict)
    """Of honest nodes: the lease and when it was given."""
    asks_at: dict[Address, float] = field(default_factory=dict)
    accepted: list[float] = field(default_factory=list)
    """When each file was accepted."""
    trained_at: float = START

    @classmethod
    def make(
        cls,
        folder: Path,
        url: str = "",
        run: RunDefinition | None = None,
        *,
        validators: Sequence[LocalSigner] = (),
        start: float = START,
    ) -> Pool:
        """A pool with its first policy, in a store of its own: the empty database at `url`, or
        SQLite in `folder`. `run` None: `definition`; no `validators`: one; `start`: its clock."""
        store = open_store(url or sqlite_url(folder / "seats.sqlite"))
        store.migrate()
        clock = [start]
        backend = replace(
            backend_on(
                store, DirectoryStore(folder / "objects", "http://127.0.0.1", b"s" * 32), run
            ),
            now=lambda: clock[0],
            random=random.Random(7).randbytes,
        )
        pool = cls(backend, clock)
        name = encoding.sha256(b"appointed")
        for at, validator in enumerate(validators or (_VALIDATOR,)):
            with store.begin() as connection:
                chain.add_event(
                    connection, block_hash=name, log_index=at, block=1, block_time=1, tx_hash=name,
                    name="ValidatorSet",
                    args={"pool": 1, "validator": validator.address, "on": True},
                )  # fmt: skip
            pool.commit(validator)
        pool.publish(0)
        return pool

    def commit(self, validator: LocalSigner = _VALIDATOR) -> None:
        """A validator commits to its draws of the next epochs: no lease is given without."""
        context, now = self.backend.context, self.clock[0]
        first = draws.epoch_at(context.run, now)
        signed = []
        for epoch in range(first, first + draws.EPOCHS_AHEAD):
            statement = DrawCommitment(
                pool=1, epoch=epoch, commitment=encoding.sha256(str(epoch).encode())
            )
            signature = validator.sign(statement, context.domain(statement))
            signed.append(
                SignedDrawCommitment(
                    commitment=statement, validator=validator.address, signature=signature
                )
            )
        with self.backend.store.begin() as connection:
            draws.commit(connection, context, validator.address, signed, now)

    def seat(self, count: int, *, honest: bool, names: Sequence[Address] = ()) -> None:
        """`count` active nodes, each of a provider of its own; `names`: their addresses."""
        group = self.honest if honest else self.droppers
        with self.backend.store.begin() as connection:
            for at in range(count):
                number = len(self.honest) + len(self.droppers) + 1
                node, owner = (
                    ids.address(f"0x{kind + number:040x}") for kind in (1 << 80, 1 << 81)
                )
                node = names[at] if names else node
                nodes.admit(
                    connection, node, hardware=_HARDWARE, runtime="process", now=self.clock[0]
                )
                nodes.set_status(connection, node, "active", last_heartbeat=self.clock[0])
                nodes.set_member(connection, node, provider=owner)
                group.append(node)

    def pass_time(self, seconds: float) -> int:
        """Lets the pool work for so long; the files that were accepted meanwhile."""
        life, end, before = LifeTicks(self.backend), self.clock[0] + seconds, len(self.accepted)
        while self.clock[0] < end:
            self.clock[0] += STEP
            with self.backend.store.begin() as connection:
                connection.execute(sa.update(schema.nodes).values(last_heartbeat=self.clock[0]))
            life.tick()
            for node in (*self.droppers, *self.honest):  # the droppers are first to ask
                self._turn(node)
            self._train()
        return len(self.accepted) - before

    def _turn(self, node: Address) -> None:
        now = self.clock[0]
        if node in self.holds:
            digest, since = self.holds[node]
            if now - since < WORK:
                return
            self._accept(node, digest)
        if now < self.asks_at.get(node, 0.0):
            return
        with self.backend.store.read() as connection:
            version = policies.latest_version(connection) or 0
        answer = leasing.lease(self.backend, node, LeaseRequest(policy_version=version))
        self.asks_at[node] = now + answer.retry_after_ms / 1000
        if answer.lease is None:
            return
        if node in self.droppers:
            self.asks_at[node] = answer.lease.lease.deadline + STEP
        else:
            self.holds[node] = (self.backend.digest(answer.lease.lease), now)

    def _accept(self, node: Address, digest: Digest) -> None:
        """What a verdict on an honest file writes."""
        now = self.clock[0]
        del self.holds[node]
        with self.backend.store.begin() as connection:
            lease = leases.get(connection, digest)
            if lease is None or lease.status != "open":
                return
            leases.set_status(connection, digest, "submitted")
            file = {"digest": digest, "lease_digest": digest, "sha256": digest, "size": 1}
            place = {"node": node, "step": lease.step, "policy_version": lease.policy_version}
            text = {"body": "", "receipt": "", "status": "accepted", "received_at": now}
            connection.execute(sa.insert(schema.submissions).values(**file, **place, **text))
            standing.judged(connection, node, Outcome.ACCEPTED, Reason.NONE)
            run = self.backend.context.run
            groups.add(
                connection,
                [
                    groups.GroupRow(digest, at, lease.policy_version, 2, True, 0, now)
                    for at in range(run.groups_per_lease)
                ],
            )
        self.accepted.append(now)

    def _train(self) -> None:
        """Seals a full batch; its policy is there after the training."""
        run, now = self.backend.context.run, self.clock[0]
        if now < self.trained_at:
            return
        with self.backend.store.read() as connection:
            step, latest = batches.next_step(connection), policies.latest_version(connection)
        if step > (latest or 0):
            self.publish(step)
        with self.backend.store.begin() as connection:
            fresh = sa.select(schema.groups.c.submission_digest, schema.groups.c.group_no).where(
                schema.groups.c.batch_step.is_(None),
                schema.groups.c.policy_version >= step - run.max_staleness,
            )
            order = fresh.order_by(schema.groups.c.accepted_at, schema.groups.c.submission_digest)
            free = connection.execute(order.limit(run.groups_per_batch)).all()
            if len(free) < run.groups_per_batch:
                return
            groups.take(connection, [(Digest(row[0]), int(row[1])) for row in free], step)
            batches.add(connection, batches.BatchRow(step, ZERO_DIGEST, "", 8, 0, 0, now))
        self.trained_at = now + TRAINING

    def publish(self, version: int) -> None:
        """Policy `version` is there."""
        with self.backend.store.begin() as connection:
            connection.execute(
                sa.insert(schema.policies).values(
                    version=version,
                    digest=encoding.sha256(str(version).encode()),
                    step=version,
                    body="",
                    published_at=self.clock[0],
                )
            )


@dataclass(frozen=True)
class Loss:
    """Shares of the honest pool's accepted files that dropping costs it."""

    first: float
    """In the first lease time."""
    after: float
    """After it."""


def measure(folder: Path, *, lives: int = 6) -> tuple[Loss, Loss]:
    """Ten dropping seats among five honest nodes: in a pool that has worked for three lease times,
    and in one where all start together."""
    old = Pool.make(folder / "old")
    old.seat(5, honest=True)
    start = old.pass_time(LIFE)
    rate = old.pass_time(2 * LIFE) / 2
    old.seat(10, honest=False)
    first = old.pass_time(LIFE)
    after = old.pass_time(lives * LIFE) / lives
    fresh = Pool.make(folder / "fresh")
    fresh.seat(10, honest=False)
    fresh.seat(5, honest=True)
    early = fresh.pass_time(LIFE)
    later = fresh.pass_time(lives * LIFE) / lives
    for pool in (old, fresh):
        pool.backend.store.close()
    return (
        Loss(1 - first / rate, 1 - after / rate),
        Loss(1 - early / start, 1 - later / rate),
    )
