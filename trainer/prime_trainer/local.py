"""`trainer local`: a run's whole training loop in one process, without chain, keys or pool.

    run.toml ─► run definition, as `orchestrator run new` creates it
    policy s ─► leases' rows: plan, generate, grade           (prime_verify/build.py, as a node)
      ─► groups whose rewards differ                          (prime_core/batch.py, as a manager)
        ─► train_step: advantages, objective, packing         (learner.py, as `trainer run`)
          ─► policy s + 1: a model folder, loaded again ─► every few steps: held-out problems

Proofs, verification and pay are omitted, because the trainer trusts its own generations.

<out>/run.json           the run definition; a pool built from the same TOML has the same digest
<out>/metrics.jsonl      one line per step;  curve.svg  its rewards
<out>/samples.jsonl      prompts and answers of each step, with rewards and their parts
<out>/evaluations.jsonl  one line per evaluation on held-out problems
<out>/model/             the last policy, a Hugging Face folder
<out>/checkpoints/       until then: the state for --resume (checkpoint.py), including
    local-<step>.json    the groups that wait for a batch and the first evaluation
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from prime_broadcast.files import write_whole
from prime_broadcast.manifest import build_manifest
from prime_core import encoding
from prime_core.batch import FreeGroup, choose
from prime_core.errors import FatalError, UserError
from prime_core.folders import held_alone, make_folder
from prime_core.gateway import Answers
from prime_core.ids import Step
from prime_core.rollout import Rollout
from prime_core.run import MICRO, RunDefinition
from prime_core.waiting import StoppedError, interruptible
from prime_engine.base import Discard, Engine
from prime_envs.base import UNASKED, Grade, Problem
from prime_envs.definition import read_toml, require_config, run_from
from prime_envs.registry import environment_for
from prime_envs.shares import pass_at_k
from prime_trainer import checkpoint
from prime_trainer.advantages import UNCOMPARED
from prime_trainer.checkpoint import TrainerState
from prime_trainer.config import Settings
from prime_trainer.data import GroupKey, TrainingBatch
from prime_trainer.disk import writing
from prime_trainer.evaluate import ask, compared, summary
from prime_trainer.finished import curve
from prime_trainer.learner import Learner, make_learner, train_step
from prime_trainer.loading import require_model_folder
from prime_trainer.metrics import MetricsFile, Stopwatch, alarms_of, read_lines
from prime_trainer.observe import Observers
from prime_trainer.parallel import joined_world, published_state
from prime_trainer.publish import export
from prime_trainer.samples import SAMPLES, append_samples, sample_line, spread, tool_figures
from prime_trainer.sampling import Answered, Sampling, recorded
from prime_trainer.train import MAX_SKIPPED_IN_A_ROW
from prime_verify.build import PlannedRow, generate_rows, plan_rows
from prime_verify.proofs.thresholds import newest
from prime_verify.setups import synthetic_lease

log = logging.getLogger(__name__)

POOL_ONLY: Mapping[str, Any] = {
    "task": {"image": "local"}, "price_per_unit": 0, "stake_per_seat": 0, "slash_amount": 0,
}  # fmt: skip
"""Values that only a pool needs, so that a TOML may omit them here."""
MODEL, CHECKPOINTS = "model", "checkpoints"
"""Folders in the run's folder: the last policy, once finished; its checkpoints, until then."""
MAX_SEED = (1 << 32) - 1
MOST_GENERATED = 20
"""Maximum groups generated for one step, in batches' worth; beyond it, the tasks are too easy or
too hard."""


@dataclass(frozen=True)
class Options:
    """Options of `trainer local`, apart from the run and the trainer's settings."""

    engine: str = "plain"
    dtype: str = "float32"
    device: str = "cpu"
    threads: int | None = None
    evaluate_every: int = 10
    """Steps between evaluations, in addition to those of the first and the last policy; 0: none."""
    problems: int = 64
    """Held-out problems per evaluation."""
    seed: int = 0
    """Determines the tasks, the sampling noise and the evaluation's problems; at most MAX_SEED."""
    samples: int = 8
    """Rows per step that are written to samples.jsonl."""
    checkpoint_every: int = 10
    """Steps between checkpoints, in addition to the one written when a run is stopped; 0: none."""
    resume: bool = False
    """Continue the run in the folder from its last checkpoint."""
    cassette: Path | None = None
    """Recorded answers for the calls of the gateway's tools; a request without one ends its row as
    `tool_limit`."""


@dataclass(frozen=True)
class Group:
    """All answers to one prompt, generated by one policy."""

    free: FreeGroup
    rollouts: tuple[Rollout, ...]

    @property
    def key(self) -> GroupKey:
        """Its lease's digest and its number in the lease."""
        return self.free.sha256, self.free.group_no


@dataclass
class Made:
    """Everything generated for one step."""

    rows: list[tuple[PlannedRow, Rollout, Grade]] = field(default_factory=list)
    groups: int = 0
    alike: int = 0

    def figures(self, samples: int) -> dict[str, Any]:
        """Metrics of everything generated, trained on or not; `samples`: rows per group."""
        graded = [one for one in self.rows if not one[2].ungraded]
        rewards = [rollout.reward for _, rollout, _ in graded]
        if not rewards:
            return {"generated_rows": 0}
        mean = math.fsum(rewards) / len(rewards)
        groups = [
            [g.parts["task_micro"] >= MICRO for _, _, g in group if not g.ungraded]
            for group in (self.rows[at : at + samples] for at in range(0, len(self.rows), samples))
        ]
        passes = [pass_at_k(len(one), sum(one), len(one)) for one in groups if one]
        sources: dict[str, list[float]] = defaultdict(list)
        parts: dict[str, list[int]] = defaultdict(list)
        for row, rollout, grade in graded:
            sources[_source(row)].append(rollout.reward)
            for name, value in grade.parts.items():
                parts[name].append(value)
        return {
            "generated_rows": len(self.rows),
            "generated_reward": mean,
            "reward_deviation": math.sqrt(
                math.fsum((value - mean) ** 2 for value in rewards) / len(rewards)
            ),
            "task": math.fsum(g.parts["task_micro"] for _, _, g in graded) / MICRO / len(rewards),
            "pass_1": sum(map(sum, groups)) / len(rewards),
            "pass_k": math.fsum(passes) / len(passes),
            "reward_by_environment": {
                name: math.fsum(values) / len(values) for name, values in sorted(sources.items())
            },
            "reward_parts": {
                name: math.fsum(values) / len(values) for name, values in sorted(parts.items())
            },
        }


def _source(row: PlannedRow) -> str:
    """The source of a task, if its metadata names one."""
    for key in ("environment", "source"):
        if isinstance(name := row.problem.metadata.get(key), str) and name:
            return name
    return "run"


def local_run(source: Path, model: Path) -> RunDefinition:
    """Builds the run of a TOML file for the base model in `model`, as `orchestrator run new` does.
    Raises UserError."""
    require_config(model)
    require_model_folder(model)
    values = {**POOL_ONLY, "calibration": newest().digest(), **read_toml(source)}
    base = build_manifest(model, pool=0, version=0, step=0).result_digest
    return run_from(values, source, model, base)


def _print(line: str) -> None:
    """Prints at once, also where a pipe or a file is the output."""
    print(line, flush=True)


def run_local(
    source: Path,
    settings: Settings,
    options: Options,
    stop: threading.Event,
    say: Callable[[str], None] = _print,
) -> Path:
    """Trains `settings.steps` policies from the TOML file `source`; returns the last one's folder.

    Call it in the main thread. A stop request raises StoppedError after the state for
    `options.resume` has been written: immediately during generation, otherwise after the step.
    Raises UserError if `settings.data` already holds a run that has begun (with resume: holds none,
    another or a finished one) or the tasks give equal rewards, FatalError for an alarm that ends
    the run or a damaged checkpoint, and the engine's errors.
    """
    out, base = settings.data, settings.need("model")
    if settings.steps is None:
        raise UserError("the number of steps is not given", hint="name it by --steps")
    if not 0 <= options.seed <= MAX_SEED:
        raise UserError(f"the seed {options.seed} is not in 0 … {MAX_SEED}", hint="change --seed")
    run = _run_to_resume(source, base, out) if options.resume else _new_run(source, base, out)
    if options.evaluate_every and not 1 <= options.problems <= run.environment.heldout_size:
        raise UserError(
            f"{options.problems} held-out problems were asked for; the run holds out "
            f"{run.environment.heldout_size}",
            hint="change --problems or heldout_size, or say --evaluate-every 0",
        )
    answers = recorded(run, options.cassette)
    make_folder(out / CHECKPOINTS)
    threads = options.threads or torch.get_num_threads()
    with ExitStack() as stack:
        stack.enter_context(held_alone(out / CHECKPOINTS, "trainer local", "--out"))
        write_whole(out / "run.json", run.raw())
        world = stack.enter_context(joined_world())
        if world.size > 1:
            raise UserError("a local run is one process", hint="start it without torchrun")
        torch.set_num_threads(threads)
        observers = stack.enter_context(Observers.of(settings, leads=True))
        learner = make_learner(run, settings, world)
        local = Local(learner, options, observers, say, answers)
        stack.callback(local.close)
        return local.train(stop)


def _new_run(source: Path, base: Path, out: Path) -> RunDefinition:
    make_folder(out)
    if any(out.iterdir()) and not _failed_at_start(out):
        raise UserError(
            f"{out} is not empty", hint="name another folder with --out, or continue with --resume"
        )
    return local_run(source, base)


def _failed_at_start(out: Path) -> bool:
    """Whether the folder has only what a run writes before its first step or evaluation: its
    definition, the lock, and TensorBoard's files."""
    files = {path.relative_to(out) for path in out.rglob("*") if not path.is_dir()}
    own = {Path("run.json"), Path(CHECKPOINTS, "lock")}
    return (out / CHECKPOINTS).is_dir() and all(
        path.name.startswith("events.out.tfevents") for path in files - own
    )


def _run_to_resume(source: Path, base: Path, out: Path) -> RunDefinition:
    if not (out / "run.json").is_file():
        raise UserError(f"{out} holds no run to continue", hint="leave out --resume")
    if (out / MODEL).exists():
        raise UserError(
            f"the run in {out} is finished: its policy is in {out / MODEL}",
            hint="to train on, name that folder by --model and another by --out",
        )
    run = local_run(source, base)
    if run.raw() != (out / "run.json").read_bytes():
        raise UserError(
            f"{source} and the model make another run than the one in {out}",
            hint="resume with the file and the model that it was started with",
        )
    return run


class Local:
    """One local run: its policies, the groups that wait for a batch, and its output files."""

    def __init__(
        self,
        learner: Learner,
        options: Options,
        observers: Observers,
        say: Callable[[str], None],
        answers: Answers | None = None,
    ) -> None:
        run, settings = learner.run, learner.settings
        self.run, self.learner, self.settings, self.options = run, learner, settings, options
        self.world = learner.world
        self.observers, self.say = observers, say
        self.out: Path = settings.data
        self.base: Path = settings.need("model")
        self.answers = answers
        self.environment = environment_for(run)
        self.folder, self.version = self.base, 0
        self.waiting: list[Group] = []
        self.leases = 0
        self.first: list[Answered] | None = None
        self.evaluated = -1
        if options.resume:
            self._resume()
        self.engine = self._load()
        self.metrics = MetricsFile(self.out / "metrics.jsonl")

    def close(self) -> None:
        """Ends the grader's processes and frees the engine."""
        self.environment.close()
        self.engine.close()

    def train(self, stop: threading.Event) -> Path:
        """See run_local."""
        steps, every = self.settings.steps or 0, self.options.evaluate_every
        often, skipped = self.options.checkpoint_every, 0
        try:
            while True:
                if stop.is_set():
                    raise StoppedError
                due = every and (self.version % every == 0 or self.version == steps)
                if due and self.evaluated < self.version:
                    self.evaluate()
                if self.version >= steps:
                    break
                line = self.step()
                skipped = 0 if line["applied"] else skipped + 1
                if skipped >= MAX_SKIPPED_IN_A_ROW:
                    raise FatalError(f"{skipped} steps in a row changed no weight")
                if often and self.version % often == 0 and self.version < steps:
                    self.save()
        except StoppedError as error:
            self.save()
            raise StoppedError(
                f"stopped at policy {self.version} of {steps}, which is kept in {self.out}; "
                "continue with the same command and --resume"
            ) from error
        return self.finish()

    def step(self) -> dict[str, Any]:
        """Runs one step: generates and selects a batch, trains, and loads the new policy. Returns
        its line of metrics. Raises StoppedError during generation, in which case the step is rolled
        back."""
        watch = Stopwatch(begins=self.observers.waiting)
        before = self.leases, list(self.waiting)
        try:
            with watch.timed("generate"):
                batch, made = self.batch()
        except StoppedError:
            self.leases, self.waiting = before
            raise
        line = train_step(self.learner, batch, watch) | made.figures(self.run.samples_per_group)
        rollouts = [rollout for _, rollout, _ in made.rows]
        line |= tool_figures(rollouts, self.run.conversation, self.engine.tokenizer)
        line["alarms"] = alarms_of(line, self.settings)
        for alarm in line["alarms"]:
            log.warning("alarm at step %d: %s", batch.step, alarm)
        with watch.timed("snapshot"):
            state = published_state(self.learner.policy, self.world)
            self._replace(state)
        line |= {"time": time.time(), "seconds": dict(watch.seconds)}
        self.observers.complete(line, self.world.size)
        self.metrics.append(line)
        self.observers.step(line)
        self._write_samples(batch.step, made)
        self.say(_progress(line))
        if line["alarms"] and self.settings.alarm_action == "stop":
            raise FatalError(f"alarm at step {batch.step}: {'; '.join(line['alarms'])}")
        return line

    def batch(self) -> tuple[TrainingBatch, Made]:
        """Returns the next batch and everything generated for it. Raises UserError if too many
        groups have equal rewards."""
        run, step, made = self.run, self.version, Made()
        wanted = run.groups_per_batch + run.surplus_groups
        self.waiting = [g for g in self.waiting if run.fresh(step, g.free.policy_version)]
        while True:
            chosen = choose(
                [group.free for group in self.waiting],
                step=step,
                groups_per_batch=run.groups_per_batch,
                max_staleness=run.max_staleness,
                surplus=run.surplus_groups,
                selection=run.selection,
            )
            if chosen is not None:
                break
            if made.groups >= MOST_GENERATED * wanted:
                self._write_samples(step, made)
                raise UserError(
                    f"step {step}: {made.groups} groups of {run.samples_per_group} answers were "
                    f"generated, and in {made.alike} of them all are rewarded alike, which teaches "
                    "nothing",
                    hint=f"read them (trainer samples {self.out}); take easier or harder tasks "
                    "(trainer filter), or more samples_per_group",
                )
            with interruptible():
                self._generate(-(-(wanted - len(self.waiting)) // run.groups_per_lease), made)
        known = {group.key: group for group in self.waiting}
        keys = tuple((free.sha256, free.group_no) for free in chosen)
        taken = [known.pop(key) for key in keys]
        self.waiting = list(known.values())
        batch = TrainingBatch(
            Step(step),
            encoding.sha256(encoding.canonical_json([list(key) for key in keys])),
            tuple(group.rollouts for group in taken),
            keys,
            made.groups,
            made.alike,
        )
        return batch, made

    def _generate(self, leases: int, made: Made) -> None:
        """Generates answers to the prompts of `leases` more leases; groups whose rewards differ are
        added to `waiting`."""
        run, plans = self.run, []
        for _ in range(leases):
            number = (self.options.seed << 32) + self.leases
            lease = synthetic_lease(run, number, self.version, self.version)
            tokenizer = self.engine.tokenizer
            plan = plan_rows(
                lease.signed.lease, lease.lease_digest, run, self.environment, tokenizer
            )
            plans.append((lease.lease_digest, plan))
            self.leases += 1
        generations = iter(
            generate_rows(
                [row for _, plan in plans for row in plan],
                run,
                self.engine,
                Discard(),
                self.environment,
                self.answers,
            )
        )
        for digest, plan in plans:
            groups: dict[int, list[Rollout]] = defaultdict(list)
            for row in plan:
                generation = next(generations)
                grade = self.environment.grade_output(
                    row.problem,
                    row.target_length,
                    generation.output_tokens,
                    self.engine.tokenizer,
                    generation.spans,
                )
                rollout = row.rollout(generation, self.version, grade.reward_micro / MICRO)
                if grade.ungraded:
                    rollout = replace(rollout, finish_reason="ungraded")
                groups[row.group].append(rollout)
                made.rows.append((row, rollout, grade))
            for number, rollouts in groups.items():
                compared = [row.reward for row in rollouts if row.finish_reason not in UNCOMPARED]
                informative = len(set(compared)) > 1
                made.groups += 1
                made.alike += not informative
                if informative:
                    total = sum(round(reward * MICRO) for reward in compared)
                    free = FreeGroup(
                        submission_digest=digest,
                        group_no=number,
                        policy_version=self.version,
                        rows=len(rollouts),
                        informative=informative,
                        reward_micro_sum=total,
                        accepted_at=float(self.leases),
                        sha256=digest,
                        size=0,
                        table=digest,
                        ungraded=len(rollouts) - len(compared),
                    )
                    self.waiting.append(Group(free, tuple(rollouts)))

    def _load(self) -> Engine:
        options = self.options
        return Sampling(options.engine, options.dtype, options.device).load(self.folder)

    def _replace(self, state: dict[str, torch.Tensor]) -> None:
        """Writes the weights as the next policy's folder and loads it in place of the old one."""
        before, own = self.folder, self.folder != self.base
        self.version += 1
        self.folder = self.out / "policies" / str(self.version)
        export(state, self.base, self.folder, self.settings.training())
        self.engine.close()
        self.engine = self._load()
        if own:
            shutil.rmtree(before)

    def evaluate(self) -> None:
        """Evaluates the newest policy on held-out problems: always the same ones, with the same
        noise."""
        self.observers.waiting("evaluate")
        run, seed = self.run, self.options.seed
        with interruptible():
            answered = ask(self.engine, run, self.options.problems, seed, 1, self.answers)
        found = summary(self.folder, seed, run, answered)
        line: dict[str, Any] = {"version": self.version, **found.as_json()}
        said = f"policy {self.version}, {self.options.problems} held-out problems: "
        said += f"reward {found.reward.mean:.3f}, correct {found.pass_1.mean:.3f}"
        if self.first is None:
            self.first = answered
        else:
            both = compared(self.base, self.folder, run, seed, self.first, answered)
            line["gain"] = {"reward": asdict(both.reward_gain), "pass_1": asdict(both.pass_1_gain)}
            gains = {"reward": both.reward_gain, "correct": both.pass_1_gain}
            said += "; since policy 0 " + ", ".join(
                f"{name} {gain.mean:+.3f} [{gain.low:+.3f}, {gain.high:+.3f}]"
                for name, gain in gains.items()
            )
        self._append("evaluations.jsonl", [line])
        self.evaluated = self.version
        self.say(said)

    def save(self) -> None:
        """Writes the state for resuming; the checkpoint is written last and makes it valid. Does
        nothing before the first step."""
        if not self.version:
            return
        state = {
            "seed": self.options.seed,
            "problems": self.options.problems,
            "leases": self.leases,
            "waiting": [
                {"free": vars(group.free), "rollouts": [vars(row) for row in group.rollouts]}
                for group in self.waiting
            ],
            "evaluated": self.evaluated,
            "first": None
            if self.first is None
            else [
                {
                    "index": one.problem.index,
                    "unasked": one.problem.unasked,
                    "target": one.target,
                    "grades": [vars(grade) for grade in one.grades],
                }
                for one in self.first
            ],
        }
        self.observers.waiting("checkpoint")
        folder = self.out / CHECKPOINTS
        path = _state_of(self.out, self.version)
        with writing("the run's state", path):
            write_whole(path, json.dumps(state, default=_plain).encode())
        newest = checkpoint.latest(self.out)
        if newest is None or newest.name != str(self.version):
            step = TrainerState(self.run.digest(), self.version, self.version)
            checkpoint.save(self.out, step, self.learner.policy, self.learner.optimizer, self.world)
        kept = {
            _state_of(self.out, int(one.name)) for one in folder.iterdir() if one.name.isdigit()
        }
        for old in set(folder.glob(_state_of(self.out, "*").name)) - kept:
            old.unlink()

    def _resume(self) -> None:
        """Restores the last checkpoint and drops the lines of later steps. Without a checkpoint,
        the run starts over. Raises UserError if seed or number of problems differ from before."""
        learner, out, options = self.learner, self.out, self.options
        found = checkpoint.load(
            out, self.run.digest(), learner.policy, learner.optimizer, self.world
        )
        if found is not None:
            self.version = found.step
            path = _state_of(out, found.step)
            try:
                state = json.loads(path.read_text())
                self._restore(state)
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise FatalError(f"{path} is damaged: {error}") from error
            if (state["seed"], state["problems"]) != (options.seed, options.problems):
                raise UserError(
                    f"the run was started with --seed {state['seed']} --problems "
                    f"{state['problems']}",
                    hint="give the same to --resume",
                )
        shutil.rmtree(out / "policies", ignore_errors=True)
        if self.version:
            self.folder = out / "policies" / str(self.version)
            weights = published_state(learner.policy, self.world)
            export(weights, self.base, self.folder, self.settings.training())
        for name, key, last in (
            ("metrics.jsonl", "step", self.version - 1),
            (SAMPLES, "step", self.version - 1),
            ("evaluations.jsonl", "version", self.evaluated),
        ):
            kept = [line for line in read_lines(out / name, key) if line[key] <= last]
            text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept)
            with writing(f"the file {name}", out / name):
                write_whole(out / name, text.encode())
        self.say(f"continues from policy {self.version}")

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.leases, self.evaluated = state["leases"], state["evaluated"]
        self.waiting = [
            Group(FreeGroup(**group["free"]), tuple(Rollout(**row) for row in group["rollouts"]))
            for group in state["waiting"]
        ]
        if state["first"] is not None:
            self.first = [
                Answered(
                    Problem(UNASKED, one["index"], "", "", unasked=one["unasked"])
                    if one["unasked"]
                    else self.environment.problem(one["index"]),
                    one["target"],
                    tuple(Grade(**grade) for grade in one["grades"]),
                )
                for one in state["first"]
            ]

    def finish(self) -> Path:
        """Moves the newest policy's folder to its final place and writes the curve."""
        out = self.out / MODEL
        with writing("the trained model", out):
            if self.folder == self.base:
                shutil.copytree(self.base, self.out / "policies" / "0")
                self.folder = self.out / "policies" / "0"
            self.folder.rename(out)
            shutil.rmtree(self.out / "policies")
            shutil.rmtree(self.out / CHECKPOINTS)
            steps = read_lines(self.out / "metrics.jsonl")
            (self.out / "curve.svg").write_text(curve(steps))
        self.say(f"policy {self.version}: {out}")
        return out

    def _write_samples(self, step: int, made: Made) -> None:
        """Writes rows spread evenly over those that a step generated: texts, rewards and their
        parts."""
        lines = [
            sample_line(
                step, rollout, self.run, self.engine.tokenizer, grade.parts, reason=grade.reason
            )
            for _, rollout, grade in spread(made.rows, self.options.samples)
        ]
        append_samples(self.out, lines)
        self.observers.texts(step, lines)

    def _append(self, name: str, lines: Sequence[Mapping[str, Any]]) -> None:
        path = self.out / name
        with writing(f"the file {name}", path), path.open("a") as file:
            file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def _state_of(out: Path, step: int | str) -> Path:
    """The state file of a checkpoint; `step` may be a glob pattern."""
    return out / CHECKPOINTS / f"local-{step}.json"


def _plain(value: Any) -> Any:
    """Converts an array or a mapping for JSON."""
    return dict(value) if isinstance(value, Mapping) else list(value)


def _progress(line: Mapping[str, Any]) -> str:
    """A step's line in readable form."""
    if not line["generated_rows"]:
        return f"step {line['step']}: reward {line['reward']:.3f} of groups that were left over"
    return (
        f"step {line['step']}: reward {line['generated_reward']:.3f} "
        f"± {line['reward_deviation']:.3f}, correct {line['pass_1']:.3f}, "
        f"{line['output_tokens_mean']:.0f} tokens an answer, {line['groups_alike']:.0%} of the "
        f"groups alike, {sum(line['seconds'].values()):.1f} s"
    )
