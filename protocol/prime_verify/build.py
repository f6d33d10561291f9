"""From a lease to its rollout file: plan → generate → grade → prove → Parquet.

The node's worker calls `build_rollout_file`; a validator plans the same rows from the same seed.
Each step is a function of its own, so that tests and the devnet's liars can replace exactly one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prime_core import seeds
from prime_core.ids import Digest
from prime_core.proof_form import PROOF_WINDOW
from prime_core.run import MICRO, RunDefinition
from prime_core.task import Lease, SignedLease
from prime_engine.base import Engine, Generation, GenerationRequest, StateSink
from prime_envs.base import Environment, Problem
from prime_verify.proofs import activations, sketch
from prime_verify.rollout_file import FileMetadata, FileRow, write_rollout_file


@dataclass(frozen=True)
class PlannedRow:
    """What the lease's seed dictates for one row."""

    group: int
    sample: int
    problem: Problem
    target_length: int
    prompt_tokens: tuple[int, ...]
    noise_seed: int


def plan_rows(
    lease: Lease,
    lease_digest: Digest,
    run: RunDefinition,
    environment: Environment,
    tokenizer: Any,
    problems: Digest | None = None,
) -> list[PlannedRow]:
    """The rows of a lease, sorted by (group, sample). `problems`: see SignedLease.problems."""
    seed = seeds.lease_seed(lease_digest)
    groups = run.groups_per_lease
    indices = seeds.problem_indices(problems or seed, groups, run.environment.train_size)
    rows = []
    for group, index in enumerate(indices):
        problem = environment.problem(index)
        prompt = tuple(environment.prompt_tokens(problem, lease.target, tokenizer))
        for sample in range(run.samples_per_group):
            key = seeds.noise_seed(seed, group, sample)
            rows.append(PlannedRow(group, sample, problem, lease.target, prompt, key))
    return rows


def generate_rows(
    plan: Sequence[PlannedRow],
    run: RunDefinition,
    engine: Engine,
    sink: StateSink | None = None,
) -> list[Generation]:
    """Generates every planned row with its noise, at the run's temperature and length limit."""
    requests = [
        GenerationRequest(row.prompt_tokens, run.max_output_tokens, row.noise_seed) for row in plan
    ]
    return engine.generate(requests, run.temperature, sink)


def generate_proved(
    lease_digest: Digest, plan: Sequence[PlannedRow], run: RunDefinition, engine: Engine
) -> tuple[list[Generation], list[tuple[bytes, bytes]]]:
    """`generate_rows` and `prove_rows` at once: each window is proved when it is full, so that no
    states are kept."""
    from prime_verify.proofs.windows import WindowReducer  # torch: planning rows needs none

    seed = seeds.lease_seed(lease_digest)

    def key_of(row: int, window: int, tokens: Sequence[int]) -> bytes:
        return seeds.sketch_key(seed, plan[row].group, plan[row].sample, window, tokens)

    reducer = WindowReducer(key_of)
    generations = generate_rows(plan, run, engine, reducer)
    proofs = [reducer.proof(row) for row in range(len(plan))]
    return generations, [(proof.proofs, proof.sketch) for proof in proofs]


def sketch_keys(seed: Digest, group: int, sample: int, output_tokens: Sequence[int]) -> list[bytes]:
    """The sketch key of each proof window of a row."""
    width = PROOF_WINDOW
    return [
        seeds.sketch_key(seed, group, sample, window, output_tokens[window * width :][:width])
        for window in range(activations.windows_of(len(output_tokens)))
    ]


def prove_rows(
    lease_digest: Digest, plan: Sequence[PlannedRow], generations: Sequence[Generation]
) -> list[tuple[bytes, bytes]]:
    """(activation proofs, sketch) of each row, packed as the file holds them."""
    seed = seeds.lease_seed(lease_digest)
    windows = [activations.split_windows(g.states) for g in generations]
    proofs = iter(activations.build([window for row in windows for window in row]))
    packed = []
    for row, generation, parts in zip(plan, generations, windows, strict=True):
        keys = sketch_keys(seed, row.group, row.sample, generation.output_tokens)
        own_proofs = activations.pack([next(proofs) for _ in parts])
        packed.append((own_proofs, sketch.pack(sketch.build(parts, keys))))
    return packed


def grade_rows(
    plan: Sequence[PlannedRow],
    generations: Sequence[Generation],
    environment: Environment,
    tokenizer: Any,
) -> list[float]:
    """The node's own reward of each row; a validator grades again."""
    return [
        environment.grade_output(
            row.problem, row.target_length, generation.output_tokens, tokenizer
        ).reward_micro
        / MICRO
        for row, generation in zip(plan, generations, strict=True)
    ]


def assemble_rows(
    signed: SignedLease,
    plan: Sequence[PlannedRow],
    generations: Sequence[Generation],
    rewards: Sequence[float],
    proofs: Sequence[tuple[bytes, bytes]],
) -> list[FileRow]:
    """Everything of each row put together."""
    return [
        FileRow(
            problem_id=row.problem.problem_id,
            group=row.group,
            sample=row.sample,
            prompt_tokens=row.prompt_tokens,
            output_tokens=generation.output_tokens,
            logprobs=generation.logprobs,
            target_length=row.target_length,
            finish_reason=generation.finish_reason,
            policy_version=signed.policy_version,
            reward=reward,
            proofs=activation_proofs,
            sketch=row_sketch,
        )
        for row, generation, reward, (activation_proofs, row_sketch) in zip(
            plan, generations, rewards, proofs, strict=True
        )
    ]


def metadata_of(lease_digest: Digest, engine: Engine) -> FileMetadata:
    """The set-up that made the file."""
    return FileMetadata(
        lease=lease_digest, engine=engine.name, dtype=engine.dtype, device=engine.device
    )


def build_rollout_file(
    signed: SignedLease,
    lease_digest: Digest,
    run: RunDefinition,
    engine: Engine,
    environment: Environment,
) -> bytes:
    """The honest rollout file of one lease, as Parquet bytes.

    `engine` has the policy `signed.policy_version` loaded; `lease_digest` is the EIP-712 digest of
    `signed.lease` under the pool's Work domain.
    """
    plan = plan_rows(
        signed.lease, lease_digest, run, environment, engine.tokenizer, signed.problems()
    )
    generations, proofs = generate_proved(lease_digest, plan, run, engine)
    rewards = grade_rows(plan, generations, environment, engine.tokenizer)
    rows = assemble_rows(signed, plan, generations, rewards, proofs)
    return write_rollout_file(rows, metadata_of(lease_digest, engine))
