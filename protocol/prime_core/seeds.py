"""Derivation of prompts, target lengths and sampling noise from a lease.

Everything is keccak-256 in counter mode under a domain tag, so a node has no influence on what
pays, and anyone can recompute what a lease asked for.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterator, Sequence

from eth_hash.auto import keccak

from prime_core.ids import Digest, digest, to_bytes

_U64 = 1 << 64


def lease_seed(lease_digest: Digest) -> Digest:
    """keccak256("prime/lease/v1" ‖ lease digest)."""
    return digest(keccak(b"prime/lease/v1" + to_bytes(lease_digest)))


def _stream(seed: Digest, tag: bytes) -> Iterator[int]:
    """Endless 64-bit words of keccak256(tag ‖ seed ‖ counter), four per hash."""
    counter = 0
    while True:
        block = keccak(tag + to_bytes(seed) + counter.to_bytes(8, "big"))
        for i in range(0, 32, 8):
            yield int.from_bytes(block[i : i + 8], "big")
        counter += 1


def _below(stream: Iterator[int], bound: int) -> int:
    """Uniform in [0, bound), by rejection sampling to avoid modulo bias."""
    limit = _U64 - _U64 % bound
    return next(word for word in stream if word < limit) % bound


def problem_indices(seed: Digest, groups: int, problems: int) -> list[int]:
    """Draws each group's problem index in [0, problems), without repetition within the lease (with
    repetition only if groups > problems)."""
    stream = _stream(seed, b"prime/prompts/v1")
    chosen: list[int] = []
    while len(chosen) < groups:
        index = _below(stream, problems)
        if index not in chosen or len(chosen) >= problems:
            chosen.append(index)
    return chosen


def target_lengths(seed: Digest, groups: int, allowed: Sequence[int]) -> list[int]:
    """Draws a target length from `allowed` for each of `groups` problems (used in evaluation and
    benchmarks)."""
    stream = _stream(seed, b"prime/targets/v1")
    return [allowed[_below(stream, len(allowed))] for _ in range(groups)]


def noise_seed(seed: Digest, group: int, sample: int) -> int:
    """The signed 64-bit seed of one row's sampling noise (see proofs/sampling.py). −1 is mapped to
    −2, because vLLM treats −1 as "choose a random seed"."""
    block = keccak(
        b"prime/noise/v2" + to_bytes(seed) + group.to_bytes(4, "big") + sample.to_bytes(4, "big")
    )
    drawn = int.from_bytes(block[:8], "big", signed=True)
    return -2 if drawn == -1 else drawn


def sketch_key(seed: Digest, group: int, sample: int, window: int, tokens: Sequence[int]) -> bytes:
    """32 bytes that seed the CountSketch of one window; bound to the window's own tokens."""
    body = b"".join(token.to_bytes(4, "big") for token in tokens)
    head = b"".join(value.to_bytes(4, "big") for value in (group, sample, window))
    return keccak(b"prime/sketch/v1" + to_bytes(seed) + head + body)


def drawn_rows(secret: Digest, submission_digest: Digest, rows: int, count: int) -> list[int]:
    """The rows a validator replays: PRF(secret, submission digest); sorted, distinct."""
    key = hmac.digest(to_bytes(secret), to_bytes(submission_digest), "sha256")
    stream = _stream(digest(key), b"prime/draw/v1")
    order = list(range(rows))
    for i in range(min(count, rows)):
        j = i + _below(stream, rows - i)
        order[i], order[j] = order[j], order[i]
    return sorted(order[: min(count, rows)])
