"""The vLLM engine's recorder: rows that move in the batch keep their noise, states and tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from prime_core.errors import FatalError
from prime_engine.base import GenerationRequest
from prime_engine.batch import RowSet
from prime_engine.recorder import Recorder, Row, recorded
from prime_verify.proofs.sampling_torch import gumbel

VOCABULARY = 11


def _step(recorder: Recorder, logits: Tensor, states: Tensor) -> list[int]:
    recorder.hidden(states)
    return recorder.step(logits).argmax(dim=1).tolist()


def _rows(count: int, temperature: float = 1.0) -> RowSet:
    return RowSet([GenerationRequest((1,), 9, None)] * count, temperature)


def _logits(seed: int, rows: int) -> Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def _states(*values: float) -> Tensor:
    return torch.tensor([[value] * 4 for value in values])


def test_each_row_gets_the_noise_of_its_key_and_place() -> None:
    recorder = Recorder(gumbel)
    rows = _rows(2, 0.7)
    recorder.assign(0, Row(rows, 1, 5, 6, [3, 4]))
    recorder.assign(1, Row(rows, 0, -7, 8, []))
    logits = _logits(0, 2)
    drawn = _step(recorder, logits, _states(1, 2))
    noise = gumbel(torch.tensor([5, -7]), torch.tensor([7, 7]), VOCABULARY)
    assert drawn == (logits / 0.7 + noise).argmax(dim=1).tolist()


def test_a_row_without_a_key_takes_the_most_probable_token() -> None:
    recorder = Recorder(gumbel)
    recorder.assign(0, Row(_rows(1), 0, None, 3, []))
    logits = _logits(1, 1)
    assert _step(recorder, logits, _states(1)) == logits.argmax(dim=1).tolist()


@pytest.mark.parametrize("swap", [True, False])
def test_rows_that_move_keep_what_is_theirs(swap: bool) -> None:
    recorder = Recorder(gumbel)
    rows = _rows(2)
    outputs: list[list[int]] = [[], []]
    for index in (0, 1):
        recorder.assign(index, Row(rows, index, index, 9, outputs[index]))
    first = _step(recorder, _logits(2, 2), _states(1, 2))
    outputs[0].append(first[0])
    outputs[1].append(first[1])
    if swap:
        recorder.move(0, 1, swap=True)
        second = _step(recorder, _logits(3, 2), _states(3, 4))
        outputs[1].append(second[0])
        outputs[0].append(second[1])
        expected = {0: [1, 4], 1: [2, 3]}
    else:  # row 0 has ended; row 1 takes its place
        recorder.assign(0, None)
        recorder.move(1, 0, swap=False)
        second = _step(recorder, _logits(3, 1), _states(5))
        outputs[1].append(second[0])
        expected = {0: [1], 1: [2, 5]}
    for number, (logprobs, states) in enumerate(recorded(rows, outputs)):
        floats = (states.astype(np.uint32) << 16).view(np.float32)
        assert floats[:, 0].tolist() == expected[number]
        assert len(logprobs) == len(expected[number])
        assert (logprobs < 0).all()


def test_rows_of_two_calls_have_records_and_temperatures_of_their_own() -> None:
    recorder = Recorder(gumbel)
    cold, warm = _rows(1, 0.5), _rows(1, 2.0)
    recorder.assign(0, Row(cold, 0, 3, 4, []))
    recorder.assign(1, Row(warm, 0, 4, 4, []))
    logits = _logits(9, 2)
    drawn = _step(recorder, logits, _states(1, 2))
    for at, (owner, temperature) in enumerate([(cold, 0.5), (warm, 2.0)]):
        ((logprobs, states),) = recorded(owner, [[drawn[at]]])
        expected = (logits[at] / temperature).log_softmax(dim=0)[drawn[at]]
        assert logprobs[0] == pytest.approx(float(expected), abs=1e-6)
        assert (states.astype(np.uint32) << 16).view(np.float32)[0, 0] == at + 1


def test_a_step_that_vllm_threw_away_is_overwritten() -> None:
    recorder = Recorder(gumbel)
    rows = _rows(1)
    output: list[int] = []
    recorder.assign(0, Row(rows, 0, 1, 2, output))
    _step(recorder, _logits(4, 1), _states(8))  # half of a prompt
    (token,) = _step(recorder, _logits(5, 1), _states(9))
    output.append(token)
    ((_, states),) = recorded(rows, [output])
    assert (states.astype(np.uint32) << 16).view(np.float32)[0, 0] == 9


def test_tokens_that_were_not_drawn_here_are_refused() -> None:
    recorder = Recorder(gumbel)
    rows = _rows(1)
    recorder.assign(0, Row(rows, 0, 1, 2, []))
    (token,) = _step(recorder, _logits(6, 1), _states(1))
    with pytest.raises(FatalError):
        recorded(rows, [[(token + 1) % VOCABULARY]])
    with pytest.raises(FatalError):
        recorded(rows, [[token, token]])


def test_states_of_other_rows_are_refused() -> None:
    recorder = Recorder(gumbel)
    recorder.assign(0, Row(_rows(1), 0, 1, 2, []))
    recorder.hidden(_states(1, 2))
    with pytest.raises(FatalError):
        recorder.step(_logits(7, 1))


def test_a_warming_engine_is_left_alone() -> None:
    logits = _logits(8, 3)
    assert Recorder(gumbel).step(logits) is logits


class _Sink:
    """Receives states and keeps none."""

    def step(self, *_: object) -> None:
        pass

    def end(self, rows: object) -> None:
        pass


def test_steps_that_were_merged_are_recorded_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prime_engine.recorder.TOGETHER", 2)
    found = []
    for sink in (None, _Sink()):
        recorder, rows = Recorder(gumbel), _rows(2)
        rows.sink = sink
        outputs: list[list[int]] = [[], []]
        for index in (0, 1):
            recorder.assign(index, Row(rows, index, index, 9, outputs[index]))
        for seed in range(7):
            for output, token in zip(
                outputs, _step(recorder, _logits(seed, 2), _states(1, 2)), strict=True
            ):
                output.append(token)
        assert len(rows.steps) == (7 if sink is None else 1)
        found.append([logprobs.tolist() for logprobs, _ in recorded(rows, outputs)])
    assert found[0] == found[1]
