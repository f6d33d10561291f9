"""Faults between real programs: a byte flips at a relay, an origin or a client is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from broadcast_world import CHUNK, TRAINER, TRUST, Run, same_files, until

from devnet.ports import free_port
from prime_broadcast import layout
from prime_broadcast.chunks import PER_SOURCE
from prime_broadcast.client import Base, FetchStats, fetch
from prime_broadcast.landing import MARGIN, PIECE
from prime_broadcast.relay import Relay
from prime_broadcast.server import Limits, Origin, Server, Serving
from prime_broadcast.transfer import Link

MIB = 1 << 20
WEIGHTS = "model.safetensors"


def test_a_byte_that_flips_at_a_relay_blames_only_that_relay(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prime_broadcast.relay.SCRUB_RATE", 1.0)  # the scrubber would find it
    signed = run.publish()
    with (
        Origin(run.root) as origin,
        Relay(tmp_path / "r", TRUST) as relay,
    ):
        relay.offer([signed], [[origin.url]])
        until(lambda: relay.complete() == [0], "version 0 at the relay")
        with (layout.version_folder(tmp_path / "r", 0) / WEIGHTS).open("r+b") as file:
            file.seek(5 * CHUNK + 3)
            byte = file.read(1)
            file.seek(5 * CHUNK + 3)
            file.write(bytes([byte[0] ^ 1]))
        assert relay.complete() == [0]
        # The origin stands in for what no relay delivers, so the wrong chunk is asked of the relay.
        stats = fetch(signed, [relay.url, origin.url], tmp_path / "n" / "0", patience=10.0)
    assert same_files(tmp_path / "n" / "0", run, 0)
    assert [(fault.url, fault.kind) for fault in stats.faults] == [(relay.url, "bad_data")]
    assert f"wrong chunk 5 of /policies/0/{WEIGHTS}" in stats.faults[0].reason
    assert stats.refetched == 1
    assert stats.by_source[relay.url] > 0
    assert stats.by_source[origin.url] >= CHUNK


@contextmanager
def origin_process(run: Run, port: int, rate: float | None) -> Iterator[subprocess.Popen[str]]:
    """`prime-broadcast serve`, held to `rate` by its limiter; killed at the end."""
    start = [sys.executable, "-m", "prime_broadcast.cli"]
    if rate is not None:
        slow = (
            "import sys,functools;from prime_broadcast import cli,server;"
            f"limits=server.Limits(bytes_per_second={rate});"
            "server.Serving=functools.partial(server.Serving,limits=limits);"
        )
        start = [sys.executable, "-c", slow + "cli.main(sys.argv[1:])"]
    child = subprocess.Popen(
        [
            *(*start, "serve", str(run.folder / "served"), "--json", "--port", str(port)),
            *("--data", str(run.root), "--key", str(run.folder / "key")),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def sent_by(url: str) -> int:
    """What a server has sent, by its own count."""
    for line in Link(url).read_small("/metrics", MIB).decode().splitlines():
        if line.startswith("prime_broadcast_sent_bytes_total "):
            return int(float(line.split()[-1]))
    raise AssertionError("the server does not count")


def test_an_origin_killed_and_started_again_costs_what_was_under_way_and_no_more(
    tmp_path: Path,
) -> None:
    run, port = Run(tmp_path / "run", size=4_000_000), free_port()
    run.checkpoint(run.folder / "served")
    verified, half, came = [0], threading.Event(), list[FetchStats]()

    def note(done: int, total: int) -> None:
        verified[0] = done
        if 3 * done > total:
            half.set()

    with origin_process(run, port, 4e6) as first:
        assert first.stdout is not None
        url = json.loads(first.stdout.readline())["url"]
        signed = layout.manifest_of(run.root, 0)
        size = sum(entry.size for entry in signed.manifest.files)
        fetching = threading.Thread(
            target=lambda: came.append(
                fetch(signed, [url], tmp_path / "n" / "0", progress=note, patience=60.0)
            )
        )
        fetching.start()
        assert half.wait(60)
        first.send_signal(signal.SIGKILL)
        first.wait()
    kept = verified[0]
    assert 0 < kept < size
    assert not came
    with origin_process(run, port, None) as second:
        assert second.stdout is not None
        assert json.loads(second.stdout.readline())["url"] == url
        fetching.join(60)
        assert came, "the fetch has ended"
        again = sent_by(url) - (size - kept)
    assert same_files(tmp_path / "n" / "0", run, 0)
    # What was verified never comes again: of the rest each connection had begun one chunk.
    assert again <= 4096, again
    assert came[0].refetched == 0
    assert {(fault.url, fault.kind) for fault in came[0].faults} == {(url, "failed")}


def received_from(origin: Server) -> int:
    """What its one client, which is stopped, has received: all that was sent but what still lies
    in the kernel, at either end of a connection."""
    while True:
        sent, waiting = origin.counters.bytes_sent, 0
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            _, here, there, _, queues, *_ = line.split()
            to_send, to_read = (int(queue, 16) for queue in queues.split(":"))
            if int(here.split(":")[1], 16) == origin.port:
                waiting += to_send
            elif int(there.split(":")[1], 16) == origin.port:
                waiting += to_read
        if origin.counters.bytes_sent == sent:
            return sent - waiting


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chunk", "size", "rate", "share"),
    [
        pytest.param(CHUNK, 1_000_000, 1e6, 0.25, id="chunks of 16 KiB, a quarter"),
        pytest.param(CHUNK, 1_000_000, 1e6, 0.7, id="chunks of 16 KiB, seven tenths"),
        pytest.param(8 * MIB, 8_000_000, 4e6, 0.4, id="chunks of 8 MiB, two fifths"),
        pytest.param(8 * MIB, 8_000_000, 4e6, 0.8, id="chunks of 8 MiB, four fifths"),
    ],
)
def test_a_client_killed_anywhere_refetches_a_piece_and_the_margin_a_connection_and_never_a_chunk(
    tmp_path: Path, chunk: int, size: int, rate: float, share: float
) -> None:
    run = Run(tmp_path / "run", size=size)
    signed = run.publish(chunk_size=chunk)
    whole = sum(entry.size for entry in signed.manifest.files)
    dest = tmp_path / "n"
    tail = ["--signer", TRAINER.address, "--pool", "7", "--chain-id", "31337", "--json"]

    def command(url: str) -> list[str]:
        return [sys.executable, "-m", "prime_broadcast.cli", "fetch", url, str(dest), *tail]

    with Origin(run.root, Serving(limits=Limits(bytes_per_second=rate))) as origin:
        child = subprocess.Popen(command(origin.url), stdout=subprocess.DEVNULL)
        try:
            until(lambda: origin.counters.bytes_sent > share * whole, "its share")
            child.send_signal(signal.SIGSTOP)
            os.waitpid(child.pid, os.WUNTRACED)
            index = (run.root / "policies" / "index.json").stat().st_size
            first = received_from(origin) - index
        finally:
            child.send_signal(signal.SIGKILL)
            child.wait()
    assert not (dest / "0").exists()
    with Origin(run.root) as origin:
        said = subprocess.run(command(origin.url), stdout=subprocess.PIPE, check=True).stdout
        second = origin.counters.bytes_sent - index
    again = first + second - whole  # its smallest answers, of no chunk, are counted too
    assert again <= PER_SOURCE * min(chunk, PIECE + MARGIN) + 4096, again
    stats = json.loads(said.splitlines()[-1])
    assert (stats["refetched"], stats["faults"]) == (0, [])
    assert same_files(dest / "0", run, 0)


def test_a_client_four_versions_behind_comes_by_deltas_from_a_relay_alone(
    run: Run, tmp_path: Path
) -> None:
    """What a chain needs of a relay are the deltas of the versions that it keeps: the oldest one's
    leads from a base that the relay itself no longer has."""
    signed = [run.publish() for _ in range(6)]
    chain = {one.manifest.version: one.manifest for one in signed}
    with Relay(tmp_path / "r", TRUST) as relay:
        with Origin(run.root) as origin:
            for one in signed:
                relay.offer([one], [[origin.url]])
                until(lambda v=one.manifest.version: v in relay.complete(), "the version")  # type: ignore[misc]
            for old in (0, 1):
                fetch(signed[old], [origin.url], tmp_path / "n" / str(old))
        until(lambda: relay.versions() == [1, 2, 3, 4, 5], "the oldest is dropped")
        for old, steps in ((1, (2, 3, 4, 5)), (0, (1, 2, 3, 4, 5))):
            base = Base(tmp_path / "n" / str(old), chain[old])
            dest = tmp_path / f"from-{old}" / "5"
            stats = fetch(signed[5], [relay.url], dest, bases=[base], chain=chain)
            assert (stats.route, stats.hops) == ("delta", steps)
            assert set(stats.by_source) == {relay.url}
            assert same_files(dest, run, 5)
