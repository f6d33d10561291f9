"""Evaluation on held-out problems: reward, pass@1 and pass@k, each with its 95 % interval.

A problem's pass probability is estimated from n samples. Intervals are over problems, because
samples of one problem are not independent. Base and trained model get the same problems, targets
and noise, so that differences are paired by problem.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from prime_core import seeds
from prime_core.errors import UserError
from prime_core.gateway import Answers
from prime_core.run import RunDefinition
from prime_engine.base import Engine
from prime_envs.registry import environment_for
from prime_envs.shares import Interval, interval, pass_at_k, share
from prime_trainer.sampling import (
    Answered,
    Kept,
    Sampling,
    answer,
    keep,
    recorded,
    sampling_seed,
)


@dataclass(frozen=True)
class Part:
    """Results for one environment or one budget."""

    reward: Interval
    pass_1: Interval
    pass_k: Interval
    length_error: Interval


@dataclass(frozen=True)
class Evaluation:
    """Results on held-out problems, from the run's own grader. `task` is correctness alone;
    `length_error` is the mean distance from the target in the environment's unit of length.

    `pass_1` and `pass_k`: probability that one answer, or at least one of k, is fully correct.
    """

    model: str
    seed: int
    samples: int
    reward: Interval
    task: Interval
    length_error: Interval
    pass_1: Interval
    pass_k: Interval
    by_target: dict[str, Interval]
    by_budget: dict[str, Part] = field(default_factory=dict)
    by_environment: dict[str, Part] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        """Plain data for `--json`; `mean_reward` repeats `reward.mean`."""
        return {"mean_reward": self.reward.mean, **asdict(self)}


@dataclass(frozen=True)
class Comparison:
    """Trained model against base on the same problems and noise; gains are paired differences."""

    base: Evaluation
    trained: Evaluation
    reward_gain: Interval
    pass_1_gain: Interval
    pass_k_gain: Interval

    def as_json(self) -> dict[str, object]:
        """Plain data for `--json`."""
        return {
            "mean_reward": self.trained.reward.mean,
            **asdict(self),
        }


def evaluate(
    model: Path,
    run: RunDefinition,
    *,
    problems: int,
    seed: int,
    samples: int = 1,
    sampling: Sampling = Sampling(),  # noqa: B008 - frozen
) -> Evaluation:
    """Generates `samples` answers to each of `problems` held-out problems, at the run's
    temperature, and summarizes them.

    Targets are drawn from all targets of the run. Raises UserError if the run holds out fewer
    problems, `sampling` keeps answers to another question or its cassette does not go with the run,
    UnavailableError if `model` cannot be loaded, PolicyError if the installed environment is not
    the run's.
    """
    return summary(model, seed, run, answers_of(model, run, problems, seed, samples, sampling))


def answers_of(
    model: Path,
    run: RunDefinition,
    problems: int,
    seed: int,
    samples: int,
    sampling: Sampling,
    name: str = "model",
) -> list[Answered]:
    """Loads `model` and returns its graded answers, kept under `name`. Raises the same errors as
    `evaluate`."""
    _require_heldout(run, problems)
    gateway = recorded(run, sampling.cassette)
    stated = {"run": run.digest(), "seed": seed, "samples": samples, "problems": problems}
    kept = keep(sampling, name, model, stated)
    engine = sampling.load(model)
    try:
        return ask(
            engine, run, problems, seed, samples,
            gateway=gateway, kept=kept, progress=sampling.progress,
        )  # fmt: skip
    finally:
        engine.close()


def ask(
    engine: Engine,
    run: RunDefinition,
    problems: int,
    seed: int,
    samples: int,
    gateway: Answers | None = None,
    kept: Kept | None = None,
    progress: Callable[[int], None] = lambda answered: None,
) -> list[Answered]:
    """Returns the graded answers of an evaluation; for `gateway` and `kept` see sampling.answer.
    `progress` is called after each batch with its number of problems. Raises the same errors as
    `evaluate`."""
    _require_heldout(run, problems)
    first, source = run.environment.train_size, sampling_seed(seed)
    drawn = seeds.problem_indices(source, problems, run.environment.heldout_size)
    environment = environment_for(run)
    found: list[Answered] = []
    try:
        for some in answer(
            engine, run, environment, [first + index for index in drawn],
            samples=samples, source=source, gateway=gateway, kept=kept,
        ):  # fmt: skip
            found += some
            progress(len(some))
    finally:
        environment.close()
    return found


def _require_heldout(run: RunDefinition, problems: int) -> None:
    ref = run.environment
    if not 1 <= problems <= ref.heldout_size:
        raise UserError(
            f"{problems} problems were asked for; the run holds out {ref.heldout_size}",
            hint=f"use --problems 1 to {ref.heldout_size}",
        )


def compare(
    base: Path,
    trained: Path,
    run: RunDefinition,
    *,
    problems: int,
    seed: int,
    samples: int,
    sampling: Sampling = Sampling(),  # noqa: B008 - frozen
) -> Comparison:
    """Evaluates both models on the same problems, targets and noise. Raises the same errors as
    `evaluate`."""
    before = answers_of(base, run, problems, seed, samples, sampling, "base")
    after = answers_of(trained, run, problems, seed, samples, sampling)
    return compared(base, trained, run, seed, before, after)


def compared(
    base: Path,
    trained: Path,
    run: RunDefinition,
    seed: int,
    before: Sequence[Answered],
    after: Sequence[Answered],
) -> Comparison:
    """Compares both models' answers to the same problems, as far as both were graded. Raises the
    same errors as `summary`."""
    found, later = summary(base, seed, run, before), summary(trained, seed, run, after)
    both = [(a.graded(), b.graded()) for a, b in zip(before, after, strict=True)]
    both = [(a, b) for a, b in both if a.grades and b.grades]
    if not both:
        raise UserError(f"the environment {run.environment.name} graded no problem of both models")

    def gain(measure: Callable[[Answered], float]) -> Interval:
        return interval([measure(b) - measure(a) for a, b in both])

    return Comparison(
        base=found,
        trained=later,
        reward_gain=gain(_reward),
        pass_1_gain=gain(_pass_1),
        pass_k_gain=gain(_pass_k),
    )


def summary(model: Path, seed: int, run: RunDefinition, answered: Sequence[Answered]) -> Evaluation:
    """Summarizes graded answers. Those that could not be graded are left out; raises UserError if
    that is all of them."""
    samples = len(answered[0].grades)
    answered = [one for one in map(Answered.graded, answered) if one.grades]
    if not answered:
        raise UserError(f"the environment {run.environment.name} could grade no answer")
    whole = _part(answered)
    by_budget = _split(answered, lambda one: str(one.target))
    by_environment = _split(answered, lambda one: environment_name(one, run))
    return Evaluation(
        model=str(model),
        seed=seed,
        samples=samples,
        reward=whole.reward,
        task=share([_mean([g.parts["task_micro"] / 1e6 for g in a.grades]) for a in answered]),
        length_error=whole.length_error,
        pass_1=whole.pass_1,
        pass_k=whole.pass_k,
        by_target={name: part.reward for name, part in by_budget.items()},
        by_budget=by_budget,
        by_environment=by_environment,
    )


def environment_name(one: Answered, run: RunDefinition) -> str:
    """The source of a problem, from its metadata, or else the run's environment."""
    for key in ("environment", "source"):
        if isinstance(name := one.problem.metadata.get(key), str) and name:
            return name
    return run.environment.name


def _split(answered: Sequence[Answered], key: Callable[[Answered], str]) -> dict[str, Part]:
    found: dict[str, list[Answered]] = defaultdict(list)
    for one in answered:
        found[key(one)].append(one)
    return {name: _part(members) for name, members in sorted(found.items())}


def _part(answered: Sequence[Answered]) -> Part:
    return Part(
        reward=interval([_reward(a) for a in answered]),
        pass_1=share([_pass_1(a) for a in answered]),
        pass_k=share([_pass_k(a) for a in answered]),
        length_error=interval(
            [_mean([abs(g.parts["length"] - a.target) for g in a.grades]) for a in answered]
        ),
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _reward(one: Answered) -> float:
    return _mean([grade.score for grade in one.grades])


def _pass_1(one: Answered) -> float:
    return pass_at_k(len(one.grades), one.passes, 1)


def _pass_k(one: Answered) -> float:
    return pass_at_k(len(one.grades), one.passes, len(one.grades))


def evaluation_table(found: Evaluation) -> str:
    """Overall figures, then by environment and by budget."""
    k = found.samples
    lines = [
        f"{name:13} {_show(value)}"
        for name, value in (
            ("reward", found.reward),
            ("task", found.task),
            ("length_error", found.length_error),
            ("pass@1", found.pass_1),
            (f"pass@{k}", found.pass_k),
        )[: 5 if k > 1 else 4]
    ]
    groups = [("environment", name, part) for name, part in found.by_environment.items()]
    budgets = sorted(found.by_budget.items(), key=lambda item: int(item[0]))
    groups += [("target", name, part) for name, part in budgets]
    for kind, name, part in groups:
        whole = f"pass@{k} {_show(part.pass_k)}  " if k > 1 else ""
        lines.append(
            f"  {kind} {name:>8}  reward {_show(part.reward)}  pass@1 {_show(part.pass_1)}  "
            f"{whole}({part.reward.count} problems)"
        )
    return "\n".join(lines)


def comparison_table(both: Comparison) -> str:
    """Base, trained, and the paired gains."""
    lines = [f"{'':13} {'base':26} {'trained':26} gain"]
    rows = (
        ("reward", both.base.reward, both.trained.reward, both.reward_gain),
        ("pass@1", both.base.pass_1, both.trained.pass_1, both.pass_1_gain),
        (f"pass@{both.base.samples}", both.base.pass_k, both.trained.pass_k, both.pass_k_gain),
    )
    for name, one, two, gain in rows[: 3 if both.base.samples > 1 else 2]:
        lines.append(f"{name:13} {_show(one):26} {_show(two):26} {_show(gain)}")
    for name, part in sorted(both.trained.by_budget.items(), key=lambda item: int(item[0])):
        before = both.base.by_budget.get(name)
        shown = "not graded" if before is None else _show(before.reward)
        lines.append(
            f"  target {name:>5} {shown:26} {_show(part.reward):26} ({part.reward.count} problems)"
        )
    return "\n".join(lines)


def _show(value: Interval) -> str:
    return f"{value.mean:7.4f}  [{value.low:.4f}, {value.high:.4f}]"
