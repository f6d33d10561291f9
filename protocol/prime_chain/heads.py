"""New blocks by WebSocket subscription (`eth_subscribe`, geth's RPC pub/sub).

A subscription only wakes a loop that would otherwise wait for its poll interval. Its contents are
not used, so an endpoint that lies, floods or hangs costs at most one look at the chain in
`LEAST_SECONDS`.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

from websockets.exceptions import WebSocketException
from websockets.sync.client import connect

from prime_core.errors import UserError

log = logging.getLogger(__name__)

LEAST_SECONDS = 0.5
"""Least time between two wake-ups."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
ANSWER_SECONDS = 10.0
"""Time for connecting and for the answer to the subscription."""
SILENT_SECONDS = 60.0
"""An endpoint that announces no block for so long is connected to again."""
MAX_BYTES = 64 << 10
_SUBSCRIBE = json.dumps(
    {"jsonrpc": "2.0", "id": 1, "method": "eth_subscribe", "params": ["newHeads"]}
)


class NewHeads:
    """Sets `woken` when an endpoint announces a block: one thread per endpoint, until `close`."""

    def __init__(self, urls: Sequence[str]) -> None:
        """Raises UserError if a URL is not ws:// or wss://."""
        for url in urls:
            if urlsplit(url).scheme not in ("ws", "wss") or not urlsplit(url).hostname:
                raise UserError(
                    f"{url[:200]!r} is not a WebSocket URL", hint="write it like wss://HOST/PATH"
                )
        self.woken = threading.Event()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._follow, args=(url,), name="new-heads", daemon=True)
            for url in urls
        ]
        for thread in self._threads:
            thread.start()

    def wait(self, seconds: float) -> None:
        """Returns after `seconds`, or earlier once a block is announced or `close` is called."""
        began = time.monotonic()
        if self.woken.wait(seconds):
            left = min(seconds, LEAST_SECONDS) - (time.monotonic() - began)
            self._stop.wait(max(0.0, left))
            self.woken.clear()

    def close(self) -> None:
        self._stop.set()
        self.woken.set()
        for thread in self._threads:
            thread.join(ANSWER_SECONDS)

    def _follow(self, url: str) -> None:
        host, pause = urlsplit(url).hostname, FIRST_PAUSE
        while not self._stop.is_set():
            try:
                if self._listen(url):
                    pause = FIRST_PAUSE
            except (OSError, WebSocketException, TimeoutError, ValueError) as error:
                log.warning("%s announces no blocks: %s", host, error or type(error).__name__)
            self._stop.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _listen(self, url: str) -> bool:
        """Whether blocks came, once the connection ended or went silent."""
        came = False
        with connect(
            url, open_timeout=ANSWER_SECONDS, close_timeout=1, max_size=MAX_BYTES
        ) as socket:
            socket.send(_SUBSCRIBE)
            answer = json.loads(socket.recv(timeout=ANSWER_SECONDS))
            if not isinstance(answer, dict) or "result" not in answer:
                raise ValueError("it refuses the subscription")
            last = time.monotonic()
            while not self._stop.is_set() and time.monotonic() - last < SILENT_SECONDS:
                try:
                    socket.recv(timeout=LEAST_SECONDS)
                except TimeoutError:
                    continue
                came, last = True, time.monotonic()
                self.woken.set()
        return came
