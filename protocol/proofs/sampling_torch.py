"""The noise of proofs/sampling.py on torch tensors, on any device: the same bits."""

from __future__ import annotations

import torch
from torch import Tensor

from protocol.proofs.sampling import CHUNK, GOLDEN, MULTIPLIER_1, MULTIPLIER_2


def _signed(value: int) -> int:
    """A 32-bit word as the int32 with the same bits (torch has no uint32 arithmetic)."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


_GOLDEN = _signed(GOLDEN)
_MULTIPLIER_1 = _signed(MULTIPLIER_1)
_MULTIPLIER_2 = _signed(MULTIPLIER_2)


def _shift(x: Tensor, n: int) -> Tensor:
    """Logical right shift of int32, which torch shifts arithmetically."""
    return (x >> n).bitwise_and_((1 << (32 - n)) - 1)


def mix(x: Tensor) -> Tensor:
    """The finalizer of proofs/sampling.py on int32 tensors, wrapping."""
    x = x ^ _shift(x, 16)
    x.mul_(_MULTIPLIER_1)
    x.bitwise_xor_(_shift(x, 15))
    x.mul_(_MULTIPLIER_2)
    return x.bitwise_xor_(_shift(x, 15))


def noise_bits(keys: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """int32 (N, vocabulary) with the bits of sampling.noise_bits; keys int64 (N, 2) of unsigned
    32-bit words, positions int64 (N,), both on the device of the result."""
    key = keys.to(torch.int32)  # wraps: keeps the low 32 bits
    position = positions.to(torch.int32)
    a = mix(key[:, 0] + (position + 1) * _GOLDEN)
    b = mix(key[:, 1] ^ a)[:, None]
    a = a[:, None]
    rows = len(key)
    bits = torch.empty((rows, vocabulary), dtype=torch.int32, device=keys.device)
    step = max(1, CHUNK // max(1, rows)) if keys.device.type == "cpu" else vocabulary
    for start in range(0, vocabulary, step):
        stop = min(start + step, vocabulary)
        ids = torch.arange(start + 1, stop + 1, dtype=torch.int32, device=keys.device)
        bits[:, start:stop] = mix(mix(a + ids * _GOLDEN) ^ b)
    return bits


def gumbel(keys: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """The noise g: float32 (N, vocabulary), on the device of `keys`."""
    bits = noise_bits(keys, positions, vocabulary).to(torch.int64).bitwise_and_(0xFFFFFFFF)
    w = bits.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return w.neg_().log1p_().neg_().log_().neg_()
