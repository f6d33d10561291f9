"""One learning run in one process: the devnet's task, model and settings; generation, judging and
training in turn, with a fixed delay between the policy that generates and the one that is trained.

    policy s − delay ─► files of four groups, some by liars ─► each through the real validator
      ─► groups with some difference in their rewards, until the batch is full
        ─► train_step ─► policy s + 1 ─► every few steps: held-out reward

Every sample that was generated counts, also of groups without difference and of rejected files.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.form import ROOT
from bench.trainer_parts import batch_of, bench_run, bench_settings
from prime_core import encoding
from prime_core.rollout import Rollout
from prime_core.run import LengthBudgets, RunDefinition
from prime_core.verdict import Outcome
from prime_engine.base import Engine, Generation
from prime_engine.variants import quantizer
from prime_envs.base import Environment
from prime_envs.registry import environment_for, environment_ref, load_environment
from prime_trainer.config import ObjectiveSettings
from prime_trainer.evaluate import answers_of, summary
from prime_trainer.learner import Learner, make_learner, train_step
from prime_trainer.metrics import Stopwatch
from prime_trainer.parallel import World, published_state
from prime_trainer.publish import export
from prime_trainer.sampling import Sampling
from prime_verify import build
from prime_verify.case import Case
from prime_verify.engines import load_engine
from prime_verify.finding import Finding
from prime_verify.rollout_file import load_rollouts, write_rollout_file
from prime_verify.setups import HonestFile, synthetic_lease
from prime_verify.verify import verify_file

MODEL = ROOT / "devnet" / "model"
HELDOUT = 256
TARGETS = (2, 6, 10, 14)
GOAL = 0.75
FILE_GROUPS = 4
EVALUATE_EVERY = 4
EVALUATION_SEED = 7
BATCH_ROWS = 256
OLDER = 2


@dataclass(frozen=True)
class Mode:
    """What one arm of the experiment does otherwise. `liars`: share of files; `inject`: share of
    tokens whose behaviour log-probability is lowered by 5 (ratios near 150); `samples` of a group.

    Sixteen answers are never all paid alike here (the reward counts each dot), so the online filter
    finds nothing to leave out: it is measured with as many rows in groups of two.

    The demo takes 32 groups a batch at a rate of 3e-4 and is there in some 12 steps, most of them
    warm-up; a delay of four is a third of such a run, which then swings to and fro. Staleness costs
    about as many steps however large they are (`demo_…`, `half_…`), so it is measured where a run
    has some tens of them: a quarter of the batch at a quarter of the rate."""

    groups: int = 8
    samples: int = 16
    delay: int = 0
    liars: float = 0.0
    objective: str = "grpo"
    inject: float = 0.0
    filtered: bool = True
    gradient_clip: float = 1.0
    learning_rate: float = 7.5e-5


MODES: dict[str, Mode] = {
    "sync": Mode(),
    "stale2": Mode(delay=2),
    "stale4": Mode(delay=4),
    "liars20": Mode(delay=2, liars=0.2),
    "inject_two_sided": Mode(delay=2, inject=0.02),
    "inject_one_sided": Mode(delay=2, inject=0.02, objective="one_sided"),
    "unfiltered": Mode(delay=2, filtered=False),
    "twos": Mode(groups=64, samples=2, delay=2),
    "twos_unfiltered": Mode(groups=64, samples=2, delay=2, filtered=False),
    "clip_0.1": Mode(delay=2, gradient_clip=0.1),
    "clip_off": Mode(delay=2, gradient_clip=1e9),
    "half_sync": Mode(groups=16, learning_rate=1.5e-4),
    "half_stale2": Mode(groups=16, delay=2, learning_rate=1.5e-4),
    "half_stale4": Mode(groups=16, delay=4, learning_rate=1.5e-4),
    "demo_sync": Mode(groups=32, learning_rate=3e-4),
    "demo_stale2": Mode(groups=32, delay=2, learning_rate=3e-4),
    "demo_stale4": Mode(groups=32, delay=4, learning_rate=3e-4),
}


@dataclass
class Record:
    """One run's outcome, as it is kept. `curve`: (policy, samples generated before it, held-out
    reward); `lengths` and `actual`: mean distance from each target, and mean length where it was
    asked for, at each point of the curve. `missed`: lying files that were accepted; `wronged`:
    honest ones that were not; `rejected`: samples in all files that were not."""

    mode: str
    seed: int
    steps: int
    samples: int = 0
    rejected: int = 0
    missed: int = 0
    wronged: int = 0
    liars_files: int = 0
    curve: list[tuple[int, int, float]] = field(default_factory=list)
    lengths: dict[str, list[float]] = field(default_factory=dict)
    actual: dict[str, list[float]] = field(default_factory=dict)
    gradient_norms: list[float] = field(default_factory=list)
    samples_to_goal: float | None = None
    cpu_seconds: float = 0.0

    def to_json(self) -> str:
        return json.dumps(vars(self))

    @staticmethod
    def from_json(text: str) -> Record:
        return Record(**json.loads(text))


def crossing(curve: list[tuple[int, int, float]], goal: float) -> float | None:
    """Samples at which the line through the held-out rewards first reaches `goal`."""
    before: tuple[int, int, float] | None = None
    for point in curve:
        if point[2] >= goal:
            if before is None:
                return float(point[1])
            share = (goal - before[2]) / (point[2] - before[2])
            return before[1] + share * (point[1] - before[1])
        before = point
    return None


def learning_definition(mode: Mode) -> RunDefinition:
    """The devnet's run, held open for four stale policies."""
    budgets = LengthBudgets(targets=TARGETS, penalty_micro=150_000, form="clip")
    size = len(load_environment("reverse", {}, budgets))
    return bench_run(
        groups=mode.groups,
        samples=mode.samples,
        name="learning",
        base_model=encoding.sha256(b"devnet"),
        environment=environment_ref(
            "reverse", {}, budgets, train_size=size - HELDOUT, heldout_size=HELDOUT
        ),
        max_output_tokens=40,
        groups_per_lease=FILE_GROUPS,
        max_staleness=4,
        budgets=budgets,
    )


@dataclass(frozen=True)
class Policies:
    """The policies by version, in folders; an EngineProvider for the validator. Each is loaded
    once, and kept as long as its folder."""

    folder: Path
    loaded: dict[tuple[int, int | None], Engine] = field(default_factory=dict)

    def path(self, version: int) -> Path:
        return self.folder / str(version) if version else MODEL

    def load(self, version: int, bits: int | None = None) -> Engine:
        if (version, bits) not in self.loaded:
            options: dict[str, Any] = {} if bits is None else {"prepare": quantizer(bits=bits)}
            self.loaded[version, bits] = load_engine(
                self.path(version), dtype="float32", threads=1, batch_rows=BATCH_ROWS, **options
            )
        return self.loaded[version, bits]

    def drop_before(self, version: int) -> None:
        """Deletes policies that are no longer used to generate or to compare."""
        for known, bits in [key for key in self.loaded if key[0] < version]:
            del self.loaded[known, bits]
            shutil.rmtree(self.folder / str(known), ignore_errors=True)

    def engine(self, version: int, policy_digest: str) -> Engine:
        return self.load(version)

    def earlier(self, version: int) -> Iterator[tuple[int, Engine]]:
        for older in range(max(0, version - OLDER), version):
            yield older, self.load(older)


@dataclass
class Draft:
    """A file in the making: its lease and rows, who makes it, and what came of them."""

    lease: HonestFile
    lies: bool
    engine: Engine
    plan: list[build.PlannedRow]
    generations: list[Generation] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)


class Learning:
    """One run, step by step."""

    def __init__(self, name: str, seed: int, root: Path, world: World) -> None:
        self.mode = MODES[name]
        self.run = learning_definition(self.mode)
        self.environment: Environment = environment_for(self.run)
        self.policies = Policies(root / "policies")
        self.record = Record(name, seed, 0)
        self.rng = random.Random(seed)
        self.files = 0
        settings = bench_settings(
            MODEL, root, learning_rate=self.mode.learning_rate, warmup_steps=10, weight_decay=0.0,
            beta1=0.9, beta2=0.95, gradient_clip=self.mode.gradient_clip,
            objective=ObjectiveSettings(name=self.mode.objective),
        )  # fmt: skip
        self.learner: Learner = make_learner(self.run, settings, world)

    def evaluate(self) -> None:
        """Held-out reward of the newest policy, one answer to each of all held-out problems."""
        model, record = self.policies.path(self.record.steps), self.record
        answered = answers_of(model, self.run, HELDOUT, EVALUATION_SEED, 1, Sampling())
        found = summary(model, EVALUATION_SEED, self.run, answered)
        record.curve.append((record.steps, record.samples, found.reward.mean))
        for target, part in found.by_budget.items():
            record.lengths.setdefault(target, []).append(part.length_error.mean)
            mine = [one.grades[0].parts["length"] for one in answered if one.target == int(target)]
            record.actual.setdefault(target, []).append(statistics.fmean(mine))

    def step(self) -> None:
        """One batch: generated by the policy that is `delay` old, then trained."""
        step = self.record.steps
        version = max(0, step - self.mode.delay)
        groups = self.generate(version)
        rows = [row for group in groups for row in group]
        if self.mode.inject:
            rows = [self.injected(row) for row in rows]
        line = train_step(self.learner, batch_of(rows, self.mode.samples, step), Stopwatch())
        self.record.gradient_norms.append(float(line["gradient_norm"]))
        self.record.steps += 1
        state = published_state(self.learner.policy, self.learner.world)
        export(state, MODEL, self.policies.path(self.record.steps))
        self.policies.drop_before(version - OLDER)

    def injected(self, row: Rollout) -> Rollout:
        """A row some of whose tokens claim to have been far less likely than they were."""
        values = [
            value - 5.0 if self.rng.random() < self.mode.inject else value for value in row.logprobs
        ]
        return replace(row, logprobs=tuple(values))

    def generate(self, version: int) -> list[list[Rollout]]:
        """Groups for a batch: files come until it is full, never more than it still lacks."""
        wanted = self.mode.groups
        taken: list[list[Rollout]] = []
        while len(taken) < wanted:
            for rows in self.files_of(version, -(-(wanted - len(taken)) // FILE_GROUPS)):
                for group in sorted({row.group for row in rows}):
                    members = [row for row in rows if row.group == group]
                    if not self.mode.filtered or len({row.reward for row in members}) > 1:
                        taken.append(members)
        return taken[:wanted]

    def files_of(self, version: int, count: int) -> Iterator[list[Rollout]]:
        """The rows of each of `count` more files; those of the same maker are generated together,
        which changes nothing about them."""
        made: list[Draft] = []
        for _ in range(count):
            number = (self.record.seed << 24) + self.files
            lease = synthetic_lease(self.run, number, version)
            lies = self.rng.random() < self.mode.liars
            engine = self.policies.load(version, 4 if lies else None)
            plan = build.plan_rows(
                lease.signed.lease, lease.lease_digest, self.run, self.environment, engine.tokenizer
            )
            made.append(Draft(lease, lies, engine, plan))
            self.files += 1
            self.record.samples += FILE_GROUPS * self.mode.samples
        for lies in (False, True):
            mine = [draft for draft in made if draft.lies is lies]
            if mine:
                rows = [row for draft in mine for row in draft.plan]
                answers = iter(build.generate_rows(rows, self.run, mine[0].engine))
                for draft in mine:
                    draft.generations = [next(answers) for _ in draft.plan]
        for draft in made:
            draft.rewards = build.grade_rows(
                draft.plan, draft.generations, self.environment, draft.engine.tokenizer
            )
            yield self.judged(draft) if self.mode.liars else plain(draft)

    def judged(self, draft: Draft) -> list[Rollout]:
        """The rows of a file that the real validator accepts; none of one that it rejects."""
        lease = draft.lease
        proofs = build.prove_rows(lease.lease_digest, draft.plan, draft.generations)
        data = write_rollout_file(
            build.assemble_rows(lease.signed, draft.plan, draft.generations, draft.rewards, proofs),
            build.metadata_of(lease.lease_digest, draft.engine),
        )
        secret = encoding.sha256(b"learning" + lease.lease_digest.encode())
        found: Finding = verify_file(Case(
            data, lease.signed, lease.lease_digest, self.run, self.environment, self.policies,
            draw_secret=secret, submission_digest=lease.lease_digest,
        ))  # fmt: skip
        accepted = found.outcome is Outcome.ACCEPTED
        self.record.liars_files += draft.lies
        self.record.missed += draft.lies and accepted
        self.record.wronged += not draft.lies and not accepted
        if not accepted:
            self.record.rejected += FILE_GROUPS * self.mode.samples
            return []
        table = found.verdict_table(
            lease.lease_digest, encoding.sha256(data), lease.signed.policy_version, 0
        )
        return load_rollouts(data, table)


def plain(draft: Draft) -> list[Rollout]:
    """An honest file's rows without the way through proofs and judging."""
    return [
        row.rollout(made, draft.lease.signed.policy_version, reward)
        for row, made, reward in zip(draft.plan, draft.generations, draft.rewards, strict=True)
    ]


def learn(name: str, seed: int, steps: int, world: World) -> Record:
    """A whole run: until an evaluation reaches the goal, or `steps` are trained."""
    started = time.process_time()
    with tempfile.TemporaryDirectory(prefix="learning-") as folder:
        learning = Learning(name, seed, Path(folder), world)
        record = learning.record
        learning.evaluate()
        while record.steps < steps:
            learning.step()
            if record.steps % EVALUATE_EVERY == 0 or record.steps == steps:
                learning.evaluate()
                if record.curve[-1][2] >= GOAL:
                    break
    record.samples_to_goal = crossing(record.curve, GOAL)
    record.cpu_seconds = round(time.process_time() - started, 1)
    return record
