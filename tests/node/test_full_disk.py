"""An agent whose disk is really full: what goes on, what waits, what is said."""

from __future__ import annotations

import itertools
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from bridge_kit import Bench, Flag, Kit, bridge_kit, hand_in, heartbeat_loop
from full_disk import fill
from full_disk import small_disk as small_disk
from node_world import NODE, NodeWorld, until

from prime_core.errors import UnavailableError
from prime_node.bridge_messages import HandIn, LeaseWish
from prime_node.spool import Spool
from prime_node.worker.loop import StopFlag, work
from prime_orchestrator.store import nodes


@pytest.fixture
def kit(world: NodeWorld, small_disk: Path) -> Iterator[Kit]:
    with bridge_kit(world, small_disk / "k") as made:
        yield made


def test_heartbeats_go_on_and_the_journal_is_read(
    kit: Kit, small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lease = hand_in(kit)
    loop, _ = heartbeat_loop(kit, lambda stop: stop.set())
    backend, received = kit.world.backend, time.time() - 1000
    with backend.store.begin() as connection:
        nodes.set_status(connection, NODE.address, "active", last_heartbeat=received)
    fill(small_disk / "filler")
    assert loop._beat() is None
    with backend.store.read() as connection:
        node = nodes.get(connection, NODE.address)
    assert node is not None
    assert node.last_heartbeat > received
    assert "no heartbeat got through" not in caplog.text
    assert [entry.lease_digest for entry in kit.spool.waiting()] == [lease]
    other = Spool(kit.folder.parent / "spool", now=time.time, sweep=False)
    assert other.find(lease) is not None, "so do commands that run with the agent"
    assert kit.broker.open_leases() == (lease,)


def test_heartbeats_go_out_when_the_journal_cannot_be_read_at_all(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop, _ = heartbeat_loop(kit, lambda stop: stop.set())

    def refused(*_: object, **__: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr("prime_node.spool.sqlite3.connect", refused)
    assert loop._beat() is None
    assert "no heartbeat got through" not in caplog.text
    assert "cannot read the spool, so this heartbeat names no open lease" in caplog.text


def test_a_finished_file_waits_for_room_while_its_lease_lasts(
    kit: Kit, small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is built once, said once, and handed in as soon as there is room."""
    filler = small_disk / "filler"
    fill(filler)
    stop, tries = Flag(), itertools.count(1)
    bench = Bench(kit, stop)
    kit.broker._closed = False

    def wait(_: float) -> None:
        if next(tries) == 3:
            filler.unlink()
            kit.uploader.start()

    with caplog.at_level(logging.INFO):
        work(kit.client, bench, stop, sleep=wait)  # type: ignore[arg-type]
    assert len(bench.built) == 1
    until(kit.world.submissions, "it is handed in")
    assert next(tries) == 4
    assert caplog.text.count("it is sent again until the lease runs out") == 1
    assert caplog.text.count("has to wait: cannot keep the file") == 1, "the agent says it, too"
    assert "No space left on device" in caplog.text
    assert not list(kit.world.folder.glob("*.parquet"))
    assert kit.uploader.stop(10) == 0


def test_a_copy_that_the_journal_has_no_room_for_takes_none_from_its_next_try(
    kit: Kit, small_disk: Path
) -> None:
    """Else the file would wait for as much room again as it has, and lie there until a restart."""
    offer = kit.client.lease(LeaseWish(wait_seconds=10))
    assert offer.lease is not None
    assert offer.domain is not None
    wish = HandIn(lease_digest=offer.lease.lease.digest(offer.domain), file="f")
    (kit.folder / "f").write_bytes(b"x" * (1 << 16))
    filler = small_disk / "filler"
    fill(filler)
    os.truncate(filler, filler.stat().st_size - (1 << 16))
    kit.broker._closed = True  # answers at once instead of waiting for the receipt
    for _ in range(2):
        with pytest.raises(UnavailableError, match=r"the journal .* is refused"):
            kit.broker.submit(wish)
    filler.unlink()
    kit.broker.submit(wish)
    (entry,) = kit.spool.waiting()
    assert entry.path.stat().st_size == 1 << 16


def test_a_lease_that_runs_out_on_a_full_disk_is_given_back(
    kit: Kit, small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(small_disk / "filler")
    stop, now = Flag(), [time.time()]
    bench = Bench(kit, stop)

    def wait(_: float) -> None:
        now[0] += 100

    work(kit.client, bench, stop, sleep=wait, clock=lambda: now[0])  # type: ignore[arg-type]
    assert len(bench.built) == 1
    assert kit.broker.open_leases() == ()
    assert "given back: it ran out before its file could be kept: " in caplog.text
    assert not list(kit.world.folder.glob("*.parquet"))


def test_a_worker_that_is_asked_to_stop_gives_back_what_cannot_be_kept(
    kit: Kit, small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(small_disk / "filler")
    stop = StopFlag()
    bench = Bench(kit, stop)
    work(kit.client, bench, stop)  # type: ignore[arg-type]
    assert kit.broker.open_leases() == ()
    assert "given back: the worker was asked to stop, its file not kept" in caplog.text
    offer = kit.client.lease(LeaseWish(wait_seconds=0))
    assert offer.lease is not None, "it comes back unchanged"
    assert offer.domain is not None
    assert offer.lease.lease.digest(offer.domain) == bench.built[0]


def test_a_worker_whose_agent_went_away_ends_with_its_file(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that comes back starts a worker of its own."""
    stop, moments = Flag(), itertools.count(step=10)
    bench = Bench(kit, stop)
    gone = threading.Event()

    def not_sent(*_: object) -> None:
        gone.set()
        raise UnavailableError("the agent does not answer on its socket")

    monkeypatch.setattr(kit.client, "send_file", not_sent)
    with pytest.raises(UnavailableError, match="does not answer"):
        work(
            kit.client,
            bench,
            stop,
            sleep=lambda _: None,
            now=lambda: float(next(moments)),  # type: ignore[arg-type]
        )
    assert gone.is_set()
    assert not list(kit.world.folder.glob("*.parquet"))
