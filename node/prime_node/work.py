"""Receipts that the manager issued but did not root: a node can put such a leaf on chain itself.

receipt ──one epoch──▶ may be posted ──one validity──▶ too late
                       lease and receipt (signed by the manager) prove that the work is owed
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from prime_chain.client import Call
from prime_chain.events import LeafPosted, RootPosted
from prime_chain.history import read_events
from prime_core.errors import PrimeError, UserError
from prime_core.ids import Address, Digest
from prime_core.transport.client import OrchestratorClient
from prime_node.link import Link
from prime_node.spool import Entry, Spool
from prime_node.state import DataFolder

State = Literal["rooted", "waiting", "forgotten", "too late", "unknown"]


@dataclass(frozen=True)
class Receipted:
    """A file with its receipt; times in Unix seconds. `unknown`: it could not be determined whether
    the file is rooted."""

    entry: Entry
    state: State
    post_from: int
    post_until: int

    def as_json(self) -> dict[str, Any]:
        return {
            "submission_digest": self.entry.submission_digest,
            "lease_digest": self.entry.lease_digest,
            "state": self.state,
            "post_from": self.post_from,
            "post_until": self.post_until,
        }


def read_receipts(data: DataFolder) -> list[Entry]:
    """Returns the journal entries with receipts in this folder, whose agent may be running. Shadow
    files are omitted: no contract would accept them."""
    if not (data.spool / "journal.sqlite").is_file():
        return []
    entries = Spool(data.spool, now=time.time, sweep=False).receipted()
    return [entry for entry in entries if not entry.lease.lease.shadow]


def received_since(entries: Sequence[Entry], since: float) -> list[Entry]:
    """Returns those whose receipt is dated `since` (Unix seconds) or later."""
    return [
        entry
        for entry in entries
        if entry.receipt is not None and entry.receipt.receipt.received_at >= since
    ]


def standing(link: Link, entries: Sequence[Entry], orchestrator: str | None) -> list[Receipted]:
    """Returns the state of each receipt according to orchestrator and chain, newest last.

    The orchestrator names a file's root, and the chain shows whether it holds that root. Without
    the orchestrator, only leaves that nodes posted themselves are known.
    """
    mine = read_events(link.client, link.deployment, contracts=("work",), pool=link.pool)
    roots = {event.root for event in mine if isinstance(event, RootPosted)}
    posted = {event.leaf for event in mine if isinstance(event, LeafPosted)}
    now, periods = link.client.agreed_block("latest").time, link.deployment.periods
    named = _roots(orchestrator, [one for one in entries if one.submission_digest not in posted])
    found = []
    for entry in entries:
        assert entry.receipt is not None, "only receipted entries are asked for"
        since = entry.receipt.receipt.received_at + periods.epoch_length
        answered = entry.body.submission.valid_until + periods.accountable
        until = min(since + periods.validity, answered)  # as in Work.postLeaf
        state: State
        if entry.submission_digest in posted:
            state = "rooted"
        else:
            root = None if named is None else named.get(entry.submission_digest)
            if root is not None:
                state = "rooted" if root in roots else "unknown"
            else:
                state = "unknown" if named is None else "forgotten"
        if state == "forgotten" and now < since:
            state = "waiting"
        if state in ("forgotten", "unknown") and now > until:
            state = "too late"
        found.append(Receipted(entry, state, since, until))
    return found


def _roots(
    orchestrator: str | None, entries: Sequence[Entry]
) -> dict[Digest, Digest | None] | None:
    """Returns the root that the orchestrator names for each submission it knows, None for those
    without a root. Returns None if it does not answer."""
    if orchestrator is None:
        return None
    wanted: dict[Address, set[Digest]] = {}
    for entry in entries:
        wanted.setdefault(entry.body.submission.node, set()).add(entry.submission_digest)
    found: dict[Digest, Digest | None] = {}
    try:
        with OrchestratorClient(orchestrator, timeout=5.0) as client:
            for node, missing in wanted.items():
                for info in client.submissions(node):
                    if info.submission_digest in missing:
                        found[info.submission_digest] = info.root
                        missing.discard(info.submission_digest)
                    if not missing:
                        break
    except PrimeError:
        return None
    return found


def post_call(link: Link, entry: Entry) -> Call:
    """Returns the transaction that roots one receipted file. Raises UserError if it cannot be
    built."""
    if entry.receipt is None:
        raise UserError(f"there is no receipt for submission {entry.submission_digest}")
    return link.contracts.work.post_leaf(
        entry.lease.lease,
        entry.lease.signature,
        entry.body.submission,
        entry.body.signature,
        entry.receipt.receipt,
        entry.receipt.signature,
    )


def pick(found: Sequence[Receipted], submission: Digest | None) -> list[Receipted]:
    """Returns the receipts to post: the named one, else all forgotten ones. Raises UserError if
    there is nothing to post."""
    if submission is None:
        due = [one for one in found if one.state == "forgotten"]
        if not due:
            raise UserError(
                "no receipt here is known to be forgotten",
                hint="see them with: prime-node work list; name one to post it anyway",
            )
        return due
    named = [one for one in found if one.entry.submission_digest == submission]
    if not named:
        raise UserError(
            f"there is no receipt for submission {submission} in this data folder",
            hint="give the agent's own --data DIR",
        )
    return named  # regardless of its state: the contract refuses what is already posted
