"""Reasons: each has its ending and its sentence."""

from __future__ import annotations

import pytest

from prime_core.verdict import Evidence, Outcome, Reason


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_says_what_it_means(reason: Reason) -> None:
    assert len(reason.sentence) > 20
    assert ("public" in reason.sentence) == (reason.outcome is Outcome.REJECTED)


@pytest.mark.parametrize(
    "chance", ["nan", "-1", "2", "1e5", "1e-5 ", "+0", "0.", "inf", "1.5", "0,1"]
)
def test_a_chance_is_a_number_between_0_and_1_in_one_spelling(chance: str) -> None:
    validate = Evidence.__pydantic_validator__.validate_assignment
    for good in ("", "0", "1", "0.0123", "1e-06", f"{1.23456e-14:.3g}", f"{0.999:.3g}"):
        validate(Evidence.model_construct(), "chance", good)
    with pytest.raises(ValueError, match="chance"):
        validate(Evidence.model_construct(), "chance", chance)
