"""One process of SHARDCAST in the bench, run by the Python of an environment that has the package
(and none of ours). The package is used as shipped through its classes; three courtesies let it run
where it would not by itself:

- a `data1.bin` of 1 MiB lies at each server's root, which its clients ask for first;
- the two files that all of its clients on a machine share (/tmp/dummy.bin and one inside of the
  package's folder) get a place per process, without which several clients at once fail;
- a relay starts looking at once, so none of its 30 seconds between looks is counted.

    {"do": "origin", "root": …}                    → {"url": …}
    {"do": "publish", "file": …, "shard": bytes}   → {"version": …, "seconds": …}
    {"do": "relay", "root": …, "sources": […]}     → {"url": …}
    {"do": "await", "version": …}                  → {}   once the relay has every shard
    {"do": "fetch", "version": …, "sources": […], "dest": …} → {"path": … or null}
"""

from __future__ import annotations

import importlib
import json
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

CHECK_SECONDS = 1
"""Between a relay's looks upstream."""


class Peer:
    """Keeps what was started."""

    def __init__(self, host: str, own: pathlib.Path) -> None:
        client = importlib.import_module("shardcast.client")
        client.__dict__["__file__"] = str(own / "package" / "client.py")
        client.__dict__["Path"] = lambda path: pathlib.Path(
            own / "dummy.bin" if str(path) == "/tmp/dummy.bin" else path  # noqa: S108
        )
        self._host = host
        self._origin: Any = None
        self._relay: Any = None

    def origin(self, root: str) -> dict[str, Any]:
        self._lay(root)
        module = importlib.import_module("shardcast.origin_server")
        self._origin = module.OriginServer(root, 0)
        return {"url": self._url(self._origin)}

    def publish(self, file: str, shard: int = 50_000_000) -> dict[str, Any]:
        begun = time.perf_counter()
        version = self._origin.broadcast(file, shard)
        return {"version": version, "seconds": time.perf_counter() - begun}

    def relay(self, root: str, sources: list[str]) -> dict[str, Any]:
        if self._relay is not None:
            self._relay.shutdown_event.set()
        self._lay(root)
        module = importlib.import_module("shardcast.middle_node")
        self._relay = module.MiddleNode(sources, root, 0, CHECK_SECONDS)
        return {"url": self._url(self._relay)}

    def wait(self, version: str) -> dict[str, Any]:
        while version not in self._relay.processed_versions:
            time.sleep(0.002)
        return {}

    def fetch(self, version: str, sources: list[str], dest: str) -> dict[str, Any]:
        module = importlib.import_module("shardcast.client_node")
        node = module.ClientNode(sources, dest)
        return {"path": node.download_version(version, str(pathlib.Path(dest) / "whole.bin"))}

    def _lay(self, root: str) -> None:
        folder = pathlib.Path(root)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "data1.bin").write_bytes(bytes(1 << 20))

    def _url(self, server: Any) -> str:
        return f"http://{self._host}:{server.http_server.server_address[1]}"


def serve(host: str, own: pathlib.Path) -> None:
    """Answers until stdin ends."""
    (own / "package").mkdir(parents=True, exist_ok=True)
    peer = Peer(host, own)
    verbs: dict[str, Callable[..., dict[str, Any]]] = {
        "origin": peer.origin, "publish": peer.publish, "relay": peer.relay, "await": peer.wait,
        "fetch": peer.fetch,
    }  # fmt: skip
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        words = json.loads(line)
        print(json.dumps(verbs[words.pop("do")](**words)), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], pathlib.Path(sys.argv[2]))
