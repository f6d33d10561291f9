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
from prime_orchestrator.store import Connection, nodes, on_commit, policies

SHOWN = 8
KEPT = 256
"""Versions whose arrivals are kept."""
MOST_NODES = 100_000
"""Most nodes whose recorded version is kept in memory; above it, all are dropped."""
MOST_TIMES = 200
"""Most arrivals of a policy that are listed."""


def note(
    connection: Connection,
    written: dict[Address, int],
    said: Sequence[tuple[Address, int | None]],
    latest: int | None,
    *,
    now: float,
) -> None:
    """Records the versions that heartbeats report, if those policies were published. `latest` is
    the newest one. `written`: each node's last version that this process recorded, which costs
    nothing again."""
    if latest is None:
        return
    known = [
        (node, version)
        for node, version in said
        if version is not None
        and latest - KEPT < version <= latest
        and written.get(node) != version
    ]
    if known:
        policies.note_arrivals(connection, known, now=now)
        if len(written) > MOST_NODES:
            written.clear()
        on_commit(connection, written.update, dict(known))


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
    found = []
    for version, published_at in reversed(policies.newest_times(connection, SHOWN)):
        times = policies.arrivals_of(connection, version)
        found.append(
            PolicyReach(
                version=version,
                published_at=int(published_at),
                nodes=working,
                arrived=len(times),
                after_ms=tuple(max(0, round(1000 * (at - published_at))) for at in _thinned(times)),
            )
        )
    return found


def _thinned(times: Sequence[float]) -> Sequence[float]:
    """Returns at most MOST_TIMES of the times, evenly spread by rank, with the last."""
    if len(times) <= MOST_TIMES:
        return times
    return [times[rank * len(times) // MOST_TIMES - 1] for rank in range(1, MOST_TIMES + 1)]


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
        reached.add_metric([str(policy.version)], policy.arrived)
        if policy.after_ms:
            last.add_metric([str(policy.version)], policy.after_ms[-1] / 1000)
    return [reached, last]
