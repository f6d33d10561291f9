"""The comparison of sketches with and without standardised states."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'prime-open[torch]'")

from bench.standardised import File, Scale, distance, shares

RNG = np.random.default_rng(3)
KEYS = [[bytes([row]) * 32] for row in range(4)]


def states(outlier: float, noise: float = 0.0, dims: slice = slice(None)) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    made = rng.normal(size=(4, 20, 64)).astype(np.float32)
    made[..., 0] *= outlier
    made[..., dims] += noise * RNG.normal(size=made[..., dims].shape).astype(np.float32)
    return list(made)


def test_a_scale_of_one_changes_nothing() -> None:
    one = Scale(np.zeros(64, np.float32), np.ones(64, np.float32))
    a, b = states(1.0), states(1.0, 0.1)
    assert distance(a, b, KEYS, one) == distance(a, b, KEYS, None) > 0
    assert distance(a, a, KEYS, None) == 0


def test_changes_next_to_an_outlier_show_better_once_it_is_scaled_down() -> None:
    """That the comparison would show a gain if there were one: here noise is not relative."""
    true = states(100.0)
    every = np.concatenate(true)
    scale = Scale(every.mean(0), every.std(0))
    lie = states(100.0, 0.3, slice(1, None))
    file = File(lie, true, true, KEYS)
    assert shares(file, scale)[0] > 3 * shares(file, None)[0]
