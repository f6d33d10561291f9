"""Seeds: the node chooses nothing that pays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_core import seeds
from prime_core.ids import Digest, digest

digests = st.binary(min_size=32, max_size=32).map(digest)


@given(digests, st.integers(1, 40), st.integers(40, 5000))
def test_problems_are_in_range_and_distinct_within_a_lease(
    seed: Digest, groups: int, problems: int
) -> None:
    indices = seeds.problem_indices(seed, groups, problems)
    assert len(set(indices)) == groups
    assert all(0 <= index < problems for index in indices)


@given(digests, st.integers(1, 50))
def test_targets_come_from_the_allowed_set_only(seed: Digest, groups: int) -> None:
    targets = seeds.target_lengths(seed, groups, (2, 6, 10, 14))
    assert len(targets) == groups
    assert set(targets) <= {2, 6, 10, 14}


@given(digests, digests, st.integers(1, 300), st.integers(1, 300))
def test_drawn_rows_are_distinct_in_range_and_of_the_asked_number(
    secret: Digest, submission: Digest, rows: int, count: int
) -> None:
    drawn = seeds.drawn_rows(secret, submission, rows, count)
    assert drawn == sorted(set(drawn))
    assert len(drawn) == min(rows, count)
    assert all(0 <= row < rows for row in drawn)


@given(digests, digests)
def test_no_two_samples_share_their_noise(a: Digest, b: Digest) -> None:
    leases = {a, b}
    drawn = {
        seeds.noise_seed(x, group, sample)
        for x in leases
        for group in range(8)
        for sample in range(8)
    }
    assert len(drawn) == 64 * len(leases)


def test_the_seed_for_which_vllm_draws_its_own_is_never_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(seeds, "keccak", lambda _: b"\xff" * 32)
    assert seeds.noise_seed(digest(b"\x11" * 32), 0, 0) == -2


def test_the_derivations_do_not_drift() -> None:
    """Published vectors: any change here is a change of the protocol's version."""
    seed = seeds.lease_seed(digest(b"\x11" * 32))
    assert seed == SEED
    assert seeds.problem_indices(seed, 4, 1000) == PROBLEMS
    assert seeds.target_lengths(seed, 6, (2, 6, 10, 14)) == TARGETS
    assert seeds.noise_seed(seed, 3, 5) == NOISE
    assert seeds.drawn_rows(seed, digest(b"\x22" * 32), 64, 5) == DRAWN


SEED = "0x0677d6aea60e2446ebd6d4114ece56001dbfc53bf3472303712cffa2fa2ad4f0"
PROBLEMS = [724, 961, 782, 635]
TARGETS = [14, 2, 2, 2, 6, 2]
NOISE = 369107872630785922
DRAWN = [39, 42, 50, 53, 62]
