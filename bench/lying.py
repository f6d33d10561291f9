"""What all ways to lie (attacks.py) share: the files to lie about, honest work done for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Protocol

from bench.honest import Bench
from prime_engine.base import Engine, Generation, GenerationRequest, ReplayRequest
from prime_engine.variants import VARIANTS
from prime_engine.vllm import NAME as VLLM
from prime_verify.build import PlannedRow
from prime_verify.engines import load_engine
from prime_verify.rollout_file import FileRow, read_rollout_file, write_rollout_file
from prime_verify.setups import HonestFile

DTYPE = "bfloat16"
Plan = Sequence[PlannedRow]
Made = Sequence[Generation]


@dataclass(frozen=True)
class Job:
    """The files to lie about: those of the leases `numbers`."""

    bench: Bench
    numbers: range

    @property
    def honest_engine(self) -> Engine:
        return self.bench.engine(DTYPE)

    @cached_property
    def leases(self) -> list[tuple[HonestFile, list[PlannedRow]]]:
        return [self.bench.lease(number) for number in self.numbers]

    @property
    def plan(self) -> list[PlannedRow]:
        """The rows of all files, one after another."""
        return [row for _, plan in self.leases for row in plan]

    def files(self, generations: Made, change: Change | None = None) -> list[HonestFile]:
        """The files of `generations` (of `plan`, in order), declared as the honest engine's."""
        left = list(generations)
        files = []
        for lease, plan in self.leases:
            made, left = left[: len(plan)], left[len(plan) :]
            altered = None
            if change is not None:
                altered = partial(change, job=self, lease=lease, made=made)
            files.append(self.bench.assemble(lease, plan, made, self.honest_engine, altered))
        return files


class Change(Protocol):
    """Alters the rows of one file that was made honestly."""

    def __call__(
        self, rows: list[FileRow], plan: Plan, *, job: Job, lease: HonestFile, made: Made
    ) -> list[FileRow]: ...


Attack = Callable[[Job], list[HonestFile]]


@cache
def _loaded(folder: Path, device: str, name: str) -> Engine:
    return load_engine(folder, dtype=DTYPE, device=device, threads=1, prepare=VARIANTS[name])


def variant(job: Job, name: str) -> Engine:
    return _loaded(job.bench.folder, job.bench.device, name)


def asked_of(job: Job, plan: Plan, keyed: bool = True, flip: int = 0) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            row.prompt_tokens,
            job.bench.run.max_output_tokens,
            row.noise_seed ^ flip if keyed else None,
        )
        for row in plan
    ]


def claim(job: Job, plan: Plan, tokens: Sequence[Sequence[int]]) -> list[Generation]:
    """Given tokens as if the true policy had drawn them: its states and log-probabilities."""
    engine = job.honest_engine
    replays = engine.replay(
        [
            ReplayRequest(row.prompt_tokens, tuple(text), row.noise_seed)
            for row, text in zip(plan, tokens, strict=True)
        ],
        job.bench.run.temperature,
    )
    return [
        Generation(
            tuple(text),
            found.logprobs,
            found.states,
            "end" if text[-1] in engine.end_tokens else "length",
        )
        for text, found in zip(tokens, replays, strict=True)
    ]


def retold(choose: Callable[[Job, Plan], Sequence[Sequence[int]]]) -> Attack:
    """Tokens by `choose`; states and log-probabilities those of the true policy for them."""

    def attack(job: Job) -> list[HonestFile]:
        return job.files(claim(job, job.plan, choose(job, job.plan)))

    return attack


def texts(made: Sequence[Generation]) -> list[tuple[int, ...]]:
    return [generation.output_tokens for generation in made]


def as_vllm(made: HonestFile) -> HonestFile:
    """The same file, declared as vLLM's work."""
    file = read_rollout_file(made.data)
    data = write_rollout_file(file.rows, replace(file.metadata, engine=VLLM))
    return replace(made, data=data)
