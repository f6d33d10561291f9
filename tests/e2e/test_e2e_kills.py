"""Killed at any moment and started again: no accepted file lost, none trained twice."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from e2e_kit import processes_of, require_anvil

from devnet import findings
from devnet.__main__ import QUICK_PERIODS
from devnet.network import Network
from devnet.observe import ChainFacts, trained
from devnet.plan import Plan, node_plans
from devnet.walk import Walk
from prime_chain import events
from prime_core.batch import SignedBatch
from prime_core.messages import Status

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]


def test_sigkill_of_orchestrator_validator_and_trainer_loses_and_repeats_nothing(
    tmp_path: Path,
) -> None:
    require_anvil()
    plan = Plan(root=tmp_path / "run", nodes=node_plans(2, 0), periods=QUICK_PERIODS).quick()
    network = Network(plan)
    walk = Walk(network, note=print, tick=lambda: None)
    starters = {
        "orchestrator": network.start_orchestrator,
        "validator": lambda: network.start_validator("validator"),
        "trainer": network.start_trainer,
    }
    try:
        walk.start()
        accepted: list[int] = [_accepted(network.status())]
        for name, start in starters.items():
            before = network.status()
            sealed = _sealed(network, before.step)
            network.supervisor.stop(name, how=signal.SIGKILL)
            start()
            goal = before.step + 2
            walk.until(f"progress after the {name}'s death", _reached(goal), 240)
            after = network.status()
            accepted.append(_accepted(after))
            assert _sealed(network, before.step) == sealed, "a sealed batch changed"
        assert accepted == sorted(accepted), "accepted files were lost"
        walk.settle()
        chain = ChainFacts.read(network)
        published = [event.version for event in chain.of(events.PolicyPublished)]
        with network.client() as client:
            batches, files = trained(network, client, chain)
        judged = findings.fresh(batches, files, published)
        assert judged.ok, judged.because
        lines = (network.root / "trainer" / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line)["step"] for line in lines]
        assert steps == list(range(len(steps))), "a step is missing or was trained twice"
    finally:
        network.stop()
    assert processes_of(network.root) == []


def _accepted(status: Status) -> int:
    return status.files.get("accepted", 0)


def _reached(step: int) -> Callable[[Status], bool]:
    return lambda status: status.step >= step and (status.latest_version or 0) >= step


def _sealed(network: Network, steps: int) -> list[str]:
    with network.client() as client:
        return [
            client.get(f"/v1/batches/{step}/manifest", SignedBatch).manifest.digest()
            for step in range(steps)
        ]
