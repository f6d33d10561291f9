"""Group-wise round-to-nearest fake quantization of weights: values change, the storage type does
not.

For tests, detection benchmarks and the devnet's attackers; honest nodes never import this.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


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


def quantizer(bits: int = 4, group: int = 32) -> Callable[[torch.nn.Module], None]:
    """A `prepare` for PlainEngine: rounds the weights of every linear layer in place, except the LM
    head (its weights may be tied to the embedding)."""

    def prepare(model: torch.nn.Module) -> None:
        head = model.get_output_embeddings()  # type: ignore[operator]
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, torch.nn.Linear) and module is not head:
                    module.weight.copy_(fake_quantize(module.weight, bits, group))

    return prepare
