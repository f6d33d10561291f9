"""Windows reduced while a row grows: the same proofs, and memory that does not grow with it."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from prime_core.errors import FatalError, MalformedError
from prime_core.ids import digest
from prime_core.proof_form import PROOF_WINDOW
from prime_core.seeds import sketch_key
from prime_verify.proofs import activations, sketch, windows

SEED = digest(b"\x11" * 32)


def _key(row: int, window: int, tokens: Sequence[int]) -> bytes:
    return sketch_key(SEED, row, 0, window, tokens)


def _states(count: int, hidden: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, hidden, generator=generator).to(torch.bfloat16)


def _bits(states: torch.Tensor) -> np.ndarray:
    return states.view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize("size", [1, 3, 127, 128, 129, 2048, 32 * 576])
def test_the_device_path_is_the_reference(size: int) -> None:
    states = _states(5, size)
    states[1] = 1.0  # all tied
    states[2, : size // 2] = -states[2, : size // 2].abs()
    states[3] = 0.0
    keys = [_key(w, 0, (w,)) for w in range(5)]
    ours, theirs = windows.reduce_on_device(states, keys), windows.reduce(states, keys)
    assert np.array_equal(ours.positions, theirs.positions)
    assert np.array_equal(ours.values, theirs.values)
    assert np.array_equal(ours.digests, theirs.digests)
    assert np.array_equal(ours.sketches, theirs.sketches)


def test_the_digest_follows_the_written_formula_and_sees_every_bit() -> None:
    def splitmix(i: int) -> int:
        z = (i + 1) * 0x9E3779B97F4A7C15 & (1 << 64) - 1
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
        z = (z ^ z >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
        return z ^ z >> 31

    window = np.arange(1, 8, dtype=np.uint16) * 9001
    words = [int(a) | int(b) << 16 for a, b in zip(window[::2], [*window[1::2], 0], strict=True)]
    expected = [
        (sum(splitmix(4 * i + j) * word for i, word in enumerate(words)) & (1 << 64) - 1) >> 32
        for j in range(4)
    ]
    assert windows.digests([window])[0].tolist() == expected
    changed = [
        window ^ (np.uint16(1) << bit) * (np.arange(7) == i) for i in range(7) for bit in range(16)
    ]
    assert len({tuple(d) for d in windows.digests([window, *changed]).tolist()}) == 1 + 7 * 16


def test_states_that_are_no_numbers_are_refused() -> None:
    states = _states(2, 300)
    states[1, 7] = torch.inf
    with pytest.raises(MalformedError):
        windows.reduce_on_device(states, [b"\0" * 32] * 2)


@pytest.mark.parametrize(
    ("lengths", "delay"),
    [((1, 31, 32, 33, 64, 100), 0), ((96,), 0), ((5, 5, 5), 0), ((33, 70, 70, 70), 5)],
)
def test_rows_reduced_as_they_grow_have_the_proofs_of_whole_rows(
    lengths: tuple[int, ...], delay: int
) -> None:
    """Row i begins `delay`·i steps late: then windows wait to be reduced together."""
    hidden = 48
    states = [_states(n, hidden, seed=n + i) for i, n in enumerate(lengths)]
    tokens = [torch.arange(n) * 7 + i for i, n in enumerate(lengths)]
    reducer = windows.WindowReducer(_key)
    for step in range(max(lengths) + delay * len(lengths)):
        places = {
            row: step - delay * row for row, n in enumerate(lengths) if 0 <= step - delay * row < n
        }
        rows = list(places)
        if rows and step % 5 == 3:  # a step that the engine throws away
            junk = torch.full((len(rows), hidden), torch.nan, dtype=torch.bfloat16)
            reducer.step(rows, list(places.values()), torch.full((len(rows),), 9), junk)
        if rows:
            reducer.step(
                rows,
                list(places.values()),
                torch.stack([tokens[row][place] for row, place in places.items()]),
                torch.stack([states[row][place] for row, place in places.items()]),
            )
        reducer.end([row for row, place in places.items() if lengths[row] == place + 1])
    for row, n in enumerate(lengths):
        parts = activations.split_windows(_bits(states[row]))
        of_windows = tokens[row].split(PROOF_WINDOW)
        keys = [_key(row, w, own.tolist()) for w, own in enumerate(of_windows)]
        found = reducer.proof(row)
        assert found.proofs == activations.pack(activations.build(parts))
        assert found.sketch == sketch.pack(sketch.build(parts, keys))
        assert found.digests == tuple(d.astype("<u4").tobytes() for d in windows.digests(parts))
        assert len(found.digests) == activations.windows_of(n)


def test_a_skipped_place_and_a_window_already_reduced_are_refused() -> None:
    reducer = windows.WindowReducer(_key)
    one, state = torch.tensor([1]), _states(1, 8)
    for place in range(33):
        reducer.step([0], [place], one, state)
    with pytest.raises(FatalError):
        reducer.step([0], [34], one, state)
    with pytest.raises(FatalError):
        reducer.step([0], [31], one, state)


@pytest.mark.slow
def test_memory_of_proofs_does_not_grow_with_the_row() -> None:
    """One row of 32,768 tokens at hidden size 5,120: its states are 320 MiB."""
    hidden, tokens = 5120, 32_768
    states = [_states(1, hidden, seed) for seed in range(7)]
    reducer = windows.WindowReducer(_key)
    one = torch.tensor([3])
    peaks = {}
    tracemalloc.start()
    for place in range(tokens):
        reducer.step([0], [place], one, states[place % 7])
        if place + 1 in (tokens // 8, tokens):
            peaks[place + 1] = tracemalloc.get_traced_memory()[1]
            held = reducer._states.nbytes
    tracemalloc.stop()
    reducer.end([0])
    assert len(reducer.proof(0).digests) == tokens // PROOF_WINDOW
    assert held == 8 * PROOF_WINDOW * hidden * 2  # room for eight windows
    # numpy's part: what is left of a window is some 600 bytes
    assert peaks[tokens] - peaks[tokens // 8] < (tokens - tokens // 8) // PROOF_WINDOW * 1200
