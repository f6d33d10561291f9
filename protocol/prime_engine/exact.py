"""Exact classes: which machines compute the same bits, and the canonical proof pass.

    proof pass    one row alone, in chunks of PROOF_CHUNK tokens from its first token:
                  log-probabilities and states of every output token. It does not depend on how the
                  row was generated
    class         facts: everything whose change may change bits, as text  ─┐
                  fingerprint: SHA-256 of the proof passes of fixed probes ─┴► digest

Two engines with equal classes have the same policy, dtype and kernels, and compute the same bits as
far as the probes show. The facts may be equal and the fingerprints different; then the classes are
different. A loaded policy with changed weights has another fingerprint.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from prime_core.errors import UnavailableError
from prime_core.ids import Digest, digest

if TYPE_CHECKING:
    from prime_engine.base import Engine

REPLAY_MODE = "proof-pass-1"
RANKS = "tensor parallel"
"""The fact that names the processes of an engine, each with a part of every layer; 1 without it."""
PROOF_CHUNK = 256
"""Tokens of one prefill of the proof pass."""
PROBES = (1, 2, 31, PROOF_CHUNK - 1, PROOF_CHUNK + 1, PROOF_CHUNK + 40)
"""Lengths of the probes in tokens; shorter for a model with fewer positions."""

ProofPart = tuple[NDArray[np.float32], NDArray[np.uint8]]
"""Consecutive output tokens of a proof pass: log-probabilities float32 [n], and the final norm's
output in the engine's dtype as bytes, uint8 [n, H · size of the dtype]."""


@dataclass(frozen=True)
class NumericClass:
    """An exact class with one loaded policy. `facts` are names and values as text."""

    facts: Mapping[str, str]
    fingerprint: Digest

    @property
    def key(self) -> Digest:
        """SHA-256 of the facts: the class without its policy."""
        from prime_core import encoding  # its packages are not on every machine with a card

        return encoding.sha256(encoding.canonical_json(dict(self.facts)))

    @property
    def engine(self) -> str:
        """Engine.name of its engines."""
        return self.facts.get("engine", "")

    @property
    def dtype(self) -> str:
        """The dtype of its engines."""
        return self.facts.get("dtype", "")

    def digest(self) -> Digest:
        """keccak256("prime/class/v1" ‖ key ‖ fingerprint)."""
        from prime_core import encoding

        return encoding.keccak256(
            b"prime/class/v1" + bytes.fromhex(self.key[2:] + self.fingerprint[2:])
        )

    @property
    def words(self) -> str:
        """The facts for a reader who needs such hardware."""
        return ", ".join(f"{name} {value}" for name, value in sorted(self.facts.items()))


def image_digest() -> str:
    """Returns the digest of the container image that this program runs in, without its
    repository; "none" outside containers."""
    from prime_core.task import IMAGE_VARIABLE  # its packages are not on every machine with a card

    return os.environ.get(IMAGE_VARIABLE, "").rpartition("@")[2] or "none"


def measure(engine: Engine) -> NumericClass:
    """Measures the class of a loaded policy by running the probes twice.

    Raises UnavailableError if the engine has no proof pass, or does not repeat its own bits.
    """
    facts = engine.facts()
    passes = [_probe(engine) for _ in range(2)]
    if passes[0] != passes[1]:
        raise UnavailableError(f"{engine.name} on {engine.device} does not repeat its own bits")
    return NumericClass(facts, passes[0])


def _probe(engine: Engine) -> Digest:
    """SHA-256 of the proof passes of the probes."""
    hashed = hashlib.sha256()
    longest = min(max(PROBES), engine.positions - 1)
    for length in sorted({min(length, longest) for length in PROBES}):
        tokens = [
            (7 + 7_919 * i * i + 104_729 * length) % engine.vocabulary for i in range(length + 1)
        ]
        for logprobs, states in engine.proof_pass(tokens[:1], tokens[1:], 1.0):
            hashed.update(logprobs.tobytes() + states.tobytes())
    return digest(hashed.digest())
