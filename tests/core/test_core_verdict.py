"""Reasons: each has its ending and its sentence."""

from __future__ import annotations

import pytest

from protocol.core.verdict import Outcome, Reason


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_says_what_it_means(reason: Reason) -> None:
    assert len(reason.sentence) > 20
    assert ("public" in reason.sentence) == (reason.outcome is Outcome.REJECTED)
