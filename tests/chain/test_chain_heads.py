"""Subscriptions to new blocks: a real chain, and endpoints that fail or lie."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from websockets.sync.server import ServerConnection, serve

from devnet.deployed import Deployed
from prime_chain import heads
from prime_chain.heads import NewHeads
from prime_core.errors import UserError

LONG = 60.0


@contextmanager
def endpoint(behave: Callable[[ServerConnection], None]) -> Iterator[str]:
    with serve(behave, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()
        thread.join()


def subscribed(socket: ServerConnection) -> None:
    asked = json.loads(socket.recv())
    assert (asked["method"], asked["params"]) == ("eth_subscribe", ["newHeads"])
    socket.send(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": "0x1"}))


def test_a_block_wakes_the_waiting_loop(deployed: Deployed) -> None:
    found = NewHeads([deployed.url.replace("http", "ws", 1)])
    try:
        while not found.woken.is_set():  # the subscription takes a moment
            deployed.anvil.mine(1)
            found.woken.wait(0.05)
        found.wait(LONG)
    finally:
        found.close()
    found.wait(LONG)  # returns at once after `close`


@pytest.mark.parametrize("fault", ["closes", "refuses", "garbage", "huge"])
def test_a_faulty_endpoint_is_tried_again_and_stops_nothing(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "FIRST_PAUSE", 0.01)
    healthy, connections = threading.Event(), []

    def behave(socket: ServerConnection) -> None:
        connections.append(fault)
        if healthy.is_set():
            subscribed(socket)
            socket.send("{}")
            socket.recv()
        elif fault == "refuses":
            socket.recv()
            socket.send(json.dumps({"id": 1, "error": {"code": -32601, "message": "none"}}))
        elif fault == "garbage":
            socket.send("[[[")
        elif fault == "huge":
            subscribed(socket)
            socket.send("x" * (2 * heads.MAX_BYTES))
        if len(connections) == 3:
            healthy.set()

    with endpoint(behave) as url:
        found = NewHeads([url])
        try:
            assert found.woken.wait(LONG)
            assert len(connections) >= 4
        finally:
            found.close()


def test_an_endpoint_that_floods_costs_one_look_in_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    over = threading.Event()

    def behave(socket: ServerConnection) -> None:
        subscribed(socket)
        while not over.is_set():
            socket.send("{}")

    pauses: list[float] = []
    with endpoint(behave) as url:
        found = NewHeads([url])
        found.woken.wait(LONG)
        monkeypatch.setattr(found._stop, "wait", pauses.append)
        found.wait(LONG)
        monkeypatch.undo()
        over.set()
        found.close()
    assert pauses[0] > heads.LEAST_SECONDS / 2


def test_other_urls_are_refused() -> None:
    for url in ("http://127.0.0.1:1", "ws://", "x"):
        with pytest.raises(UserError, match="is not a WebSocket URL"):
            NewHeads([url])
