"""`python -m devnet lies`: networks with some liars each, one after the other, until every kind has
been slashed, made void, or let pass; then what came of each, from outside.

    up → each liar until it has shown enough → nodes stop → every file judged and rooted
       → chain, published leaves, `prime-node audit replay` → one entry of the record
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from devnet import lies
from devnet.kinds import LIES
from devnet.lies import JudgedFile, Record
from devnet.network import Network
from devnet.observe import ChainFacts, audit, node_facts, published_leaves
from devnet.origin import ROOT, commit, machine
from devnet.plan import Plan, node_plans
from devnet.walk import Walk
from prime_core.deployment import Periods
from prime_core.errors import PrimeError, UnavailableError
from prime_core.ids import Address
from prime_core.messages import Status, SubmissionInfo
from prime_core.signing import Domain
from prime_core.transport.client import OrchestratorClient
from prime_core.verdict import Reason

PERIODS = Periods(
    epoch_length=8, validity=90, slash_window=6, dispute_window=6, reward_delay=4, unbonding=120
)
"""Slashes come soon; a file may still wait for its verdict while many processes start."""
SHOW_SECONDS = 420.0
"""How long the liars of one network may take."""
Note = Callable[[str], None]


def plan_of(kinds: Sequence[str], root: Path) -> Plan:
    """A network with one liar of each kind: files of 32 rows, and batches that many files fill, so
    that policies change a few times only."""
    return Plan(
        root=root,
        nodes=node_plans(lies.HONEST + len(kinds), len(kinds), kinds),
        periods=PERIODS,
        groups_per_batch=48,
        groups_per_lease=4,
        samples_per_group=8,
    )


def play_all(
    kinds: Sequence[str],
    out: Path,
    root: Path,
    together: int,
    empty: Callable[[], None],
    note: Note,
) -> Record:
    """Plays `kinds`, and keeps what came in `out` after every network. `empty` clears `root`.

    A network that fails is reported and left out: its kinds stay to be played.
    """
    started = time.monotonic()

    def tell(words: str) -> None:
        note(f"[{time.monotonic() - started:6.1f} s] {words}")

    found, whole = load(out), True
    for number, lot in enumerate(lies.lots(kinds, together) if kinds else [], 1):
        tell(f"network {number}: {', '.join(lot)}")
        empty()
        try:
            found["networks"].append(play(lot, root, tell))
        except PrimeError as error:
            tell(f"this network failed, its kinds are not recorded: {error}")
            whole = False
            continue
        found["ok"] = lies.all_as_listed(found["networks"])
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(found, indent=1) + "\n")
    return {**found, "ok": found["ok"] and whole}


def load(out: Path) -> Record:
    """What `out` has of these sources, under a head of today."""
    mine = lies.sources(ROOT)
    networks = json.loads(out.read_text())["networks"] if out.exists() else []
    networks = [network for network in networks if network["sources"] == mine]
    return {
        "date": _today(),
        "commit": commit(),
        "machine": machine(),
        "networks": networks,
        "ok": lies.all_as_listed(networks),
    }


def play(kinds: Sequence[str], root: Path, note: Note) -> Record:
    """One network from start to end. Raises PrimeError if it does not get that far."""
    network = Network(plan_of(kinds, root))
    walk = Walk(network, note, tick=lambda: None)
    started = time.monotonic()
    head = {"date": _today(), "commit": commit(), "sources": lies.sources(ROOT)}
    try:
        walk.bring_up()
        note("the liars are at work")
        _until_shown(walk)
        note("every file its verdict and root")
        walk.stop_nodes()
        note("looking from outside, replaying")
        seen = _looked_at(network)
    finally:
        network.stop()
    return {**head, "seconds": round(time.monotonic() - started), **seen}


def _until_shown(walk: Walk) -> None:
    """Until each liar has shown enough, and is stopped then; or until it has taken too long."""
    network = walk.network
    names = network.names()
    left = {node.name: node.ends for node in network.plan.nodes if node.ends is not None}

    def all_shown(status: Status) -> bool:
        for seen in status.nodes:
            name = names.get(seen.node, "")
            if name in left and lies.shown(left[name], seen):
                del left[name]
                network.supervisor.stop(name)
        return not left

    try:
        walk.until("every liar's end", all_shown, SHOW_SECONDS)
    except UnavailableError:
        walk.note(f"no end in {SHOW_SECONDS:.0f} s: {', '.join(left)}")


def _looked_at(network: Network) -> Record:
    """Liars and honest nodes, from the chain, what is published, and audits."""
    contracts, nodes = network.contracts(), network.plan.nodes
    chain = ChainFacts.read(network)
    with network.client() as client:
        facts = {
            node.name: node_facts(network, contracts, client, chain, node.name) for node in nodes
        }
        by_address = _files(client, chain, network.deployment().domain("work"))
    files = {name: by_address.get(network.accounts[name].address, []) for name in facts}
    asked = {n.name: lies.subjects(files[n.name], facts[n.name]) for n in nodes if n.liar}
    every = [subject for subjects in asked.values() for subject in subjects]
    said = dict(zip(every, audit(network, every) if every else [], strict=False))
    return {
        "liars": [
            lies.record(
                node.liar,
                files[node.name],
                facts[node.name],
                [said[subject] for subject in asked[node.name] if subject in said],
            )
            for node in nodes
            if node.liar
        ],
        "honest": [
            lies.honest_record(files[node.name], facts[node.name]) for node in nodes if node.paid
        ],
    }


def _files(
    client: OrchestratorClient, chain: ChainFacts, domain: Domain
) -> dict[Address, list[JudgedFile]]:
    """Every node's files in the order in which they were handed in."""
    found: dict[Address, list[JudgedFile]] = {}
    leaves = published_leaves(client, chain, domain)
    for digest, leaf in sorted(leaves.items(), key=lambda one: one[1].submission.valid_until):
        info = client.get(f"/v1/submissions/{digest}", SubmissionInfo)
        file = JudgedFile(digest, info.status, Reason(info.reason))
        found.setdefault(leaf.node, []).append(file)
    return found


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


def table(networks: Sequence[Record]) -> str:
    """One line a kind, in the order of the list of lies."""
    found = lies.newest(networks)
    lines = [_line("kind", "listed", "came", "file", "judged", "slashes", "audit", "reasons")]
    for kind, lie in LIES.items():
        one = found.get(kind)
        if one is None:
            lines.append(_line(kind, lie.ends, "not played"))
            continue
        reasons = ", ".join(f"{name} {count}" for name, count in one["reasons"].items())
        audits = " ".join(sorted({*one["audits"]}))
        counts = (one["files"], one["judged"], len(one["slashes"]))
        lines.append(_line(kind, lie.ends, one["came"], *counts, audits, reasons))
        lines += [f"  NOT AS LISTED: {words}" for words in one["wrong"]]
        earlier = [
            liar for network in networks for liar in network["liars"] if liar["kind"] == kind
        ]
        lines += [f"  another: {two['came']}, file {two['files']}" for two in earlier[:-1]]
    hurt = [node for network in networks for node in network["honest"] if not node["ok"]]
    lines += [f"HONEST, AND HURT: {node}" for node in hurt]
    return "\n".join(lines)


def _line(*cells: object) -> str:
    widths = (18, 8, 10, 4, 6, 7, 8, 0)
    return "  ".join(
        f"{cell!s:<{width}}" for cell, width in zip(cells, widths, strict=False)
    ).rstrip()
