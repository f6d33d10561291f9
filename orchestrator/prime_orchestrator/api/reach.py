"""Which share of the nodes has which policy, and how soon after its publication.

A node's heartbeat names the newest policy that it has verified on disk. The first heartbeat that
names a version is its arrival, so arrivals are late by up to one heartbeat. Only active nodes
count.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client.core import GaugeMetricFamily, Metric

from prime_core.ids import Address
from prime_core.messages import PolicyReach
from prime_orchestrator.store import Connection, nodes, policies

SHOWN = 8
KEPT = 256
"""Versions whose arrivals are kept."""


def note(
    connection: Connection,
    said: Sequence[tuple[Address, int | None]],
    latest: int | None,
    *,
    now: float,
) -> None:
    """Records the versions that heartbeats report, if those policies were published. `latest` is
    the newest one."""
    if latest is None:
        return
    known = [
        (node, version)
        for node, version in said
        if version is not None and latest - KEPT < version <= latest
    ]
    if known:
        policies.note_arrivals(connection, known, now=now)


def forget(connection: Connection) -> None:
    """Deletes the arrivals of old versions."""
    latest = policies.latest_version(connection)
    if latest is not None:
        policies.forget_arrivals(connection, latest - KEPT)


def picture(connection: Connection) -> list[PolicyReach]:
    """Returns the reach of the newest policies, oldest first. A node that skipped a version is
    never counted for it."""
    by_status = nodes.counts(connection)
    working = by_status.get("active", 0) + by_status.get("silent", 0)
    return [
        PolicyReach(
            version=row.version,
            published_at=int(row.published_at),
            nodes=working,
            after_ms=tuple(
                max(0, round(1000 * (at - row.published_at)))
                for at in policies.arrivals_of(connection, row.version)
            ),
        )
        for row in reversed(policies.newest(connection, SHOWN))
    ]


def metrics(connection: Connection) -> list[Metric]:
    """Returns how many nodes have each of the newest policies, and when the last of them got it."""
    reached = GaugeMetricFamily(
        "prime_policy_reach_nodes", "Nodes that have a policy. Unit: nodes.", labels=["version"]
    )
    last = GaugeMetricFamily(
        "prime_policy_last_arrival_seconds",
        "Seconds from a policy's publication to its latest arrival at a node.",
        labels=["version"],
    )
    for policy in picture(connection):
        reached.add_metric([str(policy.version)], len(policy.after_ms))
        if policy.after_ms:
            last.add_metric([str(policy.version)], policy.after_ms[-1] / 1000)
    return [reached, last]
