"""bfloat16 linear layers on processors without bfloat16 instructions (before AVX-512).

On these, PyTorch multiplies bfloat16 matrices element by element: 7 GFLOP/s per core, where float32
reaches 70. A product of bfloat16 values is exact in float32, so multiplying in float32 and rounding
the sum is the same computation in another order of addition.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor


def native_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 matrices at least as fast as float32."""
    return bool(
        torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def widen(model: torch.nn.Module) -> None:
    """Makes every bfloat16 linear layer of `model` multiply in float32 and round its result. The
    weights' float32 copies take twice their size; later changes to the weights have no effect.
    Hooks are kept."""
    for module in model.modules():
        if type(module) is torch.nn.Linear and module.weight.dtype is torch.bfloat16:
            bias = None if module.bias is None else module.bias.detach().float()
            module.forward = partial(_wide, module.weight.detach().float(), bias)  # type: ignore[method-assign]


def _wide(weight: Tensor, bias: Tensor | None, states: Tensor) -> Tensor:
    """states bfloat16 [..., in] → bfloat16 [..., out]."""
    return torch.nn.functional.linear(states.float(), weight, bias).to(states.dtype)
