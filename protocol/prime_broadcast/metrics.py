"""What a server and a relay count, in Prometheus' text format (version 0.0.4).

A node has no port for it: its counts are its `policies.jsonl` and `prime-node status`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prime_broadcast.server import Counters
    from prime_broadcast.tasks import ChunkStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def of_server(counters: Counters, connected: int) -> str:
    """What a server sent. `connected`: connections that are open now."""
    statuses = {str(int(status)): count for status, count in counters.by_status.items()}
    return (
        family("prime_broadcast_sent_bytes_total", "counter", {(): counters.bytes_sent})
        + family("prime_broadcast_connections", "gauge", {(): connected})
        + family("prime_broadcast_connections_total", "counter", {(): counters.connections})
        + family("prime_broadcast_connections_refused_total", "counter", {(): counters.refused})
        + family("prime_broadcast_connections_evicted_total", "counter", {(): counters.evicted})
        + family(
            "prime_broadcast_answers_total",
            "counter",
            {(("status", status),): count for status, count in statuses.items()},
        )
    )


def family(name: str, kind: str, values: Mapping[tuple[tuple[str, str], ...], int | float]) -> str:
    """One metric: its type, and a line for each set of labels."""
    lines = [f"# TYPE {name} {kind}"]
    for labels, value in sorted(values.items()):
        inner = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels)
        lines.append(f"{name}{{{inner}}} {value}" if inner else f"{name} {value}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


class Received:
    """Sums over fetches; safe from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: Counter[str] = Counter()
        self._chunks: Counter[str] = Counter()
        self._faults: Counter[tuple[str, str]] = Counter()
        self._seconds = 0.0

    def add(self, stats: ChunkStats, seconds: float) -> None:
        """One run of the chunk engine."""
        with self._lock:
            self._bytes.update(stats.by_source)
            self._chunks.update(verified=stats.chunks, kept=stats.kept, refetched=stats.refetched)
            self._faults.update((fault.url, fault.kind) for fault in stats.faults)
            self._seconds += seconds

    def refused(self) -> None:
        """The disk refused what had come."""
        with self._lock:
            self._faults["", "disk"] += 1

    def render(self) -> str:
        """As text: bytes by source, chunks by what became of them, faults, seconds."""
        with self._lock:
            return (
                family(
                    "prime_broadcast_received_bytes_total",
                    "counter",
                    {(("source", url),): count for url, count in self._bytes.items()},
                )
                + family(
                    "prime_broadcast_chunks_total",
                    "counter",
                    {(("result", result),): count for result, count in self._chunks.items()},
                )
                + family(
                    "prime_broadcast_faults_total",
                    "counter",
                    {
                        (("source", url), ("kind", kind)): count
                        for (url, kind), count in self._faults.items()
                    },
                )
                + family(
                    "prime_broadcast_fetch_seconds_total",
                    "counter",
                    {(): round(self._seconds, 3)},
                )
            )


def held(complete: Collection[int]) -> str:
    """What a relay has whole."""
    return family("prime_broadcast_versions", "gauge", {(): len(complete)}) + family(
        "prime_broadcast_newest_version", "gauge", {(): max(complete, default=-1)}
    )
