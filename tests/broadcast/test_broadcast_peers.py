"""Who gives way when all places of a server are taken."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import pytest
from broadcast_world import Run, until

from prime_broadcast.content import DirectoryContent
from prime_broadcast.http1 import Limits
from prime_broadcast.peers import SLOW_READER_SECONDS, Peer, peer_to_drop, place_of, site_of
from prime_broadcast.server import Server, Serving
from prime_broadcast.transfer import Link

NOW = 1000.0
FILE = "/policies/0/model.safetensors"


def peer(address: str, *, idle: float | None = None, waiting: float | None = None) -> Peer:
    """One that has been idle, or has left bytes lying, for so many seconds."""
    return Peer(
        cast(asyncio.StreamWriter, None),
        address,
        None if idle is None else NOW - idle,
        None if waiting is None else NOW - waiting,
    )


def test_the_longest_idle_goes_before_any_that_is_served() -> None:
    idle = [peer("a", idle=1.0), peer("b", idle=5.0)]
    slow = peer("c", waiting=100.0)
    assert peer_to_drop([*idle, slow], "d", NOW) is idle[1]


def test_the_slowest_reader_goes_if_it_is_slow_enough() -> None:
    quick, slow = peer("a", waiting=0.1), peer("b", waiting=SLOW_READER_SECONDS + 1)
    later = peer("c", waiting=SLOW_READER_SECONDS + 0.5)
    assert peer_to_drop([quick, slow, later], "d", NOW) is slow


def test_quick_readers_keep_their_places() -> None:
    assert peer_to_drop([peer("a", waiting=1.0), peer("b")], "c", NOW) is None
    assert peer_to_drop([peer("a", waiting=1.0), peer("a")], "a", NOW) is None


def test_an_address_with_many_places_gives_one_to_an_address_with_fewer() -> None:
    many = [peer("a", waiting=float(age)) for age in range(4)]
    assert peer_to_drop([*many, peer("b")], "c", NOW) is many[3]
    assert peer_to_drop([*many, peer("b")], "b", NOW) is many[3]
    assert peer_to_drop([*many, peer("b"), peer("b"), peer("b")], "b", NOW) is None
    assert peer_to_drop([*many, peer("b")], "a", NOW) is None


@pytest.mark.parametrize(
    ("address", "place", "site"),
    [
        ("10.1.2.3", "10.1.2.3", "10.1.2.3"),
        ("::ffff:10.1.2.3", "10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64", "2001:db8:1::/48"),
        ("fe80::1%eth0", "fe80::/64", "fe80::/48"),
        ("", "", ""),
    ],
)
def test_places_count_by_address_or_by_the_network_of_a_site(
    address: str, place: str, site: str
) -> None:
    assert place_of(address) == place
    assert site_of(address) == site


@pytest.mark.slow
def test_readers_just_fast_enough_to_stay_cannot_keep_others_out(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", size=20_000_000)  # 40 MB: more than the socket buffers hold
    run.publish(chunk_size=1 << 20)
    later = 0.0
    server = Server(
        DirectoryContent(run.root),
        Serving(limits=Limits(connections=3)),
        clock=lambda: time.monotonic() + later,
    )
    with server, ExitStack() as stack:
        for number in range(3):
            sock = socket.create_connection(("127.0.0.1", server.port), timeout=20)
            stack.enter_context(sock).sendall(f"GET {FILE} HTTP/1.1\r\n\r\n".encode())
            until(lambda n=number: server.counters.requests == n + 1, "a slow reader's request")
        link = Link(server.url)
        later = SLOW_READER_SECONDS + 1
        assert link.role() == "origin", "the newcomer is served"
        link.close()
        assert (server.counters.evicted, server.counters.refused) == (1, 0)
        until(lambda: server.connected == 2, "the end of one slow reader, and of the newcomer")
