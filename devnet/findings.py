"""The six findings that make a demo a proof: pure judgements over what was observed from outside.

`observe.py` gathers the observation from outside (RPC, signed URLs, the trainer's metrics, the
nodes' own folders); nothing here reads a counter that the demo kept for itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prime_chain.amounts import prime

NEEDED_RISE = 0.30
NEEDED_REWARD = 0.75
MAX_STALENESS = 2


@dataclass(frozen=True)
class Finding:
    """One judgement: whether it holds, and a sentence that says from what."""

    name: str
    ok: bool
    because: str
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluation:
    """`trainer evaluate` on the held-out problems, of a policy that came through the relay."""

    version: int
    mean_reward: float
    problems: int
    on_chain: bool
    """The evaluated folder is bit for bit the policy whose digest the chain holds."""


def learned(evaluations: Sequence[Evaluation], *, asked: bool = True) -> Finding:
    """Mean held-out reward rose by ≥ 0.30 to ≥ 0.75, in the last two evaluations of the run.

    `asked` is False for a run of a fixed, small number of steps: then only that evaluations are of
    policies on chain is asked, and the sentence says so.
    """
    if len(evaluations) < 2:
        return Finding("learned", False, "there are not two evaluations to compare")
    first, last = evaluations[0], evaluations[-1]
    details = {"evaluations": [vars(e) for e in evaluations]}
    foreign = [e.version for e in evaluations if not e.on_chain]
    if foreign:
        return Finding("learned", False, f"policies {foreign} are not those on chain", details)
    rise = last.mean_reward - first.mean_reward
    words = (
        f"mean held-out reward went from {first.mean_reward:.3f} (policy {first.version}) to "
        f"{last.mean_reward:.3f} (policy {last.version}) on {last.problems} problems"
    )
    if not asked:
        return Finding("learned", True, f"not asked of a short run; {words}", details)
    steady = list(evaluations[1:])[-2:]
    ok = (
        len(steady) == 2
        and all(e.mean_reward >= NEEDED_REWARD for e in steady)
        and rise >= NEEDED_RISE
    )
    return Finding("learned", ok, words, {**details, "rise": rise})


@dataclass(frozen=True)
class NodeFacts:
    """One node as the chain and the orchestrator's public pages show it. Amounts in wei."""

    name: str
    address: str
    liar: bool
    slash_transactions: tuple[str, ...]
    slashed: int
    ejected_on_chain: bool
    lease_refused: bool | None
    """Asked for a lease with its own key after the confirmed slash: refused. None: not asked."""
    leases_after_slash: int
    """Leases dated after the block that confirmed its slash."""
    stake_deposited: int
    stake_active: int
    rejected_leaves: int
    ends: str = "slashed"
    """What should come of a liar: "slashed", "void" (its files earn nothing), "unseen"."""
    units: int = 0
    """Units of its accepted files."""


def liars_slashed(nodes: Sequence[NodeFacts]) -> Finding:
    """Every liar slashed on chain, ejected and without a lease since (one whose files are void:
    unpaid and unslashed; of one that should not be seen nothing is asked); no honest node lost a
    wei."""
    wrong: list[str] = []
    for node in nodes:
        if node.liar and node.ends != "slashed":
            if node.ends == "void" and node.units:
                wrong.append(f"{node.name} earned {node.units} units, and should none")
            elif node.ends == "void" and node.slashed:
                wrong.append(f"{node.name} was slashed for files that are only void")
        elif node.liar:
            if not node.slash_transactions or node.slashed <= 0:
                wrong.append(f"{node.name} was not slashed")
            elif not node.ejected_on_chain:
                wrong.append(f"{node.name} was slashed but not ejected")
            elif node.leases_after_slash or not node.lease_refused:
                wrong.append(f"{node.name} could still get leases after its slash")
        elif node.slashed or node.rejected_leaves or node.ejected_on_chain:
            wrong.append(f"{node.name} is honest and was punished")
        elif node.stake_active != node.stake_deposited:
            wrong.append(f"{node.name} is honest and its stake changed")
    slashed = [
        f"{node.name} in {node.slash_transactions[0]}"
        + (f" and {len(node.slash_transactions) - 1} more" if node.slash_transactions[1:] else "")
        for node in nodes
        if node.slash_transactions
    ]
    words = f"slashed: {', '.join(slashed) or 'no one'}; no honest stake moved"
    details = {"nodes": [vars(node) for node in nodes]}
    return Finding("liars_slashed", not wrong, "; ".join(wrong) or words, details)


@dataclass(frozen=True)
class Payment:
    """One node's pay in wei: claimed on chain, and rebuilt from events and objects."""

    name: str
    claimed: int
    rebuilt: int
    honest: bool


def paid(payments: Sequence[Payment], rebuilt_roots_match: bool) -> Finding:
    """Every honest node claimed on chain exactly what the rebuild gives, and more than nothing."""
    wrong = [
        f"{p.name} claimed {prime(p.claimed)}, the rebuild gives {prime(p.rebuilt)}"
        for p in payments
        if p.honest and (p.claimed != p.rebuilt or p.claimed <= 0)
    ]
    if not rebuilt_roots_match:
        wrong.append("a reward root on chain is not the one that the rebuild gives")
    if not any(p.honest for p in payments):
        wrong.append("there is no honest node to pay")
    total = sum(p.claimed for p in payments if p.honest)
    words = f"{prime(total)} claimed, equal to the last wei to the rebuild from events and objects"
    details = {"payments": [vars(p) for p in payments]}
    return Finding("paid", not wrong, "; ".join(wrong) or words, details)


@dataclass(frozen=True)
class AuditReplay:
    """One `prime-node audit replay`: what it was asked of, what it must say, what it said."""

    subject: str
    expected: str
    said: str


def replayed(replays: Sequence[AuditReplay], slashes: int) -> Finding:
    """The audit of every slash says match, of an accepted file accepted."""
    wrong = [f"{r.subject}: {r.said} instead of {r.expected}" for r in replays]
    wrong = [w for w, r in zip(wrong, replays, strict=True) if r.said != r.expected]
    matches = sum(r.expected == "match" for r in replays)
    accepted = sum(r.expected == "accepted" for r in replays)
    if matches < slashes:
        wrong.append(f"{slashes} slashes, but only {matches} were replayed")
    if not accepted:
        wrong.append("no accepted file was replayed")
    words = f"{matches} slashes replayed as match, {accepted} accepted files as accepted"
    return Finding(
        "replayed", not wrong, "; ".join(wrong) or words, {"replays": [vars(r) for r in replays]}
    )


@dataclass(frozen=True)
class TrainedFile:
    """One file of one trained batch, as the sealed manifest names it."""

    step: int
    sha256: str
    groups: tuple[int, ...]
    policy_version: int
    leaf_on_chain: bool
    """Its submission is proved to be a leaf of a work root that the chain holds."""


@dataclass(frozen=True)
class TrainedBatch:
    """One step of the trainer: what its metrics say it trained, against the sealed manifest."""

    step: int
    digest_trained: str
    digest_sealed: str
    signed_by_manager: bool
    rows: int


def fresh(
    batches: Sequence[TrainedBatch], files: Sequence[TrainedFile], published: Sequence[int]
) -> Finding:
    """Every trained row at most 2 policies old, every batch sealed, every submission rooted, no
    row trained twice; and each policy on chain (`published`) but the first is one such step."""
    wrong: list[str] = []
    steps = [b.step for b in batches]
    if sorted(steps) != sorted(version - 1 for version in published if version > 0):
        wrong.append("the steps trained are not the policies published")
    if not steps:
        wrong.append("nothing was trained")
    if len(set(steps)) != len(steps):
        wrong.append("a step was trained twice")
    for batch in batches:
        if batch.digest_trained != batch.digest_sealed or not batch.signed_by_manager:
            wrong.append(f"step {batch.step} did not train the batch that the manager sealed")
    taken: set[tuple[str, int]] = set()
    for file in files:
        if file.step - file.policy_version > MAX_STALENESS:
            wrong.append(f"step {file.step} trained rows of policy {file.policy_version}")
        if not file.leaf_on_chain:
            wrong.append(f"file {file.sha256} is under no root on chain")
        for group in file.groups:
            if (file.sha256, group) in taken:
                wrong.append(f"group {group} of {file.sha256} was trained twice")
            taken.add((file.sha256, group))
    rows = sum(b.rows for b in batches)
    staleness = max((f.step - f.policy_version for f in files), default=0)
    words = (
        f"{rows} rows in {len(steps)} sealed batches, at most {staleness} policies old, every "
        "submission under a root on chain, none trained twice"
    )
    details = {"steps": len(steps), "rows": rows, "staleness_max": staleness}
    return Finding("fresh", not wrong, "; ".join(wrong[:5]) or words, details)


@dataclass(frozen=True)
class Arrival:
    """One policy at one node, from the node's own folder and journal."""

    node: str
    version: int
    as_delta: bool
    signed: bool
    """The manifest kept next to it carries the trainer's signature and the digest on chain."""
    identical: bool
    """Its result digest is the manifest's."""


def delivered(
    arrivals: Sequence[Arrival], honest: Sequence[str], published: Sequence[int]
) -> Finding:
    """Each policy reached each honest node, signed and bit-identical, some of them as deltas."""
    wrong: list[str] = []
    for node in honest:
        got = {a.version for a in arrivals if a.node == node}
        if missing := sorted(set(published) - got):
            wrong.append(f"{node} never had policies {missing[:8]}")
    for arrival in arrivals:
        if not (arrival.signed and arrival.identical):
            wrong.append(f"policy {arrival.version} at {arrival.node} is not the signed one")
    deltas = sum(a.as_delta for a in arrivals)
    if not deltas:
        wrong.append("nothing traveled as a delta")
    if not published:
        wrong.append("nothing was published")
    words = (
        f"{len(published)} policies at {len(honest)} honest nodes, {deltas} of "
        f"{len(arrivals)} arrivals as deltas, all bit-identical to signed manifests"
    )
    details = {"arrivals": len(arrivals), "deltas": deltas, "published": list(published)}
    return Finding("delivered", not wrong, "; ".join(wrong[:5]) or words, details)
