"""How sure an accusation is said to be: never below the least chance, as 0 says that it is none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from prime_core.verdict import Reason
from prime_verify.checks import check_improbable_tokens
from prime_verify.finding import RulingError
from prime_verify.proofs import sampling
from prime_verify.proofs.tails import LEAST_CHANCE
from prime_verify.proofs.thresholds import STATISTICS, Limits
from prime_verify.replay import RowStatistics, accuse

VOCABULARY = 97


def row_of(observed: int, margin: float = 0.0) -> RowStatistics:
    return RowStatistics(
        0, 300, 10, 0.0, dict.fromkeys(STATISTICS, 0.0) | {"margin_max": margin},
        margin, False, observed, 1e-3,
    )  # fmt: skip


@pytest.mark.parametrize("observed", [40, 100, 300])
def test_a_file_of_improbable_tokens_alone_is_stated_with_the_least_chance(observed: int) -> None:
    logprobs = np.full(observed, -20.0, dtype=np.float32)
    assert sampling.poisson_tail(observed, observed * 1e-3) < LEAST_CHANCE
    rows: Any = [SimpleNamespace(logprobs=logprobs, places=np.arange(observed))]
    engine: Any = SimpleNamespace(vocabulary=VOCABULARY)
    with pytest.raises(RulingError) as said:
        check_improbable_tokens(rows, engine)
    found = said.value.finding
    assert (found.reason, found.chance) == (Reason.IMPROBABLE_TOKENS, LEAST_CHANCE)


@pytest.mark.parametrize("margin", [0.0, 2.0])
@pytest.mark.parametrize("observed", [40, 300])
def test_a_replay_that_finds_improbable_tokens_states_no_chance_below_the_least(
    observed: int, margin: float
) -> None:
    limits = Limits({"row": {"margin_max": 1.0}})
    found = accuse([row_of(observed, margin)], limits)
    assert found is not None
    assert (found.reason, found.chance) == (Reason.IMPROBABLE_TOKENS, LEAST_CHANCE)
