"""Other weights are one lie, no matter which sign of them another machine sees first."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'prime-open[torch]'")

from prime_core.draws import SaltOpening
from prime_core.encoding import sha256
from prime_core.task import SignedLease
from prime_core.verdict import Evidence, Reason
from prime_verify.audit_compare import compare_slash
from prime_verify.finding import Finding

WEIGHTS = (Reason.WRONG_ACTIVATIONS, Reason.WRONG_SAMPLING, Reason.WRONG_POLICY)


def result(said: Reason, found: Reason, *, sketch: float = 2.0, chance: float = 1e-9) -> str:
    evidence = Evidence.model_construct(
        reason=int(said), rows_drawn=(0, 3), statistics={"sketch": "2"}, chance="1e-09",
        row_statistics={}, lease=SignedLease.model_construct(opening=None),
    )  # fmt: skip
    finding = Finding(
        found, "here", statistics={"sketch": sketch}, rows_drawn=(0, 3), chance=chance
    )
    return compare_slash(evidence, finding, ()).result


@pytest.mark.parametrize("said", WEIGHTS)
@pytest.mark.parametrize("found", WEIGHTS)
def test_which_sign_of_other_weights_shows_first_is_no_contradiction(
    said: Reason, found: Reason
) -> None:
    """States or samples: on the edge of a limit the device's rounding decides."""
    assert result(said, found) == "match"
    assert result(said, found, sketch=3.0) == "mismatch", "the statistics have to agree"
    assert result(said, found, chance=1e-30) == "mismatch", "and the chance"
    assert result(said, Reason.NONE) == "mismatch", "an honest file stays honest"


@pytest.mark.parametrize("other", [Reason.FORGED_PROOF, Reason.TAMPERED_LOGPROBS, Reason.EARLY_END])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_lie_of_another_kind_is_another_finding(weights: Reason, other: Reason) -> None:
    assert result(weights, other) == "mismatch"
    assert result(other, weights) == "mismatch"


def test_only_the_lease_says_that_its_class_decides() -> None:
    """The statistics are the accuser's own words."""
    opening = SaltOpening.model_construct(numeric_class=sha256(b"a class"))
    for lease, due in (
        (SignedLease.model_construct(opening=None), "mismatch"),
        (SignedLease.model_construct(opening=opening), "cannot tell"),
    ):
        evidence = Evidence.model_construct(
            reason=int(Reason.TAMPERED_LOGPROBS), rows_drawn=(0, 3), lease=lease, chance="",
            statistics={"exact_rows": "2"}, row_statistics={}, detail="",
        )  # fmt: skip
        honest = Finding(Reason.NONE, "here", rows_drawn=(0, 3))
        assert compare_slash(evidence, honest, ()).result == due
