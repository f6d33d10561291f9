"""Hardware challenge: multiply seeded integer matrices; the result is checked with Freivalds'
method.

Round r of a challenge draws two size×size int8 matrices A_r, B_r from SHAKE-256 (FIPS 202) of
"prime/hardware/v1" ‖ seed ‖ r ‖ "A" or "B", row by row; the solution is A_r · B_r as int64. Solving
costs rounds · size³ multiply-adds, checking O(rounds · size²) (Freivalds, 1977).

It shows how fast this key's holder multiplied at this moment. It does not show which machine did
it, or that the machine will be available later.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from prime_core.errors import MalformedError, UnavailableError
from prime_core.ids import Digest, to_bytes
from prime_core.run import MAX_SOLUTION_BYTES

MAX_SIZE = 8192
REPETITIONS = 2
"""Random vectors of one check."""
_BLOCK = 1024
"""Longest inner dimension whose int8 products sum exactly in float32: 1024 · 2¹⁴ = 2²⁴."""


def matrices(
    seed: Digest, size: int, round_number: int
) -> tuple[NDArray[np.int8], NDArray[np.int8]]:
    """A and B of one round, int8 [size, size]. Raises MalformedError if size is out of bounds."""
    if not 1 <= size <= MAX_SIZE:
        raise MalformedError(f"challenge size {size} is not in 1 … {MAX_SIZE}")
    head = b"prime/hardware/v1" + to_bytes(seed) + round_number.to_bytes(4, "big")
    a, b = (
        np.frombuffer(hashlib.shake_256(head + name).digest(size * size), dtype=np.int8)
        for name in (b"A", b"B")
    )
    return a.reshape(size, size), b.reshape(size, size)


def multiply_adds(size: int, rounds: int) -> int:
    """Number of multiply-adds of a solution."""
    return rounds * size**3


def solution_bytes(size: int, rounds: int) -> int:
    """Exact length of a solution on the wire: int64 little-endian [rounds, size, size]."""
    return rounds * size * size * 8


def solve(seed: Digest, size: int, rounds: int, device: str = "cpu") -> NDArray[np.int64]:
    """Computes all products, int64 [rounds, size, size].

    `device` "cpu" uses numpy, anything else ("cuda", "cuda:1") uses torch on that device: float32
    blocks of 1,024 terms, which are exact, summed as integers. Raises MalformedError if a run may
    ask for no such challenge, UnavailableError if torch or the device is missing.
    """
    if min(size, rounds) < 1 or solution_bytes(size, rounds) > MAX_SOLUTION_BYTES:
        raise MalformedError(f"a challenge of {rounds} rounds of size {size} is out of bounds")
    products = np.empty((rounds, size, size), dtype=np.int64)
    for r in range(rounds):
        a, b = matrices(seed, size, r)
        products[r] = _product_numpy(a, b) if device == "cpu" else _product_torch(a, b, device)
    return products


def _product_numpy(a: NDArray[np.int8], b: NDArray[np.int8]) -> NDArray[np.int64]:
    total = np.zeros(a.shape, dtype=np.int64)
    for k in range(0, a.shape[1], _BLOCK):
        block = a[:, k : k + _BLOCK].astype(np.float32) @ b[k : k + _BLOCK].astype(np.float32)
        total += block.astype(np.int64)
    return total


def _product_torch(
    a: NDArray[np.int8], b: NDArray[np.int8], device: str
) -> NDArray[np.int64]:  # pragma: no cover - needs an accelerator
    try:
        import torch
    except ImportError as error:
        raise UnavailableError(f"device {device!r} needs torch, which is not installed") from error
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UnavailableError(f"device {device!r} is asked for, but torch sees no CUDA device")
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False  # TF32 would round the products
    try:
        left = torch.from_numpy(a.copy()).to(device)
        right = torch.from_numpy(b.copy()).to(device)
        total = torch.zeros(a.shape, dtype=torch.int64, device=device)
        for k in range(0, a.shape[1], _BLOCK):
            block = left[:, k : k + _BLOCK].float() @ right[k : k + _BLOCK].float()
            total += block.to(torch.int64)
        result: NDArray[np.int64] = total.cpu().numpy()
        return result
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def decode_solution(data: bytes, size: int, rounds: int) -> NDArray[np.int64]:
    """Decodes products: int64 [rounds, size, size]. Raises MalformedError unless the length is
    exact; does not check the entries."""
    expected = solution_bytes(size, rounds)
    if len(data) != expected:
        raise MalformedError(f"a solution has {expected} bytes, not {len(data)}")
    return np.frombuffer(data, dtype="<i8").astype(np.int64).reshape(rounds, size, size)


def encode_solution(products: NDArray[np.int64]) -> bytes:
    """Encodes products (int64 [rounds, size, size]) as little-endian bytes, row by row. Checks
    nothing."""
    return products.astype("<i8").tobytes()


def check(
    seed: Digest,
    size: int,
    rounds: int,
    products: NDArray[np.int64],
    rng: np.random.Generator,
) -> bool:
    """Returns True if `products` (int64 [rounds, size, size]) are correct. Wrong ones pass with
    probability ≤ 2⁻³² per repetition, drawn from `rng`, which the solver must not be able to
    predict.

    Arithmetic wraps modulo 2⁶⁴. An entry of a correct product is below 2²⁷, so entries are bounded
    first; then a wrong entry differs by d = 2ᵏ·odd with k ≤ 28, and d·x ≡ c (mod 2⁶⁴) has at most
    one solution x among the 2³² values drawn.
    """
    if products.shape != (rounds, size, size) or products.dtype != np.int64:
        return False
    bound = size << 14
    if products.size and (products.max() > bound or products.min() < -bound):
        return False
    for r in range(rounds):
        a, b = matrices(seed, size, r)
        x = rng.integers(0, 1 << 32, size=(size, REPETITIONS), dtype=np.int64)
        expected = _times(a, _times(b, x))
        if not np.array_equal(_times(products[r], x), expected):
            return False
    return True


def _times(matrix: NDArray[np.int8] | NDArray[np.int64], x: NDArray[np.int64]) -> NDArray[np.int64]:
    """matrix · x in wrapping int64, in blocks of rows to bound memory."""
    rows = [
        matrix[i : i + 256].astype(np.int64, copy=False) @ x for i in range(0, len(matrix), 256)
    ]
    return np.concatenate(rows)
