"""Ten thousand nodes for a day of simulated time, on the orchestrator's own rules.

What runs as in a pool: leases (`api.leasing`, scheduler, targets, speed classes, rests, slots of
newcomers), `LifeTicks`, the transaction that takes a submission, the one that records a verdict
(`manager.judging`: credits, groups, quarantine, slash), sealing of batches, the draws of rows and
of second opinions, and settlement. HTTP, the chain, engines, graders and replay do not run.

What is simplified:
- Heartbeats are written ahead: while a node is on, its row holds the time at which it goes off.
- Nodes ask for leases once in ROUND seconds, in random order, TOGETHER at once as the API answers
  them, until the scheduler has no work.
- An engine runs BATCH rows at once, each at a BATCH-th of the node's speed, and a row that ends
  makes room for the next. A node with several slots (`standing.Slots`) asks for another lease when
  there is room. It loads another policy once its open leases have ended, as a worker does.
- Each node is a provider of its own. A slash is executed CONFIRM seconds after the verdict.
- A file is caught with the rate that devnets measured for its lie (bench/results/lies.json:
  rejections ÷ judged files). A lie in a quarter of a file's rows (`few`) is caught if a drawn row
  is caught alone (bench/results/detection.json: `caught256`); the file's own statistics are left
  out, so this is a lower bound. Sums over many files (`manager.history`) are left out too.
- Validators are a queue with as many servers. Replaying costs what detection.json says
  (`validate_ratio_b64_bf16`).
The population itself (`people`) is assumed, not measured.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from bench import seats
from bench.form import ROOT
from prime_core import encoding
from prime_core.draws import lot
from prime_core.errors import PolicyError
from prime_core.ids import ZERO_DIGEST, Address, Digest, Signature
from prime_core.lifecycle import NodeState, step_node
from prime_core.messages import LeaseRequest
from prime_core.rollout import SignedSubmission, Submission
from prime_core.run import LengthBudgets, RunDefinition, SpeedClasses
from prime_core.settlement import JudgedFact
from prime_core.storage.base import ObjectStat
from prime_core.storage.directory import DirectoryStore
from prime_core.task import SignedLease
from prime_core.verdict import (
    Law,
    Opinion,
    Outcome,
    Reason,
    SignedOpinion,
    VerdictRow,
    VerdictTable,
    reason_digest,
)
from prime_orchestrator import scheduler
from prime_orchestrator.api import intake, leasing, validators
from prime_orchestrator.api.liveness import LifeTicks
from prime_orchestrator.manager import batches, history
from prime_orchestrator.manager.judging import Judge, Judgement, enough
from prime_orchestrator.manager.members import apply_node_event
from prime_orchestrator.manager.settlement import refresh_credits
from prime_orchestrator.manager.standing import LEASE_SLOTS
from prime_orchestrator.store import batches as store_batches
from prime_orchestrator.store import jobs, leases, nodes, policies, schema, submissions

HOUR = 3600.0
TICK = 10.0
"""Seconds between two ticks; `LifeTicks` takes a longer gap for an outage."""
ROUND = 60.0
TOGETHER = 64
CONFIRM = HOUR
PROMPT = 300
MEDIAN = 25.0
"""Tokens a second of the median node with BATCH rows."""
BATCH = 16
OVERHEAD = 20.0
"""Seconds from a lease's last row to its submission."""
VALIDATOR_SPEED = 16.0
"""Of each validator, in median nodes."""
TRAINING = 3600.0
"""Seconds that the trainer needs for a batch."""
INFORMATIVE = 0.7
SEALED = Signature("0x" + "00" * 65)
SHORTEST = 2048
SERVERS = 64
"""Validators of 10,000 nodes."""
DROPPER, PICKY = "drops_leases", "drops_long_leases"


def definition(count: int) -> RunDefinition:
    """A run for `count` nodes: a batch takes a group of a tenth of them. What
    is not named here has the run's defaults."""
    return seats.definition().model_copy(
        update={
            "name": "population",
            "max_output_tokens": 16_384,
            "samples_per_group": 8,
            "groups_per_lease": 2,
            "groups_per_batch": count // 10,
            "budgets": LengthBudgets(
                targets=(SHORTEST, 4096, 8192),
                by_class={"1": (SHORTEST,), "2": (4096, 8192), "3": (8192,)},
                penalty_micro=0,
            ),
            "speed": SpeedClasses(ratios_micro=(500_000, 2_000_000)),
            "lease_seconds": 10_800,
            "price_per_unit": 1,
            "stake_per_seat": 10**9,
            "slash_amount": 10**6,
        }
    )


@dataclass(frozen=True)
class Lie:
    """How one kind of lie is found. `rate`: share of judged files that were rejected or void."""

    rate: float
    reason: Reason
    row: float | None
    """Chance that one row of it is caught alone; None: not measured."""


def lies() -> dict[str, Lie]:
    """Every kind of lie that devnets tried, with the rates that they measured."""
    results = ROOT / "bench" / "results"
    rows = {
        row["name"]: row for row in json.loads((results / "detection.json").read_text())["rows"]
    }
    found = {}
    for network in json.loads((results / "lies.json").read_text())["networks"]:
        for liar in network["liars"]:
            kind, reasons = liar["kind"], Counter(liar["reasons"])
            row = rows.get(f"caught256_{kind}")
            found[kind] = Lie(
                rate=sum(reasons.values()) / liar["judged"],
                reason=Reason[reasons.most_common(1)[0][0]] if reasons else Reason.NONE,
                row=None if row is None else float(row["value"]),
            )
    return found


def replay_ratio() -> float:
    """How many times faster a row is replayed than made, on the same machine."""
    found = json.loads((ROOT / "bench" / "results" / "detection.json").read_text())["rows"]
    return next(float(row["value"]) for row in found if row["name"] == "validate_ratio_b64_bf16")


@dataclass
class Person:
    """One node. Times are seconds from the start."""

    address: Address
    rate: float
    """Tokens a second."""
    delay: float
    """Seconds that it needs for a new policy."""
    kind: str
    """Its lie; empty: honest."""
    few: bool
    """Lies in a quarter of the rows of each file, not in all."""
    hours: list[tuple[float, float]]
    """When it is on."""
    on: bool = False
    proven: bool = False
    asks_at: float = 0.0
    holds: dict[Digest, SignedLease] = field(default_factory=dict)
    """Its open leases."""
    free: list[float] = field(default_factory=lambda: [0.0] * BATCH)
    """When each place in its engine's batch is free: a heap."""
    engaged_since: float = 0.0
    """When it took the first of its open leases."""
    version: int = 0
    """The policy of its newest lease."""
    engaged: float = 0.0
    """Seconds with at least one lease."""
    spent: float = 0.0
    """Seconds that a full batch takes for what it generated."""
    made: int = 0
    """Tokens generated, handed in or not."""
    first_on: float | None = None
    first_lease: float | None = None
    first_accepted: float | None = None
    caught_at: float | None = None
    accepted: int = 0
    judged: int = 0
    expired: int = 0

    def stop(self) -> None:
        """Loses all work."""
        self.holds.clear()
        self.free = [0.0] * BATCH

    def wants(self, now: float) -> bool:
        """Whether it asks for a lease now."""
        able = self.on and self.caught_at is None and self.asks_at <= now
        return able and (not self.holds or (self.kind != DROPPER and self.free[0] <= now))

    def take(self, lease: Digest, signed: SignedLease, now: float) -> None:
        """Opens a lease."""
        if not self.holds:
            self.engaged_since = now
        self.holds[lease] = signed

    def end(self, lease: Digest, spent: float, now: float) -> SignedLease | None:
        """Ends a lease after `spent` seconds of a full batch; None: its work was lost before."""
        signed = self.holds.pop(lease, None)
        if signed is not None:
            self.spent += spent
            self.asks_at = now
            if not self.holds:
                self.engaged += now - self.engaged_since
        return signed

    def work(
        self, rows: list[int], version: int, now: float, deadline: float
    ) -> tuple[float, float]:
        """Adds a lease's rows to the batch, the next row to the place that is free first. Returns
        when the last one ends, and the work until `deadline`, where rows are broken off, in seconds
        of a full batch."""
        begins = now if version == self.version or not self.holds else max(self.free)
        self.version, last, spent = version, now, 0.0
        for row in rows:
            at = max(begins, heapq.heappop(self.free))
            end = at + row * BATCH / self.rate
            last = max(last, end)
            end = max(at, min(end, deadline))
            heapq.heappush(self.free, end)
            spent += (end - at) / BATCH
        return last, spent


def people(count: int, end: float, draw: random.Random, kinds: dict[str, Lie]) -> list[Person]:
    """Speeds are lognormal with a spread of e around the median, the fastest twentieth 4 times as
    fast again. Two fifths are servers: on, broken after a day in the mean, back within half an
    hour. The others are on in the evening of one of eight time zones, for 2 to 14 hours, with
    breaks. A fifth lies, in equal parts by every kind."""
    found = []
    names = [DROPPER, PICKY, *sorted(kinds)]
    liars = 0
    for number in range(count):
        rate = MEDIAN * draw.lognormvariate(0.0, 1.0) * (4.0 if draw.random() < 0.05 else 1.0)
        kind, few = "", False
        if number % 5 == 4:
            kind = names[liars % len(names)]
            few = kind in kinds and kinds[kind].row is not None and liars // len(names) % 2 == 1
            liars += 1
        hours = _server(end, draw) if draw.random() < 0.4 else _evenings(end, draw)
        found.append(
            Person(
                address=Address(""),
                rate=max(1.0, rate),
                delay=draw.lognormvariate(4.1, 1.0),
                kind=kind,
                few=few,
                hours=hours,
            )
        )
    return found


def _server(end: float, draw: random.Random) -> list[tuple[float, float]]:
    at, hours = draw.uniform(0, 600.0), []
    while at < end:
        off = at + draw.expovariate(1 / (24 * HOUR))
        hours.append((at, min(off, end)))
        at = off + draw.uniform(60.0, 1800.0)
    return hours


def _evenings(end: float, draw: random.Random) -> list[tuple[float, float]]:
    zone = draw.choice((-8, -5, -3, 0, 1, 3, 5, 9))
    start = (draw.gauss(18.0, 2.0) - zone) % 24 * HOUR
    length = min(14.0, max(2.0, draw.gauss(7.0, 3.0))) * HOUR
    hours: list[tuple[float, float]] = []
    for day in itertools.count(-1):
        at, last = day * 24 * HOUR + start, day * 24 * HOUR + start + length
        if at >= end:
            return hours
        while at < last:  # breaks: Weibull with a heavy tail, 4 hours in the mean
            off = min(last, at + draw.weibullvariate(2 * HOUR, 0.5))
            if off > 0 and at < end:
                hours.append((max(0.0, at), min(off, end)))
            at = off + draw.expovariate(1 / 900.0)
    return hours


class _Nowhere(DirectoryStore):
    """Keeps no object."""

    def put(self, key: str, data: bytes) -> None:
        pass

    def exists(self, key: str) -> bool:
        return True


Rates = dict[Address, tuple[float | None, float | None]]


@dataclass
class World:
    """The pool, its people and what happens next."""

    pool: seats.Pool
    people: list[Person]
    kinds: dict[str, Lie]
    draw: random.Random
    servers: list[float]
    """When each validator is free."""
    ratio: float
    events: list[tuple[float, int, str, Any]] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    published: list[tuple[float, int]] = field(default_factory=lambda: [(0.0, 0)])
    changed: bool = True
    training: int | None = None
    """The batch that is trained on."""
    training_until: float = 0.0
    first_batch: float | None = None
    facts: dict[Digest, JudgedFact] = field(default_factory=dict)
    replayed: float = 0.0
    opinions: int = 0
    busy: float = 0.0
    waits: list[float] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)

    @property
    def now(self) -> float:
        return self.pool.clock[0] - seats.START

    @property
    def run(self) -> RunDefinition:
        return self.pool.backend.context.run

    def later(self, at: float, what: str, of: Any) -> None:
        """Plans an event."""
        heapq.heappush(self.events, (at, next(self.numbers), what, of))

    def live(self, end: float) -> None:
        """Lets `end` seconds pass."""
        for person in self.people:
            for on, off in person.hours:
                self.later(on, "on", (person, off))
                self.later(off, "off", person)
        life, at, asked = LifeTicks(self.pool.backend), 0.0, -ROUND
        committed = 0.0
        while at < end:
            at += TICK
            while self.events and self.events[0][0] <= at:
                moment, _, what, of = heapq.heappop(self.events)
                self.pool.clock[0] = seats.START + max(self.now, moment)
                getattr(self, f"_{what}")(of)
            self.pool.clock[0] = seats.START + at
            life.tick()
            if at - committed >= self.run.epoch_seconds:
                self.pool.commit()
                committed = at
            self._train()
            if at - asked >= ROUND:
                asked = at
                self._ask()

    # ── nodes ──

    def _on(self, of: tuple[Person, float]) -> None:
        person, off = of
        person.on = True
        person.first_on = self.now if person.first_on is None else person.first_on
        with self.pool.backend.store.begin() as connection:
            row = nodes.get(connection, person.address)
            assert row is not None
            state, _ = step_node(
                NodeState(row.status, row.last_heartbeat), "heartbeat", self.pool.clock[0],
                death_seconds=self.run.death_seconds, orchestrator_up_since=0.0,
            )  # fmt: skip
            nodes.set_status(
                connection, person.address, state.status, last_heartbeat=seats.START + off
            )
        person.asks_at = self.now
        self.changed = True

    def _off(self, person: Person) -> None:
        person.on = False
        person.stop()

    def _ask(self) -> None:
        waiting = [one for one in self.people if one.wants(self.now)]
        self.draw.shuffle(waiting)
        refused: set[tuple[int, bool]] = set()
        enough = False
        while waiting and not enough:
            batch: list[tuple[Person, int]] = []
            while waiting and len(batch) < TOGETHER:
                person = waiting.pop()
                version = self._loaded(person)
                if (version, person.proven) not in refused:
                    batch.append((person, version))
            asks = [
                leasing.Ask(
                    person.address,
                    LeaseRequest(policy_version=version, holds=tuple(person.holds)),
                )
                for person, version in batch
            ]
            answers = leasing.lease_all(self.pool.backend, asks) if asks else []
            for (person, version), answer in zip(batch, answers, strict=True):
                if isinstance(answer, PolicyError):
                    raise answer
                if answer.lease is not None:
                    self._begin(person, answer.lease)
                elif answer.reason == scheduler.ENOUGH and not person.holds:
                    enough = True
                elif answer.reason == scheduler.NEWCOMERS:
                    refused |= {(at, False) for _, at in self.published}
                elif answer.reason.startswith(("policy ", "batch ")):
                    refused.add((version, person.proven))  # the same for all with this policy
                elif person.holds:
                    person.asks_at = math.inf  # until one of its leases has ended
                else:
                    person.asks_at = self.now + max(ROUND, answer.retry_after_ms / 1000)

    def _loaded(self, person: Person) -> int:
        return max(
            version for at, version in self.published if at == 0.0 or at + person.delay <= self.now
        )

    def _begin(self, person: Person, signed: SignedLease) -> None:
        digest = self.pool.backend.digest(signed.lease)
        target, now = signed.lease.target, self.now
        deadline = signed.lease.deadline - seats.START
        person.first_lease = now if person.first_lease is None else person.first_lease
        rows = [
            min(self.run.max_output_tokens, max(16, int(target * self.draw.lognormvariate(0, 0.3))))
            for _ in range(self.run.rows_per_lease)
        ]
        dropped = person.kind == DROPPER or (person.kind == PICKY and target > SHORTEST)
        until, spent = math.inf, 0.0
        if not dropped:
            last, spent = person.work(rows, signed.policy_version, now, deadline)
            until = last + OVERHEAD
        person.take(digest, signed, now)
        if until > deadline:
            self.later(deadline + TICK, "drop", (person, digest, spent))
        else:
            self.later(until, "finish", (person, digest, spent, rows))

    def _drop(self, of: tuple[Person, Digest, float]) -> None:
        person, lease, spent = of
        if person.end(lease, spent, self.now) is not None:
            person.expired += 1

    def _finish(self, of: tuple[Person, Digest, float, list[int]]) -> None:
        person, lease, spent, rows = of
        signed = person.end(lease, spent, self.now)
        if signed is None:
            return
        person.made += sum(rows)
        backend = self.pool.backend
        with backend.store.read() as connection:
            row = leases.get(connection, lease)
        assert row is not None
        if row.status != "open" or row.deadline < self.pool.clock[0]:
            return
        claim = Submission(
            pool=1, lease_digest=lease, node=person.address, step=signed.lease.step,
            policy_digest=signed.lease.policy_digest, sha256=lease, size=1, rows=len(rows),
            valid_until=row.deadline + self.run.validity_seconds,
        )  # fmt: skip
        digest = backend.digest(claim)
        sealed = SignedSubmission(submission=claim, node=person.address, signature=SEALED)
        intake.accept(backend, [intake.Checked(sealed, digest, ObjectStat(1, lease))])
        self._queue(person, digest, row.policy_version, signed, rows)

    # ── validators ──

    def _queue(
        self, person: Person, digest: Digest, version: int, signed: SignedLease, rows: list[int]
    ) -> None:
        """Draws what each opinion sees and when it is there; the verdict comes with the last."""
        secret = encoding.sha256(self.draw.randbytes(32))
        with self.pool.backend.store.read() as connection:
            before = submissions.accepted_of(connection, person.address)
        drawn = history.draw_count(self.run, before, secret)
        again = lot("again", secret, digest) % validators.AGAIN_ONE_IN == 0
        needed = 2 if again and len(self.servers) > 1 else 1
        said: list[Outcome] = []
        at, count, shared = self.now, drawn, self.draw.random()
        while True:
            outcome = self._opinion(person, count, len(rows), shared)
            said.append(outcome)
            free = heapq.heappop(self.servers)
            begins = max(at, free)
            work = sum(rows) * count / len(rows) / (VALIDATOR_SPEED * MEDIAN * self.ratio)
            heapq.heappush(self.servers, begins + work)
            self.waits.append(begins - at)
            self.replayed += count / len(rows) * sum(rows)
            self.opinions += 1
            self.busy += work
            at = begins + work
            if len(said) >= needed and enough(outcome, said, len(self.servers), needed, quorum=2):
                break
            # Opinions that the first draw does not ask for replay the file whole.
            count = drawn if len(said) < needed else len(rows)
            shared = self.draw.random() if len(said) < needed else shared
        self.later(at, "verdict", (person, digest, version, signed, rows, outcome))

    def _opinion(self, person: Person, drawn: int, rows: int, shared: float) -> Outcome:
        """What one replay finds. `shared`: uniform in [0, 1); validators of the same rows agree."""
        lie = self.kinds.get(person.kind)
        if lie is None or lie.reason is Reason.NONE:
            return Outcome.ACCEPTED
        if not person.few:
            return lie.reason.outcome if shared < lie.rate else Outcome.ACCEPTED
        assert lie.row is not None
        false = max(1, rows // 4)
        hidden = sum(  # chance that none of the false rows that are drawn is caught
            math.comb(false, hit) * math.comb(rows - false, drawn - hit) * (1 - lie.row) ** hit
            for hit in range(min(false, drawn) + 1)
        ) / math.comb(rows, drawn)
        return lie.reason.outcome if shared >= hidden else Outcome.ACCEPTED

    def _verdict(
        self,
        of: tuple[Person, Digest, int, SignedLease, list[int], Outcome],
    ) -> None:
        person, digest, version, signed, rows, outcome = of
        reason = Reason.NONE if outcome is Outcome.ACCEPTED else self.kinds[person.kind].reason
        backend, now = self.pool.backend, int(self.pool.clock[0])
        law = Law(
            lease=backend.digest(signed.lease), run=self.run.digest(),
            verification_class=ZERO_DIGEST, verifier=ZERO_DIGEST, draws=ZERO_DIGEST,
        )  # fmt: skip
        table = VerdictTable(
            submission_digest=digest, sha256=digest, policy_version=version,
            step=signed.lease.step,
            rows=self._table(rows) if outcome is Outcome.ACCEPTED else (),
        )  # fmt: skip
        name = encoding.sha256(digest.encode())
        opinion = Opinion(
            pool=1, submission=digest, law=ZERO_DIGEST, outcome=int(outcome),
            reason=reason_digest(reason), table=name,
            evidence=name if outcome is Outcome.REJECTED else ZERO_DIGEST, judged_at=now,
        )  # fmt: skip
        found = [
            Judgement(
                SignedOpinion(
                    opinion=opinion, law=law, validator=backend.manager.address, signature=SEALED
                ),
                table,
            )
        ]
        judge = Judge(
            backend.store, backend.objects, backend.context, backend.draws, backend.now, lambda: 2
        )
        verdict = judge.stored(found[0], found)
        with backend.store.begin() as connection:
            row = submissions.get(connection, digest)
            assert row is not None
            judge.record(connection, row, verdict)
            jobs.change(connection, digest, status="done")
        self.facts[digest] = JudgedFact(
            name, name, outcome, sum(rows) if outcome is Outcome.ACCEPTED else 0, now
        )
        person.judged += 1
        self.outcomes[outcome.name] += 1
        self.changed = True
        if outcome is Outcome.ACCEPTED:
            person.accepted += 1
            person.proven = True
            if person.first_accepted is None:
                person.first_accepted = self.now
        elif outcome is Outcome.REJECTED and person.caught_at is None:
            person.caught_at = self.now
            person.stop()
            self.later(self.now + CONFIRM, "execute", person)

    def _table(self, rows: list[int]) -> tuple[VerdictRow, ...]:
        size, found = self.run.samples_per_group, []
        for group in range(len(rows) // size):
            differ = self.draw.random() < INFORMATIVE
            for sample in range(size):
                found.append(
                    VerdictRow(
                        problem_id=str(group), group=group, sample=sample,
                        reward_micro=1_000_000 * (sample % 2) if differ else 0,
                        prompt_tokens=PROMPT, output_tokens=rows[group * size + sample],
                    )
                )  # fmt: skip
        return tuple(found)

    def _execute(self, person: Person) -> None:
        backend = self.pool.backend
        with backend.store.begin() as connection:
            mine = schema.slashes.c.node == person.address
            connection.execute(sa.update(schema.slashes).where(mine).values(status="executed"))
            apply_node_event(
                connection, backend.context, person.address, "slash_confirmed", backend.now()
            )
            refresh_credits(connection, person.address)

    # ── trainer ──

    def _train(self) -> None:
        backend = self.pool.backend
        if self.training is not None and self.now >= self.training_until:
            self.pool.publish(self.training + 1)
            self.published.append((self.now, self.training + 1))
            self.training, self.changed = None, True
        if self.changed:
            batches.seal_ready_batches(
                backend.store, backend.objects, backend.manager, backend.context, backend.now
            )
            self.changed = False
        with backend.store.read() as connection:
            sealed = store_batches.next_step(connection)
            latest = policies.latest_version(connection) or 0
        if self.training is None and sealed > latest:
            self.first_batch = self.now if self.first_batch is None else self.first_batch
            self.training, self.training_until = latest, self.now + TRAINING


def simulate(
    folder: Path,
    count: int,
    hours: float,
    run: RunDefinition | None = None,
    *,
    slots: int = LEASE_SLOTS,
) -> World:
    """The world after `hours`. `slots`: most leases that a node holds open at once."""
    pool = seats.Pool.make(folder, run=run or definition(count))
    pool.backend = replace(
        pool.backend,
        objects=_Nowhere(folder / "objects", "http://127.0.0.1", b"s" * 32),
        lease_slots=slots,
    )
    draw, kinds = random.Random(20), lies()
    crowd = people(count, hours * HOUR, draw, kinds)
    pool.seat(count, honest=True)
    with pool.backend.store.begin() as connection:
        for person, address in zip(crowd, pool.honest, strict=True):
            person.address = address
            nodes.set_status(connection, address, "silent", last_heartbeat=seats.START)
            measured = person.rate * draw.lognormvariate(0.0, 0.2)
            nodes.set_rates(connection, address, token_rate=None, challenge_rate=measured)
    servers = [0.0] * max(2, count * SERVERS // 10_000)
    world = World(pool, crowd, kinds, draw, servers, replay_ratio())
    world.live(hours * HOUR)
    return world
