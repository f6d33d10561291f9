"""Relays: cut-through, bounded, resumable, and unable to pass on what the trainer did not sign."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import httpx
import pytest
from broadcast_world import (
    CHUNK,
    STRANGER,
    TRAINER,
    TRUST,
    Run,
    answer,
    bad_server,
    same_files,
    sign,
    until,
)

from prime_broadcast import layout, relay
from prime_broadcast.client import Base, fetch
from prime_broadcast.content import live_version
from prime_broadcast.manifest import Trust, verify_folder
from prime_broadcast.relay import IDLE, Relay, RelayEvent, Scrubber
from prime_broadcast.server import Limits, Origin, Serving
from prime_broadcast.transfer import Link
from prime_core.checkpoint import SignedManifest
from prime_core.errors import UnavailableError, UserError
from prime_core.ids import ZERO_DIGEST


class Watched:
    """A relay and the events that it reported."""

    def __init__(self, root: Path, trust: Trust = TRUST) -> None:
        self.events: list[RelayEvent] = []
        self.relay = Relay(root, trust, on_event=self.events.append)

    def kinds(self, version: int) -> list[str]:
        return [event.kind for event in self.events if event.version == version]

    def wait_for(self, *versions: int) -> None:
        until(lambda: set(versions) <= set(self.relay.complete()), f"{versions} at the relay")


@contextmanager
def relaying(root: Path) -> Iterator[Watched]:
    watched = Watched(root)
    with watched.relay:
        yield watched


def get(signed: SignedManifest, urls: list[str], dest: Path, **options: object) -> None:
    options.setdefault("patience", 5.0)
    fetch(signed, urls, dest, **options)  # type: ignore[arg-type]


def test_a_policy_passes_through_a_chain_of_relays_bit_for_bit(run: Run, tmp_path: Path) -> None:
    signed = [run.publish(), run.publish()]
    with ExitStack() as stack:
        url = stack.enter_context(Origin(run.root)).url
        for depth in range(4):
            watched = stack.enter_context(relaying(tmp_path / f"r{depth}"))
            watched.relay.offer(signed, [[url]])
            url = watched.relay.url
        get(signed[0], [url], tmp_path / "0")
        bases = [Base(tmp_path / "0", signed[0].manifest)]
        get(signed[1], [url], tmp_path / "1", bases=bases)
        watched.wait_for(0, 1)
        assert same_files(tmp_path / "0", run, 0)
        assert same_files(tmp_path / "1", run, 1)
        health = json.loads(Link(url).read_small("/healthz", 1000))
        assert httpx.get(f"{url}/readyz").json() == health
        assert health == {"role": "relay", "versions": [0, 1], "complete": [0, 1]}


def test_a_relay_passes_chunks_on_before_it_has_the_rest(run: Run, tmp_path: Path) -> None:
    signed = run.publish()
    gate = threading.Event()

    def half(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        if handler.span[0] >= 10 * CHUNK:  # type: ignore[attr-defined]
            gate.wait(30)
        answer(handler, body)

    with bad_server(run.root, half) as upstream, relaying(tmp_path / "r") as watched:
        watched.relay.offer([signed], [[upstream]])
        link = Link(watched.relay.url)
        buffer = bytearray(CHUNK)
        size = len(run.file(0))
        path = "/policies/0/model.safetensors"
        try:
            for index in (0, 9):
                link.read_range(path, index * CHUNK, size, memoryview(buffer))
                assert bytes(buffer) == run.file(0)[index * CHUNK : (index + 1) * CHUNK]
            assert watched.relay.complete() == []
            assert watched.relay.versions() == [0]
            health = Link(watched.relay.url).health()
            assert (health["versions"], health["complete"]) == ([0], [])
            assert httpx.get(f"{watched.relay.url}/readyz").status_code == 503
        finally:
            gate.set()
        link.read_range(path, 15 * CHUNK, size, memoryview(buffer))
        assert bytes(buffer) == run.file(0)[15 * CHUNK : 16 * CHUNK]
        link.close()
        watched.wait_for(0)


def test_with_its_base_a_relay_makes_the_files_from_the_delta(run: Run, tmp_path: Path) -> None:
    zero = run.publish()
    with Origin(run.root) as origin, relaying(tmp_path / "r") as watched:
        watched.relay.offer([zero], [[origin.url]])
        watched.wait_for(0)
        before = origin.counters.bytes_sent
        one = run.publish()
        watched.relay.offer([one, zero], [[origin.url]])
        watched.wait_for(0, 1)
        sent = origin.counters.bytes_sent - before
        assert sent == one.manifest.deltas[0].size
        get(one, [watched.relay.url], tmp_path / "1")
    assert same_files(tmp_path / "1", run, 1)


def test_a_relay_whose_base_is_damaged_fetches_the_rest_and_serves_nothing_wrong(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "SCRUB_RATE", 1.0)  # the scrubber would find it
    zero, one = run.publish(), run.publish()
    with Origin(run.root) as origin, relaying(tmp_path / "r") as watched:
        watched.relay.offer([zero], [[origin.url]])
        watched.wait_for(0)
        path = layout.version_folder(tmp_path / "r", 0) / "model.safetensors"
        data = bytearray(path.read_bytes())
        data[5 * CHUNK + 3] ^= 1
        path.write_bytes(data)
        watched.relay.offer([zero, one], [[origin.url]])
        watched.wait_for(1)
        assert "fault" in watched.kinds(1)
        get(one, [watched.relay.url], tmp_path / "n" / "1")
    assert same_files(tmp_path / "n" / "1", run, 1)


def test_a_delta_is_never_applied_over_chunks_that_are_being_served(
    run: Run, tmp_path: Path
) -> None:
    """What a delta makes is verified after it is written."""
    zero, one = run.publish(), run.publish()
    with Origin(run.root) as origin, relaying(tmp_path / "r") as watched:
        watched.relay.offer([zero], [[origin.url]])
        watched.wait_for(0)
        live = live_version(one, tmp_path / "live")
        live.folder.mkdir()
        name = f"delta-{zero.manifest.version}"
        (live.folder / name).write_bytes(run.file(1, name))
        assert watched.relay._from_delta(live)
        again = live_version(one, tmp_path / "live")
        again.arrivals["model.safetensors"].mark(2)
        assert not watched.relay._from_delta(again)
    assert all(arrival.complete for name, arrival in live.arrivals.items() if "delta" not in name)


def test_a_relay_keeps_the_newest_five(run: Run, tmp_path: Path) -> None:
    signed = [run.publish() for _ in range(7)]
    with Origin(run.root) as origin, relaying(tmp_path / "r") as watched:
        for count in range(1, 8):
            watched.relay.offer(signed[:count], [[origin.url]])
            watched.wait_for(count - 1)
        until(lambda: watched.relay.complete() == [2, 3, 4, 5, 6], "five versions")
        until(lambda: layout.versions(tmp_path / "r") == [2, 3, 4, 5, 6], "five folders")
        assert watched.relay.versions() == [2, 3, 4, 5, 6]
        with pytest.raises(UnavailableError, match="404"):
            get(signed[0], [watched.relay.url], tmp_path / "0", patience=0.2)
        watched.relay.offer(signed, [[origin.url]])
        assert watched.relay.versions() == [2, 3, 4, 5, 6], "dropped ones do not come back"


def test_a_late_relay_brings_the_newest_first(run: Run, tmp_path: Path) -> None:
    signed = [run.publish() for _ in range(3)]
    with Origin(run.root) as origin, relaying(tmp_path / "r") as watched:
        watched.relay.offer(signed, [[origin.url]])
        watched.wait_for(0, 1, 2)
        done = [event.version for event in watched.events if event.kind == "complete"]
        assert done == [2, 1, 0]


def test_a_manifest_of_another_key_is_refused_and_never_served(run: Run, tmp_path: Path) -> None:
    good = run.publish()
    forged = sign(good.manifest.model_copy(update={"version": 1}), STRANGER)
    with Origin(run.root) as origin, relaying(tmp_path / "r") as watched:
        watched.relay.offer([forged, good], [[origin.url]])
        watched.wait_for(0)
        watched.relay.offer([forged, good], [[origin.url]])
        assert watched.relay.versions() == [0]
        assert watched.kinds(1) == ["refused"], "reported once"
        assert STRANGER.address in watched.events[0].detail + watched.events[1].detail


def test_a_second_manifest_for_a_version_or_an_older_step_is_refused(
    run: Run, tmp_path: Path
) -> None:
    zero, one = run.publish(), run.publish()
    second = sign(one.manifest.model_copy(update={"step": 2}))
    replayed = sign(one.manifest.model_copy(update={"version": 2, "step": 0, "deltas": ()}))
    with Origin(run.root) as origin, relaying(tmp_path / "r") as watched:
        watched.relay.offer([zero, one], [[origin.url]])
        watched.wait_for(0, 1)
        watched.relay.offer([second, replayed], [[origin.url]])
        assert watched.relay.versions() == [0, 1]
        assert "two signed manifests for policy 1" in watched.events[-1].detail + "".join(
            event.detail for event in watched.events if event.kind == "refused"
        )
        assert watched.kinds(2) == ["refused"]


def test_a_lying_upstream_is_named_and_the_next_group_feeds_the_relay(
    run: Run, tmp_path: Path
) -> None:
    signed = run.publish()

    def lie(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        answer(handler, bytes(len(body)))

    with (
        bad_server(run.root, lie) as liar,
        Origin(run.root) as origin,
        relaying(tmp_path / "r") as watched,
    ):
        watched.relay.offer([signed], [[liar], [origin.url]])
        watched.wait_for(0)
    faults = [event.detail for event in watched.events if event.kind == "fault"]
    assert any(liar in fault and "wrong chunk" in fault for fault in faults)
    verify = tmp_path / "r" / "policies" / "0"
    assert same_files(verify, run, 0)


def test_a_relay_restores_after_a_restart_and_serves_without_upstream(
    run: Run, tmp_path: Path
) -> None:
    signed = [run.publish(), run.publish()]
    with Origin(run.root) as origin, relaying(tmp_path / "r") as watched:
        watched.relay.offer(signed, [[origin.url]])
        watched.wait_for(0, 1)
    with relaying(tmp_path / "r") as watched:
        assert watched.relay.complete() == [0, 1]
        get(signed[1], [watched.relay.url], tmp_path / "1")
    assert same_files(tmp_path / "1", run, 1)


def test_a_relays_folder_of_another_run_is_said_at_once(run: Run, tmp_path: Path) -> None:
    with Origin(run.root) as origin, relaying(tmp_path / "r") as watched:
        watched.relay.offer([run.publish()], [[origin.url]])
        watched.wait_for(0)
    other = Trust(STRANGER.address, TRUST.domain, TRUST.pool)
    with pytest.raises(UserError, match="policies of another run"):
        Relay(tmp_path / "r", other).start()


def test_an_upstream_killed_and_restarted_costs_only_what_was_missing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "STANDSTILL", 0.2)
    signed = run.publish()
    served: list[int] = []

    def dies(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        if len(served) >= 10:
            handler.close_connection = True
            return
        served.append(handler.span[0])  # type: ignore[attr-defined]
        answer(handler, body)

    with relaying(tmp_path / "r") as watched:
        with bad_server(run.root, dies) as mortal:
            watched.relay.offer([signed], [[mortal]])
            until(lambda: len(served) >= 10, "ten chunks")
        assert watched.relay.complete() == []
        with Origin(run.root) as origin:
            watched.relay.offer([signed], [[origin.url]])
            watched.wait_for(0)
            size = sum(entry.size for entry in signed.manifest.files)
            assert origin.counters.bytes_sent <= size - 8 * CHUNK + 1000
    assert same_files(tmp_path / "r" / "policies" / "0", run, 0)


@pytest.mark.slow
def test_a_relay_killed_at_half_is_replaced_by_another_source(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", size=1_000_000)
    signed = run.publish()
    slow = Limits(bytes_per_second=2_000_000)
    command = [sys.executable, "-m", "prime_broadcast.cli", "relay"]
    tail = ["--signer", TRAINER.address, "--pool", "7", "--chain-id", "31337", "--port", "0"]
    with Origin(run.root, Serving(limits=slow)) as origin:
        child = subprocess.Popen(
            [*command, origin.url, "--data", str(tmp_path / "r"), "--json", *tail],
            stdout=subprocess.PIPE,
        )
        try:
            assert child.stdout is not None
            url = json.loads(child.stdout.readline())["url"]
            while json.loads(child.stdout.readline())["event"] != "learned":
                pass
            seen: list[int] = []

            def kill_at_half(done: int, total: int) -> None:
                seen.append(done)
                if done > total // 2 and child.poll() is None:
                    child.send_signal(signal.SIGKILL)
                    child.wait()

            stats = fetch(
                signed, [url, origin.url], tmp_path / "0", progress=kill_at_half, patience=20.0
            )
        finally:
            child.kill()
            child.wait()
            assert child.stdout is not None
            child.stdout.close()
    assert same_files(tmp_path / "0", run, 0)
    assert stats.by_source[url] > stats.policy_bytes // 4
    assert stats.by_source[origin.url] > 0
    verify_folder(tmp_path / "0", signed.manifest)


def test_many_clients_at_once_all_finish(run: Run, tmp_path: Path) -> None:
    signed = run.publish()
    failures: list[BaseException] = []

    def one(number: int, url: str) -> None:
        try:
            get(signed, [url], tmp_path / str(number) / "0", patience=30.0)
        except BaseException as error:
            failures.append(error)

    with Origin(run.root) as origin, relaying(tmp_path / "r") as watched:
        watched.relay.offer([signed], [[origin.url]])
        threads = [
            threading.Thread(target=one, args=(number, watched.relay.url)) for number in range(16)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        size = sum(entry.size for entry in signed.manifest.files)
        assert origin.counters.bytes_sent <= size + 1000, "the origin sent each byte once"
    assert all(same_files(tmp_path / str(n) / "0", run, 0) for n in range(16))


def test_a_corrupt_byte_on_a_relays_disk_is_detected_and_refetched(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "SCRUB_RATE", 1e9)
    signed = run.publish()
    with Origin(run.root) as origin, relaying(tmp_path / "r") as watched:
        watched.relay.offer([signed], [[origin.url]])
        watched.wait_for(0)
        sent = origin.counters.bytes_sent
        path = layout.version_folder(tmp_path / "r", 0) / "model.safetensors"
        with path.open("r+b") as file:
            file.seek(3 * CHUNK + 5)
            byte = file.read(1)
            file.seek(3 * CHUNK + 5)
            file.write(bytes([byte[0] ^ 1]))
        until(lambda: any(e.kind == "rot" for e in watched.events), "the rot is noticed")
        (rot,) = [e for e in watched.events if e.kind == "rot"]
        assert "chunk 3 of /policies/0/model.safetensors" in rot.detail
        watched.relay.offer([signed], [[origin.url]])
        watched.wait_for(0)
        assert origin.counters.bytes_sent - sent <= 2 * CHUNK, "only what was wrong came again"
        get(signed, [watched.relay.url], tmp_path / "0")
    assert same_files(tmp_path / "0", run, 0)


def test_an_index_that_did_not_change_is_not_sent_again(run: Run, tmp_path: Path) -> None:
    index = "/policies/index.json"
    zero = run.publish()
    with Origin(run.root) as origin, Relay(tmp_path / "relay", TRUST) as relay:
        relay.offer([zero], [[origin.url]])
        until(lambda: relay.complete() == [0], "version 0")
        for server in (origin, relay):
            link = Link(server.url)
            first = link.read_changed(index, 1 << 20, None)
            assert first is not None
            assert link.read_changed(index, 1 << 20, first[1]) is None
            assert server.counters.by_status[304] == 1
            link.close()
        one = run.publish()
        relay.offer([one, zero], [[origin.url]])
        link = Link(relay.url)
        later = link.read_changed(index, 1 << 20, first[1])
        link.close()
    assert later is not None
    assert len(layout.parse_index(later[0])) == 2


def test_a_version_whose_folder_is_gone_is_not_read_again_at_once(tmp_path: Path) -> None:
    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout)
            return super().wait(0)

    def note_rot(version: int, why: str) -> None:
        rotten.append(version)
        if len(rotten) == 3:
            stop.set()

    waits: list[float | None] = []
    rotten: list[int] = []
    item = layout.Item(7, "file", 1, ZERO_DIGEST, (ZERO_DIGEST,), 1)
    scrubber = Scrubber(lambda: [(7, tmp_path / "gone", [item])], note_rot)
    scrubber._stop = stop = Stop()
    scrubber._run()
    assert (rotten, waits) == ([7, 7, 7], [IDLE, IDLE, IDLE])
