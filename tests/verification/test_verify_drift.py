"""Small changes of weights, in files long enough to show them next to honest drift."""

from __future__ import annotations

from typing import Any

import pytest

from prime_core.verdict import Outcome, Reason
from prime_engine.tiny import write_tiny_model
from prime_engine.variants import VARIANTS
from prime_envs.registry import environment_for
from prime_verify.calibrate import synthetic_run
from prime_verify.engines import load_engine
from prime_verify.proofs.thresholds import LONG_TOKENS

LEASES = range(200, 206)
SHOWN = {"int8": len(LEASES), "old10_1e4": len(LEASES) // 3}
"""Files that must be rejected. Measured over 40 leases: all of `int8`, 37 of `old10_1e4`. Which
files show the smaller change depends on the run's digest and on the processor."""


@pytest.fixture(scope="module")
def long_world(world: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Files of 16 rows of up to 160 tokens, all replayed: long files."""
    folder = write_tiny_model(tmp_path_factory.mktemp("long"), seed=7, hidden=128, layers=4)
    run = synthetic_run(160, groups=4, samples=4).model_copy(
        update={"replay_rows_micro": 1_000_000}
    )
    return type(world)(run, environment_for(run), load_engine(folder)), folder


@pytest.mark.slow
@pytest.mark.parametrize("lie", sorted(SHOWN))
def test_small_changes_of_weights_show_against_a_replay_in_the_files_own_dtype(
    long_world: Any, lie: str
) -> None:
    of_long, folder = long_world
    liar = load_engine(folder, dtype="bfloat16", prepare=VARIANTS[lie])
    findings = [of_long.judge(of_long.honest(n, liar), secret=n) for n in LEASES]
    rejected = [found for found in findings if found.outcome is Outcome.REJECTED]
    assert len(rejected) >= SHOWN[lie], findings
    for found in rejected:
        assert found.reason in (Reason.WRONG_ACTIVATIONS, Reason.TAMPERED_LOGPROBS), found
    assert any("twin_" in found.detail for found in rejected), (
        "the replay in another dtype found all"
    )


@pytest.mark.slow
def test_honest_long_files_in_bfloat16_are_accepted(long_world: Any) -> None:
    of_long, folder = long_world
    honest = load_engine(folder, dtype="bfloat16")
    for number in LEASES:
        found = of_long.judge(of_long.honest(number, honest), secret=number)
        assert found.outcome is Outcome.ACCEPTED, (number, found)
        assert found.statistics["tokens"] >= LONG_TOKENS
