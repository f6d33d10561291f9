"""`trainer plan` of a step of QwQ-32B in samples of 32,896 tokens, on 8 to 64 cards of 80 GB:
arithmetic from the model's configuration, nothing is measured.

A batch has 128 groups of 16 samples, all of the longest length; rows and micro-batches hold one
sample, weights are bf16 in the forward pass, layers are recomputed, and KL needs a reference. The
peak is that of an H100 (989 TFLOP/s in bf16). docs/scale-32b.md has other settings.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from bench.form import ROOT, Row
from bench.trainer_parts import bench_run, bench_settings
from prime_trainer.config import ObjectiveSettings
from prime_trainer.dryrun import ASSUMED_USE, MEASURED_USE, compare_plans

PACKAGES = ("torch", "transformers")
MODEL = ROOT / "docs" / "examples" / "models" / "qwq-32b.json"
SAMPLE_TOKENS, GROUPS, SAMPLES = 32_896, 128, 16
TFLOPS, MEMORY_GIB = 989.0, 78.0
CARDS = (8, 16, 32, 64)


def run(quick: bool) -> list[Row]:
    """Rows NAME_of_N_cards. `quick`: 8 cards alone."""
    found: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="bench-plan-") as name:
        folder = Path(name)
        shutil.copy2(MODEL, folder / "config.json")
        settings = bench_settings(
            folder, folder / "data", row_tokens=SAMPLE_TOKENS, micro_tokens=SAMPLE_TOKENS,
            bf16=True, recompute=True, peak_tflops=TFLOPS, objective=ObjectiveSettings(kl=0.001),
        )  # fmt: skip
        run = bench_run(groups=GROUPS, samples=SAMPLES, max_output_tokens=32_768)
        plans = compare_plans(
            run, settings, CARDS[:1] if quick else CARDS, SAMPLE_TOKENS, MEMORY_GIB
        )
    for plan in plans:
        assumed, measured = plan.seconds_per_batch or (0.0, 0.0)
        values = {
            "kept": (plan.step.kept / 2**30, "GiB a card"),
            "peak": (plan.step.peak / 2**30, f"GiB a card; fits {MEMORY_GIB:g}: {plan.fits}"),
            "micro_batches": (plan.micro_batches, "a card"),
            "traffic": (plan.traffic / 2**40, "TiB a card"),
            "assumed_use": (assumed, f"s at {ASSUMED_USE:.0%} of the peak"),
            "measured_use": (measured, f"s at {MEASURED_USE:.1%} of the peak"),
        }
        found += [
            Row(f"{quantity}_of_{plan.step.ranks}_cards", value, unit)
            for quantity, (value, unit) in values.items()
        ]
    return found
