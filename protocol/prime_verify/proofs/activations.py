"""Activation proofs in TOPLOC's format (arXiv 2501.16007), batched over all windows of a file.

A window is up to 32 generated tokens; its final-norm hidden states, bf16 [t, H], are flattened to
N = t·H elements. The 128 largest magnitudes (ties to the lowest index; all if N < 128) at positions
`idx` with bf16 bit patterns y become the polynomial p of degree < k over GF(65497) with
p(idx mod m) = y, where m ≤ 65497 is the largest modulus that keeps them distinct:

    big-endian u16 m ‖ u16 c_0 … c_{k−1}            258 bytes for k = 128

The verifier evaluates p at the positions of its own largest elements and compares exponents, signs
and mantissas with its own. States are uint16 arrays of bf16 bit patterns for every engine.

Limitations: a proof does not show which token was drawn (see sampling.py). Because the prover
chooses p and m, it does not show that the prover ran the model at all (see sketch.py). Strict
decoding rejects small moduli, with which one magnitude per hidden dimension would pass.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prime_core.errors import MalformedError
from prime_core.proof_form import PROOF_TOPK, PROOF_WINDOW
from prime_verify.proofs import field
from prime_verify.proofs.picking import largest_of

MAX_MODULUS = field.PRIME
MIN_MODULUS = 1 << 15
"""Moduli up to this value are rejected. Honest ones stay within a few hundred of MAX_MODULUS."""
PROOF_BYTES = 2 + 2 * PROOF_TOPK
_WORST_MANTISSA = 127
_BATCH = 64
"""Windows interpolated at once."""

States = NDArray[np.uint16]
"""bf16 bit patterns [T, H]: one row per generated token, from the position that predicts it."""


def windows_of(tokens: int) -> int:
    """Number of proof windows of a row with `tokens` generated tokens."""
    return -(-tokens // PROOF_WINDOW)


def proof_bytes(elements: int) -> int:
    """Proof length in bytes for a window of `elements` values."""
    return 2 + 2 * min(PROOF_TOPK, elements)


def split_windows(states: States) -> list[NDArray[np.uint16]]:
    """Splits one row's states into flattened windows, each uint16 [t·H]."""
    return [
        states[start : start + PROOF_WINDOW].reshape(-1)
        for start in range(0, len(states), PROOF_WINDOW)
    ]


def largest(window: NDArray[np.uint16]) -> NDArray[np.int64]:
    """`largest_of` for a single window: int64 [min(128, N)]."""
    return largest_of([window])[0]


def modulus_of(positions: NDArray[np.int64]) -> int:
    """Largest m ≤ 65497 for which all `positions` (int64 [k], distinct, ascending) mod m are
    distinct. Raises MalformedError if there is none above MIN_MODULUS."""
    if not len(positions) or positions[-1] < MAX_MODULUS:
        return MAX_MODULUS
    for m in range(MAX_MODULUS, MIN_MODULUS, -1):
        if _distinct(positions % m):
            return m
    raise MalformedError("no modulus parts the positions")  # requires some 30,000 collisions


def _distinct(residues: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether all entries of each row of [..., k] differ: bool [...]."""
    ordered = np.sort(residues, axis=-1)
    unequal: NDArray[np.bool_] = (ordered[..., 1:] != ordered[..., :-1]).all(axis=-1)
    return unequal


def _moduli(positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """`modulus_of` for each row of [W, k]; nearly all are MAX_MODULUS."""
    moduli = np.full(len(positions), MAX_MODULUS, dtype=np.int64)
    for row in np.flatnonzero(~_distinct(positions % MAX_MODULUS)):
        moduli[row] = modulus_of(positions[row])
    return moduli


def build(windows: Sequence[NDArray[np.uint16]]) -> list[bytes]:
    """Builds one proof per flattened window (uint16 bf16 bits, [t·H], t ≥ 1).

    Windows of equal size are interpolated in batches. Raises MalformedError if states are not
    finite.
    """
    picked = largest_of(windows)
    proofs: list[bytes] = [b""] * len(windows)
    for members in _by_size([len(p) for p in picked]):
        positions = np.stack([picked[i] for i in members])
        values = np.stack([windows[i][picked[i]] for i in members])
        for i, proof in zip(members, build_picked(positions, values), strict=True):
            proofs[i] = proof
    return proofs


def build_picked(positions: NDArray[np.int64], values: NDArray[np.uint16]) -> list[bytes]:
    """Builds the proofs of W windows from their largest magnitudes: ascending positions and bf16
    bits, [W, k] each."""
    proofs = []
    for start in range(0, len(positions), _BATCH):
        some = positions[start : start + _BATCH]
        moduli = _moduli(some)
        x = some % moduli[:, None]
        y = values[start : start + _BATCH]
        coefficients = field.interpolate(x.astype(np.float64), y.astype(np.float64))
        table = np.concatenate([moduli[:, None], coefficients], axis=1).astype(">u2")
        proofs += [row.tobytes() for row in table]
    return proofs


def _by_size(sizes: Sequence[int]) -> list[list[int]]:
    """Indices grouped by size, in batches whose intermediate products fit in cache."""
    groups: dict[int, list[int]] = {}
    for i, size in enumerate(sizes):
        groups.setdefault(size, []).append(i)
    return [
        members[start : start + _BATCH]
        for members in groups.values()
        for start in range(0, len(members), _BATCH)
    ]


def pack(proofs: Sequence[bytes]) -> bytes:
    """Packs a row's proofs into one value: big-endian u16 length ‖ bytes, for each window in
    order."""
    return b"".join(struct.pack(">H", len(proof)) + proof for proof in proofs)


def unpack(data: bytes, windows: int) -> list[bytes]:
    """The inverse of `pack`. Raises MalformedError unless there are exactly `windows` proofs."""
    proofs: list[bytes] = []
    at = 0
    while at < len(data) and len(proofs) < windows:
        if at + 2 > len(data):
            raise MalformedError("a proof's length is cut off")
        (length,) = struct.unpack_from(">H", data, at)
        if length > PROOF_BYTES or at + 2 + length > len(data):
            raise MalformedError(f"a proof claims {length} bytes")
        proofs.append(data[at + 2 : at + 2 + length])
        at += 2 + length
    if at != len(data) or len(proofs) != windows:
        raise MalformedError(f"expected {windows} proofs and nothing after them")
    return proofs


@dataclass(frozen=True)
class DecodedProof:
    """A proof that passed strict decoding."""

    modulus: int
    coefficients: NDArray[np.uint16]


def decode(proof: bytes, elements: int) -> DecodedProof:
    """Strictly decodes the proof of a window of `elements` values.

    Raises MalformedError unless the length is 2 + 2·min(128, elements), m is in (2¹⁵, 65497] and
    every coefficient is below 65497.
    """
    if len(proof) != proof_bytes(elements):
        raise MalformedError(f"a proof of {len(proof)} bytes where {proof_bytes(elements)} are due")
    words = np.frombuffer(proof, dtype=">u2")
    modulus = int(words[0])
    if not MIN_MODULUS < modulus <= MAX_MODULUS:
        raise MalformedError(f"modulus {modulus} is not in ({MIN_MODULUS}, {MAX_MODULUS}]")
    coefficients = words[1:].astype(np.uint16)
    if (coefficients >= field.PRIME).any():
        raise MalformedError(f"a coefficient is not below {field.PRIME}")
    return DecodedProof(modulus, coefficients)


@dataclass(frozen=True)
class WindowMatches:
    """Comparison of W windows, arrays of length W.

    `exponent`: share of the verifier's largest elements whose exponent differs. `sign`: share whose
    sign differs. `mantissa`: mean |Δ mantissa| (0 … 127) over elements with equal exponent, 127 if
    there are none. `mantissa_median`: their median.
    """

    exponent: NDArray[np.float64]
    sign: NDArray[np.float64]
    mantissa: NDArray[np.float64]
    mantissa_median: NDArray[np.float64]


def verify(proofs: Sequence[DecodedProof], windows: Sequence[NDArray[np.uint16]]) -> WindowMatches:
    """Compares decoded proofs with the verifier's own flattened windows (uint16 bf16 bits, [N], N ≥
    1), in order, at the `min(128, N)` largest elements of each.

    Raises MalformedError if states are not finite or the counts differ.
    """
    if len(proofs) != len(windows):
        raise MalformedError(f"{len(proofs)} proofs for {len(windows)} windows")
    result = WindowMatches(*(np.zeros(len(windows)) for _ in range(4)))
    picked = largest_of(windows)
    for members in _by_size([len(p) for p in picked]):
        x = np.stack([picked[i] % proofs[i].modulus for i in members]).astype(np.float64)
        c = np.stack([proofs[i].coefficients for i in members]).astype(np.float64)
        claimed = field.evaluate(c, x).astype(np.int64)
        own = np.stack([windows[i][picked[i]] for i in members]).astype(np.int64)
        same = (claimed >> 7) & 0xFF == (own >> 7) & 0xFF
        error = np.where(same, np.abs((claimed & 0x7F) - (own & 0x7F)), 0)
        equal = same.sum(axis=1)
        result.exponent[members] = 1.0 - equal / same.shape[1]
        result.sign[members] = (claimed >> 15 != own >> 15).mean(axis=1)
        mean = error.sum(axis=1) / np.maximum(equal, 1)
        result.mantissa[members] = np.where(equal > 0, mean, _WORST_MANTISSA)
        result.mantissa_median[members] = _medians(error, same, equal)
    return result


def _medians(
    error: NDArray[np.int64], same: NDArray[np.bool_], equal: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Median of `error` [W, k] over each row's `equal` [W] places where `same`."""
    ordered = np.sort(np.where(same, error, _WORST_MANTISSA + 1), axis=1)  # the rest sorts last
    rows = np.arange(len(error))
    at = np.maximum(equal - 1, 0)
    low, high = ordered[rows, at // 2], ordered[rows, (at + 1) // 2]
    return np.where(equal > 0, (low + high) / 2, _WORST_MANTISSA)
