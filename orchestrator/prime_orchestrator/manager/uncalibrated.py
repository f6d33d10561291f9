"""The quota of nodes whose cards have no limits of their own.

Their files are judged at the widest limits and cost no stake (Calibration.widest), so a node could
state such a card to hide small changes of weights. What that can gain is bounded here: one active
node in SHARE, at least one, has a *place*, at most one of each provider, those admitted first. The
others get no lease. Only in runs whose tasks get GPUs are files judged in this way. A node needs a
place if

    declared  the calibration covers no card of the family that the node named when it was admitted
    shown     a file of the node was accepted with a card and engine that the calibration lacks
    kin       it has no accepted file yet, and another node of its provider has `shown` such a card

A node that declares another device than its files state is found by its first accepted file, so it
can gain the files of the leases that it held until then, once a provider. `shown` lasts until the
run has a calibration of the card. A provider of whose node OUTSIDE of the newest WINDOW files were
outside the widest limits has no place as long as these files are in the table.

What validators measured of accepted files can propose limits (`observations`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from prime_core.errors import MalformedError, NotFoundError, PrimeError
from prime_core.ids import Address, Digest
from prime_core.known_cards import family_of, is_gpu
from prime_core.node import Hardware
from prime_core.run import RunDefinition
from prime_core.storage.base import ObjectStore
from prime_core.verdict import MAX_TABLE_BYTES, Reason, Verdict, VerdictTable
from prime_orchestrator.context import read_object
from prime_orchestrator.store import Connection, drift, nodes, submissions
from prime_orchestrator.store.nodes import NodeRow
from prime_verify.proofs.thresholds import Calibration, shipped_as

log = logging.getLogger(__name__)

SHARE = 10
OUTSIDE, WINDOW = 4, 32
SECONDS = 60.0
"""The quota is read again after this time, and at once if a new node asks."""
MOST_OBSERVED = 200
"""Newest judged files of a node that propose limits."""
CUT_OFF = 100
"""Of a provider with more than one file outside the widest limits in so many, accepted files say
too little of the card: they propose nothing."""
_ADVICE = (
    "use a card that the run's calibration lists, work without pay (prime-node join --shadow), or "
    "ask the pool's operator to measure this one (orchestrator calibrate)"
)


@dataclass(frozen=True)
class Quota:
    """`seen`: all active nodes; `cards`: the cards of those that need a place; `troubles`: why some
    of these get no lease."""

    seen: frozenset[Address] = frozenset()
    cards: Mapping[Address, str] = field(default_factory=dict)
    troubles: Mapping[Address, str] = field(default_factory=dict)


def declared(node: NodeRow, run: RunDefinition, calibration: Calibration) -> str:
    """Returns the node's card if its tasks get it and the calibration does not cover it; else
    ""."""
    gpus = Hardware.model_validate_json(node.hardware).gpus if run.task.gpus else ()
    return gpus[0].model if gpus and not calibration.covers(gpus[0].model) else ""


def shown(connection: Connection, calibration: Calibration) -> dict[Address, str]:
    """Returns the nodes with accepted files of a card that the calibration lacks, with the card."""
    found: dict[Address, str] = {}
    for node, setup in drift.setups(connection):
        engine, dtype, device = (*setup.removesuffix(" exact").split(" ", 2), "", "")[:3]
        if device and is_gpu(device) and calibration.setup(engine, dtype, device) is None:
            found[node] = device
    return found


def observations(
    connection: Connection, objects: ObjectStore, calibration: Calibration, card: str
) -> tuple[dict[Address, list[VerdictTable]], list[str]]:
    """Returns by provider the tables of accepted files of nodes that showed a card of the family of
    `card`, as far as they were judged by `calibration`; and a phrase for what is left out. Tables
    that are gone or do not parse are left out, too."""
    cards = {
        node: device
        for node, device in shown(connection, calibration).items()
        if family_of(device) == family_of(card)
    }
    found: dict[Address, list[VerdictTable]] = {}
    counts: dict[Address, list[int]] = {}
    foreign = 0
    for node, row in nodes.those(connection, cards).items():
        owner = row.provider or node
        files = [
            one
            for one in submissions.newest(connection, submissions.Wanted(node=node), MOST_OBSERVED)
            if one.verdict is not None and not one.shadow
        ]
        outside = sum(one.reason == Reason.UNCALIBRATED for one in files)
        count = counts.setdefault(owner, [0, 0])
        count[0], count[1] = count[0] + outside, count[1] + len(files)
        for one in files:
            if one.status != "accepted" or one.verdict is None:
                continue
            try:
                verdict = Verdict.model_validate_json(read_object(objects, one.verdict))
                said = verdict.deciding
                if said.law.verification_class != calibration.digest():
                    foreign += 1
                    continue
                raw = read_object(objects, Digest(said.opinion.table), MAX_TABLE_BYTES)
                found.setdefault(owner, []).append(VerdictTable.model_validate_json(raw))
            except (NotFoundError, MalformedError, ValueError) as error:
                log.warning("the verdict of file %s is left out: %s", one.digest, error)
    left_out = []
    for owner, (outside, judged) in counts.items():
        if outside * CUT_OFF > judged and owner in found:
            del found[owner]
            left_out.append(
                f"provider {owner}: {outside} of {judged} files were outside the widest limits"
            )
    if foreign:
        left_out.append(f"{foreign} files that another calibration judged (--keep names it)")
    return found, left_out


def _of_providers(connection: Connection, cards: Mapping[Address, str]) -> dict[Address, str]:
    """Returns the providers of the nodes of `cards`, also of those that left, with a card."""
    if not cards:
        return {}
    return {
        row.provider: cards[row.address]
        for row in nodes.every(connection)
        if row.address in cards and row.provider is not None
    }


def failing(connection: Connection, own: Collection[Address]) -> Address | None:
    """Returns that one of a provider's nodes whose files were too often outside the widest limits;
    None if there is none."""
    counts = submissions.tallies_of(connection, own)
    for node in sorted(own):
        if counts.get(node, {}).get("void", 0) < OUTSIDE:
            continue
        newest = submissions.newest_endings(connection, node, WINDOW)
        if sum(Reason(reason) is Reason.UNCALIBRATED for _, reason, _ in newest) >= OUTSIDE:
            return node
    return None


def why_failing(node: Address) -> str:
    """Returns why the provider of a `failing` node gets no lease."""
    return (
        f"{OUTSIDE} of the newest {WINDOW} files of node {node} were outside the widest limits, so "
        f"its provider gets no lease for a card without calibration: {_ADVICE}"
    )


def read(connection: Connection, run: RunDefinition, calibration: Calibration) -> Quota:
    """Reads the active nodes that need a place, and gives the places out."""
    if not run.task.gpus:
        return Quota()
    by_files = shown(connection, calibration)
    active = nodes.every(connection, ["active"])
    of_kin = _of_providers(connection, by_files)
    old = drift.nodes(connection) if of_kin else set()
    need = {
        row.address: (row, card)
        for row in active
        if (
            card := by_files.get(row.address)
            or declared(row, run, calibration)
            or ("" if row.address in old else of_kin.get(row.provider or row.address, ""))
        )
    }
    providers = {row.provider for row, _ in need.values() if row.provider is not None}
    siblings = nodes.of_providers(connection, providers)
    everyone = {*need, *(one.address for own in siblings.values() for one in own)}
    counts = submissions.tallies_of(connection, everyone)
    void = {node for node, found in counts.items() if found.get("void", 0) >= OUTSIDE}
    places = max(1, len(active) // SHARE)
    taken: set[Address] = set()
    judged: dict[Address, Address | None] = {}
    troubles: dict[Address, str] = {}
    for row, card in need.values():
        owner = row.provider or row.address
        if owner not in judged:
            own = void.intersection(one.address for one in siblings.get(owner, [row]))
            judged[owner] = failing(connection, own) if own else None
        bad = judged[owner]
        if bad is not None:
            troubles[row.address] = why_failing(bad)
        elif owner in taken:
            troubles[row.address] = (
                f"no limits are calibrated for {card}, and another node of this provider has its "
                f"one place for such cards: {_ADVICE}"
            )
        elif len(taken) >= places:
            troubles[row.address] = (
                f"no limits are calibrated for {card}, and {places} of {len(active)} active nodes "
                f"may use such cards: earlier nodes have the places; wait, {_ADVICE}"
            )
        else:
            taken.add(owner)
    return Quota(
        frozenset(row.address for row in active),
        {address: card for address, (_, card) in need.items()},
        troubles,
    )


class QuotaDueError(Exception):
    """The quota of `run` must be read before a lease can be decided; see KeptQuota.of."""

    def __init__(self, run: RunDefinition, asks: NodeRow | None) -> None:
        super().__init__("the quota of cards without limits is not read")
        self.run = run
        self.asks = asks


@dataclass
class KeptQuota:
    """The quota, read once in SECONDS."""

    _quota: Quota = field(default_factory=Quota)
    _of: Digest | None = None
    _read_at: float = -math.inf
    _failed_at: float = -math.inf
    _calibrations: dict[Digest, Calibration] = field(default_factory=dict)

    def of(
        self,
        connection: Connection,
        objects: ObjectStore,
        run: RunDefinition,
        now: float,
        asks: NodeRow | None = None,
    ) -> Quota:
        """Returns the quota of `run` at `now` (Unix seconds). `asks`: an active node, which it has
        to know. Empty if the run's calibration cannot be read: then no file can be judged."""
        if (kept := self.kept(run, now, asks)) is not None:
            return kept
        calibration = self._calibration(objects, run, now)
        if calibration is None:
            return Quota()
        quota = self._quota = read(connection, run, calibration)
        self._of, self._read_at = Digest(run.calibration), now
        return quota

    def kept(self, run: RunDefinition, now: float, asks: NodeRow | None) -> Quota | None:
        """Like `of`, but reads nothing: None where `of` would read."""
        named = Digest(run.calibration)
        if not run.task.gpus:
            return Quota()
        calibration = shipped_as(named) or self._calibrations.get(named)
        if calibration is None:
            return Quota() if 0 <= now - self._failed_at < SECONDS else None
        old = self._of != named or not 0 <= now - self._read_at < SECONDS
        quota = self._quota  # once: another thread may replace it
        unknown = asks is not None and asks.address not in quota.seen
        if old or (unknown and asks is not None and declared(asks, run, calibration)):
            return None
        return quota

    def _calibration(
        self, objects: ObjectStore, run: RunDefinition, now: float
    ) -> Calibration | None:
        """The run's calibration; None if its object could not be read in the last SECONDS."""
        named = Digest(run.calibration)
        if found := shipped_as(named):
            return found
        if named not in self._calibrations and not 0 <= now - self._failed_at < SECONDS:
            try:
                raw = read_object(objects, named)
                self._calibrations[named] = Calibration.model_validate_json(raw)
            except (PrimeError, ValueError) as error:
                self._failed_at = now
                log.warning("the run's calibration %s cannot be read: %s", named, error)
        return self._calibrations.get(named)
