"""The demo, as a newcomer runs it: real chain, real processes, a liar caught, the honest paid."""

from __future__ import annotations

import ast
import json
import shutil
import signal
import socket
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from e2e_kit import ROOT, devnet, findings, listening, processes_of, require_anvil, run, until
from otlp import collecting

from devnet.network import Network
from prime_chain.events import Claimed, RootPosted, SlashProposed
from prime_chain.history import read_events
from prime_core.run import MICRO, RunDefinition

SIX = {"learned", "liars_slashed", "paid", "replayed", "fresh", "delivered"}


@dataclass(frozen=True)
class Ended:
    """A demo that has ended: its folder, its exit code, its output, and the spans of its leases'
    traces as (service, name)."""

    root: Path
    returncode: int
    output: str
    traces: list[set[tuple[str, str]]]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A short demo. Every program asks three RPC endpoints, of which one at a time fails in some
    way for a minute."""
    require_anvil()
    root = tmp_path_factory.mktemp("demo") / "run"
    words = ("up", "--plain", "--quick", "--steps", "3", "--nodes", "3", "--liars", "1")
    with collecting() as collector, pytest.MonkeyPatch.context() as patched:
        patched.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        done = run(devnet(*words, "--rpc-faults", "60", "--root", str(root)), 1700)
    return Ended(root, done.returncode, done.stdout, [*collector.traces.values()])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_short_demo_holds_its_findings_and_leaves_nothing_behind(
    ended: Ended,
) -> None:
    root = ended.root
    assert findings(root) == dict.fromkeys(SIX, True), ended.output
    assert ended.returncode == 0
    assert "<svg" in (root / "report.html").read_text()
    assert not (root / "pids.json").exists()
    assert processes_of(root) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_one_trace_follows_a_lease_through_all_programs(ended: Ended) -> None:
    """The programs agree on the trace's id without naming it to one another."""
    whole = {
        ("orchestrator", "lease"), ("prime-node", "generate"), ("prime-node", "upload"),
        ("orchestrator", "submission"), ("validator", "judge"), ("orchestrator", "verdict"),
        ("trainer", "train"),
    }  # fmt: skip
    assert any(trace >= whole for trace in ended.traces), ended.traces
    assert all(trace <= whole for trace in ended.traces)


def shares_hold(root: Path) -> None:
    """Every target length was asked for, and kept its least share of the accepted leases, as far
    as whole leases can."""
    found = json.loads((root / "report.json").read_text())["targets"]
    run = RunDefinition.parse((root / "run.json").read_bytes())
    least = run.budgets.min_share / MICRO
    assert tuple(share["target"] for share in found) == run.budgets.targets
    for name in ("asked", "accepted"):
        whole = sum(share[name] for share in found)
        assert whole >= 4 * len(found)
        for share in found:
            assert share[name] >= least * whole - 2, (name, found)
    assert not any(share["starving"] for share in found)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_network_behind_failing_endpoints_loses_nothing_and_pays_and_slashes_once(
    ended: Ended,
) -> None:
    """A slow node, a fast one and a liar. Ten minutes of faults: `make soak ARGS=rpc-faults`."""
    assert ended.output.count("faults: {") == 1
    injected = ast.literal_eval(
        next(line for line in ended.output.splitlines() if "faults: {" in line).partition(
            "faults: "
        )[2]
    )
    assert len(injected) >= 5
    shares_hold(ended.root)
    network = Network.recorded(ended.root)
    liars = {network.accounts[node.name].address for node in network.plan.nodes if node.liar}
    network.anvil.start()
    try:
        contracts = network.contracts()
        events = read_events(contracts.client, contracts.deployment)
    finally:
        network.stop()
    roots = [event for event in events if isinstance(event, RootPosted)]
    assert [event.seq for event in roots] == list(range(1, len(roots) + 1))
    assert len({event.root for event in roots}) == len(roots), "a root was posted twice"
    slashes = [event for event in events if isinstance(event, SlashProposed)]
    assert {event.node for event in slashes} == liars
    assert len({event.leaf for event in slashes}) == len(slashes)
    payments = Counter(event.node for event in events if isinstance(event, Claimed))
    assert payments
    assert set(payments.values()) == {1}, "a node was paid twice"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_check_rederives_the_findings_from_a_run_that_has_ended(
    ended: Ended, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    shutil.copytree(ended.root, root)
    (root / "findings.json").unlink()
    # A trainer that says it trained something else than what was sealed is found out.
    metrics = root / "trainer" / "metrics.jsonl"
    first, *rest = metrics.read_text().splitlines()
    forged = first.replace('"batch": "0x', '"batch": "0xf')[: len(first) + 1]
    metrics.write_text("\n".join([forged, *rest]) + "\n")
    assert run(devnet("check", "--root", str(root), "--json"), 300).returncode == 1
    assert findings(root) == dict.fromkeys(SIX, True) | {"fresh": False}
    assert processes_of(root) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ctrl_c_ends_every_process_and_frees_every_port(tmp_path: Path) -> None:
    require_anvil()
    root = tmp_path / "run"
    with (tmp_path / "output").open("wb") as output:
        demo = subprocess.Popen(
            devnet("up", "--plain", "--quick", "--nodes", "2", "--liars", "0", "--root", str(root)),
            cwd=ROOT,
            stdout=output,
            stderr=output,
        )
    try:
        log = root / "logs" / "honest-2.log"
        until(lambda: log.exists() or demo.poll() is not None, "the nodes start", 400)
        assert demo.poll() is None, (tmp_path / "output").read_text()
        children = psutil.Process(demo.pid).children(recursive=True)
        ports = listening([demo.pid, *(child.pid for child in children)])
        assert len(ports) >= 2, "the chain and the orchestrator at least"
        demo.send_signal(signal.SIGINT)
        assert demo.wait(90) == 130
        assert psutil.wait_procs(children, timeout=120)[1] == []
        for port in ports:
            with socket.create_server(("127.0.0.1", port)):
                pass
    finally:
        demo.kill()
        demo.wait()
    assert processes_of(root) == []
