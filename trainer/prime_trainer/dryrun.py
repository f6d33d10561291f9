"""`trainer run --dry-run`: what would be trained, the settings and their sources, and the cost.

Sizes come from the headers of the weight files, device memory from a simulated step (planning.py),
time from the operations of a batch and two fractions of the device's peak.
"""

from __future__ import annotations

import json
import math
import struct
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prime_core.errors import UserError
from prime_core.run import RunDefinition
from prime_trainer.config import ENV_PREFIX, ObjectiveSettings, Settings
from prime_trainer.loading import require_model_folder
from prime_trainer.model import shape_of
from prime_trainer.planning import StepPlan, plan_step, samples_of_micro_batch

PROMPT_TOKENS = 128
"""Assumed prompt length if the environment is not available."""
SAMPLED_PROMPTS = 32
ASSUMED_USE, MEASURED_USE = 0.4, 0.166
"""Share of a device's peak, operations that are done twice included: assumed for large models, and
the best measured of a whole step (0.6 B parameters, rows of 16k tokens, one H100, which is 12.5 %
without what is done twice)."""
USE = (
    f"{ASSUMED_USE:.0%} of the device's peak (assumed) to {MEASURED_USE:.1%} (the best measured, "
    "of a small model on one H100)"
)
MAX_HEADER = 64 << 20


@dataclass(frozen=True)
class Estimate:
    """Cost of a batch. `seconds_per_batch` is compute time, without waits, at ASSUMED_USE and at
    MEASURED_USE."""

    parameters: int
    ranks: int
    rows_per_batch: int
    tokens_per_sample: int
    tokens_per_batch: int
    flops_per_batch: float
    step: StepPlan
    """Memory and traffic of one rank."""
    host: int
    """Bytes of the copies that are written and published, and of those that stale rows are scored
    by, in rank 0's host memory."""
    batches: int
    """Bytes of the current batch and the prefetched one."""
    seconds_per_batch: tuple[float, float] | None
    """None if the device's peak is unknown."""
    assumes: str


def parameters_of(folder: Path) -> int:
    """Number of weights in a folder's safetensors files, from their headers. Raises UserError."""
    total: int = 0
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with path.open("rb") as file:
                (size,) = struct.unpack("<Q", file.read(8))
                if size > MAX_HEADER:
                    raise ValueError("the header is too long")
                header = json.loads(file.read(size))
            for name, entry in header.items():
                if name != "__metadata__":
                    count: int = 1
                    for side in entry["shape"]:
                        count *= int(side)
                    total += count
        except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
            raise UserError(f"{path} is not a safetensors file: {error}") from error
    return int(total)


def measured_prompt(run: RunDefinition, folder: Path) -> int:
    """Mean length of the run's first prompts in tokens of the model's tokenizer. Raises PrimeError
    if the environment is not available (its dataset may be elsewhere)."""
    from transformers import AutoTokenizer

    from prime_envs.registry import environment_for

    environment = environment_for(run)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        target = max(run.budgets.targets)
        count = min(SAMPLED_PROMPTS, run.environment.train_size)
        sizes = [len(environment.ask(i, target, tokenizer)[1]) for i in range(count)]
    finally:
        environment.close()
    return round(sum(sizes) / count)


def estimate(
    run: RunDefinition,
    settings: Settings,
    *,
    ranks: int,
    peak: float | None,
    prompt: int | None = None,
) -> Estimate:
    """Costs of one batch on `ranks` devices with `peak` operations per second each.

    `prompt`: measured prompt length in tokens (None: assumed). Raises UserError for a folder
    without a model.
    """
    folder: Path = settings.need("model")
    require_model_folder(folder)
    try:
        config = SimpleNamespace(**json.loads((folder / "config.json").read_text()))
        shape = shape_of(config)
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{folder}/config.json describes no causal LM: {error}") from error
    parameters = parameters_of(folder)
    targets = run.budgets.targets
    output = min(run.max_output_tokens, round(sum(targets) / len(targets)))
    length = (PROMPT_TOKENS if prompt is None else prompt) + output
    rows = run.groups_per_batch * run.samples_per_group
    flops = shape.training_flops([length] * rows, [output] * rows) * _passes(settings)
    asked = length - output
    step = plan_step(
        run, settings, ranks=ranks, sample_tokens=asked + run.max_output_tokens, prompt_tokens=asked
    )
    past = 0
    if settings.mismatch_every:  # the trained weights meanwhile, and the last policies
        past = step.trained * (4 + run.max_staleness * (2 if settings.bf16 else 4)) // ranks
    return Estimate(
        parameters=parameters,
        ranks=ranks,
        rows_per_batch=rows,
        tokens_per_sample=length,
        tokens_per_batch=length * rows,
        flops_per_batch=flops,
        step=step,
        host=2 * parameters + step.kept + step.host + past,
        batches=2 * rows * 4 * (length + output),  # tokens, and log-probabilities of outputs
        seconds_per_batch=None if peak is None else _seconds(flops, peak * ranks),
        assumes=f"{'a guess of' if prompt is None else 'as the first prompts have,'} "
        f"{asked} tokens a prompt, the mean of the run's targets generated (memory: of the longest "
        f"samples), {USE}",
    )


@dataclass(frozen=True)
class PlanRow:
    """A batch on one number of ranks, if every sample has the maximum length."""

    step: StepPlan
    fits: bool | None
    """Whether the step's peak fits a device; None if its memory is unknown."""
    micro_batches: int
    """Micro-batches of each rank per batch."""
    traffic: int
    """Bytes that a rank receives from all-gathers and passes to reduce-scatters per batch."""
    seconds_per_batch: tuple[float, float] | None
    """Compute time at ASSUMED_USE and at MEASURED_USE; None if the device's peak is unknown."""


def compare_plans(
    run: RunDefinition,
    settings: Settings,
    ranks: Sequence[int],
    sample_tokens: int,
    memory_gib: float,
) -> list[PlanRow]:
    """One row per number of ranks. `sample_tokens`: prompt and output of the longest sample;
    `memory_gib`: memory of one device, 0 if unknown. Raises UserError for a folder without
    config.json."""
    folder: Path = settings.need("model")
    prompt = min(PROMPT_TOKENS, sample_tokens - 1)
    rows = run.groups_per_batch * run.samples_per_group
    found = []
    for size in ranks:
        step = plan_step(
            run, settings, ranks=size, sample_tokens=sample_tokens, prompt_tokens=prompt
        )
        shape = shape_of(SimpleNamespace(**json.loads((folder / "config.json").read_text())))
        flops = shape.training_flops([sample_tokens] * rows, [sample_tokens - prompt] * rows)
        flops *= _passes(settings)
        peak = settings.peak_tflops * 1e12 * size
        together = samples_of_micro_batch(settings, sample_tokens) * size
        batches = math.ceil(rows * settings.context_parallel / together)
        found.append(
            PlanRow(
                step=step,
                fits=step.peak <= memory_gib * 2**30 if memory_gib else None,
                micro_batches=batches,
                traffic=batches * (step.gathered + step.reduced),
                seconds_per_batch=_seconds(flops, peak) if peak else None,
            )
        )
    return found


def _seconds(flops: float, peak: float) -> tuple[float, float]:
    """Seconds for `flops` at ASSUMED_USE and at MEASURED_USE of `peak` operations a second."""
    return flops / (peak * ASSUMED_USE), flops / (peak * MEASURED_USE)


def in_seconds(found: tuple[float, float]) -> str:
    """Formats a range of seconds."""
    return (
        " to ".join(f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}" for seconds in found)
        + " s"
    )


def _passes(settings: Settings) -> float:
    """Total work relative to one forward and backward pass (which equal 3 forwards)."""
    forwards = 3.0
    forwards += 1.0 if settings.recompute else 0.0
    forwards += 1.0 if settings.objective.kl else 0.0
    proximal = settings.objective.ratio == "proximal"
    forwards += 1.0 if proximal and settings.optimizer_steps > 1 else 0.0
    return forwards / 3.0


def cpu_peak() -> float:
    """Measures the operations per second of a single-threaded fp32 matrix product on this
    machine."""
    import torch

    side = 768
    one = torch.ones(side, side)
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        torch.mm(one, one)
        best = min(best, time.perf_counter() - start)
    return 2.0 * side**3 / best


def sources(
    settings: Settings, flags: Mapping[str, object], config: Path | None,
    environment: Mapping[str, str],
) -> dict[str, tuple[str, str]]:  # fmt: skip
    """Each setting's value as text, and its source: flag, environment, file or default."""
    given = tomllib.loads(config.read_text()) if config is not None else {}
    upper = {name.upper() for name in environment}
    found = {}
    for name in type(settings).model_fields:
        if flags.get(name) not in (None, (), []):
            origin = "flag"
        elif f"{ENV_PREFIX}{name}".upper() in upper:
            origin = "environment"
        elif name in given:
            origin = str(config)
        else:
            origin = "default"
        found[name] = (str(getattr(settings, name)), origin)
    return found


def report(
    run: RunDefinition,
    objective: ObjectiveSettings,
    found: Estimate,
    resolved: Mapping[str, tuple[str, str]],
) -> str:
    """The plan as readable text."""
    o = objective
    lines = [f"run {run.name} ({run.digest()})", ""]
    lines += [
        f"  {name:16} {value:44} {origin}"
        for name, (value, origin) in resolved.items()
        if origin != "default" or value not in ("None", "", "()", "0")
    ]
    lines += [
        "",
        f"objective   {o.name}: clip {o.clip:g}, delta {o.delta:g}, "
        f"KL {o.kl:g} ({o.kl_form}), entropy {o.entropy:g}, "
        f"advantage {o.advantage}, ratio to the {o.ratio} policy, over-long samples: {o.overlong}",
        f"batch       {run.groups_per_batch} groups of {run.samples_per_group} = "
        f"{found.rows_per_batch} rows, about {found.tokens_per_batch:,} tokens, "
        f"at most {run.max_staleness} policies old",
        f"selection   by {run.selection}, {run.surplus_groups} groups of surplus",
        f"model       {found.parameters:,} weights, {found.step.trained:,} trained",
        f"device      {in_bytes(found.step.peak)} at most on each of {found.ranks}, of which "
        f"{in_bytes(found.step.kept)} are weights, reference and optimizer",
        f"host        {in_bytes(found.host)} for copies to write, to publish and to score stale "
        f"rows by, {in_bytes(found.batches)} for two batches",
        f"work        {found.flops_per_batch:.3g} operations a batch, "
        + (
            "time unknown: name --peak-tflops"
            if found.seconds_per_batch is None
            else f"{in_seconds(found.seconds_per_batch)} of computing"
        ),
        f"assumed     {found.assumes}",
    ]
    return "\n".join(lines)


def in_bytes(number: int) -> str:
    """Formats a number of bytes."""
    value = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"


def plan_table(rows: Sequence[PlanRow]) -> str:
    """One line per number of ranks, and what the seconds assume."""
    columns = ("ranks", "kept", "peak", "host", "fits", "micro-batches", "traffic", "computing")
    words = {True: "yes", False: "no", None: "?"}
    lines = [columns]
    for row in rows:
        seconds = row.seconds_per_batch
        lines.append((
            str(row.step.ranks), in_bytes(row.step.kept), in_bytes(row.step.peak),
            in_bytes(row.step.host),
            words[row.fits], str(row.micro_batches), in_bytes(row.traffic),
            "?" if seconds is None else in_seconds(seconds),
        ))  # fmt: skip
    table = ["  ".join(f"{cell:>13}" for cell in line) for line in lines]
    return "\n".join([*table, f"computing: {USE}, without waiting for other ranks"])
