"""`python -m devnet check`: the six findings of a run, derived anew from outside."""

from __future__ import annotations

import json

from rich.console import Console
from rich.table import Table

from devnet import findings
from devnet.findings import Finding
from devnet.network import Network
from devnet.observe import Observation, observe


def check(network: Network) -> tuple[list[Finding], Observation]:
    """Observes and judges; also writes `findings.json` beside the run."""
    seen = observe(network)
    judged = judge(network, seen)
    (network.root / "findings.json").write_text(as_json(judged))
    return judged, seen


def judge(network: Network, seen: Observation) -> list[Finding]:
    """The six, in the order of the README."""
    honest = [node.name for node in network.plan.nodes if node.paid]
    slashes = sum(len(node.slash_transactions) for node in seen.nodes)
    return [
        findings.learned(seen.evaluations, asked=not network.plan.fixed_steps),
        findings.liars_slashed(seen.nodes),
        findings.paid(seen.payments, seen.roots_match),
        findings.replayed(seen.replays, slashes),
        findings.fresh(seen.batches, seen.files, seen.published),
        findings.delivered(seen.arrivals, honest, seen.published),
    ]


def as_json(judged: list[Finding]) -> str:
    rows = [
        {"name": f.name, "ok": f.ok, "because": f.because, "details": dict(f.details)}
        for f in judged
    ]
    return json.dumps({"ok": all(f.ok for f in judged), "findings": rows}, indent=2, default=str)


def print_findings(judged: list[Finding], json_output: bool) -> None:
    """A table, or one JSON object."""
    if json_output:
        print(as_json(judged))
        return
    table = Table(title="Six findings, each derived from outside", show_lines=True)
    table.add_column("finding")
    table.add_column("holds")
    table.add_column("because", overflow="fold")
    for finding in judged:
        mark = "[green]yes[/]" if finding.ok else "[bold red]NO[/]"
        table.add_row(finding.name, mark, finding.because)
    Console().print(table)
