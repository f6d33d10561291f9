"""`trainer plan` of a step of QwQ-32B in samples of 32,896 tokens, on 8 to 64 cards of 80 GB:
arithmetic from the model's configuration, nothing is measured.

A batch has 128 groups of 16 samples, all of the longest length; rows and micro-batches hold one
sample, weights are bf16 in the forward pass, layers are recomputed, and KL needs a reference. The
peak is that of an H100 (989 TFLOP/s in bf16). `8bit` keeps AdamW's moments in 8 bits, `cpN` lets N
cards share each sample.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from bench.form import ROOT, Row
from bench.trainer_parts import bench_run, bench_settings
from prime_trainer.config import ObjectiveSettings
from prime_trainer.dryrun import ASSUMED_USE, MEASURED_USE, compare_plans

PACKAGES = ("torch", "transformers")
MODEL = ROOT / "docs" / "examples" / "models" / "qwq-32b.json"
SAMPLE_TOKENS, GROUPS, SAMPLES = 32_896, 128, 16
TFLOPS, MEMORY_GIB = 989.0, 78.0
CARDS = (8, 16, 32, 64)
SETUPS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "": (CARDS, {}),
    "_8bit": ((8, 16), {"optimizer": "adamw8bit"}),
    "_8bit_cp2": ((8,), {"optimizer": "adamw8bit", "context_parallel": 2}),
}
"""Names of setups: numbers of cards, settings."""


def run(quick: bool) -> list[Row]:
    """Rows NAME_of_CARDS_cards and, with other settings, NAME_of_CARDS_cards_SETUP. `quick`: 8
    cards alone."""
    found: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="bench-plan-") as name:
        folder = Path(name)
        shutil.copy2(MODEL, folder / "config.json")
        for setup, (cards, changes) in SETUPS.items():
            if quick and setup:
                break
            settings = bench_settings(
                folder, folder / "data", row_tokens=SAMPLE_TOKENS, micro_tokens=SAMPLE_TOKENS,
                bf16=True, recompute=True, peak_tflops=TFLOPS,
                objective=ObjectiveSettings(kl=0.001), **changes,
            )  # fmt: skip
            plans = compare_plans(
                bench_run(groups=GROUPS, samples=SAMPLES, max_output_tokens=32_768), settings,
                cards[: 1 if quick else None], SAMPLE_TOKENS, MEMORY_GIB,
            )  # fmt: skip
            for plan in plans:
                assert plan.seconds_per_batch is not None
                values = {
                    "kept": (plan.step.kept / 2**30, "GiB a card"),
                    "peak": (plan.step.peak / 2**30, "GiB a card"),
                    "fits": (float(bool(plan.fits)), f"1: the peak is at most {MEMORY_GIB:g} GiB"),
                    "micro_batches": (float(plan.micro_batches), "a card"),
                    "traffic": (plan.traffic / 2**40, "TiB a card"),
                    "assumed": (plan.seconds_per_batch[0], f"s at {ASSUMED_USE:.0%} of the peak"),
                    "measured_use": (
                        plan.seconds_per_batch[1], f"s at {MEASURED_USE:.1%} of the peak"
                    ),
                }  # fmt: skip
                found += [
                    Row(f"{quantity}_of_{plan.step.ranks}_cards{setup}", value, unit)
                    for quantity, (value, unit) in values.items()
                ]
    return found
