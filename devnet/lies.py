"""Ways to lie, each the honest builder with exactly one step replaced.

Known lies for the demo, tests and the detection bench; an honest node never imports this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from protocol.core import seeds
from protocol.core.ids import Digest
from protocol.core.run import RunDefinition
from protocol.core.task import SignedLease
from protocol.engine.base import Engine, Generation
from protocol.environments.base import Environment
from protocol.proofs import activations, sketch
from protocol.verification import build
from protocol.verification.build import PlannedRow
from protocol.verification.rollout_file import write_rollout_file

Builder = Callable[[SignedLease, Digest, RunDefinition, Engine, Environment], bytes]
Proved = Sequence[tuple[bytes, bytes]]

TRIES = 4


def int4(
    signed: SignedLease, digest: Digest, run: RunDefinition, engine: Engine, env: Environment
) -> bytes:
    """Everything as asked, by an engine whose weights were rounded to 4 bits (see `liars.py`)."""
    return build.build_rollout_file(signed, digest, run, engine, env)


def best_of_4(
    signed: SignedLease, digest: Digest, run: RunDefinition, engine: Engine, env: Environment
) -> bytes:
    """Samples each row four times, honestly otherwise, and hands in the one that pays best."""
    plan = build.plan_rows(signed.lease, digest, run, env, engine.tokenizer)
    tries = []
    for number in range(TRIES):
        noisy = [
            replace(row, noise_key=(row.noise_key[0] ^ number, row.noise_key[1])) for row in plan
        ]
        generations = build.generate_rows(noisy, run, engine)
        tries.append((build.grade_rows(plan, generations, env, engine.tokenizer), generations))
    best = np.argmax([rewards for rewards, _ in tries], axis=0)
    rewards = [tries[t][0][i] for i, t in enumerate(best)]
    generations = [tries[t][1][i] for i, t in enumerate(best)]
    proofs = build.prove_rows(digest, plan, generations)
    return _assemble(signed, digest, plan, generations, rewards, proofs, engine)


def copied_proof(
    signed: SignedLease, digest: Digest, run: RunDefinition, engine: Engine, env: Environment
) -> bytes:
    """Proves the first row of each group and hands in that proof for its other samples too."""

    def prove(plan: Sequence[PlannedRow], generations: Sequence[Generation]) -> Proved:
        honest = build.prove_rows(digest, plan, generations)
        first = {row.group: honest[i] for i, row in reversed(list(enumerate(plan)))}
        return [
            first[row.group] if len(first[row.group][0]) == len(own[0]) else own
            for row, own in zip(plan, honest, strict=True)
        ]

    return _with_proofs(prove, signed, digest, run, engine, env)


def made_up_proof(
    signed: SignedLease, digest: Digest, run: RunDefinition, engine: Engine, env: Environment
) -> bytes:
    """Never computes a state: proofs and sketches of random activations of the right shape."""
    seed = seeds.lease_seed(digest)

    def prove(plan: Sequence[PlannedRow], generations: Sequence[Generation]) -> Proved:
        rng = np.random.default_rng(int(digest[2:18], 16))
        packed = []
        for row, generation in zip(plan, generations, strict=True):
            noise = rng.normal(size=generation.states.shape).astype(np.float32)
            states = (noise.view(np.uint32) >> 16).astype(np.uint16)  # bf16 bits of the noise
            windows = activations.split_windows(states)
            keys = build.sketch_keys(seed, row.group, row.sample, generation.output_tokens)
            packed.append(
                (
                    activations.pack(activations.build(windows)),
                    sketch.pack(sketch.build(windows, keys)),
                )
            )
        return packed

    return _with_proofs(prove, signed, digest, run, engine, env)


def _with_proofs(
    prove: Callable[[Sequence[PlannedRow], Sequence[Generation]], Proved],
    signed: SignedLease,
    digest: Digest,
    run: RunDefinition,
    engine: Engine,
    env: Environment,
) -> bytes:
    plan = build.plan_rows(signed.lease, digest, run, env, engine.tokenizer)
    generations = build.generate_rows(plan, run, engine)
    rewards = build.grade_rows(plan, generations, env, engine.tokenizer)
    return _assemble(signed, digest, plan, generations, rewards, prove(plan, generations), engine)


def _assemble(
    signed: SignedLease,
    digest: Digest,
    plan: Sequence[PlannedRow],
    generations: Sequence[Generation],
    rewards: Sequence[float],
    proofs: Proved,
    engine: Engine,
) -> bytes:
    rows = build.assemble_rows(signed, plan, generations, rewards, proofs)
    return write_rollout_file(rows, build.metadata_of(digest, engine))


LIES: dict[str, Builder] = {
    "int4": int4,
    "best_of_4": best_of_4,
    "copied_proof": copied_proof,
    "made_up_proof": made_up_proof,
}
