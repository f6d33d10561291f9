"""The policy: a Hugging Face causal LM that returns the log-probabilities of given tokens.

Weights are fp32 masters. Their bf16 rounding is published, and nodes sample from it.
Log-probabilities are log softmax(logits / T) in fp32; T is the run's temperature.

Supports every decoder that transformers can load and that takes an attention function (Qwen2,
Qwen3, Llama and similar): an embedding, a list of layers, a head over the last hidden state. Models
with capped logits are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from prime_core.errors import FatalError
from prime_trainer.attention import Segments
from prime_trainer.context import Cut

PAD = -1
"""Sequence id of padding, which attends only to itself and is never predicted."""
CHUNK_LOGITS = 1 << 26
"""Logits held at once (256 MiB in fp32); more are computed in chunks, and recomputed in the
backward pass."""


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch of R rows of L tokens.

    `inputs`, `positions`, `sequences`: (R, L) int64: token ids, positions within each sample,
    sample numbers (PAD for padding). `predict`: (N,) flat positions in R·L whose *next* token is a
    generated one; `targets`: (N,) that token. `segments`: location of each sample.

    With `cut`, all but `segments` are this rank's part of rows that a context group shares.
    """

    inputs: Tensor
    positions: Tensor
    sequences: Tensor
    predict: Tensor
    targets: Tensor
    segments: Segments
    cut: Cut | None = None


class Policy(nn.Module):
    """Wraps the language model so that one forward pass (hooked by FSDP) returns what the loss
    needs, and logits are computed only where a generated token is predicted.

    `entropy_gradient`: whether the objective has an entropy term; otherwise the entropy is only
    measured, which is cheaper. `head_fp32`: with narrower weights, compute and keep logits in fp32,
    from the same weights that are published; by default logits have the head's own width, and only
    the softmax is wide. `cpu_offload`: parameters are kept in host memory.
    """

    def __init__(self, lm: Any, temperature: float) -> None:
        super().__init__()
        self.lm = lm
        self.temperature = temperature
        self.entropy_gradient = True
        self.head_fp32 = False
        self.cpu_offload = False

    @property
    def decoder(self) -> Any:
        """Embedding, layers and final norm, without adapter wrappers."""
        return causal_lm(self.lm).get_decoder()

    def forward(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Returns the log-probability of each target and the entropy of its distribution: (N,),
        (N,), fp32 (or float64 for float64 weights); of whole rows, also if a context group shares
        them."""
        hidden = self.decoder(
            input_ids=batch.inputs,
            position_ids=batch.positions,
            use_cache=False,
            segments=batch.segments,
            context=None if batch.cut is None else batch.cut.context,
        ).last_hidden_state
        chosen = hidden.reshape(-1, hidden.shape[-1])[batch.predict]
        head = causal_lm(self.lm).get_output_embeddings()
        rows = max(1, CHUNK_LOGITS // int(head.weight.shape[0]))
        if self.head_fp32 and head.weight.dtype in (torch.bfloat16, torch.float16):
            head = wide_head(head)
        if chosen.shape[0] <= rows:
            logprobs, entropy = self._score(chosen, batch.targets, head)
        else:
            parts = [
                checkpoint(self._score, part, targets, head, use_reentrant=False)
                for part, targets in zip(chosen.split(rows), batch.targets.split(rows), strict=True)
            ]
            logprobs, entropy = (torch.cat(each) for each in zip(*parts, strict=True))
        if batch.cut is not None:
            both = batch.cut.whole(torch.stack([logprobs, entropy]))
            logprobs, entropy = both[0].clone(), both[1].clone()  # FSDP warns of views
        return logprobs, entropy

    def _score(
        self, hidden: Tensor, targets: Tensor, head: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        logits = head(hidden)
        logits = (logits if logits.dtype == torch.float64 else logits.float()) / self.temperature
        total = torch.logsumexp(logits, dim=-1)
        logprobs = logits.gather(-1, targets[:, None])[:, 0] - total
        with torch.set_grad_enabled(self.entropy_gradient and torch.is_grad_enabled()):
            shares = torch.softmax(logits, dim=-1)
            entropy = total - (shares * logits).sum(dim=-1)
        return logprobs, entropy


def wide_head(head: Any) -> Callable[[Tensor], Tensor]:
    """The head's map in fp32 from its own weights. They are widened once, so that the gradients of
    all chunks are summed in fp32."""
    weight = head.weight.float()
    bias = None if getattr(head, "bias", None) is None else head.bias.float()
    return lambda hidden: nn.functional.linear(hidden.float(), weight, bias)


def causal_lm(lm: Any) -> Any:
    """The transformers model, without peft's wrapper if there is one."""
    return lm.get_base_model() if hasattr(lm, "get_base_model") else lm


def require_finite(state: dict[str, Tensor]) -> None:
    """Raises FatalError naming the first weight that is not finite."""
    for name, tensor in state.items():
        if not torch.isfinite(tensor).all():
            raise FatalError(f"the weight {name} is not finite")


@dataclass(frozen=True)
class Shape:
    """Compute costs of a model: parameters of the layers' linear maps and of the head, and its
    attention width (layers · heads · head size)."""

    layer_parameters: int
    head_parameters: int
    attention_width: int

    @property
    def attention_cost(self) -> float:
        """Cost of one pair of attended tokens relative to one token's linear layers (see
        packing)."""
        return 2.0 * self.attention_width / max(1, self.layer_parameters)

    def training_flops(self, lengths: list[int], outputs: list[int]) -> float:
        """FLOPs of one forward and backward pass over samples of `lengths` tokens, of which
        `outputs` are predicted: 6 per parameter and token, and 6·width·length² for causal
        attention."""
        pairs = sum(length * length for length in lengths)
        linear = self.layer_parameters * sum(lengths) + self.head_parameters * sum(outputs)
        return 6.0 * linear + 6.0 * self.attention_width * pairs


def shape_of(config: Any) -> Shape:
    """A decoder's costs, from its configuration."""
    hidden, layers = int(config.hidden_size), int(config.num_hidden_layers)
    heads = int(config.num_attention_heads)
    size = int(getattr(config, "head_dim", None) or hidden // heads)
    keys = int(getattr(config, "num_key_value_heads", None) or heads)
    attention_ = hidden * size * (2 * heads + 2 * keys)
    mlp = 3 * hidden * int(config.intermediate_size)
    return Shape(
        layer_parameters=layers * (attention_ + mlp),
        head_parameters=hidden * int(config.vocab_size),
        attention_width=layers * heads * size,
    )
