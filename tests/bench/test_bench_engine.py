"""`bench engine`: its parts at their smallest size."""

from __future__ import annotations

from functools import partial

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'prime-open[torch]'")

from bench import engine
from bench.engine import DEVNET, asked
from bench.honest_files import VLLM_PYTHON
from prime_verify.engines import load_engine

MISSING = "vLLM is not installed: scripts/setup_vllm.sh"


def test_memory_of_proofs_is_far_below_that_of_the_states() -> None:
    tokens = 8192  # 80 MiB of states: other tests leave some MiB of noise in this process
    assert engine.states(tokens)["mb"] < tokens * engine.HIDDEN * 2 / 2**20 / 2


@pytest.mark.slow
def test_shares_of_the_plain_engine_are_shares() -> None:
    load = partial(load_engine, DEVNET, batch_rows=engine.ROWS, threads=1)
    found = engine.proofs(load, quick=True)
    assert found["tokens"] == engine.ROWS * 33
    assert -0.5 < found["proof_share"] < 0.9
    assert 0 < found["prefill_share"] < 1


@pytest.mark.soak
@pytest.mark.skipif(not VLLM_PYTHON.exists(), reason=MISSING)
def test_four_leases_at_once_need_fewer_steps_than_one_after_another() -> None:
    found = asked("slots", "vllm", DEVNET, quick=True)
    assert found["steps_4"] < found["steps_1"]
    assert found["full_4"] > found["full_1"]
