"""Prometheus' text format (version 0.0.4), from the store and this process's request counts."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence

from prime_orchestrator.api import reach
from prime_orchestrator.api.backend import Backend
from prime_orchestrator.manager import uploads
from prime_orchestrator.manager.history import excess, others_of
from prime_orchestrator.store import (
    batches,
    drift,
    intents,
    jobs,
    meta,
    nodes,
    opinions,
    policies,
    submissions,
)
from prime_orchestrator.store.drift import DriftRow
from prime_orchestrator.store.opinions import Record

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class RequestCounts:
    """Answers by method and status; safe from several threads."""

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


def render(backend: Backend, requests: RequestCounts) -> str:
    """All metrics as text."""
    with backend.store.read() as connection:
        states = Counter(str(node.status) for node in nodes.every(connection))
        lines = [
            *_family("prime_nodes", "gauge", "status", states),
            *_family("prime_submissions", "gauge", "status", submissions.counts(connection)),
            *_family(
                "prime_shadow_submissions",
                "gauge",
                "status",
                submissions.counts(connection, shadow=True),
            ),
            *_family("prime_jobs", "gauge", "status", jobs.counts(connection)),
            *_family("prime_intents", "gauge", "status", intents.counts(connection)),
            *_family("prime_relay_lies_reported", "gauge", "relay", _quoted(backend.lies.counts())),
            *_single("prime_next_step", batches.next_step(connection)),
        ]
        repeating = submissions.repeating(connection)
        lines += _family("prime_repeating_submissions", "gauge", "status", repeating)
        lines += _drift(drift.every(connection))
        lines += _validators(opinions.track_records(connection))
        lines += _second_opinions(opinions.waiting(connection), backend.now())
        lines += _single("prime_rejections_lapsed", opinions.lapsed(connection))
        share = submissions.mean_compute_share(connection)
        if share is not None:
            lines += _single("prime_verification_compute_share", share)
        latest = policies.latest_version(connection)
        if latest is not None:
            lines += _single("prime_policy_version", latest)
            lines += reach.metrics(connection)
        for batch in batches.latest(connection, 1):
            lines += _single("prime_batch_mean_reward", batch.mean_reward_micro / 1e6)
            lines += _single("prime_batch_staleness_max", batch.staleness_max)
        lines.append("# TYPE prime_uploads_swept_total counter")
        lines.append(f"prime_uploads_swept_total {uploads.swept_so_far(connection)}")
        lines.append("# TYPE prime_chain_gaps_total counter")
        lines.append(f"prime_chain_gaps_total {int(meta.get(connection, meta.CHAIN_GAPS) or 0)}")
        seen = meta.get(connection, meta.CHAIN_SEEN_AT)
        if seen is not None:
            lines += _single("prime_chain_seen_timestamp_seconds", float(seen))
    lines.append("# TYPE prime_http_requests_total counter")
    for (method, code), number in sorted(requests.snapshot().items()):
        lines.append(f'prime_http_requests_total{{method="{method}",status="{code}"}} {number}')
    return "\n".join(lines) + "\n"


def _drift(sums: Sequence[DriftRow]) -> list[str]:
    """Per node: the mean of its files' statistics as shares of their limits, and by how many
    standard errors that lies above the other nodes'."""
    names = ("prime_node_drift", "prime_node_drift_files", "prime_node_drift_excess")
    lines = [f"# TYPE {name} gauge" for name in names] if sums else []
    for row in sums:
        labels = f'node="{row.node}",setup="{_escaped(row.setup)}",statistic="{row.statistic}"'
        lines.append(f"prime_node_drift{{{labels}}} {row.mean:.6g}")
        lines.append(f"prime_node_drift_files{{{labels}}} {row.files}")
        beyond = excess(row, others_of(row, sums))
        if beyond is not None:
            lines.append(f"prime_node_drift_excess{{{labels}}} {beyond:.6g}")
    return lines


def _validators(records: Sequence[Record]) -> list[str]:
    """Per validator: opinions and how many were overruled; and of planted files of each kind how
    many it judged, and how many of them wrongly."""
    names = ("prime_validator_opinions", "prime_validator_overruled")
    planted = ("prime_validator_planted", "prime_validator_planted_wrong")
    lines = [f"# TYPE {name} gauge" for name in (*names, *planted)] if records else []
    for row in records:
        who = f'validator="{row.validator}"'
        lines.append(f"{names[0]}{{{who}}} {row.opinions}")
        lines.append(f"{names[1]}{{{who}}} {row.overruled}")
        for kind, judged, wrong in (
            ("honest", row.honest, row.accused),
            ("lying", row.lying, row.missed),
        ):
            lines.append(f'{planted[0]}{{{who},kind="{kind}"}} {judged}')
            lines.append(f'{planted[1]}{{{who},kind="{kind}"}} {wrong}')
    return lines


def _second_opinions(waiting: Mapping[str, tuple[int, float]], now: float) -> list[str]:
    """Files that wait for another validator, by what was said of them, and since when."""
    counts = {kind: waiting.get(kind, (0, now))[0] for kind in ("accepted", "rejected")}
    ages = {kind: round(now - waiting.get(kind, (0, now))[1]) for kind in counts}
    return [
        *_family("prime_second_opinions_waiting", "gauge", "said", counts),
        *_family("prime_second_opinions_oldest_seconds", "gauge", "said", ages),
    ]


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _quoted(values: Mapping[str, int]) -> dict[str, int]:
    return {_escaped(name): number for name, number in values.items()}


def _family(name: str, kind: str, label: str, values: Mapping[str, int]) -> list[str]:
    rows = [f'{name}{{{label}="{value}"}} {number}' for value, number in sorted(values.items())]
    return [f"# TYPE {name} {kind}", *rows]


def _single(name: str, value: float) -> list[str]:
    return [f"# TYPE {name} gauge", f"{name} {value}"]
