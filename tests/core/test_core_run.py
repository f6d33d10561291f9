"""Bounds of the run definition."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from protocol.core.run import RunDefinition, SpeedClasses


def test_a_challenge_s_solution_has_at_most_64_mebibytes() -> None:
    assert SpeedClasses(challenge_size=2048, challenge_rounds=2).challenge_rounds == 2
    with pytest.raises(ValidationError, match="64 MiB"):
        SpeedClasses(challenge_size=2048, challenge_rounds=3)
    with pytest.raises(ValidationError, match="64 MiB"):
        SpeedClasses(challenge_size=8192, challenge_rounds=64)


def test_a_silent_node_is_dead_within_a_minute_by_default() -> None:
    ticks = 2  # seconds: silence must exceed the bound, and a tick a second must notice it
    assert RunDefinition.model_fields["death_seconds"].default + ticks < 60
