"""Every lie on a whole network, some at a time: which are still to be played, when a liar has shown
enough, what came of it. Pure; `play` runs the networks, `python -m devnet lies` asks for them.

A record of all of them has one entry a network, each with the sources it ran: what a liar did is
played again once the code that makes or judges files has changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from devnet.findings import NodeFacts, liars_slashed
from devnet.kinds import LIES, Ending
from prime_core.ids import Digest
from prime_core.messages import NodeInfo
from prime_core.task import SubmissionStatus
from prime_core.verdict import Reason

HONEST = 2
"""Honest nodes next to the liars of each network."""
SHOWN = 6
"""Judged files of a liar that should not be slashed yet, before it has shown enough."""
GIVEN_UP = 200
"""Judged files of one that should be slashed, none of them rejected, before the wait ends.
The least lie that is listed so, one step of 1e-5, shows in one file of ten or twenty."""
NOT_ITS_OWN = frozenset({Reason.UNAVAILABLE, Reason.LATE, Reason.POLICY_TOO_OLD, Reason.UNROOTED})
"""Void for time alone, on a busy machine: these say nothing of what is in the file."""
AUDITED: Mapping[Ending, str] = {"slashed": "match", "void": "match", "unseen": "accepted"}
"""What an audit says of each slash; of a void file; of an accepted one."""
SOURCES = (
    *("protocol/prime_engine", "protocol/prime_verify"),
    *("protocol/prime_verify/proofs", "protocol/prime_verify/canaries"),
)
"""What makes and judges files, next to the two programs that lie."""

Came = Literal["slashed", "rejected", "void", "unseen", "mixed", "nothing"]
Record = dict[str, Any]


@dataclass(frozen=True)
class JudgedFile:
    """One file of a node as anyone sees it once its root is on chain."""

    submission: Digest
    status: SubmissionStatus
    reason: Reason


def sources(root: Path) -> str:
    """SHA-256 of what decides how a lie ends."""
    paths = [root / "node" / "prime_node" / "planting.py", root / "devnet" / "liars.py"]
    paths.append(root / "devnet" / "kinds.py")
    for folder in SOURCES:
        found = (root / folder).glob("*")
        paths += sorted(path for path in found if path.suffix in (".py", ".json"))
    return sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


# ── what to play ─────────────────────────────────────────────────────────────────────────────────


def newest(networks: Iterable[Record]) -> dict[str, Record]:
    """The newest record of each kind."""
    return {liar["kind"]: liar for network in networks for liar in network["liars"]}


def lots(kinds: Sequence[str], together: int) -> list[tuple[str, ...]]:
    """`kinds` for one network after the other, at most `together` each, as even as can be."""
    count = -(-len(kinds) // together)
    return [tuple(kinds[i::count]) for i in range(count)]


def shown(ends: Ending, seen: NodeInfo) -> bool:
    """Whether a liar that should end like this has done enough: it is ejected, or SHOWN or GIVEN_UP
    of its files were judged and none rejected (after a rejection its slash is under way)."""
    if seen.status == "ejected":
        return True
    judged = seen.accepted + seen.void
    return not seen.rejected and judged >= (GIVEN_UP if ends == "slashed" else SHOWN)


# ── what came ────────────────────────────────────────────────────────────────────────────────────


def came(files: Sequence[JudgedFile], facts: NodeFacts) -> Came:
    """How it ended; files that are void for time alone are left out."""
    if facts.slash_transactions:
        return "slashed"
    ended = {file.status for file in own(files)}
    if "rejected" in ended:
        return "rejected"
    if not ended:
        return "nothing"
    if len(ended) > 1:
        return "mixed"
    return "void" if ended == {"void"} else "unseen"


def own(files: Iterable[JudgedFile]) -> list[JudgedFile]:
    """The files that were judged by what is in them."""
    return [file for file in files if file.status != "submitted" and file.reason not in NOT_ITS_OWN]


def subjects(files: Sequence[JudgedFile], facts: NodeFacts) -> tuple[Digest, ...]:
    """What of a liar is to be audited: each of its slashes, or the first of its files."""
    if facts.slash_transactions:
        return tuple(Digest(tx) for tx in facts.slash_transactions)
    return tuple(file.submission for file in own(files)[:1])


def record(
    kind: str, files: Sequence[JudgedFile], facts: NodeFacts, audits: Sequence[str]
) -> Record:
    """The record of one liar: its expected ending, its actual one, and the causes. `audits`: what
    the audits of its `subjects` say.

    `files` is how many of its files were judged until the first that was not accepted, or in all.
    """
    expected, judged = LIES[kind].ends, own(files)
    ended = came(files, facts)
    refused = [n for n, file in enumerate(judged, 1) if file.status != "accepted"]
    wrong = []
    if ended != expected:
        wrong.append(f"{ended}, and should be {expected}")
    finding = liars_slashed([facts])
    if not finding.ok:
        wrong.append(finding.because)
    due = len(subjects(files, facts))
    if due == 0 or len(audits) != due or {*audits} != {AUDITED[expected]}:
        wrong.append(f"audits say {list(audits)}, and should say {AUDITED[expected]} of {due}")
    reasons = Counter(file.reason.name for file in judged if file.status != "accepted")
    return {
        "kind": kind,
        "expected": expected,
        "came": ended,
        "reasons": dict(reasons),
        "files": refused[0] if refused else len(judged),
        "judged": len(judged),
        "late": len(files) - len(judged),
        "slashes": list(facts.slash_transactions),
        "burned_wei": str(facts.slashed),
        "audits": list(audits),
        "wrong": wrong,
        "ok": not wrong,
    }


def honest_record(files: Sequence[JudgedFile], facts: NodeFacts) -> Record:
    """One honest node next to them: nothing of it may be refused for what is in it."""
    judged = own(files)
    accused = [file.reason.name for file in judged if file.status != "accepted"]
    finding = liars_slashed([facts])
    return {
        "name": facts.name,
        "accepted": len(judged) - len(accused),
        "refused": accused,
        "late": len(files) - len(judged),
        "stake_wei": str(facts.stake_active),
        "ok": finding.ok and not accused,
    }


def all_as_listed(networks: Sequence[Record]) -> bool:
    """Whether every kind was played and ended as listed, and no honest node was hurt."""
    found = newest(networks)
    unhurt = all(node["ok"] for network in networks for node in network["honest"])
    return unhurt and {*found} == {*LIES} and all(one["ok"] for one in found.values())
