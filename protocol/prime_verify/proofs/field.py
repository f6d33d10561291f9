"""Batched, exact polynomial arithmetic over GF(65497) with float64 matrix products.

Elements are integers 0 … 65496 stored as float64, so that products use BLAS: a product is below
2³², a sum of 1,024 of them below 2⁴², and a double is exact up to 2⁵³. All functions process W
polynomials at once, each with k points; k is padded to a multiple of 16 where that helps.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

PRIME = 65497
_BABY = 16
_SHORT = 8
"""Factors up to this degree are multiplied term by term, longer ones by FFT."""

Field = NDArray[np.float64]
"""Integers modulo PRIME as float64, reduced to 0 … PRIME − 1."""


def reduce(x: Field) -> Field:
    """x mod PRIME for integer-valued |x| < 2⁴⁵. Adding a half keeps the quotient away from
    integers, so that the rounding of the multiplication cannot cross one."""
    quotient = x + 0.5
    quotient *= 1.0 / PRIME
    np.floor(quotient, out=quotient)
    quotient *= PRIME
    return np.subtract(x, quotient, out=quotient)


@cache
def inverses() -> Field:
    """Table of modular inverses, float64 [PRIME]; entry 0 is 0 and must not be used."""
    exponents = np.ones(PRIME, dtype=np.int64)
    generator = _generator()
    for i in range(1, PRIME - 1):
        exponents[i] = exponents[i - 1] * generator % PRIME
    powers = exponents[: PRIME - 1]
    table = np.zeros(PRIME, dtype=np.float64)
    table[powers] = powers[-np.arange(PRIME - 1) % (PRIME - 1)]
    return table


def _generator() -> int:
    """Smallest primitive root; PRIME − 1 = 2³ · 3 · 2729."""
    return next(
        g
        for g in range(2, PRIME)
        if all(pow(g, (PRIME - 1) // q, PRIME) != 1 for q in (2, 3, 2729))
    )


def _baby_powers(x: Field) -> tuple[Field, Field]:
    """(x⁰ … x¹⁵ as [W, k, 16], x¹⁶ as [W, k]). The exponent is the first axis in memory, so that
    numpy's inner loops run over all of x."""
    powers = np.empty((_BABY, *x.shape), dtype=np.float64)
    powers[0] = 1
    powers[1] = x
    square = reduce(x * x)
    powers[2] = square
    powers[3] = reduce(square * x)
    fourth = reduce(square * square)
    powers[4:8] = reduce(powers[:4] * fourth)
    eighth = reduce(fourth * fourth)
    powers[8:] = reduce(powers[:8] * eighth)
    return powers.transpose(1, 2, 0), reduce(eighth * eighth)


def evaluate(coefficients: Field, x: Field) -> Field:
    """Values [W, k] of polynomials [W, n] (ascending coefficients) at points [W, k]."""
    return _evaluate(coefficients, _baby_powers(x))


def _evaluate(coefficients: Field, steps: tuple[Field, Field]) -> Field:
    """Baby-step giant-step: baby steps in one matrix product, giant steps by Horner in x¹⁶."""
    count, n = coefficients.shape
    blocks = -(-n // _BABY)
    padded = np.zeros((count, blocks * _BABY), dtype=np.float64)
    padded[:, :n] = coefficients
    powers, giant = steps
    parts = reduce(
        powers @ padded.reshape(count, blocks, _BABY).transpose(0, 2, 1)
    )  # [W, k, blocks]
    value = parts[..., -1]
    for block in range(blocks - 2, -1, -1):
        value = reduce(value * giant + parts[..., block])
    return value


def _power_sums(weights: Field, steps: tuple[Field, Field], n: int) -> Field:
    """S_r = Σ_i weights_i · x_i^r for r < n: [W, n]."""
    blocks = -(-n // _BABY)
    powers, giant = steps
    scaled = np.empty((len(weights), blocks, weights.shape[1]), dtype=np.float64)
    scaled[:, 0] = weights
    for block in range(1, blocks):
        scaled[:, block] = reduce(scaled[:, block - 1] * giant)
    sums = reduce(scaled @ powers)  # [W, blocks, 16]
    return sums.reshape(len(weights), blocks * _BABY)[:, :n]


def _master(x: Field) -> Field:
    """Coefficients [W, k + 1], ascending, of Π_i (X − x_i), by a product tree."""
    count, k = x.shape
    size = 1 << (k - 1).bit_length() if k > 1 else 1
    # Monic factors are stored without their leading 1: (X^d + a)(X^d + b) = X^2d + (a + b)X^d + ab.
    # Missing leaves are the factor X, which only shifts the result. Short factors are stored with
    # the degree as the first axis [d, W, n], so that numpy's inner loops are long; the pairing
    # does not matter.
    level = np.zeros((1, count, size), dtype=np.float64)
    level[0, :, :k] = PRIME - x
    while level.shape[2] > 1 and len(level) <= _SHORT:
        degree, half = len(level), level.shape[2] // 2
        a, b = level[:, :, :half], level[:, :, half:]
        product = np.zeros((2 * degree, count, half), dtype=np.float64)
        for i in range(degree):
            product[i : i + degree] += a[i] * b
        product[degree:] += a + b
        level = reduce(product)
    level = np.ascontiguousarray(level.transpose(1, 2, 0))  # [W, n, d]
    while level.shape[1] > 1:
        a, b = level[:, 0::2], level[:, 1::2]
        degree = level.shape[2]
        product = np.zeros((count, a.shape[1], 2 * degree), dtype=np.float64)
        product[..., : 2 * degree - 1] = _convolve(a, b)
        product[..., degree:] += a + b
        level = reduce(product)
    master = np.ones((count, k + 1), dtype=np.float64)
    master[:, :k] = level[:, 0, size - k :]
    return master


def _convolve(a: Field, b: Field) -> Field:
    """Exact integer convolution along the last axis, lengths ≤ 128: the FFT error stays near 2⁴⁰ ·
    2⁻⁵³ · log₂ 256, far below ½."""
    length = a.shape[-1] + b.shape[-1] - 1
    size = 1 << (length - 1).bit_length()
    product = np.fft.irfft(np.fft.rfft(a, size) * np.fft.rfft(b, size), size)
    return np.rint(product[..., :length])


def interpolate(x: Field, y: Field) -> Field:
    """Ascending coefficients [W, k] of the polynomials of degree < k through (x, y), both [W, k].

    The points of one polynomial must be distinct modulo PRIME. Lagrange's form, expanded: with M =
    Π(X − x_i) and w_i = y_i / M'(x_i), c_j = Σ_{l>j} M_l · S_{l−j−1}, S_r = Σ w_i x_i^r.
    """
    k = x.shape[1]
    master = _master(x)
    derivative = reduce(master[:, 1:] * np.arange(1, k + 1))
    steps = _baby_powers(x)
    slopes = _evaluate(derivative, steps)
    weights = reduce(y * inverses()[slopes.astype(np.int64)])
    sums = _power_sums(weights, steps, k)
    # c_j is the correlation of M_1 … M_k with S: reverse S, convolve, take the last k terms.
    return reduce(_convolve(master[:, 1:], sums[:, ::-1])[:, k - 1 :])
