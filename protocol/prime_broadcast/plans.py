"""Which way a policy is brought: the whole, or which deltas from where. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prime_broadcast.manifest import total_size
from prime_core.checkpoint import DeltaEntry, Manifest

APPLY_RATE = 1e9
"""Bytes of resulting weights a second that a delta is applied at, where nothing was measured."""


FARTHEST = 16
"""A client further behind fetches the whole policy."""
WORTH_SECONDS = 1.0
"""Only a gain of more time than this justifies more bytes: the links are others', too."""


@dataclass(frozen=True)
class Base:
    """A verified policy folder that is already here."""

    folder: Path
    manifest: Manifest


@dataclass(frozen=True)
class Hop:
    """One delta of a chain: from version `entry.base` to `target`."""

    target: Manifest
    entry: DeltaEntry


@dataclass(frozen=True)
class Plan:
    """What to download, `cost` bytes in all: the deltas of `hops`, from `start`, which is here, or
    from `anchor`, to be downloaded whole before; without hops, the policy's whole files."""

    cost: int
    start: Base | None = None
    hops: tuple[Hop, ...] = ()
    anchor: Manifest | None = None


@dataclass(frozen=True)
class Speed:
    """What a plan's time depends on, in bytes per second: of all links together, and of applying
    deltas (resulting weights)."""

    bandwidth: float
    apply_rate: float = APPLY_RATE


def price(downloaded: int, applied: int, speed: Speed | None) -> float:
    """Seconds where the speed is known, else bytes."""
    if speed is None or speed.bandwidth <= 0:
        return float(downloaded)
    return downloaded / speed.bandwidth + applied / speed.apply_rate


def plan_route(
    manifest: Manifest,
    bases: Sequence[Base],
    chain: Mapping[int, Manifest] | None = None,
    speed: Speed | None = None,
) -> Plan:
    """The way to `manifest` of the fewest bytes: the whole, or deltas from a base that is here over
    versions whose manifests are in `chain` (each already trusted). If `speed` is known, and
    another way is more than WORTH_SECONDS faster, that one. Only deltas whose base digest is that
    very base's are taken."""
    starts = [(Plan(0, base), base.manifest) for base in bases]
    whole = Plan(total_size(manifest))
    plans = [whole, *_cheapest(manifest, starts, chain or {}, None)]
    smallest = min(plans[::-1], key=lambda plan: plan.cost)
    if speed is None or speed.bandwidth <= 0:
        return smallest
    plans += _cheapest(manifest, starts, chain or {}, speed)
    fastest = min(plans, key=lambda plan: seconds_of(plan, speed))
    gain = seconds_of(smallest, speed) - seconds_of(fastest, speed)
    return fastest if gain > WORTH_SECONDS else smallest


def seconds_of(plan: Plan, speed: Speed) -> float:
    """How long a plan takes."""
    return price(plan.cost, sum(total_size(hop.target) for hop in plan.hops), speed)


def between(manifest: Manifest, here: Collection[int], *, base_model: bool) -> range:
    """The versions whose manifests a chain of deltas to `manifest` passes, from the newest version
    before it `here`. If none is here, from policy 0 where this machine has a source of the
    `base_model`, that policy's own manifest included. Empty if a delta begins with a version that
    is here, or if the way is longer than FARTHEST."""
    version = manifest.version
    before = [number for number in here if number < version]
    if not manifest.deltas or any(entry.base in before for entry in manifest.deltas):
        return range(0)
    first = max(before) + 1 if before else 0 if base_model else version
    return range(first, version) if version - first < FARTHEST else range(0)


def plan_from_anchor(
    manifest: Manifest, chain: Mapping[int, Manifest], without: Collection[int] = ()
) -> Plan | None:
    """The fewest bytes for who has nothing and finds the whole nowhere: an older policy's whole
    (of none of the versions `without`), and deltas from it. None if no chain leads here."""
    anchors = [m for m in chain.values() if m.version not in {manifest.version, *without}]
    starts = [(Plan(total_size(anchor), anchor=anchor), anchor) for anchor in anchors]
    return next(iter(_cheapest(manifest, starts, chain, None)), None)


def _cheapest(
    manifest: Manifest,
    starts: Sequence[tuple[Plan, Manifest]],
    chain: Mapping[int, Manifest],
    speed: Speed | None,
) -> list[Plan]:
    """The cheapest way with at least one delta, if there is one (Dijkstra over versions)."""
    known = {**chain, manifest.version: manifest}
    heap: list[tuple[float, int, int, Plan, Manifest]] = []
    for number, (plan, at) in enumerate(starts):
        heap.append((price(plan.cost, 0, speed), at.version, number, plan, at))
    heapq.heapify(heap)
    count = len(heap)
    best: dict[tuple[int, str], float] = {}
    while heap:
        spent, version, _, plan, at = heapq.heappop(heap)
        here = at.result_digest == manifest.result_digest and version == manifest.version
        if here and plan.hops:
            return [plan]
        if best.get((version, at.result_digest), float("inf")) <= spent:
            continue
        best[version, at.result_digest] = spent
        for target in known.values():
            for entry in target.deltas:
                if entry.base == version and entry.base_digest == at.result_digest:
                    onward = Plan(
                        plan.cost + entry.size,
                        plan.start,
                        (*plan.hops, Hop(target, entry)),
                        plan.anchor,
                    )
                    step = price(entry.size, total_size(target), speed)
                    count += 1
                    heapq.heappush(heap, (spent + step, target.version, count, onward, target))
    return []
