"""The trainer on one GPU: tokens a second and MFU of a 0.5 B Qwen3-shaped model of random weights,
packed into rows of 4k and of 16k tokens, in bf16 with activation checkpointing.

A step is the whole `train_step`: plan, collate, forward, backward, clip, AdamW. MFU counts the
model's own operations (6 a parameter and token, and attention), not those computed twice. The peer
is prime-rl's published figure for 0.6 B at 16k on one H100; another device's is not comparable.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.form import Row
from bench.trainer_parts import (
    batch_of,
    bench_model,
    bench_run,
    bench_settings,
    published_lengths,
    random_rows,
)
from prime_core.errors import UnavailableError
from prime_trainer.learner import make_learner, train_step
from prime_trainer.metrics import Stopwatch
from prime_trainer.observe import peak_flops
from prime_trainer.parallel import World, joined_world

PACKAGES = ("torch", "transformers")
PEER_TOKENS_S, PEER = 11_896.0, "prime-rl, 0.6 B at 16k on one H100 (published)"
SAMPLES = 8
VOCABULARY = 151_936


@dataclass(frozen=True)
class Size:
    """One packing: tokens a row, lengths as a share of the published ones, groups a step."""

    name: str
    row_tokens: int
    scale: float
    groups: int


SIZES = (Size("4k", 4096, 1 / 4, 8), Size("16k", 16_384, 1.0, 4))


def run(quick: bool) -> list[Row]:
    """The rows. Raises UnavailableError where there is no GPU."""
    if not torch.cuda.is_available():
        raise UnavailableError("this bench needs a CUDA device, and this machine has none")
    found: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder, joined_world() as world:
        model = bench_model(
            Path(folder) / "model", hidden=1024, layers=28, vocabulary=VOCABULARY, positions=16_384
        )
        for size in SIZES:
            peer = PEER_TOKENS_S if size.name == "16k" else None
            found += rates(model, size, world, rounds=2 if quick else 5, bf16=True, peer=peer)
    return found


def rates(
    model: Path, size: Size, world: World, *, rounds: int, bf16: bool, peer: float | None = None
) -> list[Row]:
    """Tokens a second, and MFU where the device's peak is known; medians without the first step."""
    settings = bench_settings(
        model, model.parent, row_tokens=size.row_tokens, micro_tokens=size.row_tokens, bf16=bf16,
        recompute=True,
    )  # fmt: skip
    learner = make_learner(bench_run(groups=size.groups, samples=SAMPLES), settings, world)
    lengths = published_lengths(size.groups * SAMPLES, 11, size.scale)
    rows = random_rows(lengths, SAMPLES, 64, 12)
    seconds = []
    for step in range(rounds + 1):
        start = time.perf_counter()
        line = train_step(learner, batch_of(rows, SAMPLES, step), Stopwatch())
        if step:
            seconds.append(time.perf_counter() - start)
    took = statistics.median(seconds)
    found = [
        Row(f"tokens_s_{size.name}", line["tokens"] / took, "tok/s", peer=peer,
            peer_name=PEER if peer else "", better="higher"),
    ]  # fmt: skip
    device = torch.cuda.get_device_name() if world.device.type == "cuda" else "cpu"
    peak = peak_flops(settings, device)
    if peak is not None:
        found.append(
            Row(f"mfu_{size.name}", line["flops"] / (took * peak), f"of {device}", better="higher")
        )
    return found
