"""The model behind one port: generate with seeded noise and captured states, replay by prefill.

Importing this needs numpy only. States are the final norm's output at the positions that *predict*
each output token (prompt_len − 1 … prompt_len + T − 2), as bf16 bit patterns, so that proofs need
no engine.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from prime_core.proof_form import FinishReason

Dtype = Literal["float32", "bfloat16"]
Noise = Callable[[Any, Any, int], Any]
"""(seeds int64 (N,), positions int64 (N,) of the input tokens in their rows, vocabulary) → Gumbel
noise float32 (N, vocabulary), torch tensors: proofs.sampling_torch.gumbel, handed in so that the
packages stay apart."""


def cpu_name() -> str:
    """What a file says of the processor: "cpu" on x86-64, where limits are measured. Others name
    their architecture: how far their kernels drift is to be measured before anybody is judged."""
    machine = platform.machine().lower()
    return "cpu" if machine in ("x86_64", "amd64") else f"cpu {machine}"


@dataclass(frozen=True)
class GenerationRequest:
    """One row to generate. `noise_seed` is the signed 64-bit seed of core.seeds.noise_seed; None
    takes the most probable token at each position (evaluation, and one of the known lies)."""

    prompt_tokens: tuple[int, ...]
    max_output_tokens: int
    noise_seed: int | None


@dataclass(frozen=True)
class Generation:
    """T generated tokens, the end token included; `logprobs` float32 [T] = log softmax(logits / T)
    of each, before the noise; `states` uint16 [T, H], or [T, 0] if a sink took them."""

    output_tokens: tuple[int, ...]
    logprobs: NDArray[np.float32]
    states: NDArray[np.uint16]
    finish_reason: FinishReason
    spans: tuple[int, ...] = ()
    """Of a conversation (prime_core.rollout.SCHEMAS): `logprobs` has 0 for the environment's
    tokens, `states` has rows for the model's only."""


@dataclass(frozen=True)
class ReplayRequest:
    """One row to check: tokens as claimed, the noise as the lease dictates.

    `rivals`: for each position the token that Replay.contrasts sets against the claimed one; None
    takes the seeded choice among all others.
    """

    prompt_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    noise_seed: int
    rivals: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Replay:
    """What this engine finds at each of the T output positions.

    `logprobs` float32 [T] of the claimed tokens; `winners` int64 [T] the seeded choice; `margins`
    float32 [T] by how much the winner's logits/T + noise exceeds the claimed token's (0 if equal);
    `rivals` int64 [T], see ReplayRequest; `contrasts` float32 [T] by how much the claimed token's
    logits/T exceeds its rival's, without noise (as far apart as those of two engines are, a margin
    between them can be); `tail_mass` float32 [T] probability of all tokens less probable than
    TAIL_PROBABILITY; `end_probability` of the last token; `states` uint16 [T, H].
    """

    logprobs: NDArray[np.float32]
    winners: NDArray[np.int64]
    margins: NDArray[np.float32]
    rivals: NDArray[np.int64]
    contrasts: NDArray[np.float32]
    tail_mass: NDArray[np.float32]
    end_probability: float
    states: NDArray[np.uint16]


class StateSink(Protocol):
    """Takes states as they are made, so that no engine holds those of whole rows
    (proofs.windows.WindowReducer)."""

    def step(self, rows: Sequence[int], places: Sequence[int], tokens: Any, states: Any) -> None:
        """Tokens int64 (n,) and states bf16 (n, H), torch tensors, of n rows (their numbers among
        the requests) at these places of their outputs. A place may come again while its window of
        32 places is the row's last."""
        ...

    def end(self, rows: Sequence[int]) -> None:
        """Nothing more comes of these rows."""
        ...


TAIL_PROBABILITY = 1e-4
"""Tokens below this are the tail whose observed and expected numbers are compared."""


class Engine(Protocol):
    """A policy, loaded. One thread at a time."""

    @property
    def name(self) -> str:
        """Name and generation of the implementation, as in the file's metadata: "plain/1"."""
        ...

    @property
    def dtype(self) -> str: ...

    @property
    def device(self) -> str:
        """Device kind: `cpu_name` or the accelerator's name, as in the file's metadata."""
        ...

    @property
    def vocabulary(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def end_tokens(self) -> frozenset[int]: ...

    @property
    def tokenizer(self) -> Any:
        """The policy folder's Hugging Face tokenizer."""
        ...

    def twin(self, dtype: str) -> Engine:
        """The same policy computed in `dtype` (itself if that is its own): the measure of what the
        dtype alone changes. Raises UnavailableError if it cannot compute in that dtype."""
        ...

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        temperature: float,
        sink: StateSink | None = None,
    ) -> list[Generation]:
        """Generates every row, in order; with a `sink` states go there, and Generation.states is
        empty. Raises MalformedError on a request that cannot be run."""
        ...

    def replay(self, requests: Sequence[ReplayRequest], temperature: float) -> list[Replay]:
        """Prefills every row, in order. Raises MalformedError on a request that cannot be run."""
        ...

    def close(self) -> None:
        """Frees what the process must not hold twice; the engine is not used after it."""
        ...
