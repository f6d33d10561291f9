"""`trainer run --dry-run`: what would be trained, with which settings from where, at what cost.

Sizes are exact (from the weights' own headers); memory and time are estimates, each with what it
assumes. Pure but for reading the model's folder and, on a CPU, timing one matrix product.
"""

from __future__ import annotations

import json
import struct
import time
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prime_core.errors import UserError
from prime_core.run import RunDefinition
from prime_trainer.config import ENV_PREFIX, Objective, Settings
from prime_trainer.loading import require_model_folder
from prime_trainer.model import CHUNK_LOGITS, Shape, shape_of

PROMPT_TOKENS = 128
"""Taken for a prompt's length where the environment is not here to ask."""
SAMPLED_PROMPTS = 32
ASSUMED_MFU = 0.4
MAX_HEADER = 64 << 20


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank's device, and on a host: the copy that is written and published, and the
    batch that trains with the one ahead of it."""

    weights: int
    gradients: int
    optimizer: int
    reference: int
    gathered: int
    activations: int
    logits: int
    host: int
    batches: int

    @property
    def device(self) -> int:
        """All of it on the device."""
        return int(sum(asdict(self).values())) - self.host - self.batches


@dataclass(frozen=True)
class Estimate:
    """What a batch costs. `parameters` exact; seconds of computing, without any wait."""

    parameters: int
    trained_parameters: int
    ranks: int
    rows_per_batch: int
    tokens_per_sample: int
    tokens_per_batch: int
    flops_per_batch: float
    memory: Memory
    seconds_per_batch: float | None
    """None where nobody knows the device's peak."""
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
            raise UserError(f"{path} is no safetensors file: {error}") from error
    return int(total)


def measured_prompt(run: RunDefinition, folder: Path) -> int:
    """Mean tokens of the run's first prompts under the model's own tokenizer. Raises PrimeError if
    the environment is not here (its dataset may be elsewhere)."""
    from transformers import AutoTokenizer

    from prime_envs.registry import environment_for

    environment = environment_for(run)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        target = max(run.budgets.targets)
        count = min(SAMPLED_PROMPTS, run.environment.train_size)
        sizes = [
            len(environment.prompt_tokens(environment.problem(i), target, tokenizer))
            for i in range(count)
        ]
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
    """Costs of one batch on `ranks` devices of `peak` operations a second each; `prompt` tokens
    each, as measured (None: assumed)."""
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
    held = 2 * rows * 4 * (length + output)  # two batches: tokens, and log-probabilities
    passes = _passes(settings)
    flops = shape.training_flops([length] * rows, [output] * rows) * passes
    trained = parameters
    if settings.lora_rank:
        trained = min(parameters, _adapter_parameters(config, settings.lora_rank))
    memory = _memory(settings, config, shape, parameters, trained, ranks, held)
    return Estimate(
        parameters=parameters,
        trained_parameters=trained,
        ranks=ranks,
        rows_per_batch=rows,
        tokens_per_sample=length,
        tokens_per_batch=length * rows,
        flops_per_batch=flops,
        memory=memory,
        seconds_per_batch=None if peak is None else flops / (peak * ASSUMED_MFU * ranks),
        assumes=f"{'a guess of' if prompt is None else 'as the first prompts have,'} "
        f"{PROMPT_TOKENS if prompt is None else prompt} tokens a prompt, the mean "
        "of the run's targets generated, "
        f"{ASSUMED_MFU:.0%} of the device's peak",
    )


def _passes(settings: Settings) -> float:
    """Work beside forward and backward (3 forwards' worth) as a factor."""
    forwards = 3.0
    forwards += 1.0 if settings.recompute else 0.0
    forwards += 1.0 if settings.objective.kl else 0.0
    proximal = settings.objective.ratio == "proximal"
    forwards += 1.0 if proximal and settings.optimizer_steps > 1 else 0.0
    return forwards / 3.0


def _adapter_parameters(config: Any, rank: int) -> int:
    hidden, layers = int(config.hidden_size), int(config.num_hidden_layers)
    heads = int(config.num_attention_heads)
    size = int(getattr(config, "head_dim", None) or hidden // heads)
    keys = int(getattr(config, "num_key_value_heads", None) or heads)
    q, kv, inner = heads * size, keys * size, int(config.intermediate_size)
    sides = 2 * (hidden + q) + 2 * (hidden + kv) + 3 * (hidden + inner)
    return layers * rank * sides


def _memory(
    settings: Settings, config: Any, shape: Shape, parameters: int, trained: int, ranks: int,
    held: int,
) -> Memory:  # fmt: skip
    width = 2 if settings.bf16 else 4
    hidden, layers = int(config.hidden_size), int(config.num_hidden_layers)
    inner = int(config.intermediate_size)
    tokens = max(settings.row_tokens, settings.micro_tokens)
    attention = shape.attention_width // layers
    layer = tokens * width * (6 * hidden + 4 * attention + 4 * inner)
    kept = tokens * width * hidden * layers + layer if settings.recompute else layer * layers
    whole = parameters + trained if settings.lora_rank else parameters
    logits = min(CHUNK_LOGITS, tokens * int(config.vocab_size))
    wide = 2 * 4 * shape.head_parameters if settings.bf16 and settings.head_fp32 else 0
    return Memory(
        weights=4 * whole // ranks,
        gradients=4 * trained // ranks,
        optimizer=8 * trained // ranks,
        reference=4 * parameters // ranks if settings.objective.kl else 0,
        gathered=0 if ranks == 1 and not settings.bf16 else width * _gathered(config, shape),
        activations=kept,
        logits=3 * 4 * logits + wide,
        host=2 * parameters + (4 * whole + 8 * trained) // ranks,
        batches=held,
    )


def _gathered(config: Any, shape: Shape) -> int:
    """Weights whole on a rank at once: two layers, one of them on its way, and embedding and head,
    which stay from the first layer to the last."""
    ends = 1 if getattr(config, "tie_word_embeddings", False) else 2
    return 2 * shape.layer_parameters // int(config.num_hidden_layers) + ends * (
        shape.head_parameters
    )


def cpu_peak() -> float:
    """Operations a second of one thread's fp32 matrix product, here and now."""
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
    """Each setting's value as text, and where it is from: flag, environment, file or default."""
    given = tomllib.loads(config.read_text()) if config is not None else {}
    upper = {name.upper() for name in environment}
    found = {}
    for name in type(settings).model_fields:
        if flags.get(name) not in (None, ()):
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
    objective: Objective,
    found: Estimate,
    resolved: Mapping[str, tuple[str, str]],
) -> str:
    """The plan as a person reads it."""
    o, m = objective, found.memory
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
        f"model       {found.parameters:,} weights, {found.trained_parameters:,} trained",
        f"device      {_bytes(m.device)} on each of {found.ranks}: weights {_bytes(m.weights)}, "
        f"gradients {_bytes(m.gradients)}, optimizer {_bytes(m.optimizer)}, "
        f"reference {_bytes(m.reference)}, gathered {_bytes(m.gathered)}, "
        f"activations {_bytes(m.activations)}, logits {_bytes(m.logits)}",
        f"host        {_bytes(m.host)} for the copy that is written and published, "
        f"{_bytes(m.batches)} for two batches",
        f"work        {found.flops_per_batch:.3g} operations a batch, "
        + (
            "time unknown: name --peak-tflops"
            if found.seconds_per_batch is None
            else f"about {found.seconds_per_batch:.3g} s of computing"
        ),
        f"assumed     {found.assumes}",
    ]
    return "\n".join(lines)


def _bytes(number: int) -> str:
    value = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"
