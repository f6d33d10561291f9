"""The CountSketch: as specified, bound to its key, close for close states only."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from prime_core.errors import MalformedError
from prime_core.ids import digest
from prime_core.seeds import sketch_key
from prime_verify.proofs import sketch
from prime_verify.proofs.sketch import GOLDEN, mix

KEY = bytes(range(32))


def _window(count: int = 4096, seed: int = 0) -> NDArray[np.uint16]:
    rng = np.random.default_rng(seed)
    return sketch.float_to_bf16(rng.normal(0, 1, count).astype(np.float32))


def test_bf16_conversions_are_torchs() -> None:
    rng = np.random.default_rng(0)
    values = (rng.normal(0, 1, 5000) * 10.0 ** rng.integers(-30, 30, 5000)).astype(np.float32)
    bits = sketch.float_to_bf16(values)
    theirs = torch.from_numpy(values).to(torch.bfloat16)
    assert np.array_equal(bits, theirs.view(torch.int16).numpy().view(np.uint16))
    assert np.array_equal(sketch.bf16_to_float(bits), theirs.float().numpy())


def test_sketch_follows_the_written_formula() -> None:
    window = _window(1003)
    words = [int.from_bytes(KEY[i : i + 4], "big") for i in (0, 4)]
    sums = np.zeros(64)
    for i, value in enumerate(sketch.bf16_to_float(window).astype(np.float64)):
        seeded = np.array([(words[0] + GOLDEN * (i // 4 + 1)) % 2**32], dtype=np.uint32)
        word = int(mix(mix(seeded) ^ np.uint32(words[1]))[0])
        byte = word >> 8 * (i % 4) & 0xFF
        sums[byte % 64] += -value if byte & 64 else value
    expected = sketch.float_to_bf16(sums.astype(np.float32))
    assert np.array_equal(sketch.build([window], [KEY])[0], expected)


def test_norm_is_kept_on_average() -> None:
    window = _window()
    norms = [
        np.linalg.norm(sketch.bf16_to_float(sketch.build([window], [bytes([i]) * 32])[0]))
        for i in range(50)
    ]
    assert np.mean(norms) == pytest.approx(np.linalg.norm(sketch.bf16_to_float(window)), rel=0.05)


def test_distance_is_nothing_for_equal_small_for_close_large_for_unrelated_states() -> None:
    window = _window()
    values = sketch.bf16_to_float(window)
    rng = np.random.default_rng(1)
    close = sketch.float_to_bf16((values + rng.normal(0, 0.05, len(values))).astype(np.float32))
    own = sketch.build([window] * 3, [KEY] * 3)
    claimed = sketch.build([window, close, _window(seed=9)], [KEY] * 3)
    equal, near, far = sketch.distances(claimed, own)
    assert equal == 0
    assert 0.02 < near < 0.1
    assert far > 0.9


def test_another_place_or_other_tokens_give_an_unrelated_sketch() -> None:
    seed = digest(bytes(32))
    base = sketch_key(seed, 0, 0, 0, [1, 2, 3])
    others = [
        sketch_key(seed, 1, 0, 0, [1, 2, 3]),
        sketch_key(seed, 0, 1, 0, [1, 2, 3]),
        sketch_key(seed, 0, 0, 1, [1, 2, 3]),
        sketch_key(seed, 0, 0, 0, [1, 2, 4]),
        sketch_key(digest(b"\x01" * 32), 0, 0, 0, [1, 2, 3]),
    ]
    window = _window()
    own = sketch.build([window] * 5, [base] * 5)
    assert (sketch.distances(sketch.build([window] * 5, others), own) > 0.9).all()


def test_decoding_is_strict() -> None:
    packed = sketch.pack(sketch.build([_window()] * 2, [KEY] * 2))
    assert len(packed) == 256
    assert sketch.decode(packed, 2).shape == (2, 64)
    for bad in (
        packed[:-1],
        packed + b"\x00",
        packed[:-2] + b"\x80\x7f",
        packed[:-2] + b"\xff\xff",
    ):
        with pytest.raises(MalformedError):
            sketch.decode(bad, 2)


def test_states_of_zero_are_equal_only_to_zero() -> None:
    zero = np.zeros((1, 64), dtype=np.uint16)
    assert sketch.distances(zero, zero).tolist() == [0]
    other = sketch.build([_window()], [KEY])
    assert sketch.distances(other, zero).tolist() == [2]
