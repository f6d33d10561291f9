"""Digests of a proof pass: what a file of an exact class commits to, and their comparison.

    digest of a window = BLAKE2b-128, keyed by the window's sketch key, of log-probability float32
                         and state in the engine's dtype of each of its tokens, little-endian

Any change of one bit changes the digest, so it binds the pass to the exact weights, cache and
kernels. The digest does not show with which weights the tokens were *sampled*: a node may decode
with other weights and run the proof pass with the leased ones. Sampling margins bound that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prime_core.proof_form import PROOF_WINDOW
from prime_core.rollout import EXACT_BYTES
from prime_core.verdict import Reason
from prime_engine.exact import ProofPart

LEAST_ROWS = 2
"""Rows that must differ in their first window before a mismatch is evidence."""


@dataclass(frozen=True)
class Committed:
    """A row's proof pass: log-probabilities float32 [M] of the model's tokens, and the digests of
    their windows, concatenated."""

    logprobs: NDArray[np.float32]
    digests: bytes

    @property
    def finite(self) -> bool:
        return bool(np.isfinite(self.logprobs).all())


def commit(
    parts: Iterable[ProofPart], places: NDArray[np.int64], keys: Sequence[bytes]
) -> Committed:
    """Reduces a proof pass to its digests. `places` int64 [M] are the positions of the model's
    tokens among the output tokens, `keys` the sketch key of each of their windows. Holds one part
    of the pass at a time."""
    hashers = [hashlib.blake2b(digest_size=EXACT_BYTES, key=key) for key in keys]
    kept = []
    start = at = 0
    for logprobs, states in parts:
        own = places[(places >= start) & (places < start + len(logprobs))] - start
        start += len(logprobs)
        kept.append(logprobs[own])
        values = np.concatenate(
            [np.ascontiguousarray(kept[-1]).view(np.uint8).reshape(-1, 4), states[own]], axis=1
        )
        while len(values):
            room = PROOF_WINDOW - at % PROOF_WINDOW
            hashers[at // PROOF_WINDOW].update(values[:room].tobytes())
            at += len(values[:room])
            values = values[room:]
    return Committed(np.concatenate(kept), b"".join(h.digest() for h in hashers))


@dataclass(frozen=True)
class ExactResult:
    """Comparison of a file's drawn rows with the validator's own proof pass. `first` are rows whose
    first window differs, `rows` those with any differing window, `logprobs` those whose digests are
    equal and whose log-probabilities in the file are others. `lengths`: tokens after the prompt of
    the rows `first`, in their order."""

    compared: int
    first: tuple[int, ...]
    rows: tuple[int, ...]
    logprobs: tuple[int, ...]
    lengths: tuple[int, ...]

    def statistics(self) -> dict[str, float]:
        """Counts for tables and evidence."""
        return {
            "exact_rows": float(self.compared),
            "exact_first": float(len(self.first)),
            "exact_mismatches": float(len(self.rows)),
            "exact_logprobs": float(len(self.logprobs)),
        }

    def ruling(self, longest: int) -> tuple[Reason, str] | None:
        """The reason and detail that follow, or None if every bit is equal. The class is proven for
        rows of up to `longest` tokens (0: not proven). Only LEAST_ROWS rows of a proven class are
        evidence against the node, and differing states only in rows that are not longer; anything
        less voids the file."""
        if not self.rows and not self.logprobs:
            return None
        where = (
            f"{len(self.rows)} of {self.compared} rows differ from the proof pass, "
            f"{len(self.first)} of them in their first window; {len(self.logprobs)} rows state "
            "other log-probabilities than they prove"
        )
        if not longest:
            return Reason.UNPROVEN_MISMATCH, f"{where}; the class is not proven"
        if sum(length <= longest for length in self.lengths) >= LEAST_ROWS:
            return Reason.WRONG_PROOF_PASS, where
        if len(self.logprobs) >= LEAST_ROWS:
            return Reason.TAMPERED_LOGPROBS, where
        if len(self.first) >= LEAST_ROWS:
            where += f"; the class is proven for rows of up to {longest} tokens"
        return Reason.UNPROVEN_MISMATCH, where


def compare(
    numbers: Sequence[int],
    lengths: Sequence[int],
    claimed: Sequence[bytes],
    logprobs: Sequence[NDArray[np.float32]],
    own: Sequence[Committed],
) -> ExactResult:
    """Compares rows `numbers`: the file's digests and log-probabilities with the replay's.
    `lengths`: the rows' tokens after the prompt."""
    first, rows, stated, counted = [], [], [], []
    for number, length, said, values, mine in zip(
        numbers, lengths, claimed, logprobs, own, strict=True
    ):
        if said != mine.digests:
            rows.append(number)
            if said[:EXACT_BYTES] != mine.digests[:EXACT_BYTES]:
                first.append(number)
                counted.append(length)
        elif values.tobytes() != mine.logprobs.tobytes():
            stated.append(number)
    return ExactResult(len(numbers), tuple(first), tuple(rows), tuple(stated), tuple(counted))
