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
    """Makes every bfloat16 linear layer of `model` multiply in float32 and round its result. Its
    weights become float32, with the same values. Hooks are kept."""
    for module in model.modules():
        if type(module) is torch.nn.Linear and module.weight.dtype is torch.bfloat16:
            module.weight = _float32(module.weight)
            if module.bias is not None:
                module.bias = _float32(module.bias)
            module.forward = partial(_wide, module)  # type: ignore[method-assign]


def multiply_wide(model: torch.nn.Module) -> None:
    """Makes every linear layer of `model`, whose weights are float32, also take bfloat16 states, as
    `widen` does. For float32 states nothing changes."""
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.forward = partial(_wide, module)  # type: ignore[method-assign]


def _float32(weight: Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(weight.detach().float(), requires_grad=False)


def _wide(layer: torch.nn.Linear, states: Tensor) -> Tensor:
    """states [..., in] → [..., out] in their dtype."""
    return torch.nn.functional.linear(states.float(), layer.weight, layer.bias).to(states.dtype)
