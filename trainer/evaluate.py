"""Evaluation: the mean of the run's own reward over held-out problems, from a seed.

The seed fixes problems, target lengths and sampling noise, so two people who evaluate the same
weights with the same seed ask the same questions; engine and reward are those of the run.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from protocol.core import encoding, seeds
from protocol.core.errors import UserError
from protocol.core.ids import Digest
from protocol.core.run import RunDefinition
from protocol.environments.base import decode_output
from protocol.environments.registry import environment_for

NORMAL_95 = 1.959964


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % confidence interval (normal approximation), over `count` samples."""

    mean: float
    low: float
    high: float
    count: int


@dataclass(frozen=True)
class Evaluation:
    """Rewards on held-out problems; `task` is correctness alone, `length_error` the mean distance
    from the target in the environment's own unit of length; all by the run's own grader."""

    model: str
    seed: int
    reward: Interval
    task: Interval
    length_error: Interval
    by_target: dict[str, Interval]

    def as_json(self) -> dict[str, object]:
        """Plain data for `--json`; `mean_reward` repeats `reward.mean`."""
        return {"mean_reward": self.reward.mean, **asdict(self)}


def interval(values: Sequence[float]) -> Interval:
    """Mean and 95 % interval. Raises ValueError without values."""
    if not values:
        raise ValueError("no values to average")
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Interval(mean, -math.inf, math.inf, 1)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    half = NORMAL_95 * math.sqrt(variance / count)
    return Interval(mean, mean - half, mean + half, count)


def evaluation_seed(seed: int) -> Digest:
    """The 32 bytes from which everything random in an evaluation is drawn."""
    if not 0 <= seed < 1 << 64:
        raise UserError(f"the evaluation seed {seed} is not in 0 … 2^64 − 1")
    return encoding.sha256(b"prime/evaluate/v1" + seed.to_bytes(8, "big"))


def evaluate(
    model: Path, run: RunDefinition, *, problems: int, seed: int, device: str = "cpu"
) -> Evaluation:
    """Samples one answer to each of `problems` held-out problems, at the run's temperature.

    Targets are drawn from all that the run may ask of any speed class. Raises UserError if the run
    holds out fewer problems, UnavailableError if `model` cannot be loaded, PolicyError if the
    installed environment is not the run's.
    """
    from protocol.engine.base import GenerationRequest
    from protocol.engine.plain import PlainEngine
    from protocol.proofs.sampling_torch import gumbel

    ref = run.environment
    if not 1 <= problems <= ref.heldout_size:
        raise UserError(
            f"{problems} problems were asked for; the run holds out {ref.heldout_size}",
            hint=f"use --problems 1 to {ref.heldout_size}",
        )
    environment = environment_for(run)
    engine = PlainEngine(model, noise=gumbel, device=device, batch_rows=256)
    source = evaluation_seed(seed)
    allowed = sorted({target for targets in run.budgets.by_class.values() for target in targets})
    asked = [
        environment.problem(ref.train_size + index)
        for index in seeds.problem_indices(source, problems, ref.heldout_size)
    ]
    targets = seeds.target_lengths(source, problems, allowed)
    requests = [
        GenerationRequest(
            prompt_tokens=tuple(environment.prompt_tokens(problem, target, engine.tokenizer)),
            max_output_tokens=run.max_output_tokens,
            noise_key=seeds.noise_key(source, number, 0),
        )
        for number, (problem, target) in enumerate(zip(asked, targets, strict=True))
    ]
    answers = engine.generate(requests, run.temperature)
    rewards: list[float] = []
    tasks: list[float] = []
    errors: list[float] = []
    by_target: dict[str, list[float]] = defaultdict(list)
    for problem, target, answer in zip(asked, targets, answers, strict=True):
        text = decode_output(engine.tokenizer, answer.output_tokens)
        grade = environment.grade(problem, target, text, len(answer.output_tokens))
        rewards.append(grade.score)
        tasks.append(grade.parts["task_micro"] / 1e6)
        errors.append(abs(grade.parts["length"] - target))
        by_target[str(target)].append(grade.score)
    return Evaluation(
        model=str(model),
        seed=seed,
        reward=interval(rewards),
        task=interval(tasks),
        length_error=interval(errors),
        by_target={name: interval(values) for name, values in sorted(by_target.items())},
    )
