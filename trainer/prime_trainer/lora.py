"""LoRA through peft: small trained matrices beside frozen weights; published merged into them.

Nodes never see an adapter: a policy is W + (α/r)·B·A under the base model's own names, so engines,
proofs and deltas need nothing new. Adapters begin from a fixed seed, on every rank the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prime_core.errors import UserError
from prime_trainer.model import Policy

SEED = 20_250_507
PREFIX = "base_model.model."
BASE, DOWN, UP = ".base_layer.", ".lora_A.default.weight", ".lora_B.default.weight"


def add_adapters(policy: Policy, rank: int, alpha: int) -> Policy:
    """Puts adapters of rank `rank` beside every linear map but the head; only they are trained
    (Hu et al., arXiv 2106.09685). Raises UserError if peft is missing."""
    try:
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
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        policy.lm = get_peft_model(policy.lm, config)
    return policy


def is_adapted(name: str) -> bool:
    """Whether a state entry is part of an adapted map: its frozen weight or its two factors."""
    return BASE in name or name.endswith((DOWN, UP))


def merged(state: dict[str, Tensor], lm: Any) -> dict[str, Tensor]:
    """`state` of an adapted model as the base model names it, factors multiplied in (in fp32 or
    wider). A state without adapters comes back as it is."""
    if not hasattr(lm, "peft_config"):
        return state
    config = lm.peft_config["default"]
    scale = config.lora_alpha / config.r
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name.endswith((DOWN, UP)):
            continue
        plain = name.removeprefix(PREFIX)
        if BASE in plain:
            stem = name.split(BASE)[0]
            if name.endswith("weight"):
                tensor = tensor + scale * (state[stem + UP] @ state[stem + DOWN])
            plain = plain.replace(BASE, ".")
        found[plain] = tensor
    return found
