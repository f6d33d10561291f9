"""Runs forge's own tests, so that `make test` covers the contracts."""

from __future__ import annotations

import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from forge_kit import forge, need_forge

from bench import gas
from prime_core.errors import UnavailableError

pytestmark = [pytest.mark.forge, pytest.mark.timeout(900)]
"""Compiling alone takes 150 s where other tests keep both cores busy."""


def _passed(output: str) -> int:
    found = re.search(r"(\d+) tests passed, 0 failed", output)
    return int(found[1]) if found else 0


@pytest.fixture(scope="module")
def _built() -> None:
    """Compiles all files at once: each profile alone would compile what it runs, and most twice."""
    need_forge()
    done = forge("build")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.usefixtures("_built")
def test_unit_fuzz_and_invariant_tests_pass() -> None:
    done = forge("test")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert _passed(done.stdout) >= 120


@pytest.mark.slow
@pytest.mark.usefixtures("_built")
def test_gas_stays_under_its_bars_and_as_committed(tmp_path: Path) -> None:
    """`bench gas` says so, and refuses a snapshot that the sources do not give."""
    snapshots = tmp_path / "snapshots"
    shutil.copytree(gas.SNAPSHOT.parent, snapshots)
    assert gas.remeasure(snapshots) >= 8, "run `FOUNDRY_PROFILE=gas scripts/forge test`, commit"
    file = snapshots / gas.SNAPSHOT.name
    figures = json.loads(file.read_text())
    figures["reject of a leaf"] = str(int(figures["reject of a leaf"]) - 1)
    file.write_text(json.dumps(figures))
    with pytest.raises(UnavailableError, match="not the snapshot's"):
        gas.remeasure(snapshots)
    assert json.loads(file.read_text()) == figures, "the snapshot is left as it was"


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
