"""Format of a row's proofs. Standard library only, to keep kernels and engines light."""

from __future__ import annotations

from typing import Literal

PROOF_WINDOW = 32
"""Generated tokens covered by one activation proof and one sketch; the last may be shorter."""
PROOF_TOPK = 128
SKETCH_DIMENSIONS = 64

FinishReason = Literal["end", "length", "tool_limit"]
"""How a row ended. "tool_limit": a call ended by its limit, the pool's gateway gave no answer to
it, or the environment's code raised. Such a row is paid and not trained on; only files of runs with
a conversation have it."""
