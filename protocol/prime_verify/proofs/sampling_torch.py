"""The noise of proofs/sampling.py on torch tensors, bit-identical on any device."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from types import ModuleType

import torch
from torch import Tensor

from prime_verify.proofs.sampling import BYTES, CHUNK, FINAL_1, FINAL_2, KEY_1, KEY_2, STEP


def signed(value: int) -> int:
    """Converts a 32-bit word to the int32 with the same bits (torch has no uint32 arithmetic)."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


_KEY_1, _KEY_2, _STEP = signed(KEY_1), signed(KEY_2), signed(STEP)
_FINAL_1, _FINAL_2 = signed(FINAL_1), signed(FINAL_2)


def shift(x: Tensor, n: int) -> Tensor:
    """Logical right shift of int32 (torch's own shift is arithmetic)."""
    return (x >> n).bitwise_and_((1 << (32 - n)) - 1)


def _rotl(x: Tensor, n: int) -> Tensor:
    return (x << n).bitwise_or_(shift(x, 32 - n))


def _scramble(key: Tensor) -> Tensor:
    return _rotl(key * _KEY_1, 15).mul_(_KEY_2)


def _mix(h: Tensor, scrambled: Tensor) -> Tensor:
    return _rotl(h ^ scrambled, 13).mul_(5).add_(_STEP)


def _finish(h: Tensor) -> Tensor:
    """MurmurHash3's finalizer, in place."""
    h.bitwise_xor_(BYTES)
    h.bitwise_xor_(shift(h, 16)).mul_(_FINAL_1)
    h.bitwise_xor_(shift(h, 13)).mul_(_FINAL_2)
    return h.bitwise_xor_(shift(h, 16))


def _row_state(seeds: Tensor, positions: Tensor) -> Tensor:
    """h of sampling's module docstring: int32 (N, 1)."""
    h = torch.zeros(len(seeds), dtype=torch.int32, device=seeds.device)
    for word in (seeds, seeds >> 32, positions):
        h = _mix(h, _scramble(word.to(torch.int32)))  # wraps: keeps the low 32 bits
    return h[:, None]


def _parts(rows: int, vocabulary: int, device: torch.device) -> Iterator[tuple[slice, Tensor]]:
    """Slices of the vocabulary whose intermediate tensors fit in a CPU's cache, with their token
    ids."""
    step = max(1, CHUNK // max(1, rows)) if device.type == "cpu" else vocabulary
    for start in range(0, vocabulary, step):
        stop = min(start + step, vocabulary)
        yield slice(start, stop), torch.arange(start, stop, dtype=torch.int32, device=device)


def noise_bits(seeds: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """int32 (N, vocabulary) with the bits of sampling.noise_bits; seeds and positions int64 (N,),
    both on the device of the result."""
    h = _row_state(seeds, positions)
    bits = torch.empty((len(h), vocabulary), dtype=torch.int32, device=h.device)
    for part, ids in _parts(len(h), vocabulary, h.device):
        bits[:, part] = _finish(_mix(h, _scramble(ids)))
    return bits


def noise_of(bits: Tensor) -> Tensor:
    """g of the hashes `bits` (int32, any shape): float32. The upper half of the range is computed
    from its own end, so that neither tail loses digits."""
    high = bits >> 31  # 0, or −1 for unsigned words from 2³¹
    u = (bits ^ high).to(torch.float32).add_(0.5).mul_(2.0**-32)  # u, or 1 − u
    inner = u.log()
    low = u.neg_().log1p_()
    return torch.where(high == 0, low, inner).neg_().log_().neg_()


def kernels() -> ModuleType | None:
    """The Triton kernels, or None if Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("prime_verify.proofs.kernels")


def gumbel(seeds: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """The noise g: float32 (N, vocabulary), on the device of `seeds`."""
    if seeds.is_cuda and (triton := kernels()) is not None:  # pragma: no cover - needs a GPU
        made: Tensor = triton.gumbel(seeds, positions, vocabulary)
        return made
    h = _row_state(seeds, positions)
    noise = torch.empty((len(h), vocabulary), dtype=torch.float32, device=h.device)
    for part, ids in _parts(len(h), vocabulary, h.device):
        noise[:, part] = noise_of(_finish(_mix(h, _scramble(ids))))
    return noise
