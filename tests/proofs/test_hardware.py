"""The hardware challenge: exact products, cheap and sound checking."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from prime_core.errors import MalformedError
from prime_core.ids import digest
from prime_verify.proofs import hardware

SEED = digest(bytes(range(32)))


def _rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.mark.parametrize("size", [1, 17, 64])
def test_solution_is_the_integer_product_and_passes(size: int) -> None:
    products = hardware.solve(SEED, size, 2)
    for r in range(2):
        a, b = hardware.matrices(SEED, size, r)
        assert np.array_equal(products[r], a.astype(np.int64) @ b.astype(np.int64))
    assert hardware.check(SEED, size, 2, products, _rng())


def test_products_stay_exact_beyond_one_float32_block() -> None:
    size = 1100
    a, b = hardware.matrices(SEED, size, 0)
    products = hardware.solve(SEED, size, 1)
    rows = [0, 555, 1099]
    assert np.array_equal(products[0][rows], a[rows].astype(np.int64) @ b.astype(np.int64))
    assert hardware.check(SEED, size, 1, products, _rng())


@pytest.mark.parametrize(
    ("size", "rounds"), [(0, 1), (-1, 1), (16, 0), (16, -1), (8192, 1), (1, 2**40), (2**80, 1)]
)
def test_a_challenge_that_no_run_may_ask_for_takes_no_memory(size: int, rounds: int) -> None:
    with pytest.raises(MalformedError, match="out of bounds"):
        hardware.solve(SEED, size, rounds)


@pytest.mark.parametrize("error", [1, -1, 1 << 20, 1 << 63])
def test_one_wrong_entry_fails(error: int) -> None:
    products = hardware.solve(SEED, 32, 2)
    with np.errstate(over="ignore"):
        products[1, 3, 5] += np.uint64(error % (1 << 64)).astype(np.int64)
    assert not hardware.check(SEED, 32, 2, products, _rng())


def test_solution_of_another_seed_or_shape_fails() -> None:
    products = hardware.solve(digest(bytes(32)), 32, 1)
    assert not hardware.check(SEED, 32, 1, products, _rng())
    assert not hardware.check(SEED, 32, 2, products, _rng())
    assert not hardware.check(SEED, 32, 1, products.astype(np.int32), _rng())  # type: ignore[arg-type]


def test_wire_form_is_exact_in_length_and_round_trips() -> None:
    products = hardware.solve(SEED, 16, 2)
    data = hardware.encode_solution(products)
    assert len(data) == hardware.solution_bytes(16, 2)
    assert np.array_equal(hardware.decode_solution(data, 16, 2), products)
    with pytest.raises(MalformedError):
        hardware.decode_solution(data[:-1], 16, 2)


def test_sizes_out_of_bounds_are_refused() -> None:
    with pytest.raises(MalformedError):
        hardware.matrices(SEED, hardware.MAX_SIZE + 1, 0)


def test_importing_the_challenge_needs_no_torch() -> None:
    code = "import sys, prime_verify.proofs.hardware; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
