"""The policy: a Hugging Face causal LM that answers one question, "how likely were these tokens?".

Weights are fp32 masters; what is published is their bf16 rounding, which is also what nodes sample
from. Log-probabilities are log softmax(logits / T) in fp32, T the run's temperature.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from protocol.core.errors import FatalError, UserError

PAD = -1
"""Sequence id of padding: attends to itself only, is predicted by nobody."""


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch of R rows of L tokens.

    `inputs`, `positions`, `sequences`: (R, L) int64: token ids, positions counted anew in every
    sample, sample numbers (PAD where padded). `predict`: (N,) flat positions in R·L whose *next*
    token is a generated one; `targets`: (N,) that token.
    """

    inputs: Tensor
    positions: Tensor
    sequences: Tensor
    predict: Tensor
    targets: Tensor


def block_causal_mask(sequences: Tensor) -> Tensor:
    """(R, 1, L, L) bool: a token sees the earlier tokens of its own sample and itself, no others;
    padding sees itself (an all-masked softmax row would be NaN)."""
    length = sequences.shape[1]
    same = sequences[:, :, None] == sequences[:, None, :]
    causal = torch.ones(length, length, dtype=torch.bool, device=sequences.device).tril()
    itself = torch.eye(length, dtype=torch.bool, device=sequences.device)
    return ((same & causal & (sequences != PAD)[:, None, :]) | itself)[:, None]


class Policy(nn.Module):
    """Wraps the language model so that one forward (which FSDP hooks) gives what the loss needs,
    and the vocabulary is only touched where a generated token is predicted."""

    def __init__(self, lm: Any, temperature: float) -> None:
        super().__init__()
        self.lm = lm
        self.temperature = temperature

    def forward(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """→ log-probability of each target and entropy of its distribution: (N,), (N,) fp32 (or
        wider, as the weights are)."""
        hidden = self.lm.model(
            input_ids=batch.inputs,
            position_ids=batch.positions,
            attention_mask=block_causal_mask(batch.sequences),
            use_cache=False,
        ).last_hidden_state
        chosen = hidden.reshape(-1, hidden.shape[-1])[batch.predict]
        logits = self.lm.lm_head(chosen)
        logits = (logits if logits.dtype == torch.float64 else logits.float()) / self.temperature
        all_logprobs = torch.log_softmax(logits, dim=-1)
        logprobs = -nn.functional.nll_loss(all_logprobs, batch.targets, reduction="none")
        entropy = -(all_logprobs.exp() * all_logprobs).sum(dim=-1)
        return logprobs, entropy


def load_policy(folder: Path, temperature: float, dtype: torch.dtype = torch.float32) -> Policy:
    """Loads a Hugging Face folder from disk, never from a hub. Raises UserError if it is none."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # a log is no terminal

    if not (folder / "config.json").is_file():
        raise UserError(
            f"{folder} is no model folder: it has no config.json",
            hint="name a Hugging Face folder with config.json, tokenizer and safetensors",
        )
    lm = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, local_files_only=True, use_safetensors=True, attn_implementation="sdpa"
    )
    lm.config.use_cache = False
    return Policy(lm, temperature)


def require_finite(state: dict[str, Tensor]) -> None:
    """Raises FatalError naming the first weight that is not finite."""
    for name, tensor in state.items():
        if not torch.isfinite(tensor).all():
            raise FatalError(f"the weight {name} is not finite")
