"""Runs forge's own tests, so that `make test` covers the contracts."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from forge_kit import forge, need_forge

pytestmark = pytest.mark.forge


def _passed(output: str) -> int:
    found = re.search(r"(\d+) tests passed, 0 failed", output)
    return int(found[1]) if found else 0


@pytest.mark.slow
def test_unit_fuzz_and_invariant_tests_pass() -> None:
    need_forge()
    done = forge("test")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert _passed(done.stdout) >= 120


@pytest.mark.slow
def test_gas_stays_under_its_bars_and_as_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    need_forge()
    monkeypatch.setenv("FORGE_SNAPSHOT_CHECK", "true")
    monkeypatch.setenv("FORGE_SNAPSHOT_EMIT", "false")
    done = forge("test", profile="gas")
    said = done.stdout[-6000:] + done.stderr[-2000:]
    assert done.returncode == 0, f"run `FOUNDRY_PROFILE=gas scripts/forge test`, commit\n{said}"
    assert _passed(done.stdout) >= 8


def test_sources_are_formatted() -> None:
    need_forge()
    done = forge("fmt", "--check")
    assert done.returncode == 0, f"run `scripts/forge fmt`\n{done.stdout[-3000:]}"


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_money_and_court_invariants_hold_in_long_runs() -> None:
    """1,024 runs of 64 calls; forge makes one after the other, so two of it share them."""
    need_forge()
    assert forge("build", profile="ci").returncode == 0  # once, not by both at a time
    words = ("test", "--match-contract", "MoneyInvariant|CourtInvariant")
    half = partial(forge, *words, profile="ci", FOUNDRY_INVARIANT_RUNS="512")
    with ThreadPoolExecutor() as pool:
        running = pool.submit(half), pool.submit(half, FOUNDRY_FUZZ_SEED="0x6f70656e")
    for done in (one.result() for one in running):
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        assert done.stdout.count("runs: 512, calls: 32768, reverts: 0") == 2
