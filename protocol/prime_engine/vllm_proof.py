"""The proof pass through vLLM: one row alone in vLLM's batch, in chunks of PROOF_CHUNK tokens.

    rows in progress ── `alone` sets them aside ──╮
    the row, less its last token ─────────────────┴─► scheduler ─► chunk ─► states [n, H]
                                                                                  │ `Capture.take`
    log-probabilities of the tokens that follow [n] ◄── logits [n, V] ◄── LM head ╯

Rows in progress keep their cache and go on afterwards. vLLM's runner is handed the states of a
step's tokens where it would compute log-probabilities of prompts; `Capture.attach` takes its place.
Its own are not used: they have no temperature, and it compiles their kernel on first use.

No step of a proof pass replays a whole CUDA graph, as vLLM does for steps of one token a row, such
as a chunk of one token. Such a graph was captured with the engine's longest row as the length of
all rows, on which FlashAttention 2's split of the sums depends. Without it, attention gets the
row's own length, and engines with other longest rows compute the same bits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from prime_core.errors import FatalError
from prime_engine.exact import PROOF_CHUNK, ProofPart

_QUEUES = ("running", "waiting", "skipped_waiting", "kv_holding_waiting")
"""Where vLLM's scheduler has its requests; not every version has all of these."""
STATES = "_get_prompt_logprobs_dict"
"""The method of vLLM's runner that gets the states of all of a step's tokens."""
GRAPHS = "cudagraph_dispatcher"
"""Its attribute whose method `dispatch` chooses a step's CUDA graph."""


class ProofPass:
    """The proof pass of one row of L ≥ 2 tokens. `parts`: those of the chunks computed so far."""

    def __init__(self, tokens: Sequence[int], temperature: float) -> None:
        self._tokens = torch.tensor(tokens, dtype=torch.int64)
        self._temperature = temperature
        self._place = 0
        self.parts: list[ProofPart] = []

    @property
    def done(self) -> bool:
        return self._place == len(self._tokens) - 1

    def take(self, states: Tensor, head: Callable[[Tensor], Tensor]) -> None:
        """Receives the states [n, H] of the next chunk; `head` computes their logits [n, V]. Raises
        FatalError if the chunk has another size."""
        end = min(self._place + PROOF_CHUNK, len(self._tokens) - 1)
        if len(states) != end - self._place:
            raise FatalError(
                f"vLLM prefilled {len(states)} tokens of a proof pass, not {end - self._place}"
            )
        # All positions go through the head, so that the shapes do not depend on the prompt.
        scaled = head(states).float() / self._temperature
        following = self._tokens[self._place + 1 : end + 1].to(scaled.device)
        chosen = scaled.gather(1, following[:, None])[:, 0] - scaled.logsumexp(dim=1)
        bits = states.contiguous().view(torch.uint8).cpu().numpy()
        self.parts.append((chosen.cpu().numpy(), bits))
        self._place = end


class Capture:
    """Hands the states of vLLM's steps to the proof pass `of`, if there is one."""

    def __init__(self) -> None:
        self.of: ProofPass | None = None

    def attach(self, runner: Any) -> bool:
        """Takes the place of vLLM's log-probabilities of prompts, which no request asks for, and
        of its choice of CUDA graphs. Returns False if this version has no such methods."""
        graphs = getattr(runner, GRAPHS, None)
        if graphs is None or not hasattr(runner, STATES):
            return False
        dispatch = graphs.dispatch
        if "invalid_modes" not in inspect.signature(dispatch).parameters:
            return False

        def choose(*arguments: Any, **named: Any) -> Any:
            if self.of is not None:
                from vllm.config import CUDAGraphMode

                named["invalid_modes"] = {*(named.get("invalid_modes") or ()), CUDAGraphMode.FULL}
            return dispatch(*arguments, **named)

        def take(hidden_states: Tensor, num_scheduled_tokens: Any) -> dict[str, None]:
            if self.of is not None:
                self.of.take(hidden_states, runner.model.compute_logits)
            return {}

        setattr(runner, STATES, take)
        graphs.dispatch = choose
        return True


@contextmanager
def alone(scheduler: Any) -> Iterator[None]:
    """Sets aside all requests of vLLM's scheduler, and limits its steps to PROOF_CHUNK tokens."""
    aside = {name: getattr(scheduler, name) for name in _QUEUES if hasattr(scheduler, name)}
    most = scheduler.max_num_scheduled_tokens
    for name, queue in aside.items():
        setattr(scheduler, name, type(queue)())
    scheduler.max_num_scheduled_tokens = min(most, PROOF_CHUNK)
    try:
        yield
    finally:
        scheduler.max_num_scheduled_tokens = most
        for name, queue in aside.items():
            setattr(scheduler, name, queue)
