"""Triton kernels for CUDA devices: seeded noise, window sketches, proofs of cards and of memory.

Importing this module requires Triton. If TRITON_INTERPRET=1 is set before the import, the kernels
run in Triton's interpreter on CPU tensors; tests without a GPU use this.

    sample    logits / T + noise → token and its log-probability before the noise, in one pass
    gumbel    the noise only, as sampling_torch.gumbel
    sketch    float64 sums of signed buckets of many windows, as sketch.build, in a fixed order
    product   second-lowest bytes of an int8 product, whose int32 sums never leave the chip
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from prime_core.proof_form import SKETCH_DIMENSIONS
from prime_verify.proofs import sampling as spec
from prime_verify.proofs import sketch as sketch_spec

_KEY_1 = tl.constexpr(spec.KEY_1)
_KEY_2 = tl.constexpr(spec.KEY_2)
_STEP = tl.constexpr(spec.STEP)
_FINAL_1 = tl.constexpr(spec.FINAL_1)
_FINAL_2 = tl.constexpr(spec.FINAL_2)
_BYTES = tl.constexpr(spec.BYTES)
_GOLDEN = tl.constexpr(sketch_spec.GOLDEN)
_MULTIPLIER_1 = tl.constexpr(sketch_spec.MULTIPLIER_1)
_MULTIPLIER_2 = tl.constexpr(sketch_spec.MULTIPLIER_2)
_BUCKETS = tl.constexpr(SKETCH_DIMENSIONS)
_BLOCK = 1024
_SKETCH_BLOCK = 128
_SKETCH_PART = 8192


@triton.jit
def _mix(h, key):
    key *= _KEY_1
    key = (key << 15) | (key >> 17)
    key *= _KEY_2
    h ^= key
    h = (h << 13) | (h >> 19)
    return h * 5 + _STEP


@triton.jit
def _bits(seed, position, ids):
    """r of the specification (sampling.py) as uint32, from int64 seed and position and int32 token
    ids."""
    h = (seed ^ seed).to(tl.uint32)
    h = _mix(h, (seed & 0xFFFFFFFF).to(tl.uint32))
    h = _mix(h, ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32))
    h = _mix(h, (position & 0xFFFFFFFF).to(tl.uint32))
    h = _mix(h, ids.to(tl.uint32)) ^ _BYTES
    h ^= h >> 16
    h *= _FINAL_1
    h ^= h >> 13
    h *= _FINAL_2
    return h ^ (h >> 16)


@triton.jit
def _gumbel(bits):
    """g of uint32 hashes. Each half of the range is computed from its own end. log1p near 0 is a
    series, because a device's log may lose digits near 1."""
    low = bits < 0x80000000
    word = tl.where(low, bits, bits ^ 0xFFFFFFFF).to(tl.int32)
    u = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = 1.0 / 10.0
    series = 1.0 / 9.0 + u * series
    series = 1.0 / 8.0 + u * series
    series = 1.0 / 7.0 + u * series
    series = 1.0 / 6.0 + u * series
    series = 1.0 / 5.0 + u * series
    series = 1.0 / 4.0 + u * series
    series = 1.0 / 3.0 + u * series
    series = 1.0 / 2.0 + u * series
    series = u * (1.0 + u * series)
    small = tl.where(u < 0.25, series, -tl.log(1.0 - u))  # −ln(1 − u)
    return -tl.log(tl.where(low, small, -tl.log(u)))


@triton.jit
def _gumbel_kernel(out, seeds, positions, vocabulary, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    noise = _gumbel(_bits(tl.load(seeds + row), tl.load(positions + row), ids))
    tl.store(out + row * vocabulary + ids, noise, mask=ids < vocabulary)


@triton.jit
def _sample_kernel(
    best, winner, own, largest, total, logits, stride, temperatures, seeds, noisy, positions,
    vocabulary, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of one row: its largest noisy value, that token and its logit/T, and the block's
    maximum and sum of exponentials for the row's log-sum-exp."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocabulary
    scaled = tl.load(logits + row * stride + ids, mask=inside, other=float("-inf")).to(tl.float32)
    scaled = scaled / tl.load(temperatures + row)
    noise = _gumbel(_bits(tl.load(seeds + row), tl.load(positions + row), ids))
    drawn = tl.where(inside, scaled + noise * tl.load(noisy + row), float("-inf"))
    value, place = tl.max(drawn, axis=0, return_indices=True)
    peak = tl.max(scaled, axis=0)
    at = row * tl.num_programs(1) + block
    tl.store(best + at, value)
    tl.store(winner + at, block * BLOCK + place)
    tl.store(own + at, tl.sum(tl.where(ids == block * BLOCK + place, scaled, 0.0), axis=0))
    tl.store(largest + at, peak)
    tl.store(total + at, tl.sum(tl.exp(scaled - tl.maximum(peak, -3.0e38)), axis=0))


@triton.jit
def _sketch_mix(x):
    x ^= x >> 16
    x *= _MULTIPLIER_1
    x ^= x >> 15
    x *= _MULTIPLIER_2
    return x ^ (x >> 15)


@triton.jit
def _sketch_kernel(out, states, keys, size, PART: tl.constexpr, BLOCK: tl.constexpr):
    """One part of one window: its 64 signed float64 sums, always in the same order."""
    window = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    first = tl.load(keys + 2 * window).to(tl.uint32)
    second = tl.load(keys + 2 * window + 1).to(tl.uint32)
    buckets = tl.arange(0, _BUCKETS)[:, None]
    sums = tl.zeros((_BUCKETS,), dtype=tl.float64)
    for start in range(0, PART, BLOCK):
        at = part * PART + start + tl.arange(0, BLOCK)
        word = ((at >> 2) + 1).to(tl.uint32) * _GOLDEN + first
        word = _sketch_mix(_sketch_mix(word) ^ second)
        byte = (word >> ((at & 3) * 8).to(tl.uint32)) & 0x7F
        values = tl.load(states + window * size + at, mask=at < size, other=0.0).to(tl.float64)
        values = tl.where((byte & 0x40) > 0, -values, values)
        own = (byte & 0x3F).to(tl.int32)[None, :] == buckets
        sums += tl.sum(tl.where(own, values[None, :], 0.0), axis=1)
    tl.store(out + (window * tl.num_programs(1) + part) * _BUCKETS + tl.arange(0, _BUCKETS), sums)


@triton.jit
def _product_kernel(
    out, a, bt, rows, columns, inner,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """One tile of the result. TOGETHER tiles of rows share their columns in the cache. Sizes are
    multiples of PRODUCT_TILE, so that nothing is masked."""
    tiles = columns // COLUMNS
    place = tl.program_id(0)
    first = place // (TOGETHER * tiles) * TOGETHER
    high = tl.minimum(rows // ROWS - first, TOGETHER)
    inside = place % (TOGETHER * tiles)
    row = (first + inside % high) * ROWS + tl.arange(0, ROWS)
    column = inside // high * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, INNER)
    left = a + row.to(tl.int64)[:, None] * inner + k[None, :]
    right = bt + column.to(tl.int64)[None, :] * inner + k[:, None]
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.int32)
    for _ in range(0, inner, INNER):
        sums = tl.dot(tl.load(left), tl.load(right), sums, out_dtype=tl.int32)
        left += INNER
        right += INNER
    at = out + row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(at, (sums >> 8).to(tl.int8))


PRODUCT_TILE = 256
"""Of what the sizes of `product` are multiples."""


def product(a: Tensor, bt: Tensor, inner_tile: int = 128, stages: int = 3) -> Tensor:
    """The second-lowest bytes of a · btᵀ, int8 [M, N], from contiguous int8 [M, K] and [N, K]. M, N
    and K are multiples of PRODUCT_TILE, and sums stay below 2³¹. A multiprocessor needs 384 ·
    `inner_tile` · `stages` bytes of shared memory."""
    (rows, inner), columns = a.shape, len(bt)
    out = torch.empty((rows, columns), dtype=torch.int8, device=a.device)
    kernel: Any = _product_kernel
    kernel[(rows // 128 * (columns // 256),)](
        out, a, bt, rows, columns, inner, ROWS=128, COLUMNS=256, INNER=inner_tile, TOGETHER=8,
        num_warps=8, num_stages=stages,
    )  # fmt: skip
    return out


def gumbel(seeds: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """sampling_torch.gumbel in one kernel: float32 (N, vocabulary), from int64 (N,) tensors."""
    noise = torch.empty((len(seeds), vocabulary), dtype=torch.float32, device=seeds.device)
    kernel: Any = _gumbel_kernel
    if len(seeds):
        kernel[(len(seeds), triton.cdiv(vocabulary, _BLOCK))](
            noise, seeds.contiguous(), positions.contiguous(), vocabulary, BLOCK=_BLOCK
        )
    return noise


def sample(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, noisy: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """(tokens int64 (N,), log-probabilities float32 (N,) = log softmax(logits/T) of each).

    `logits` (N, V) of any float type with contiguous rows; `temperatures` float32, `seeds` int64,
    `noisy` float32 (1, or 0 for the most probable token), `positions` int64, (N,) each. Ties go to
    the lowest id.
    """
    rows, vocabulary = logits.shape
    blocks = triton.cdiv(vocabulary, _BLOCK)
    best, own, largest, total = torch.empty((4, rows, blocks), device=logits.device).unbind()
    winner = torch.empty((rows, blocks), dtype=torch.int64, device=logits.device)
    kernel: Any = _sample_kernel
    kernel[(rows, blocks)](
        best, winner, own, largest, total, logits, logits.stride(0), temperatures, seeds, noisy,
        positions, vocabulary, BLOCK=_BLOCK,
    )  # fmt: skip
    at = best.argmax(dim=1, keepdim=True)
    whole = (total.log() + largest).logsumexp(dim=1)
    return winner.gather(1, at)[:, 0], own.gather(1, at)[:, 0] - whole


def sketch(states: Tensor, keys: Tensor) -> Tensor:
    """The sums of sketch.build before rounding: float64 (W, 64), from bf16 states (W, N) and the
    two words of each window's key, int64 (W, 2)."""
    windows, size = states.shape
    parts = triton.cdiv(size, _SKETCH_PART)
    sums = torch.empty(
        (windows, parts, SKETCH_DIMENSIONS), dtype=torch.float64, device=states.device
    )
    kernel: Any = _sketch_kernel
    kernel[(windows, parts)](
        sums, states.contiguous(), keys.contiguous(), size,
        PART=_SKETCH_PART, BLOCK=_SKETCH_BLOCK,
    )  # fmt: skip
    return sums.sum(dim=1)
