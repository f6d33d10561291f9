"""The model interface: generate with seeded noise and captured states, replay by prefill.

Importing this module requires only numpy. States are the final norm's output at the positions that
*predict* each output token (prompt_len − 1 … prompt_len + T − 2), as bf16 bit patterns, so that
proofs do not depend on an engine.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from prime_core.proof_form import FinishReason
from prime_engine.exact import NumericClass, ProofPart

if TYPE_CHECKING:
    from prime_core.gateway import GatewayAnswer

Dtype = Literal["float32", "bfloat16"]
Noise = Callable[[Any, Any, int], Any]
"""(seeds int64 (N,), positions int64 (N,) of the input tokens in their rows, vocabulary) → Gumbel
noise float32 (N, vocabulary), all torch tensors. It is proofs.sampling_torch.gumbel, passed in to
keep the packages independent."""


def cpu_name() -> str:
    """The processor name in a file's metadata: "cpu" on x86-64, where limits were measured; other
    architectures include their name, because their kernels' drift must be measured before files are
    judged."""
    machine = platform.machine().lower()
    return "cpu" if machine in ("x86_64", "amd64") else f"cpu {machine}"


@dataclass(frozen=True)
class GenerationRequest:
    """One row to generate. `noise_seed` is the signed 64-bit seed of core.seeds.noise_seed; None
    selects the most probable token at each position (for evaluation, and for one of the known
    attacks)."""

    prompt_tokens: tuple[int, ...]
    max_output_tokens: int
    noise_seed: int | None


@dataclass(frozen=True)
class Generation:
    """T generated tokens, including the end token; `logprobs` float32 [T] = log softmax(logits / T)
    of each, before the noise; `states` uint16 [T, H], or [T, 0] if a sink received them."""

    output_tokens: tuple[int, ...]
    logprobs: NDArray[np.float32]
    states: NDArray[np.uint16]
    finish_reason: FinishReason
    spans: tuple[int, ...] = ()
    """Spans of a conversation (prime_core.rollout.SCHEMAS). `logprobs` is 0 for the environment's
    tokens, and `states` has rows only for the model's."""
    gateway: tuple[GatewayAnswer, ...] = ()
    """Signed answers to the conversation's calls, in the order of turns."""


@dataclass(frozen=True)
class ReplayRequest:
    """One row to check: tokens as claimed, noise as dictated by the lease.

    `rivals`: for each position, the token that Replay.contrasts compares with the claimed one; None
    selects the seeded choice among all others.
    """

    prompt_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    noise_seed: int
    rivals: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Replay:
    """This engine's results at each of the T output positions.

    `logprobs` float32 [T] of the claimed tokens; `winners` int64 [T], the seeded choice; `margins`
    float32 [T], by how much the winner's logits/T + noise exceeds the claimed token's (0 if equal);
    `rivals` int64 [T], see ReplayRequest; `contrasts` float32 [T], by how much the claimed token's
    logits/T exceeds its rival's, without noise (the difference between two engines' contrasts
    bounds the margin between them); `tail_mass` float32 [T], total probability of all tokens less
    probable than TAIL_PROBABILITY; `end_probability` of the last token; `states` uint16 [T, H].
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
    """Receives states as they are computed, so that engines do not hold those of whole rows
    (proofs.windows.WindowReducer)."""

    def step(self, rows: Sequence[int], places: Sequence[int], tokens: Any, states: Any) -> None:
        """Receives tokens int64 (n,) and states bf16 (n, H), torch tensors, of n rows (numbered as
        in the requests) at these positions of their outputs. A position may be repeated while its
        window of 32 positions is the row's last."""
        ...

    def end(self, rows: Sequence[int]) -> None:
        """Marks these rows as complete."""
        ...


class Discard:
    """A StateSink for callers that make no proofs: without one, an engine holds the states of whole
    rows (335 MB for 32k tokens of a 32B model)."""

    def step(self, rows: Sequence[int], places: Sequence[int], tokens: Any, states: Any) -> None:
        """Does nothing."""

    def end(self, rows: Sequence[int]) -> None:
        """Does nothing."""


TAIL_PROBABILITY = 1e-4
"""Tokens below this form the tail whose observed and expected counts are compared."""


class Engine(Protocol):
    """A loaded policy. Not thread-safe."""

    @property
    def name(self) -> str:
        """Name and version of the implementation, as in the file's metadata: "plain/1"."""
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

    def in_dtype(self, dtype: str) -> Engine:
        """The same policy computed in `dtype` (itself if that is its own), to measure the effect of
        the dtype alone. Raises UnavailableError if it cannot compute in that dtype."""
        ...

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        temperature: float,
        sink: StateSink | None = None,
    ) -> list[Generation]:
        """Generates every row, in order. With a `sink`, states go there and Generation.states is
        empty. Raises MalformedError on a request that cannot be run."""
        ...

    def replay(self, requests: Sequence[ReplayRequest], temperature: float) -> list[Replay]:
        """Prefills every row, in order. Raises MalformedError on a request that cannot be run."""
        ...

    @property
    def positions(self) -> int:
        """Maximum number of tokens in a row."""
        ...

    def proof_pass(
        self, prompt_tokens: Sequence[int], output_tokens: Sequence[int], temperature: float
    ) -> Iterator[ProofPart]:
        """Prefills one row alone in fixed chunks (prime_engine.exact); yields the output tokens in
        order. Raises MalformedError on a row that cannot be run, UnavailableError if the engine has
        no proof pass."""
        ...

    def facts(self) -> Mapping[str, str]:
        """Everything whose change may change the bits of `proof_pass`, as text. Raises
        UnavailableError if the engine has no proof pass."""
        ...

    def numeric_class(self) -> NumericClass:
        """The engine's exact class, measured once. Raises UnavailableError, see exact.measure."""
        ...

    def close(self) -> None:
        """Frees resources that the process cannot hold twice; the engine must not be used
        afterwards."""
        ...


@runtime_checkable
class PolicyReplacing(Protocol):
    """An engine that can load another policy in place."""

    def replace_policy(self, folder: Path) -> bool:
        """Loads the policy in `folder` into this engine, which must have no rows. Returns False,
        with nothing changed, if that takes a new engine: where the engine cannot, or if the
        folder's other files (configuration, tokenizer) or names of tensors differ. Raises
        UnavailableError if the weights were not loaded as they are in the policy; then the engine
        must be closed."""
        ...
