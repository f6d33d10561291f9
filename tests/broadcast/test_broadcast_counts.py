"""What a relay and an origin tell Prometheus agrees with what their readers received."""

from __future__ import annotations

import re
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
import requests
from broadcast_world import TRUST, Run, answer, bad_server, until

from prime_broadcast.folder import PolicyFolder
from prime_broadcast.manifest import total_size
from prime_broadcast.relay import Relay
from prime_broadcast.server import Origin


def counts(url: str) -> dict[str, float]:
    """Every value of a server's /metrics by its name and labels."""
    text = requests.get(f"{url}/metrics", timeout=20).text
    return {name: float(value) for name, value in re.findall(r"^(prime_\S+) (\S+)$", text, re.M)}


@pytest.mark.parametrize("own", [False, True])
def test_only_a_mirror_of_the_pools_own_comes_before_the_trainer(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    """Any node may announce a mirror. If relays preferred it, a slow one would slow down all."""
    monkeypatch.setattr("prime_broadcast.sources.OVERDUE", 600.0)
    signed = run.publish()
    sent, received = "prime_broadcast_sent_bytes_total", "prime_broadcast_received_bytes_total"
    with Origin(run.root) as origin, Relay(tmp_path / "relay", TRUST) as relay:

        def behave(handler: BaseHTTPRequestHandler, body: bytes) -> None:
            if not own:
                until(lambda: counts(origin.url)[sent] > 0, "the trainer is asked too")
            answer(handler, body)

        with bad_server(run.root, behave) as mirror:
            ours = [origin.url, mirror] if own else [origin.url]
            relay.offer([signed], [[mirror, origin.url]], ours)
            until(lambda: relay.complete() == [0], "the relay has it whole")
            taken = counts(relay.url).get(f'{received}{{source="{origin.url}"}}', 0)
            assert (taken == 0) is own


def test_a_relays_counts_are_those_of_what_it_fetched_and_sent(run: Run, tmp_path: Path) -> None:
    def lie(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        answer(handler, bytes(byte ^ 1 for byte in body))

    signed = run.publish()
    size = total_size(signed.manifest)
    chunks = sum(len(file.chunks) for file in signed.manifest.files)
    folder = PolicyFolder(tmp_path / "node", TRUST)
    with (
        bad_server(run.root, lie) as liar,
        Origin(run.root) as origin,
        Relay(tmp_path / "relay", TRUST) as relay,
    ):
        relay.offer([signed], [[liar], [origin.url]])
        stats = folder.ensure(0, signed, [relay.url]).stats
        assert stats.by_source == {relay.url: size}
        until(lambda: (tmp_path / "relay" / "policies" / "0").exists(), "the relay has it whole")

        reported = counts(relay.url)
        assert reported[f'prime_broadcast_received_bytes_total{{source="{origin.url}"}}'] == size
        assert reported['prime_broadcast_chunks_total{result="verified"}'] == chunks == stats.chunks
        lies = reported[f'prime_broadcast_faults_total{{kind="bad_data",source="{liar}"}}']
        assert lies == reported['prime_broadcast_chunks_total{result="refetched"}'] >= 1
        assert reported["prime_broadcast_fetch_seconds_total"] > 0
        assert reported["prime_broadcast_sent_bytes_total"] >= stats.bytes_received
        assert counts(origin.url)["prime_broadcast_sent_bytes_total"] >= size
