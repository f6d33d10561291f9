"""Prometheus metrics of a broadcast server and of a relay.

A node serves no metrics: its counts are in its `policies.jsonl` and in `prime-node status`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from prime_broadcast.server import Counters
    from prime_broadcast.tasks import ChunkStats

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4


@dataclass(frozen=True)
class Collected:
    """Metrics that were collected already, as prometheus_client's `Collector`."""

    metrics: Iterable[Metric]

    def collect(self) -> Iterable[Metric]:
        return self.metrics


def render(metrics: Iterable[Metric]) -> bytes:
    """The metrics in Prometheus' text format, version 0.0.4."""
    return generate_latest(Collected(metrics))


def of_server(counters: Counters, connected: int) -> list[Metric]:
    """Metrics of a server. `connected` is the number of connections that are open now."""
    answers = CounterMetricFamily(
        "prime_broadcast_answers_total",
        "HTTP answers by status code. Unit: answers.",
        labels=["status"],
    )
    for status, count in sorted(counters.by_status.items()):
        answers.add_metric([str(int(status))], count)
    return [
        CounterMetricFamily("prime_broadcast_sent_bytes_total", "Bytes sent.", counters.bytes_sent),
        GaugeMetricFamily(
            "prime_broadcast_connections", "Connections open now. Unit: connections.", connected
        ),
        CounterMetricFamily(
            "prime_broadcast_connections_total",
            "Connections accepted. Unit: connections.",
            counters.connections,
        ),
        CounterMetricFamily(
            "prime_broadcast_connections_refused_total",
            "Connections refused at the limit. Unit: connections.",
            counters.refused,
        ),
        CounterMetricFamily(
            "prime_broadcast_connections_evicted_total",
            "Idle connections closed to make room. Unit: connections.",
            counters.evicted,
        ),
        answers,
    ]


class Received:
    """Sums over a relay's fetches. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: Counter[str] = Counter()
        self._chunks: Counter[str] = Counter()
        self._faults: Counter[tuple[str, str]] = Counter()
        self._seconds = 0.0

    def add(self, stats: ChunkStats, seconds: float) -> None:
        """Adds the statistics of one fetch that took `seconds`."""
        with self._lock:
            self._bytes.update(stats.by_source)
            self._chunks.update(verified=stats.chunks, kept=stats.kept, refetched=stats.refetched)
            self._faults.update((fault.url, fault.kind) for fault in stats.faults)
            self._seconds += seconds

    def refused(self) -> None:
        """Counts a write that the disk refused."""
        with self._lock:
            self._faults["", "disk"] += 1

    def metrics(self) -> list[Metric]:
        """Bytes by source, chunks by result, faults by source and kind, seconds of fetching."""
        received = CounterMetricFamily(
            "prime_broadcast_received_bytes_total", "Bytes received.", labels=["source"]
        )
        chunks = CounterMetricFamily(
            "prime_broadcast_chunks_total",
            "Chunks verified, kept from an earlier policy, or fetched again. Unit: chunks.",
            labels=["result"],
        )
        faults = CounterMetricFamily(
            "prime_broadcast_faults_total",
            "Faults by source and kind. The disk's have no source. Unit: faults.",
            labels=["source", "kind"],
        )
        with self._lock:
            for url, count in self._bytes.items():
                received.add_metric([url], count)
            for result, count in self._chunks.items():
                chunks.add_metric([result], count)
            for (url, kind), count in self._faults.items():
                faults.add_metric([url, kind], count)
            seconds = round(self._seconds, 3)
        return [
            received,
            chunks,
            faults,
            CounterMetricFamily(
                "prime_broadcast_fetch_seconds_total", "Seconds spent fetching.", seconds
            ),
        ]


def held(complete: Collection[int]) -> list[Metric]:
    """Metrics of the policies that a relay holds completely."""
    return [
        GaugeMetricFamily(
            "prime_broadcast_versions", "Policies held completely. Unit: policies.", len(complete)
        ),
        GaugeMetricFamily(
            "prime_broadcast_newest_version",
            "Newest policy held completely; -1 if there is none. Unit: policy versions.",
            max(complete, default=-1),
        ),
    ]
