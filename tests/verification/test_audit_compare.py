"""What an audit takes for the same finding: roundings apart, and nothing else."""

from __future__ import annotations

import pytest

from prime_verify.audit_compare import as_sure, close


@pytest.mark.parametrize("other", ["3", "1e308", "-inf", "nan", "1e-9"])
def test_a_published_infinity_is_like_no_number(other: str) -> None:
    assert not close("inf", other)
    assert not close(other, "inf")
    assert not as_sure("inf", other)
    assert not as_sure(other, "inf")


def test_an_infinite_margin_is_found_again_by_who_finds_it_infinite() -> None:
    assert close("inf", "inf")


def test_no_chance_above_one_is_published_for_a_small_one() -> None:
    assert not as_sure("1e9", "1e-9")
    assert as_sure("1e-9", "3e-9")
    assert as_sure("0", "0")
    assert not as_sure("0", "1e-15")


def test_statistics_match_within_the_rounding_of_devices() -> None:
    assert close("3", "3.2")
    assert not close("3", "4")
