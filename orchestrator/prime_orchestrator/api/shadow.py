"""Shadow work: real leases and verdicts for nodes without a seat, with neither stake nor pay.

    admission  status "shadow", no invite
    lease      signed for a pool number that no contract knows (core.task.shadow_pool), so its file
               cannot reach the chain, no matter who holds the signatures
    intake     like any file; the receipt names a leaf that no root will contain
    verdict    written and published; no credit, no group for a batch, no slash, no drift

A shadow file costs validator time and storage, and anyone may ask, so the amount is limited here:
few at once, few per hour relative to paid leases, and judged only when nothing else waits. Shadow
leases do not count as supply, so they hold back no paid lease. Once a node is silent, all that it
left is deleted.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from prime_broadcast.peers import site_of
from prime_core.errors import MalformedError, NotFoundError, PolicyError, UnavailableError
from prime_core.ids import Address
from prime_core.storage.base import ObjectStore, digest_key
from prime_orchestrator.context import MAX_OBJECT_BYTES
from prime_orchestrator.scheduler import Grant, SchedulingRules, Wait
from prime_orchestrator.store import Connection, Store, challenges, leases, nodes, policies, shadows

log = logging.getLogger(__name__)

UNDER_WAY = 2
"""Open shadow leases plus shadow files waiting for a verdict, in the whole pool."""
AN_HOUR = 30
"""Shadow leases per hour in a pool that has no other work …"""
ONE_IN = 16
"""… and one more per this many paid leases in that hour."""
HOUR = 3600
AN_HOUR_EACH = 10
"""Shadow leases per hour to the nodes of one address (an IPv6 /48)."""
MOST_NODES = 512
"""Most shadow nodes in a pool."""
NODES_EACH = 4
"""Shadow nodes that one address (an IPv6 /64) may add per hour …"""
NODES_EACH_SITE = 16
"""… and all addresses of one IPv6 /48."""
KEEPS_PLACE = HOUR
"""Seconds for which a shadow node keeps its place in a full pool without an accepted file."""
FORGOTTEN_AFTER = HOUR
"""Seconds of silence after which a shadow node is deleted."""


LOCK = "shadow nodes"
"""Name of the lock under which shadow nodes are counted and one is added."""


def check_place(connection: Connection, place: str | None, account: Address, now: float) -> None:
    """Raises PolicyError if NODES_EACH other accounts asked for shadow work at the address `place`
    (None: not limited) within the hour, or NODES_EACH_SITE in its wider network, at any process of
    the pool."""
    if place is None:
        return
    site = site_of(place.partition("/")[0])
    for most, asked in (
        (NODES_EACH, challenges.asked_from(connection, place, now - HOUR)),
        (NODES_EACH_SITE, challenges.asked_from_site(connection, site, now - HOUR)),
    ):
        if len(asked - {account}) >= most:
            raise PolicyError(
                f"{most} shadow nodes came from this network within the hour; more may come "
                "later, or take a seat"
            )


def room_of(connection: Connection, now: float) -> Address | None:
    """Returns the shadow node that a newcomer displaces: None while a place is free. Raises
    PolicyError if all places are taken by nodes that keep them."""
    if nodes.count_of(connection, "shadow") < MOST_NODES:
        return None
    idle = shadows.idle_longest(connection, held_since=now - KEEPS_PLACE)
    if idle is None:
        raise PolicyError(f"the pool has its {MOST_NODES} shadow nodes: try later")
    return idle


@dataclass(frozen=True)
class Load:
    """Current shadow work. `given`: leases of the last hour, shadow ones and others."""

    latest_version: int | None
    under_way: int
    given: tuple[int, int]


def load_of(connection: Connection, now: float) -> Load:
    """Returns the pool's shadow work at `now` (Unix seconds)."""
    return Load(
        policies.latest_version(connection),
        leases.shadow_under_way(connection, now=now),
        leases.given_since(connection, now - HOUR),
    )


def decide(policy_version: int, load: Load, rules: SchedulingRules) -> Grant | Wait:
    """Returns what a shadow node without an open lease gets; `policy_version` is the newest it can
    load.

    The step is the policy's version, for the record only: no batch takes the file.
    """
    if load.latest_version is None:
        return Wait("no policy is published yet")
    if policy_version < load.latest_version - rules.max_staleness:
        return Wait(f"policy {policy_version} is too old; load {load.latest_version}")
    if load.under_way >= UNDER_WAY:
        return Wait(
            f"{UNDER_WAY} shadow files are under way; the next is given after their verdict"
        )
    shadow, paid = load.given
    if shadow >= AN_HOUR + paid // ONE_IN:
        return Wait("shadow work has had its share of this hour")
    version = min(policy_version, load.latest_version)
    return Grant(step=version, policy_version=version)


def forget(store: Store, objects: ObjectStore, now: float) -> None:
    """Deletes silent shadow nodes, and the leases, files and verdicts of those that are gone."""
    with store.begin() as connection:
        shadows.forget_nodes(connection, silent_since=now - FORGOTTEN_AFTER)
        shadows.forget_places(connection, before=now - HOUR)
        # The hourly budget counts younger leases.
        found = shadows.find(connection, given_before=now - 2 * HOUR)
    try:
        for one in found:
            _delete_objects(objects, one)
    except UnavailableError as error:
        log.warning("what silent shadow nodes left is deleted later: %s", error)
        return
    if found:
        with store.begin() as connection:
            shadows.forget(connection, found)


def _delete_objects(objects: ObjectStore, gone: shadows.DeletableLease) -> None:
    """Deletes the objects about a file. The file itself lies among the uploads and goes after its
    rows (manager.uploads).

    A verdict and its tables contain the submission's digest, and evidence the lease's. An object
    with neither stays: a validator may have named an object of ours instead.
    """
    marks = [name.encode() for name in (gone.lease, gone.submission) if name]
    for name in gone.objects:
        try:
            data = objects.get(digest_key(name), MAX_OBJECT_BYTES)
        except (NotFoundError, MalformedError):  # deleted before, or too large to be one of these
            continue
        if any(mark in data for mark in marks):
            objects.delete(digest_key(name))
