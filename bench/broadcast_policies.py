"""Consecutive policies of the devnet's model, trained as the trainer trains it and published as the
trainer publishes them: `python -m bench.broadcast_policies OUT [--steps 12] [--keep 4]`.

Real rollouts of the reverse task (seeded, graded), the run's own objective, AdamW at 3e-4 after ten
steps of warm-up; the last `keep` policies are left as checkpoint folders OUT/0, OUT/1, …
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.form import ROOT
from bench.trainer_parts import bench_run
from prime_broadcast.manifest import build_manifest
from prime_core import seeds
from prime_core.ids import Digest, Step
from prime_core.rollout import Rollout
from prime_core.run import MICRO, LengthBudgets, RunDefinition
from prime_engine.plain import PlainEngine
from prime_envs.registry import environment_ref, load_environment
from prime_trainer.config import Settings
from prime_trainer.data import TrainingBatch
from prime_trainer.learner import make_learner, train_step
from prime_trainer.metrics import Stopwatch
from prime_trainer.parallel import joined_world, published_state
from prime_trainer.publish import export
from prime_verify.build import PlannedRow, generate_rows
from prime_verify.proofs.sampling_torch import gumbel

MODEL = ROOT / "devnet" / "model"
RATE, WARM_UP = 3e-4, 10
GROUPS, SAMPLES, HELDOUT = 16, 8, 256
SEED = Digest("0x" + "b0" * 32)


def run_definition() -> RunDefinition:
    """The devnet's run in all that shapes a gradient, with smaller batches."""
    budgets = LengthBudgets(targets=(2, 6, 10, 14), penalty_micro=150_000, form="clip")
    problems = len(load_environment("reverse", {}, budgets)) - HELDOUT
    return bench_run(
        groups=GROUPS,
        samples=SAMPLES,
        base_model=build_manifest(MODEL, pool=0, version=0, step=0).result_digest,
        environment=environment_ref(
            "reverse", {}, budgets, train_size=problems, heldout_size=HELDOUT
        ),
        max_output_tokens=40,
        groups_per_lease=2,
        budgets=budgets,
    )


def batch_of(run: RunDefinition, engine: PlainEngine, step: int) -> TrainingBatch:
    """One batch of fresh rollouts: groups whose rewards are all equal are left out, as sealed
    batches leave them out."""
    environment = load_environment("reverse", {}, run.budgets)
    count = 2 * run.groups_per_batch
    seed = seeds.lease_seed(Digest(f"0x{step:064x}"))
    indices = seeds.problem_indices(seed, count, run.environment.train_size)
    targets = seeds.target_lengths(seed, count, run.budgets.targets)
    rows = []
    for group, (index, target) in enumerate(zip(indices, targets, strict=True)):
        problem = environment.problem(index)
        prompt = tuple(environment.prompt_tokens(problem, target, engine.tokenizer))
        for sample in range(run.samples_per_group):
            key = seeds.noise_seed(seed, group, sample)
            rows.append(PlannedRow(group, sample, problem, target, prompt, key))
    rollouts: list[Rollout] = []
    for row, made in zip(rows, generate_rows(rows, run, engine), strict=True):
        grade = environment.grade_output(
            row.problem, row.target_length, made.output_tokens, engine.tokenizer
        )
        rollouts.append(row.rollout(made, step, grade.reward_micro / MICRO))
    size = run.samples_per_group
    groups = [tuple(rollouts[at : at + size]) for at in range(0, len(rollouts), size)]
    mixed = [group for group in groups if len({row.reward for row in group}) > 1]
    taken = mixed[: run.groups_per_batch]
    keys = tuple((SEED, number) for number in range(len(taken)))
    return TrainingBatch(Step(step), SEED, tuple(taken), keys)


def train(out: Path, steps: int, keep: int) -> list[Path]:
    """Trains `steps` steps and returns the folders of the last `keep` policies, oldest first."""
    run = run_definition()
    settings = Settings(
        model=MODEL, data=out, learning_rate=RATE, warmup_steps=WARM_UP, weight_decay=0.0
    )
    present = MODEL
    made: list[Path] = []
    with joined_world() as world:
        learner = make_learner(run, settings, world)
        for step in range(steps):
            engine = PlainEngine(present, noise=gumbel)
            train_step(learner, batch_of(run, engine, step), Stopwatch())
            present = out / f"step-{step}"
            export(published_state(learner.policy, world), MODEL, present)
            made.append(present)
    return made[-keep:]


def main(words: list[str]) -> int:
    """Prints one folder a line."""
    parser = argparse.ArgumentParser(prog="python -m bench.broadcast_policies")
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=WARM_UP + 3)
    parser.add_argument("--keep", type=int, default=4)
    options = parser.parse_args(words)
    for folder in train(options.out, options.steps, options.keep):
        print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
