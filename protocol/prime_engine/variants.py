"""Altered weights for attacks: quantized (values change, the storage type does not), older,
shallower.

For tests, benchmarks, calibrations and attacking nodes of the devnet; honest nodes never import
this.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Prepare = Callable[[torch.nn.Module], None]
"""Modifies a loaded model (PlainEngine's `prepare`)."""


def fake_quantize(weight: Tensor, bits: int, group: int) -> Tensor:
    """Rounds `weight` [out, in] to 2^bits − 1 symmetric levels per group of `group` inputs, each
    group scaled by its largest magnitude. Same shape and dtype."""
    levels = (1 << (bits - 1)) - 1
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % group))
    blocks = padded.reshape(rows, -1, group)
    scale = blocks.abs().amax(dim=2, keepdim=True).clamp_min(1e-12) / levels
    rounded = (blocks / scale).round_().clamp_(-levels, levels) * scale
    return rounded.reshape(rows, -1)[:, :columns].to(weight.dtype)


def quantizer(bits: int = 4, group: int = 32) -> Prepare:
    """A `prepare` for PlainEngine: rounds the weights of every linear layer in place, except the LM
    head (its weights may be tied to the embedding)."""

    def prepare(model: torch.nn.Module) -> None:
        head = model.get_output_embeddings()  # type: ignore[operator]
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, torch.nn.Linear) and module is not head:
                    module.weight.copy_(fake_quantize(module.weight, bits, group))

    return prepare


def _older(steps: int, rate: float) -> Prepare:
    """Simulates an older policy: `steps` optimizer steps of ±rate on every weight, in independent
    directions, rounded to bfloat16 as in policy files."""

    def prepare(model: torch.nn.Module) -> None:
        generator = torch.Generator().manual_seed(steps)
        with torch.no_grad():
            for weight in model.parameters():
                moved = weight.float()
                for _ in range(steps):
                    moved -= rate * torch.randn(weight.shape, generator=generator).sign()
                weight.copy_(moved.to(torch.bfloat16))

    return prepare


def _quantized_cache(bits: int) -> Prepare:
    """Rounds keys and values to `bits`, with one scale per token."""

    def round_off(_layer: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        flat = output.reshape(-1, output.shape[-1])
        return fake_quantize(flat, bits, flat.shape[-1]).reshape(output.shape)

    def prepare(model: torch.nn.Module) -> None:
        for name, module in model.named_modules():
            if name.endswith(("k_proj", "v_proj")):
                module.register_forward_hook(round_off)

    return prepare


def _half_as_deep(model: Any) -> None:
    model.model.layers = model.model.layers[: len(model.model.layers) // 2]


VARIANTS: dict[str, Prepare] = {
    "int8": quantizer(8),
    "int4": quantizer(4),
    "kv8": _quantized_cache(8),
    "kv4": _quantized_cache(4),
    **{
        f"old{steps}_1e{-exponent}": _older(steps, 10.0**exponent)
        for steps in (1, 4, 10)
        for exponent in (-4, -5, -6)
    },
    "shallow": _half_as_deep,
}


def write_variant(model: Path, name: str, folder: Path) -> Path:
    """Writes the model in the folder `model`, altered as VARIANTS[name] says, into the new `folder`
    in the dtype of its files; returns `folder`. For variants of weights: a cache is not written."""
    from transformers import AutoModelForCausalLM

    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    altered: Any = AutoModelForCausalLM.from_pretrained(model, local_files_only=True, dtype="auto")
    VARIANTS[name](altered)
    altered.save_pretrained(folder)
    return folder
