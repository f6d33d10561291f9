"""Activation proofs: TOPLOC's bytes, ties, strict decoding, and what a comparison sees."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from prime_core.errors import MalformedError
from prime_verify.proofs import activations, field
from prime_verify.proofs.picking import largest_of
from prime_verify.proofs.sketch import bf16_to_float, float_to_bf16

P = field.PRIME


def _states(tokens: int, hidden: int, seed: int = 0) -> NDArray[np.uint16]:
    rng = np.random.default_rng(seed)
    return float_to_bf16(rng.normal(0, 1, (tokens, hidden)).astype(np.float32))


def _encode(positions: list[int], values: list[int]) -> str:
    modulus = activations.modulus_of(np.array(positions))
    x = np.array([[p % modulus for p in positions]], dtype=np.float64)
    coefficients = field.interpolate(x, np.array([values], dtype=np.float64))[0].astype(int)
    return struct.pack(f">{len(values) + 1}H", modulus, *coefficients).hex()


def _slow_proof(window: NDArray[np.uint16]) -> bytes:
    """The definition, word for word, in exact Python integers."""
    magnitude = [int(v) & 0x7FFF for v in window]
    order = sorted(range(len(window)), key=lambda i: (-magnitude[i], i))
    chosen = sorted(order[:128])
    modulus = next(m for m in range(P, 0, -1) if len({i % m for i in chosen}) == len(chosen))
    x = [i % modulus for i in chosen]
    coefficients = [0] * len(x)
    for i, xi in enumerate(x):
        basis, scale = [1], int(window[chosen[i]])
        for j, xj in enumerate(x):
            if i != j:
                shifted = [0, *basis]
                basis = [(s - xj * b) % P for s, b in zip(shifted, [*basis, 0], strict=True)]
                scale = scale * pow(xi - xj, -1, P) % P
        coefficients = [(c + scale * b) % P for c, b in zip(coefficients, basis, strict=True)]
    return struct.pack(f">{len(x) + 1}H", modulus, *coefficients)


def test_proofs_of_given_points_are_the_published_bytes() -> None:
    assert _encode([0, 65497], [1, 2]) == "ffd800010001"
    assert _encode([5, 65502, 131000], [10, 20, 30]) == "ffd8ff7faaadaa8f"
    decoded = struct.unpack(">5H", bytes.fromhex("ffd90001000200030004"))
    assert decoded == (65497, 1, 2, 3, 4)


@pytest.mark.parametrize(("tokens", "hidden"), [(1, 40), (3, 64), (32, 16), (32, 4096)])
def test_batched_proofs_equal_the_definition(tokens: int, hidden: int) -> None:
    windows = [_states(tokens, hidden, seed).reshape(-1) for seed in range(2)]
    assert activations.build(windows) == [_slow_proof(window) for window in windows]


def test_ties_go_to_the_lowest_index_by_every_path() -> None:
    for count in (600, 2000, 5000):
        window = np.full(count, 0x3F80, dtype=np.uint16)
        window[::2] |= 0x8000  # the sign plays no part in magnitude
        window[count - 1] = 0x4000
        expected = [*range(127), count - 1]
        assert activations.largest(window).tolist() == expected


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4000), st.integers(0, 2**32 - 1), st.integers(1, 400))
def test_largest_is_a_stable_sort_for_any_size_and_any_ties(
    count: int, seed: int, distinct: int
) -> None:
    rng = np.random.default_rng(seed)
    window = rng.integers(0x3000, 0x3000 + distinct, count).astype(np.uint16)
    window |= (rng.integers(0, 2, count) << 15).astype(np.uint16)
    order = np.argsort(-(window & 0x7FFF).astype(np.int64), kind="stable")
    assert activations.largest(window).tolist() == sorted(order[:128].tolist())


def test_a_short_window_takes_all_its_elements() -> None:
    window = _states(1, 60).reshape(-1)
    (proof,) = activations.build([window])
    assert len(proof) == activations.proof_bytes(60) == 2 + 2 * 60
    assert activations.largest(window).tolist() == list(range(60))


def test_states_that_are_not_finite_are_refused() -> None:
    window = _states(4, 64).reshape(-1)
    window[7] = 0x7F80
    with pytest.raises(MalformedError):
        activations.build([window])


def test_own_states_match_perfectly_and_packing_round_trips() -> None:
    windows = activations.split_windows(_states(70, 64))
    assert [len(w) for w in windows] == [32 * 64, 32 * 64, 6 * 64]
    proofs = activations.unpack(activations.pack(activations.build(windows)), 3)
    decoded = [activations.decode(p, len(w)) for p, w in zip(proofs, windows, strict=True)]
    found = activations.verify(decoded, windows)
    for values in (found.exponent, found.sign, found.mantissa, found.mantissa_median):
        assert values.tolist() == [0, 0, 0]


def test_negated_states_are_seen_by_the_sign_alone() -> None:
    window = _states(32, 64).reshape(-1)
    (proof,) = activations.build([window ^ np.uint16(0x8000)])
    found = activations.verify([activations.decode(proof, len(window))], [window])
    assert found.sign[0] == 1
    assert found.exponent[0] == found.mantissa[0] == 0


def test_a_constant_polynomial_does_not_match() -> None:
    window = _states(32, 128).reshape(-1)
    typical = int(np.median(window[activations.largest(window)] & 0x7FFF))
    proof = struct.pack(">129H", P, typical, *[0] * 127)
    found = activations.verify([activations.decode(proof, len(window))], [window])
    assert found.sign[0] > 0.25  # half of the elements are negative


def test_small_drift_gives_small_errors() -> None:
    states = bf16_to_float(_states(32, 128))
    rng = np.random.default_rng(2)
    noisy = float_to_bf16((states * (1 + rng.normal(0, 2e-3, states.shape))).astype(np.float32))
    (proof,) = activations.build([noisy.reshape(-1)])
    window = float_to_bf16(states).reshape(-1)
    found = activations.verify([activations.decode(proof, len(window))], [window])
    assert 0 < found.mantissa[0] < 3
    assert found.exponent[0] < 0.25


def _proof(modulus: int = P, coefficient: int = 1, count: int = 128) -> bytes:
    return struct.pack(f">{count + 1}H", modulus, *[coefficient] * count)


@pytest.mark.parametrize(
    "proof",
    [
        b"",
        b"\x00",
        b"\xff\xd9",
        _proof()[:-1],
        _proof() + b"\x00",
        _proof(count=127),
        _proof(count=129),
        _proof(modulus=0),
        _proof(modulus=128),  # m = H: one magnitude for each hidden dimension
        _proof(modulus=1 << 15),
        _proof(modulus=P + 1),
        _proof(coefficient=P),
        _proof(coefficient=0xFFFF),
    ],
)
def test_decoding_refuses_what_no_honest_prover_writes(proof: bytes) -> None:
    with pytest.raises(MalformedError):
        activations.decode(proof, 4096)


@given(st.binary(max_size=600), st.integers(0, 4))
def test_unpacking_arbitrary_bytes_never_crashes(data: bytes, windows: int) -> None:
    try:
        proofs = activations.unpack(data, windows)
    except MalformedError:
        return
    assert activations.pack(proofs) == data
    for proof in proofs:
        with pytest.raises(MalformedError):
            activations.decode(proof, 32 * 4096 + 1 + len(data) % 2 if len(proof) != 258 else 1)


@given(st.binary(min_size=258, max_size=258))
def test_every_decoded_value_can_be_compared(proof: bytes) -> None:
    window = _states(32, 32).reshape(-1)
    try:
        decoded = activations.decode(proof, len(window))
    except MalformedError:
        return
    found = activations.verify([decoded], [window])
    assert np.isfinite(found.mantissa).all()


def test_more_proofs_than_windows_are_refused() -> None:
    window = _states(32, 32).reshape(-1)
    decoded = activations.decode(_proof(), len(window))
    with pytest.raises(MalformedError):
        activations.verify([decoded, decoded], [window])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 30_000), min_size=1, max_size=6), st.integers(0, 2**32 - 1))
def test_many_windows_of_any_sizes_are_picked_as_one_by_one(sizes: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    signs = rng.integers(0, 3)  # all positive, mixed, all negative
    windows = []
    for size in sizes:
        negative = rng.random(size) < signs / 2
        windows.append((rng.integers(0, 0x7F80, size) | negative << 15).astype(np.uint16))
    together = largest_of(windows)
    for window, positions in zip(windows, together, strict=True):
        order = np.argsort(-(window & 0x7FFF).astype(np.int64), kind="stable")
        assert positions.tolist() == sorted(order[:128].tolist())


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0, 0xFFC0])
@pytest.mark.parametrize("size", [100, 4096, 30_001])
def test_one_element_that_is_not_finite_is_refused_wherever_it_lies(bits: int, size: int) -> None:
    for place in (0, size // 2, size - 1):
        window = np.full(size, 0xBF80, dtype=np.uint16)
        window[place] = bits
        with pytest.raises(MalformedError):
            largest_of([window])


@given(st.integers(0, 2**32 - 1), st.integers(0, 128))
def test_mantissa_statistics_are_over_equal_exponents_only(seed: int, changed: int) -> None:
    rng = np.random.default_rng(seed)
    window = rng.integers(0x3F80, 0x4000, 128).astype(np.uint16)
    claimed = window ^ rng.integers(0, 128, 128).astype(np.uint16)
    claimed[:changed] ^= 0x0080  # another exponent
    (proof,) = activations.build([claimed])
    found = activations.verify([activations.decode(proof, 128)], [window])
    errors = np.abs((claimed & 0x7F).astype(int) - (window & 0x7F).astype(int))[changed:]
    expected = (errors.mean(), np.median(errors)) if len(errors) else (127, 127)
    assert (found.mantissa[0], found.mantissa_median[0]) == pytest.approx(expected)
    assert found.exponent[0] == pytest.approx(changed / 128)
