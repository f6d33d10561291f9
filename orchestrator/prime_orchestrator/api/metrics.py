"""Prometheus metrics of the pool, from the store and this process's request counts."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from heapq import nlargest
from math import inf
from typing import get_args

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from prime_chain.amounts import ETHER
from prime_core.ids import Digest
from prime_core.messages import TargetShare
from prime_core.node import NodeStatus
from prime_orchestrator.api import reach
from prime_orchestrator.api.backend import Backend
from prime_orchestrator.manager import revisions, targets, uploads
from prime_orchestrator.manager.funding import funding
from prime_orchestrator.manager.history import Totals, by_statistic, excess
from prime_orchestrator.store import (
    Connection,
    batches,
    drift,
    exact_classes,
    intents,
    jobs,
    measurements,
    meta,
    nodes,
    opinions,
    policies,
    submissions,
)
from prime_orchestrator.store.drift import DriftRow
from prime_orchestrator.store.opinions import TrackRecord

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})
CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
DRIFT_SECONDS, FEW_SUMS = 0.0005, 1_000
"""With more than FEW_SUMS sums, the drift metrics are kept for DRIFT_SECONDS a sum: a minute with
those of 10,000 nodes, whose reading takes a second of CPU time."""
MOST_DRIFTING = 240
"""Most series of each drift metric. A node has about twelve, one for each statistic."""


class RequestCounts:
    """Counts answers by method and status. Thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, int]] = Counter()
        self._lock = threading.Lock()

    def count(self, method: str, status: int) -> None:
        known = method if method in METHODS else "other"
        with self._lock:
            self._counts[known, status] += 1

    def snapshot(self) -> dict[tuple[str, int], int]:
        with self._lock:
            return dict(self._counts)


class PoolMetrics:
    """A prometheus_client `Collector` over one pool's store and this process's requests."""

    def __init__(self, backend: Backend, requests: RequestCounts) -> None:
        self._backend, self._requests = backend, requests
        self._drifts: list[Metric] = []
        self._drifts_at, self._drifts_for = -inf, 0.0

    def _kept_drifts(self, connection: Connection) -> list[Metric]:
        """Returns the metrics of drift, up to DRIFT_SECONDS a sum old."""
        now = self._backend.now()
        if not 0 <= now - self._drifts_at < self._drifts_for:
            sums = drift.every(connection)
            self._drifts = list(_drift(sums, drift.totals(connection)))
            self._drifts_at = now
            self._drifts_for = DRIFT_SECONDS * (len(sums) if len(sums) > FEW_SUMS else 0)
        return self._drifts

    def collect(self) -> Iterator[Metric]:
        backend = self._backend
        with backend.store.browse() as connection:
            states = dict.fromkeys(get_args(NodeStatus), 0) | nodes.counts(connection)
            files, shadow = (submissions.counts(connection, shadow=only) for only in (False, True))
            repeating = submissions.repeating(connection)
            faults = backend.relay_faults.counts()
            yield _gauges("prime_nodes", "Nodes by status. Unit: nodes.", "status", states)
            yield _gauges(
                "prime_submissions", "Rollout files by status. Unit: files.", "status", files
            )
            yield _gauges(
                "prime_shadow_submissions",
                "Rollout files of nodes without stake, by status. Unit: files.",
                "status",
                shadow,
            )
            yield _gauges(
                "prime_repeating_submissions",
                "Files with rows that an earlier file had, by status. Unit: files.",
                "status",
                repeating,
            )
            yield _gauges(
                "prime_jobs",
                "Judging jobs that are not done, by status. Unit: files.",
                "status",
                jobs.counts(connection),
            )
            yield _gauges(
                "prime_intents",
                "Chain transactions wanted, by status. Unit: transactions.",
                "status",
                dict.fromkeys(get_args(intents.Status), 0) | intents.counts(connection),
            )
            yield _gauges(
                "prime_relay_lies_reported",
                "Nodes that reported wrong chunks, by relay. Unit: nodes.",
                "relay",
                faults,
            )
            yield _gauges(
                "prime_cards_measured_again",
                "Repeated proofs of nodes' cards by outcome. Ignored: never confirmed. "
                "Unit: proofs.",
                "outcome",
                measurements.totals(connection),
            )
            yield GaugeMetricFamily(
                "prime_next_step",
                "Number of the next training step. Unit: steps.",
                batches.next_step(connection),
            )
            if backend.store.replica_read is not None:
                yield GaugeMetricFamily(
                    "prime_replica_read",
                    "Whether public pages come from the read replica now: 1 or 0.",
                    float(backend.store.replica_read),
                )
            run = revisions.current(connection, backend.context)
            yield GaugeMetricFamily(
                "prime_suspect_classes",
                "Exact classes of the run in which honest machines may differ. Unit: classes.",
                len(exact_classes.suspects(connection, Digest(run.calibration))),
            )
            yield from _targets(targets.shares_of(connection, run, backend.now()))
            yield _gauges(
                "prime_target_dropped_reward_errors",
                "Mean reward of groups whose first lease expired, above that of other groups of "
                "this length. Unit: standard errors.",
                "target",
                {
                    str(one.target): one.errors
                    for one in backend.difficulties.of(connection, backend.now())
                },
            )
            yield from self._kept_drifts(connection)
            yield from _validators(opinions.track_records(connection))
            yield from _second_opinions(opinions.waiting(connection), backend.now())
            yield GaugeMetricFamily(
                "prime_rejections_lapsed",
                "Rejected files that ended void without a second opinion. Unit: files.",
                opinions.lapsed(connection),
            )
            share = submissions.mean_compute_share(connection)
            if share is not None:
                yield GaugeMetricFamily(
                    "prime_verification_compute_share",
                    "Validators' compute as a share of the nodes'. Unit: ratio.",
                    share,
                )
            latest = policies.latest_version(connection)
            if latest is not None:
                yield GaugeMetricFamily(
                    "prime_policy_version", "Newest policy. Unit: policy versions.", latest
                )
                yield from reach.metrics(connection)
            for batch in batches.latest(connection, 1):
                yield GaugeMetricFamily(
                    "prime_batch_mean_reward",
                    "Mean reward of the newest sealed batch. Unit: reward.",
                    batch.mean_reward_micro / 1e6,
                )
                yield GaugeMetricFamily(
                    "prime_batch_staleness_max",
                    "Age of the oldest row in the newest sealed batch. Unit: policy versions.",
                    batch.staleness_max,
                )
            yield CounterMetricFamily(
                "prime_uploads_swept_total",
                "Uploaded files deleted because no submission named them. Unit: files.",
                uploads.swept_so_far(connection),
            )
            yield CounterMetricFamily(
                "prime_chain_gaps_total",
                "Gaps found in the chain's events. Unit: gaps.",
                int(meta.get(connection, meta.CHAIN_GAPS) or 0),
            )
            money = funding(connection)
            if money is not None:
                yield _gauges(
                    "prime_pool_money",
                    "Owed: for files that no reward root settles. Held: bond and free funds. "
                    "No lease is given while owed exceeds held. Unit: PRIME.",
                    "kind",
                    {"owed": money.owed / ETHER, "held": money.money / ETHER},
                )
            seen = meta.get(connection, meta.CHAIN_SEEN_AT)
            if seen is not None:
                yield GaugeMetricFamily(
                    "prime_chain_seen_timestamp_seconds",
                    "Unix time at which the chain was last read.",
                    float(seen),
                )
        answers = CounterMetricFamily(
            "prime_http_requests_total",
            "HTTP answers of this process, by method and status. Unit: answers.",
            labels=["method", "status"],
        )
        for (method, code), number in sorted(self._requests.snapshot().items()):
            answers.add_metric([method, str(code)], number)
        yield answers


def _targets(shares: Sequence[TargetShare]) -> Iterator[Metric]:
    """What became of the latest leases of each target length."""
    leases = GaugeMetricFamily(
        "prime_target_leases",
        "Latest leases by target length: asked, accepted, expired without a file. Unit: leases.",
        labels=["target", "state"],
    )
    for share in shares:
        for state in ("asked", "accepted", "expired"):
            leases.add_metric([str(share.target), state], getattr(share, state))
    yield leases
    for name, about in (
        ("starving", "1: too little of this length is accepted or put in batches. Unit: 0 or 1."),
        ("expiring", "1: leases of this length expire twice as often as others. Unit: 0 or 1."),
    ):
        values = {str(share.target): int(getattr(share, name)) for share in shares}
        yield _gauges(f"prime_target_{name}", about, "target", values)


def _drift(sums: Sequence[DriftRow], totals: Totals) -> Iterator[Metric]:
    """Yields the MOST_DRIFTING largest drifts; nothing if no file was judged. All series of 10,000
    nodes would take megabytes a scrape."""
    labels = ["node", "setup", "statistic"]
    mean = GaugeMetricFamily(
        "prime_node_drift",
        "Mean statistic of a node's files, as a share of its limit. Unit: ratio.",
        labels=labels,
    )
    files = GaugeMetricFamily(
        "prime_node_drift_files", "Files in prime_node_drift. Unit: files.", labels=labels
    )
    beyond = GaugeMetricFamily(
        "prime_node_drift_excess",
        "How far prime_node_drift exceeds the other nodes'. Unit: standard errors.",
        labels=labels,
    )
    found = [(excess(rows, totals), rows) for rows in by_statistic(sums)]
    for errors, rows in nlargest(MOST_DRIFTING, found, key=_errors):
        named = [rows[0].node, rows[0].setup, rows[0].statistic]
        count = sum(row.files for row in rows)
        mean.add_metric(named, sum(row.total for row in rows) / count)
        files.add_metric(named, count)
        if errors is not None:
            beyond.add_metric(named, errors)
    if sums:
        yield from (mean, files, beyond)


def _errors(found: tuple[float | None, Sequence[DriftRow]]) -> float:
    return -inf if found[0] is None else found[0]


def _validators(records: Sequence[TrackRecord]) -> Iterator[Metric]:
    """Yields each validator's opinions, and its judgements of planted files by kind."""
    judged = GaugeMetricFamily(
        "prime_validator_opinions", "Opinions by validator. Unit: opinions.", labels=["validator"]
    )
    overruled = GaugeMetricFamily(
        "prime_validator_overruled",
        "Opinions overruled, by validator. Unit: opinions.",
        labels=["validator"],
    )
    planted = GaugeMetricFamily(
        "prime_validator_planted",
        "Planted files judged, by validator and kind. Unit: files.",
        labels=["validator", "kind"],
    )
    wrong = GaugeMetricFamily(
        "prime_validator_planted_wrong",
        "Planted files judged wrongly, by validator and kind. Unit: files.",
        labels=["validator", "kind"],
    )
    for row in records:
        judged.add_metric([row.validator], row.opinions)
        overruled.add_metric([row.validator], row.overruled)
        for kind, total, failed in (
            ("honest", row.honest, row.accused),
            ("lying", row.lying, row.missed),
        ):
            planted.add_metric([row.validator, kind], total)
            wrong.add_metric([row.validator, kind], failed)
    if records:
        yield from (judged, overruled, planted, wrong)


def _second_opinions(waiting: Mapping[str, tuple[int, float]], now: float) -> Iterator[Metric]:
    """Yields the number of files that wait for another validator, and the age of the oldest."""
    found = {kind: waiting.get(kind, (0, now)) for kind in ("accepted", "rejected")}
    yield _gauges(
        "prime_second_opinions_waiting",
        "Files waiting for a second validator, by the first opinion. Unit: files.",
        "said",
        {kind: count for kind, (count, _) in found.items()},
    )
    yield _gauges(
        "prime_second_opinions_oldest_seconds",
        "Longest wait for a second validator, by the first opinion.",
        "said",
        {kind: round(now - since) for kind, (_, since) in found.items()},
    )


def _gauges(name: str, about: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, about, labels=[label])
    for value, number in sorted(values.items()):
        family.add_metric([value], number)
    return family
