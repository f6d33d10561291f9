"""`python -m bench.standardised`: would the sketch see more if states were standardised first?

Files of the text model in bfloat16, honest ones and lies; each one's sketch distance to the replay
in float32 and to that in bfloat16 (same_dtype), over what the dtype alone makes on the same rows:
with states as they are, and with each dimension's mean and deviation taken out. A lie's figure is
the least of its files over the largest honest one. docs/verification.md gives the result.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.textmodel import FOLDER, STEPS, text_model
from prime_core import seeds
from prime_engine.base import Engine, ReplayRequest
from prime_engine.variants import VARIANTS
from prime_envs.registry import environment_for
from prime_verify.build import generate_rows, plan_rows, sketch_keys
from prime_verify.engines import load_engine
from prime_verify.proofs import activations, sketch
from prime_verify.proofs.thresholds import FLOORS
from prime_verify.setups import synthetic_lease, synthetic_run

LIES = ("int4", "int8", "old1_1e4", "old10_1e4", "old10_1e5")
TOKENS = 128
States = Sequence[NDArray[np.float32]]


@dataclass(frozen=True)
class Scale:
    """Mean and deviation of each hidden dimension (float32 [H])."""

    mean: NDArray[np.float32]
    deviation: NDArray[np.float32]

    def of(self, states: NDArray[np.float32]) -> NDArray[np.float32]:
        scaled: NDArray[np.float32] = ((states - self.mean) / self.deviation).astype(np.float32)
        return scaled


@dataclass(frozen=True)
class File:
    """Float states [T, H] of each row: claimed, replayed in float32, replayed in bfloat16."""

    claimed: States
    own: States
    same_dtype: States
    keys: Sequence[Sequence[bytes]]


def distance(a: States, b: States, keys: Sequence[Sequence[bytes]], scale: Scale | None) -> float:
    """Mean sketch distance over the windows of all rows."""
    found: list[float] = []
    for pair in zip(a, b, keys, strict=True):
        sides = [one if scale is None else scale.of(one) for one in pair[:2]]
        made = [
            sketch.build(activations.split_windows(sketch.float_to_bf16(one)), pair[2])
            for one in sides
        ]
        found += sketch.distances(*made).tolist()
    return float(np.mean(found))


def shares(file: File, scale: Scale | None) -> tuple[float, float]:
    """Distance to either replay over floor and dtype drift: (sketch, twin_sketch)."""
    explained = np.hypot(FLOORS["sketch"], distance(file.same_dtype, file.own, file.keys, scale))
    own = distance(file.claimed, file.own, file.keys, scale)
    same_dtype = distance(file.claimed, file.same_dtype, file.keys, scale)
    return own / float(explained), same_dtype / float(explained)


def _states(engine: Engine, plan: Sequence[Any], made: Sequence[Any]) -> States:
    asked = [
        ReplayRequest(row.prompt_tokens, tuple(one.output_tokens), row.noise_seed)
        for row, one in zip(plan, made, strict=True)
    ]
    return [sketch.bf16_to_float(found.states) for found in engine.replay(asked, 1.0)]


def files(folder: Path, count: int) -> dict[str, list[File]]:
    """`count` honest files (8 rows each), and as many of each lie."""
    run = synthetic_run(TOKENS, groups=2, samples=4)
    own = load_engine(folder, threads=1)
    same_dtype = load_engine(folder, dtype="bfloat16", threads=1)
    makers = {"honest": same_dtype}
    for name in LIES:
        makers[name] = load_engine(folder, dtype="bfloat16", threads=1, prepare=VARIANTS[name])
    made: dict[str, list[File]] = {name: [] for name in makers}
    for number in range(count):
        lease = synthetic_lease(run, number)
        digest = lease.lease_digest
        plan = plan_rows(lease.signed.lease, digest, run, environment_for(run), own.tokenizer)
        for name, maker in makers.items():
            rows = generate_rows(plan, run, maker)
            keys = [
                sketch_keys(seeds.lease_seed(digest), row.group, row.sample, one.output_tokens)
                for row, one in zip(plan, rows, strict=True)
            ]
            claimed = [sketch.bf16_to_float(one.states) for one in rows]
            made[name].append(
                File(claimed, _states(own, plan, rows), _states(same_dtype, plan, rows), keys)
            )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default=FOLDER)
    parser.add_argument("--steps", type=int, default=STEPS, help="of training, if it is not there")
    parser.add_argument("--files", type=int, default=10)
    options = parser.parse_args()
    made = files(text_model(options.model, options.steps), options.files)
    every = np.concatenate([row for file in made["honest"] for row in file.own])
    scale = Scale(every.mean(0), every.std(0))
    power = np.sort(np.square(every).mean(0))
    print(f"{power[-3:].sum() / power.sum():.0%} of the norm in 3 of {len(power)} dimensions")
    for words, chosen in (("as they are", None), ("standardised", scale)):
        found = {name: np.array([shares(file, chosen) for file in made[name]]) for name in made}
        least = {name: found[name].min(0) / found["honest"].max(0) for name in LIES}
        for at, statistic in enumerate(("sketch", "twin_sketch")):
            line = ", ".join(f"{name} {least[name][at]:.2f}" for name in LIES)
            print(f"{statistic}, states {words}: {line}")


if __name__ == "__main__":
    main()
