"""One process of the broadcast's bench: an origin, a relay, a node or a trainer, commanded by
JSON lines on stdin, one answer a line on stdout. Only the library's public functions are called.

    {"do": "origin", "root": …, "rate": bytes/s or 0}         → {"url": …}
    {"do": "relay", "root": …, "rate": …}                     → {"url": …}   (a former one ends)
    {"do": "end"}                                             → {}   (what was started ends)
    {"do": "offer", "manifest": path, "sources": [url, …]}    → {}
    {"do": "fetch", "manifest": path, "sources": […], "dest": …, "base": folder or ""} → stats
    {"do": "publish", "folder": …, "root": …, "version": …}   → {"manifest": path}
    {"do": "encode" | "apply", "base": …, "new": …, "delta": …, "into": …} → {"bytes", "seconds"}
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prime_broadcast import delta, layout
from prime_broadcast.client import Base, fetch
from prime_broadcast.manifest import MANIFEST_NAME, Trust, build_manifest, read_signed
from prime_broadcast.publish import finalize, publish
from prime_broadcast.relay import Relay
from prime_broadcast.server import Limits, Origin, Server, Serving
from prime_core.checkpoint import Manifest
from prime_core.ids import ZERO_ADDRESS
from prime_core.signing import Domain, LocalSigner

POOL = 0
SIGNER = LocalSigner(b"\x11" * 32)
"""Made up for the bench; it signs nothing else."""
DOMAIN = Domain(chain_id=0, contract=ZERO_ADDRESS)
TRUST = Trust(SIGNER.address, DOMAIN, POOL)
Answer = dict[str, Any]


class Worker:
    """Keeps what was started; a second origin or relay replaces the first."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._server: Server | Relay | None = None

    def close(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None

    def end(self) -> Answer:
        self.close()
        return {}

    def origin(self, root: str, rate: float = 0.0) -> Answer:
        self.close()
        self._server = Origin(Path(root), self._serving(rate))
        self._server.start()
        return {"url": self._server.url}

    def relay(self, root: str, rate: float = 0.0) -> Answer:
        self.close()
        self._server = Relay(Path(root), TRUST, self._serving(rate))
        self._server.start()
        return {"url": self._server.url}

    def _serving(self, rate: float) -> Serving:
        return Serving(self._host, limits=Limits(bytes_per_second=rate))

    def offer(self, manifest: str, sources: list[str]) -> Answer:
        assert isinstance(self._server, Relay)
        self._server.offer([read_signed(Path(manifest))], [sources])
        return {}

    def fetch(self, manifest: str, sources: list[str], dest: str, base: str = "") -> Answer:
        signed = read_signed(Path(manifest))
        TRUST.check(signed)
        bases = [_base(Path(base))] if base else []
        return fetch(signed, sources, Path(dest), bases=bases).as_json()

    def publish(self, folder: str, root: str, version: int) -> Answer:
        made = publish(Path(folder), Path(root), pool=POOL, version=version, step=version)
        finalize(Path(root), made.signed(SIGNER, DOMAIN))
        path = layout.version_folder(Path(root), version) / MANIFEST_NAME
        return {"manifest": str(path), "deltas": [entry.size for entry in made.deltas]}

    def encode(self, base: str, new: str, into: str) -> Answer:
        old, target = _described(Path(base), 0), _described(Path(new), 1)
        begun = time.perf_counter()
        size = delta.encode(Path(base), old, Path(new), target, Path(into))
        return {"bytes": size, "seconds": time.perf_counter() - begun}

    def apply(self, base: str, new: str, delta_path: str, into: str) -> Answer:
        old, target = _described(Path(base), 0), _described(Path(new), 1)
        Path(into).mkdir()
        begun = time.perf_counter()
        size = delta.apply(Path(base), old, Path(delta_path), target, Path(into))
        return {"bytes": size, "seconds": time.perf_counter() - begun}


def _base(folder: Path) -> Base:
    return Base(folder, TRUST.check(read_signed(folder / MANIFEST_NAME)))


_KNOWN: dict[tuple[Path, int], Manifest] = {}


def _described(folder: Path, version: int) -> Manifest:
    key = (folder, version)
    if key not in _KNOWN:
        _KNOWN[key] = build_manifest(folder, pool=POOL, version=version, step=version)
    return _KNOWN[key]


def serve(host: str) -> None:
    """Answers until stdin ends."""
    worker = Worker(host)
    verbs: dict[str, Callable[..., Answer]] = {
        "origin": worker.origin, "relay": worker.relay, "offer": worker.offer,
        "end": worker.end, "fetch": worker.fetch, "publish": worker.publish,
        "encode": worker.encode, "apply": worker.apply,
    }  # fmt: skip
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        words = json.loads(line)
        print(json.dumps(verbs[words.pop("do")](**words)), flush=True)
    worker.close()


if __name__ == "__main__":
    serve(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1")
