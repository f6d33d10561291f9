"""Polynomials over GF(65497): the published vectors, and agreement with schoolbook arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_verify.proofs import field

P = field.PRIME


def _as_field(values: object) -> field.Field:
    return np.array(values, dtype=np.float64)


@pytest.mark.parametrize(
    ("x", "y", "coefficients"),
    [
        ([1, 3, 5, 2], [1, 5, 4, 1], [49133, 40920, 49130, 57309]),
        ([1, 8, 3], [1, 2, 3], [35555, 61756, 33684]),
        ([100, 55, 2], [1, 0, 1], [28287, 10463, 53194]),
        ([65496, 0, 1], [65496, 1, 2], [1, 32750, 32748]),
    ],
)
def test_interpolation_gives_the_published_coefficients(
    x: list[int], y: list[int], coefficients: list[int]
) -> None:
    assert field.interpolate(_as_field([x]), _as_field([y])).tolist() == [coefficients]


def test_evaluation_gives_the_published_value() -> None:
    assert field.evaluate(_as_field([[1, 2, 3, 4]]), _as_field([[42]])).tolist() == [[39741]]


def test_every_inverse_is_one() -> None:
    values = np.arange(1, P, dtype=np.int64)
    assert (values * field.inverses()[1:].astype(np.int64) % P == 1).all()


def test_full_windows_interpolate_exactly_even_with_the_largest_values() -> None:
    rng = np.random.default_rng(1)
    x = np.stack([rng.permutation(P)[:128] for _ in range(40)]).astype(np.float64)
    x[0] = np.arange(P - 128, P)
    y = rng.integers(0, P, (40, 128)).astype(np.float64)
    y[:2] = P - 1
    coefficients = field.interpolate(x, y)
    assert np.array_equal(field.evaluate(coefficients, x), y)
    # Horner in exact integers, independent of the baby steps.
    value = np.zeros((40, 128), dtype=np.int64)
    for column in range(127, -1, -1):
        value = (value * x.astype(np.int64) + coefficients[:, column : column + 1].astype(int)) % P
    assert np.array_equal(value, y.astype(np.int64))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_interpolation_of_any_degree_passes_through_its_points(data: st.DataObject) -> None:
    x = data.draw(st.lists(st.integers(0, P - 1), min_size=1, max_size=128, unique=True))
    y = data.draw(st.lists(st.integers(0, P - 1), min_size=len(x), max_size=len(x)))
    coefficients = field.interpolate(_as_field([x]), _as_field([y]))
    assert coefficients.shape == (1, len(x))
    assert ((coefficients >= 0) & (coefficients < P)).all()
    assert field.evaluate(coefficients, _as_field([x])).tolist() == [y]


@given(st.integers(-(2**45) + 1, 2**45 - 1))
def test_reduction_is_the_remainder(value: int) -> None:
    assert field.reduce(_as_field([value])).tolist() == [value % P]
