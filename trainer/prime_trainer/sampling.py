"""Generates a model's answers to numbered problems of a run, graded by the run's own grader.

The seed determines problems, target lengths and sampling noise, so sampling the same weights with
the same seed gives the same answers; engine and reward are those of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prime_core import encoding, seeds
from prime_core.errors import UserError
from prime_core.gateway import Answers
from prime_core.ids import Digest
from prime_core.run import MICRO, RunDefinition
from prime_engine.base import Engine
from prime_envs.base import Environment, Grade, Problem
from prime_verify.build import PlannedRow, generate_rows

ROWS = 256
"""Answers generated in one batch."""


@dataclass(frozen=True)
class Answered:
    """One problem with its target and the grades of its samples, in sample order."""

    problem: Problem
    target: int
    grades: tuple[Grade, ...]

    @property
    def passes(self) -> int:
        """Number of fully correct samples, of any length."""
        return sum(grade.parts["task_micro"] >= MICRO for grade in self.grades)


def sampling_seed(seed: int, purpose: bytes = b"evaluate") -> Digest:
    """The 32-byte seed of all randomness. Raises UserError if `seed` is not a 64-bit number."""
    if not 0 <= seed < 1 << 64:
        raise UserError(f"the evaluation seed {seed} is not in 0 … 2^64 − 1")
    return encoding.sha256(b"prime/" + purpose + b"/v1" + seed.to_bytes(8, "big"))


def answer(
    model: Path,
    run: RunDefinition,
    environment: Environment,
    indices: Sequence[int],
    *,
    samples: int,
    source: Digest,
    device: str = "cpu",
    engine: Engine | None = None,
    gateway: Answers | None = None,
) -> list[Answered]:
    """Generates and grades `samples` answers to each problem of `indices`, at the run's
    temperature.

    `engine` has `model` loaded; None loads a plain engine on `device`. `gateway` answers calls of
    the gateway's tools (see build.generate_rows). Raises UnavailableError if
    `model` cannot be loaded, MalformedError for an invalid problem index.
    """
    from prime_engine.plain import PlainEngine
    from prime_verify.proofs.sampling_torch import gumbel

    engine = engine or PlainEngine(model, noise=gumbel, device=device, batch_rows=ROWS)
    asked = [environment.problem(index) for index in indices]
    targets = seeds.target_lengths(source, len(asked), run.budgets.targets)
    plan = [
        PlannedRow(
            group=number,
            sample=sample,
            problem=problem,
            target_length=target,
            prompt_tokens=tuple(environment.prompt_tokens(problem, target, engine.tokenizer)),
            noise_seed=seeds.noise_seed(source, number, sample),
        )
        for number, (problem, target) in enumerate(zip(asked, targets, strict=True))
        for sample in range(samples)
    ]
    answers = iter(generate_rows(plan, run, engine, environment=environment, answers=gateway))
    found = []
    for problem, target in zip(asked, targets, strict=True):
        grades = []
        for _ in range(samples):
            made = next(answers)
            grades.append(
                environment.grade_output(
                    problem, target, made.output_tokens, engine.tokenizer, made.spans
                )
            )
        found.append(Answered(problem, target, tuple(grades)))
    return found
