"""Format of a row's proofs. Standard library only, to keep kernels and engines light."""

from __future__ import annotations

from typing import Literal

PROOF_WINDOW = 32
"""Generated tokens covered by one activation proof and one sketch; the last may be shorter."""
PROOF_TOPK = 128
SKETCH_DIMENSIONS = 64

FinishReason = Literal["end", "length"]
