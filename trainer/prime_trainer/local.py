"""`trainer local`: a run's whole loop in one process, without chain, keys or pool.

    run.toml ─► run definition, as `orchestrator run new` makes it
    policy s ─► leases' rows: plan, generate, grade           (prime_verify/build.py, as a node)
      ─► groups with some difference in their rewards         (prime_core/batch.py, as a manager)
        ─► train_step: advantages, objective, packing         (learner.py, as `trainer run`)
          ─► policy s + 1: a model folder, loaded again ─► every few steps: held-out problems

What is left out: proofs, verification and pay, since the trainer trusts what it generates itself.

<out>/run.json           the run definition; a pool made of the same TOML has the same digest
<out>/metrics.jsonl      one line a step;  curve.svg  its rewards
<out>/samples.jsonl      prompts and answers of each step, with rewards and what they are made of
<out>/evaluations.jsonl  one line an evaluation on held-out problems
<out>/model/             the last policy, a Hugging Face folder
<out>/checkpoints/       until then: what --resume goes on from (checkpoint.py), and with it
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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from prime_broadcast.files import write_whole
from prime_broadcast.manifest import build_manifest
from prime_core import encoding
from prime_core.batch import FreeGroup, choose
from prime_core.errors import FatalError, UserError
from prime_core.folders import held_alone, make_folder
from prime_core.ids import Step
from prime_core.rollout import Rollout
from prime_core.run import MICRO, RunDefinition
from prime_core.stopping import interruptible
from prime_core.waiting import StoppedError
from prime_engine.base import Engine
from prime_envs.base import Grade, texts_of
from prime_envs.definition import read_toml, require_config, run_from
from prime_envs.registry import environment_for
from prime_trainer import checkpoint
from prime_trainer.alarms import alarms_of
from prime_trainer.checkpoint import TrainerState
from prime_trainer.config import Settings
from prime_trainer.data import GroupKey, TrainingBatch
from prime_trainer.disk import writing
from prime_trainer.evaluate import ask, compared, pass_at_k, summary
from prime_trainer.finished import curve
from prime_trainer.learner import make_learner, train_step
from prime_trainer.loading import require_model_folder
from prime_trainer.metrics import MetricsFile, Stopwatch, read_lines
from prime_trainer.observe import Observers
from prime_trainer.parallel import World, joined_world, published_state
from prime_trainer.publish import export
from prime_trainer.sampling import Answered
from prime_trainer.train import MAX_SKIPPED_IN_A_ROW
from prime_verify.build import PlannedRow, generate_rows, plan_rows
from prime_verify.engines import load_engine
from prime_verify.setups import synthetic_lease

log = logging.getLogger(__name__)

POOL_ONLY: Mapping[str, Any] = {
    "task": {"image": "local"}, "price_per_unit": 0, "stake_per_class": 0, "slash_amount": 0,
}  # fmt: skip
"""What a TOML needs for a pool alone, and may leave out here."""
MODEL, CHECKPOINTS = "model", "checkpoints"
"""In the run's folder: the last policy, once it is finished; until then, its checkpoints."""
MOST_GENERATED = 20
"""Batches' worth of groups generated for one step; then its tasks are too easy or too hard."""


@dataclass(frozen=True)
class Options:
    """What `trainer local` is told beyond the run and the trainer's settings."""

    engine: str = "plain"
    dtype: str = "float32"
    device: str = "cpu"
    threads: int | None = None
    evaluate_every: int = 10
    """Steps between evaluations, besides those of the first and the last policy; 0: none."""
    problems: int = 64
    """Held-out problems of an evaluation."""
    seed: int = 0
    """Fixes the tasks, the sampling noise and the evaluation's problems."""
    samples: int = 8
    """Rows of a step that are written to samples.jsonl."""
    checkpoint_every: int = 10
    """Steps between checkpoints, besides that of a run that is stopped; 0: none."""
    resume: bool = False
    """Go on with the run in the folder, from its last checkpoint."""


@dataclass(frozen=True)
class Group:
    """All answers to one prompt, by the policy that made them."""

    free: FreeGroup
    rollouts: tuple[Rollout, ...]

    @property
    def key(self) -> GroupKey:
        """Its lease's digest and its number there."""
        return self.free.sha256, self.free.group_no


@dataclass
class Made:
    """What was generated for one step."""

    rows: list[tuple[PlannedRow, Rollout, Grade]] = field(default_factory=list)
    groups: int = 0
    alike: int = 0

    def figures(self, samples: int) -> dict[str, Any]:
        """Metrics of everything that was generated, whether it is trained or not; `samples`: rows
        of a group."""
        rewards = [rollout.reward for _, rollout, _ in self.rows]
        if not rewards:
            return {"generated_rows": 0}
        mean = math.fsum(rewards) / len(rewards)
        passed = [grade.parts["task_micro"] >= MICRO for _, _, grade in self.rows]
        groups = [sum(passed[at : at + samples]) for at in range(0, len(passed), samples)]
        parts: dict[str, list[float]] = defaultdict(list)
        for row, rollout, _ in self.rows:
            parts[_source(row)].append(rollout.reward)
        return {
            "generated_rows": len(rewards),
            "generated_reward": mean,
            "reward_deviation": math.sqrt(
                math.fsum((value - mean) ** 2 for value in rewards) / len(rewards)
            ),
            "task": math.fsum(g.parts["task_micro"] for _, _, g in self.rows)
            / MICRO
            / len(rewards),
            "pass_1": sum(passed) / len(passed),
            "pass_k": math.fsum(pass_at_k(samples, one, samples) for one in groups) / len(groups),
            "reward_by_environment": {
                name: math.fsum(values) / len(values) for name, values in sorted(parts.items())
            },
        }


def _source(row: PlannedRow) -> str:
    """Where a task comes from, as far as it says so."""
    for key in ("environment", "source"):
        if isinstance(name := row.problem.metadata.get(key), str) and name:
            return name
    return "run"


def local_run(source: Path, model: Path) -> RunDefinition:
    """The run of a TOML file for the base model in `model`. Raises UserError."""
    require_config(model)
    require_model_folder(model)
    values = {**POOL_ONLY, **read_toml(source)}
    base = build_manifest(model, pool=0, version=0, step=0).result_digest
    return run_from(values, source, model, base)


def run_local(
    source: Path,
    settings: Settings,
    options: Options,
    stop: threading.Event,
    say: Callable[[str], None] = print,
) -> Path:
    """Trains `settings.steps` policies from the TOML file `source`; returns the last one's folder.

    Call it in the main thread. Raises StoppedError if it was told to stop, after it has written
    what `options.resume` goes on from: at once while it generates, else after the step. Raises
    UserError if `settings.data` holds a run already (to resume: none, another or a finished one),
    or the tasks give no difference in rewards, FatalError for an alarm that ends the run or a
    damaged checkpoint, what the engine raises.
    """
    out, base = settings.data, settings.need("model")
    if settings.steps is None:
        raise UserError("the number of steps is not given", hint="name it by --steps")
    run = _run_to_resume(source, base, out) if options.resume else _new_run(source, base, out)
    if options.evaluate_every and not 1 <= options.problems <= run.environment.heldout_size:
        raise UserError(
            f"{options.problems} held-out problems were asked for; the run holds out "
            f"{run.environment.heldout_size}",
            hint="change --problems or heldout_size, or say --evaluate-every 0",
        )
    make_folder(out / CHECKPOINTS)
    threads = options.threads or torch.get_num_threads()
    with ExitStack() as stack:
        stack.enter_context(held_alone(out / CHECKPOINTS, "trainer local"))
        write_whole(out / "run.json", run.raw())
        world = stack.enter_context(joined_world())
        if world.size > 1:
            raise UserError("a local run is one process", hint="start it without torchrun")
        torch.set_num_threads(threads)
        observers = stack.enter_context(Observers.of(settings, leads=True))
        local = Local(run, settings, options, world, observers, say)
        stack.callback(local.close)
        return local.train(stop)


def _new_run(source: Path, base: Path, out: Path) -> RunDefinition:
    make_folder(out)
    if any(out.iterdir()):
        raise UserError(
            f"{out} is not empty", hint="name another folder by --out, or go on with --resume"
        )
    return local_run(source, base)


def _run_to_resume(source: Path, base: Path, out: Path) -> RunDefinition:
    if not (out / "run.json").is_file():
        raise UserError(f"{out} holds no run to go on with", hint="leave out --resume")
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
    """One local run: its policies, the groups that wait for a batch, and what it writes."""

    def __init__(
        self,
        run: RunDefinition,
        settings: Settings,
        options: Options,
        world: World,
        observers: Observers,
        say: Callable[[str], None],
    ) -> None:
        self.run, self.settings, self.options = run, settings, options
        self.observers, self.say = observers, say
        self.out: Path = settings.data
        self.base: Path = settings.need("model")
        self.world = world
        self.environment = environment_for(run)
        self.learner = make_learner(run, settings, world)
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
                "the same command with --resume goes on"
            ) from error
        return self.finish()

    def step(self) -> dict[str, Any]:
        """One batch: generated, chosen, trained, and its policy loaded; its line of metrics. Raises
        StoppedError while it generates; the step is then not begun."""
        watch = Stopwatch(begins=self.observers.waiting)
        before = self.leases, list(self.waiting)
        try:
            with watch.timed("generate"):
                batch, made = self.batch()
        except StoppedError:
            self.leases, self.waiting = before
            raise
        line = train_step(self.learner, batch, watch) | made.figures(self.run.samples_per_group)
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
        """The next batch and everything that was generated for it. Raises UserError if the answers
        to one task are all rewarded alike, whatever is asked."""
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
                raise UserError(
                    f"step {step}: {made.groups} groups of {run.samples_per_group} answers were "
                    f"generated, and in {made.alike} of them all are rewarded alike, which teaches "
                    "nothing",
                    hint="take easier or harder tasks (trainer filter), or more samples_per_group",
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
        """Answers to so many more leases' prompts; groups with some difference go to `waiting`."""
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
                environment=self.environment,
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
                rollout = Rollout(
                    problem_id=row.problem.problem_id,
                    group=row.group,
                    sample=row.sample,
                    prompt_tokens=row.prompt_tokens,
                    output_tokens=generation.output_tokens,
                    logprobs=tuple(float(value) for value in generation.logprobs),
                    target_length=row.target_length,
                    finish_reason=generation.finish_reason,
                    policy_version=self.version,
                    reward=grade.reward_micro / MICRO,
                    spans=generation.spans,
                )
                groups[row.group].append(rollout)
                made.rows.append((row, rollout, grade))
            for number, rollouts in groups.items():
                informative = len({rollout.reward for rollout in rollouts}) > 1
                made.groups += 1
                made.alike += not informative
                if informative:
                    total = sum(round(rollout.reward * MICRO) for rollout in rollouts)
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
                    )
                    self.waiting.append(Group(free, tuple(rollouts)))

    def _load(self) -> Engine:
        options = self.options
        return load_engine(
            self.folder, engine=options.engine, dtype=options.dtype, device=options.device
        )

    def _replace(self, state: dict[str, torch.Tensor]) -> None:
        """Writes the weights as the next policy's folder and loads it in the engine's place."""
        before, own = self.folder, self.folder != self.base
        self.version += 1
        self.folder = self.out / "policies" / str(self.version)
        export(state, self.base, self.folder, self.settings.training())
        self.engine.close()
        self.engine = self._load()
        if own:
            shutil.rmtree(before)

    def evaluate(self) -> None:
        """Asks the newest policy held-out problems: always the same, with the same noise."""
        self.observers.waiting("evaluate")
        run, seed = self.run, self.options.seed
        with interruptible():
            answered = ask(
                self.folder, run, self.options.problems, seed, 1, self.options.device, self.engine
            )
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
        """Writes what the run goes on from; the checkpoint comes last and makes it count. There
        is nothing to keep before the first step."""
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
            step = TrainerState(self.run.digest(), self.version)
            checkpoint.save(self.out, step, self.learner.policy, self.learner.optimizer, self.world)
        kept = {
            _state_of(self.out, int(one.name)) for one in folder.iterdir() if one.name.isdigit()
        }
        for old in set(folder.glob(_state_of(self.out, "*").name)) - kept:
            old.unlink()

    def _resume(self) -> None:
        """Goes back to the last checkpoint; lines of later steps are dropped. Without one, the run
        begins again. Raises UserError if the evaluations would not be those of before."""
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
        for name, key, newest in (
            ("metrics.jsonl", "step", self.version - 1),
            ("samples.jsonl", "step", self.version - 1),
            ("evaluations.jsonl", "version", self.evaluated),
        ):
            kept = [line for line in read_lines(out / name) if line[key] <= newest]
            text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept)
            with writing(f"the file {name}", out / name):
                write_whole(out / name, text.encode())
        self.say(f"goes on from policy {self.version}")

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.leases, self.evaluated = state["leases"], state["evaluated"]
        self.waiting = [
            Group(FreeGroup(**group["free"]), tuple(Rollout(**row) for row in group["rollouts"]))
            for group in state["waiting"]
        ]
        if state["first"] is not None:
            self.first = [
                Answered(
                    self.environment.problem(one["index"]),
                    one["target"],
                    tuple(Grade(**grade) for grade in one["grades"]),
                )
                for one in state["first"]
            ]

    def finish(self) -> Path:
        """The newest policy's folder at its place, and the curve."""
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
        """Rows from all over what a step generated: texts, and what their rewards are made of."""
        tokenizer, wanted = self.engine.tokenizer, self.options.samples
        apart = max(1, len(made.rows) // max(1, wanted))
        self._append(
            "samples.jsonl",
            [
                {
                    "step": step,
                    "policy": rollout.policy_version,
                    "problem": rollout.problem_id,
                    "target": rollout.target_length,
                    "prompt": tokenizer.decode(list(rollout.prompt_tokens)),
                    "turns": texts_of(tokenizer, rollout.output_tokens, rollout.spans),
                    "tokens": rollout.generated,
                    "finish": rollout.finish_reason,
                    "reward": rollout.reward,
                    "parts": dict(grade.parts),
                    "reason": grade.reason,
                }
                for _, rollout, grade in made.rows[::apart][:wanted]
            ],
        )

    def _append(self, name: str, lines: Sequence[Mapping[str, Any]]) -> None:
        path = self.out / name
        with writing(f"the file {name}", path), path.open("a") as file:
            file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def _state_of(out: Path, step: int | str) -> Path:
    """The file beside a checkpoint; `step` may be a pattern."""
    return out / CHECKPOINTS / f"local-{step}.json"


def _plain(value: Any) -> Any:
    """An array or a mapping as JSON has it."""
    return dict(value) if isinstance(value, Mapping) else list(value)


def _progress(line: Mapping[str, Any]) -> str:
    """A step's line as a person reads it."""
    if not line["generated_rows"]:
        return f"step {line['step']}: reward {line['reward']:.3f} of groups that were left over"
    return (
        f"step {line['step']}: reward {line['generated_reward']:.3f} "
        f"± {line['reward_deviation']:.3f}, correct {line['pass_1']:.3f}, "
        f"{line['output_tokens_mean']:.0f} tokens an answer, {line['groups_alike']:.0%} of the "
        f"groups alike, {sum(line['seconds'].values()):.1f} s"
    )
