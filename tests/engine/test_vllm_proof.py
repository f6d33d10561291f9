"""The proof pass through vLLM without vLLM: chunks, their log-probabilities, and the scheduler."""

from __future__ import annotations

import sys
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'prime-open[torch]'")

import torch

from prime_core.errors import FatalError
from prime_engine.exact import PROOF_CHUNK
from prime_engine.vllm_proof import STATES, Capture, ProofPass, alone

ROW = [(3 * i) % 11 for i in range(PROOF_CHUNK + 5)]


def test_the_states_of_a_step_become_a_part_of_the_pass() -> None:
    random = torch.Generator().manual_seed(1)
    states = torch.randn((len(ROW) - 1, 4), generator=random)
    head = torch.randn((4, 11), generator=random)
    found, capture = ProofPass(ROW, 0.5), Capture()
    runner = SimpleNamespace(model=SimpleNamespace(compute_logits=lambda part: part @ head))
    assert not capture.attach(runner), "such a vLLM has no proof pass"
    setattr(runner, STATES, None)
    runner.cudagraph_dispatcher = SimpleNamespace(dispatch=lambda num_tokens: num_tokens)
    assert not capture.attach(runner), "nor has one that cannot leave out whole graphs"
    runner.cudagraph_dispatcher.dispatch = lambda num_tokens, invalid_modes=None: invalid_modes
    assert capture.attach(runner)
    step = getattr(runner, STATES)
    assert step(states[:3], {}) == {}, "a step of other rows"
    capture.of = found
    for part in (states[:PROOF_CHUNK], states[PROOF_CHUNK:]):
        assert not found.done
        step(part, {})
    assert found.done
    assert [len(logprobs) for logprobs, _ in found.parts] == [PROOF_CHUNK, 4]
    logprobs = np.concatenate([values for values, _ in found.parts])
    expected = ((states @ head) / 0.5).log_softmax(dim=1)[torch.arange(len(ROW) - 1), ROW[1:]]
    np.testing.assert_allclose(logprobs, expected.numpy(), atol=1e-5)
    bits = np.concatenate([rows for _, rows in found.parts])
    assert bits.tobytes() == states.numpy().tobytes()


def test_a_proof_pass_replays_no_whole_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(CUDAGraphMode=SimpleNamespace(FULL="full"))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(config=config))
    monkeypatch.setitem(sys.modules, "vllm.config", config)
    capture = Capture()
    graphs = SimpleNamespace(dispatch=lambda num_tokens, invalid_modes=None: invalid_modes)
    assert capture.attach(SimpleNamespace(cudagraph_dispatcher=graphs, **{STATES: None}))
    assert graphs.dispatch(num_tokens=1, invalid_modes=None) is None, "a step of other rows"
    capture.of = ProofPass(ROW, 1.0)
    assert graphs.dispatch(num_tokens=1, invalid_modes=None) == {"full"}
    assert graphs.dispatch(1, invalid_modes={"other"}) == {"full", "other"}


def test_a_chunk_of_another_size_is_refused() -> None:
    for size in (1, PROOF_CHUNK - 1, PROOF_CHUNK + 1):
        with pytest.raises(FatalError, match=f"prefilled {size} tokens of a proof pass"):
            ProofPass(ROW, 1.0).take(torch.zeros((size, 4)), lambda part: part)


@pytest.mark.parametrize("waiting", ["skipped_waiting", "kv_holding_waiting"])
def test_requests_are_set_aside_and_come_back(waiting: str) -> None:
    queues = {"running": [1, 2], "waiting": deque([3]), waiting: deque([4])}
    scheduler = SimpleNamespace(**queues, max_num_scheduled_tokens=4096)

    def fails() -> None:
        with alone(scheduler):
            assert not any((scheduler.running, scheduler.waiting, getattr(scheduler, waiting)))
            assert scheduler.max_num_scheduled_tokens == PROOF_CHUNK
            scheduler.running.append(5)
            raise MemoryError

    with pytest.raises(MemoryError):
        fails()
    assert vars(scheduler) == {**queues, "max_num_scheduled_tokens": 4096}
