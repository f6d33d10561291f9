"""The least that a verifying receiver costs here: recv, BLAKE3, pwrite in a bare loop, one thread.

`python -m bench.broadcast_floor PORT TARGET` fetches what a sendfile server (broadcast_parts.py) at
PORT has into TARGET and prints {"bytes", "seconds", "processor"}: processor seconds, user and
system, of the loop alone. Whoever verifies what it receives and keeps it in files pays this."""

from __future__ import annotations

import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from blake3 import blake3

from bench.broadcast_parts import sendfile_server
from bench.form import ROOT

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
                [sys.executable, "-m", "bench.broadcast_floor", port, str(target)],
                cwd=ROOT, capture_output=True, text=True, check=True,
            )  # fmt: skip
        target.unlink()
        told = json.loads(done.stdout)
        found.append(told["processor"] / told["bytes"])
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
