"""LoRA through peft: small trained matrices on frozen weights; merged for publication.

Nodes never see an adapter: a policy is W + (α/r)·B·A under the base model's own names, so engines,
proofs and deltas are unchanged. Adapters are initialized from a fixed seed, identical on every
rank.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from prime_core.errors import UserError
from prime_trainer.model import Policy

SEED = 20_250_507
PREFIX = "base_model.model."
BASE, DOWN, UP = ".base_layer.", ".lora_A.default.weight", ".lora_B.default.weight"


def add_adapters(policy: Policy, rank: int, alpha: int) -> Policy:
    """Adds adapters of rank `rank` to every linear map except the head; only they are trained (Hu
    et al., arXiv 2106.09685). They are on the meta device until `loading.fill_weights`. Raises
    UserError if peft is missing."""
    try:
        from accelerate import init_empty_weights
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise UserError(
            "LoRA needs the package peft, which is not installed",
            hint="pip install 'prime-open[trainer]', or leave --lora-rank out",
        ) from error
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=0.0,
        bias="none",
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    with init_empty_weights(include_buffers=False):
        policy.lm = get_peft_model(policy.lm, config)
    return policy


def is_adapted(name: str) -> bool:
    """Whether a state entry is part of an adapted map: its frozen weight or its two factors."""
    return BASE in name or name.endswith((DOWN, UP))


def base_name(name: str) -> str:
    """The base model's name for a weight of an adapted model."""
    return name.removeprefix(PREFIX).replace(BASE, ".")


def merge_scale(lm: Any) -> float:
    """α/rank of an adapted model; 1 of a model without adapters."""
    if not hasattr(lm, "peft_config"):
        return 1.0
    config = lm.peft_config["default"]
    return float(config.lora_alpha / config.r)


def merged(state: dict[str, Tensor], lm: Any) -> dict[str, Tensor]:
    """`state` of an adapted model under the base model's names, with factors merged (in fp32 or
    wider). A state without adapters is returned unchanged."""
    if not hasattr(lm, "peft_config"):
        return state
    scale = merge_scale(lm)
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name.endswith((DOWN, UP)):
            continue
        if BASE in name and name.endswith("weight"):
            stem = name.split(BASE)[0]
            tensor = tensor + scale * (state[stem + UP] @ state[stem + DOWN])
        found[base_name(name)] = tensor
    return found
