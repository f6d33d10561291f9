"""Whole files over loopback: one client, sixteen clients, chains of relays; ours, the peer's and
the limits in turn, one after the other, as often as asked."""

from __future__ import annotations

import filecmp
import json
import os
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from blake3 import blake3

from bench.broadcast_parts import (
    Child,
    Stage,
    copy_seconds,
    curl_seconds,
    remove,
    sendfile_server,
    settle,
)
from bench.form import ROOT
from prime_core.errors import UntrustedError

CHUNK = 4 << 20


def receive(port: int, target: Path) -> dict[str, float]:
    """One file over one connection, chunk by chunk."""
    with socket.create_connection(("127.0.0.1", port)) as sock, target.open("wb") as file:
        sock.sendall(b"GET / HTTP/1.0\r\n\r\n")
        head = b""
        while b"\r\n\r\n" not in head:
            head += sock.recv(1)
        size = int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0])
        view = memoryview(bytearray(CHUNK))
        used, begun = _processor(), time.perf_counter()
        for offset in range(0, size, CHUNK):
            part = view[: min(CHUNK, size - offset)]
            if sock.recv_into(part, len(part), socket.MSG_WAITALL) != len(part):
                raise ConnectionError("the server stopped early")
            blake3(part).digest()
            os.pwrite(file.fileno(), part, offset)
        return {
            "bytes": size,
            "seconds": time.perf_counter() - begun,
            "processor": _processor() - used,
        }


def _processor() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def floor_seconds(file: Path, fresh: Callable[[str], Path], repeats: int) -> float:
    """Processor seconds of the bare loop a byte, median of `repeats`."""
    found: list[float] = []
    for _ in range(repeats):
        target = fresh("floor")
        with sendfile_server(file) as url:
            port = url.rstrip("/").rpartition(":")[2]
            done = subprocess.run(
                [sys.executable, "-m", "bench.broadcast_whole", port, str(target)],
                cwd=ROOT, capture_output=True, text=True, check=True,
            )  # fmt: skip
        target.unlink()
        reported = json.loads(done.stdout)
        found.append(reported["processor"] / reported["bytes"])
    return statistics.median(found)


def curls(file: Path, targets: Sequence[Path], servers: int) -> float:
    """Seconds until as many curls as `targets` have `file` from `servers` sendfile servers (each of
    which serves one at a time): many clients of which none verifies anything."""
    with ExitStack() as stack:
        urls = [stack.enter_context(sendfile_server(file)) for _ in range(servers)]
        begun = time.perf_counter()
        running = [
            subprocess.Popen(["curl", "-sS", "-f", "-o", str(target), urls[number % servers]])
            for number, target in enumerate(targets)
        ]
        failed = sum(process.wait() != 0 for process in running)
        seconds = time.perf_counter() - begun
    if failed:
        raise ConnectionError(f"{failed} of {len(targets)} curls failed")
    return seconds


if __name__ == "__main__":
    print(json.dumps(receive(int(sys.argv[1]), Path(sys.argv[2]))))


FILE = "model.safetensors"
TOUCHED = 9 << 30
"""Bytes of memory that are touched before each part, of any process. It takes several times what
is written, as the kernel need not hand out again just what was touched: at 4 GiB rounds of ours
alternated between 1.2 and 2.3 s, at 9 GiB they take 1.0 to 1.4 s."""


def random_folder(stage: Stage, size: int, seed: int) -> Path:
    """A folder with one file of `size` random bytes."""
    folder = stage.fresh("folder")
    folder.mkdir()
    rng = np.random.default_rng(seed)
    with (folder / FILE).open("wb") as file:
        for start in range(0, size, 16 << 20):
            file.write(rng.bytes(min(16 << 20, size - start)))
    return folder


def require_same(one: Path, other: Path) -> None:
    """Raises UntrustedError unless the two files hold the same bytes."""
    if not filecmp.cmp(one, other, shallow=False):
        raise UntrustedError(f"{other} is not {one}: the bench's result counts for nothing")


@dataclass
class Whole:
    """Seconds of each repetition, by who; `amplification` bytes written per byte delivered."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    first_byte: list[float] = field(default_factory=list)
    amplification: list[float] = field(default_factory=list)
    processor: dict[str, float] = field(default_factory=dict)
    """Processor seconds a byte delivered, by who: "ours", "peer", "floor" (`floor_seconds`)."""

    def add(self, who: str, seconds: float) -> None:
        self.seconds.setdefault(who, []).append(seconds)

    def median(self, who: str) -> float:
        return statistics.median(self.seconds[who])


class Ours:
    """An origin with one published version, relays over it, and clients."""

    def __init__(
        self, stage: Stage, folder: Path, *, relays: int, clients: int, rate: float = 0.0
    ) -> None:
        self._stage = stage
        self._rate = rate
        root = stage.fresh("origin")
        self.origin = stage.ours("origin")
        self._manifest = self.origin.ask(
            do="publish", folder=str(folder), root=str(root), version=0
        )["manifest"]
        self._source = folder / FILE
        self._url = self.origin.ask(do="origin", root=str(root), rate=rate)["url"]
        self.relays = [stage.ours(f"relay-{number}") for number in range(relays)]
        self.clients = [stage.ours(f"client-{number}") for number in range(clients)]
        self.processor: list[float] = []
        """Processor seconds of all of them together, each round."""

    def _processor(self) -> float:
        return sum(one.processor() for one in (self.origin, *self.relays, *self.clients))

    def round(self, *, chain: int = 0) -> tuple[float, list[dict[str, object]]]:
        """Seconds from the relays' hearing of the version until every client has it, and each
        client's own account. Relays start empty: side by side, or the first `chain` in a row."""
        relays = self.relays[:chain] if chain else self.relays
        roots = [self._stage.fresh("relay") for _ in relays]
        urls = [
            relay.ask(do="relay", root=str(root), rate=self._rate)["url"]
            for relay, root in zip(relays, roots, strict=True)
        ]
        dests = [self._stage.fresh("client") / "0" for _ in self.clients]
        sources = urls[-1:] if chain else urls
        settle(TOUCHED)
        used = self._processor()
        begun = time.perf_counter()
        for number, relay in enumerate(relays):
            above = urls[number - 1] if chain and number else self._url
            relay.send(do="offer", manifest=self._manifest, sources=[above])
        for relay in relays:
            relay.receive()
        for client, dest in zip(self.clients, dests, strict=True):
            client.send(do="fetch", manifest=self._manifest, sources=sources, dest=str(dest))
        stats = [client.receive() for client in self.clients]
        seconds = time.perf_counter() - begun
        self.processor.append(self._processor() - used)
        for dest in dests:
            require_same(self._source, dest / FILE)
            remove(dest.parent)
        for relay, root in zip(relays, roots, strict=True):
            relay.ask(do="end")  # its scrubber would take files that vanish for rotten ones
            remove(root)
        return seconds, stats


class Theirs:
    """The peer's origin, relays and clients over the same file."""

    def __init__(
        self, stage: Stage, python: Path, file: Path, *, relays: int, clients: int
    ) -> None:
        self._stage = stage
        self._file = file
        tag = f"{relays}-{clients}"
        self._origin = stage.peer(python, f"peer-origin-{tag}")
        self._url = self._origin.ask(do="origin", root=str(stage.fresh("peer-origin")))["url"]
        published = self._origin.ask(do="publish", file=str(file))
        self._version = published["version"]
        self._relays = [stage.peer(python, f"peer-relay-{tag}-{n}") for n in range(relays)]
        self._clients = [stage.peer(python, f"peer-client-{tag}-{n}") for n in range(clients)]
        self.processor: list[float] = []
        """Processor seconds of all of them together, each round."""

    def _processor(self) -> float:
        return sum(one.processor() for one in (self._origin, *self._relays, *self._clients))

    def round(self, clients: int | None = None) -> tuple[float, int]:
        """(seconds, clients that ended with the right bytes). Its clients start the moment its
        relays have every shard: earlier ones only meet what is missing and wait 2 or 15 s."""
        asked = self._clients[: clients or len(self._clients)]
        roots = [self._stage.fresh("peer-relay") for _ in self._relays]
        dests = [self._stage.fresh("peer-client") for _ in asked]
        settle(TOUCHED)
        used = self._processor()
        begun = time.perf_counter()
        for relay, root in zip(self._relays, roots, strict=True):
            relay.send(do="relay", root=str(root), sources=[self._url])
        urls = [relay.receive()["url"] for relay in self._relays]
        _ask_all(self._relays, do="await", version=self._version)
        for client, dest in zip(asked, dests, strict=True):
            client.send(do="fetch", version=self._version, sources=urls, dest=str(dest))
        paths = [client.receive()["path"] for client in asked]
        seconds = time.perf_counter() - begun
        self.processor.append(self._processor() - used)
        done = 0
        for path in paths:
            if path is not None:
                require_same(self._file, Path(path))
                done += 1
        for folder in (*roots, *dests):
            shutil.rmtree(folder, ignore_errors=True)
        return seconds, done


def one_client(stage: Stage, python: Path | None, size: int, repeats: int) -> Whole:
    """origin → relay → client, the peer's, cp and two hops of curl, in turn."""
    folder = random_folder(stage, size, 1)
    ours = Ours(stage, folder, relays=1, clients=1)
    theirs = Theirs(stage, python, folder / FILE, relays=1, clients=1) if python else None
    found = Whole()
    for _ in range(repeats):
        before = [child.written() for child in (*ours.relays, *ours.clients)]
        seconds, (stats,) = ours.round()
        after = [child.written() for child in (*ours.relays, *ours.clients)]
        found.add("ours", seconds)
        first = stats["first_chunk_seconds"]
        assert isinstance(first, float)
        found.first_byte.append(first)
        found.amplification.append(max(b - a for a, b in zip(before, after, strict=True)) / size)
        if theirs is not None:
            found.add("peer", theirs.round()[0])
        found.add("curl", _curl(stage, folder / FILE))
        found.add("cp", _copy(stage, folder / FILE))
    found.processor["ours"] = statistics.median(ours.processor) / size
    if theirs is not None:
        found.processor["peer"] = statistics.median(theirs.processor) / size
    settle(TOUCHED)
    found.processor["floor"] = floor_seconds(folder / FILE, stage.fresh, repeats)
    return found


@dataclass
class Many:
    """Many clients at once through two relays: our seconds, the peer's (seconds, asked, done),
    those of as many curls without relays; `finished`: clients of ours that did in every round."""

    finished: int
    ours: list[float] = field(default_factory=list)
    peer: list[tuple[float, int, int]] = field(default_factory=list)
    curl: list[float] = field(default_factory=list)
    processor: float = 0.0
    """Processor seconds of ours a byte delivered."""


def many_clients(stage: Stage, python: Path | None, size: int, clients: int, repeats: int) -> Many:
    """`clients` at once through two relays; the peer's; curls over two sendfile servers."""
    folder = random_folder(stage, size, 2)
    ours = Ours(stage, folder, relays=2, clients=clients)
    theirs = Theirs(stage, python, folder / FILE, relays=2, clients=clients) if python else None
    found = Many(clients)
    for _ in range(repeats):
        seconds, stats = ours.round()
        found.ours.append(seconds)
        found.finished = min(found.finished, len(stats))
        if theirs is not None:
            for count in (clients, 1, 4):  # fewer may suit it better
                spent, done = theirs.round(count)
                found.peer.append((spent, count, done))
        targets = [stage.fresh("curl") for _ in range(clients)]
        settle(TOUCHED)
        found.curl.append(curls(folder / FILE, targets, 2))
        for target in targets:
            target.unlink()
    found.processor = statistics.median(ours.processor) / (clients * size)
    return found


def chains(stage: Stage, size: int, rate: float, repeats: int) -> dict[int, list[float]]:
    """Seconds by number of relays in a row (1 and 4), every server limited to `rate` bytes/s and
    serving one: each link has that rate. The limiter is the server's own."""
    folder = random_folder(stage, size, 3)
    ours = Ours(stage, folder, relays=4, clients=1, rate=rate)
    found: dict[int, list[float]] = {1: [], 4: []}
    for _ in range(repeats):
        for depth in (1, 4):
            found[depth].append(ours.round(chain=depth)[0])
    return found


def _ask_all(children: Sequence[Child], **command: object) -> None:
    for child in children:
        child.send(**command)
    for child in children:
        child.receive()


def _curl(stage: Stage, file: Path) -> float:
    first, second = stage.fresh("curl"), stage.fresh("curl")
    first.touch()
    settle(TOUCHED)
    seconds = curl_seconds(file, first, second)
    require_same(file, second)
    first.unlink()
    second.unlink()
    return seconds


def _copy(stage: Stage, file: Path) -> float:
    target = stage.fresh("copy")
    settle(TOUCHED)
    seconds = copy_seconds(file, target)
    target.unlink()
    return seconds
