"""What the broadcast's bench is made of: child processes that answer JSON lines, what the kernel
counts of them, the peer's environment, and the limits (cp; sendfile with curl)."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench.form import ROOT
from prime_core.errors import UnavailableError

PEER = "shardcast 0.3.2"
PEER_REQUIREMENT = "shardcast==0.3.2"
ANSWER_SECONDS = 240.0


class Child:
    """A process that takes one JSON object a line and answers each with one."""

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name = name
        self._log = log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                list(command),
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self.peak_anon = 0
        self._buffer = b""
        self.receive()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, **command: object) -> None:
        """Asks without waiting."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()

    def receive(self, seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
        """The next answer. Raises UnavailableError if none comes in time or the process died."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + seconds
        fd = self._process.stdout.fileno()
        while True:
            line, newline, rest = self._buffer.partition(b"\n")
            if newline:
                self._buffer = rest
                with contextlib.suppress(ValueError):  # the peer prints for people, too
                    answer = json.loads(line)
                    if isinstance(answer, dict):
                        return answer
                continue
            ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(fd, 1 << 16) if ready else b""
            if not data:
                said = self._log.read_text(errors="replace")[-800:]
                what = "died" if ready else f"gave no answer in {seconds:.0f} s"
                raise UnavailableError(f"the bench's {self.name} {what}: {said}")
            self._buffer += data

    def ask(self, **command: object) -> dict[str, Any]:
        self.send(**command)
        return self.receive()

    def written(self) -> int:
        """Bytes this process caused to be written to disk (`write_bytes`, whole pages)."""
        for line in Path(f"/proc/{self.pid}/io").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "write_bytes":
                return int(value)
        raise UnavailableError("this kernel does not count written bytes")

    def processor(self) -> float:
        """Processor seconds so far, user and system, of this process and the children that it
        waited for (the peer's wget); counted by the kernel in hundredths."""
        text = Path(f"/proc/{self.pid}/stat").read_text()
        ticks = text.rpartition(")")[2].split()[11:15]
        return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")

    def anon(self) -> int:
        """Private memory now, bytes (RssAnon); 0 once it has ended."""
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
                if line.startswith("RssAnon:"):
                    return int(line.split()[1]) * 1024
        return 0

    def close(self) -> None:
        """Ends it: at once if it does not by itself."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


class Stage:
    """A scratch folder and the processes in it, ended together; their private memory is watched."""

    def __init__(self, stack: ExitStack, scratch: Path) -> None:
        self.scratch = scratch
        self._stack = stack
        self._children: list[Child] = []
        self._made = 0
        self._over = threading.Event()
        thread = threading.Thread(target=self._watch, daemon=True)
        thread.start()
        stack.callback(thread.join)
        stack.callback(self._over.set)

    def ours(self, name: str, host: str = "127.0.0.1", prefix: Sequence[str] = ()) -> Child:
        """A process of this library (`bench/broadcast_worker.py`)."""
        command = [*prefix, sys.executable, "-m", "bench.broadcast_worker", host]
        child = self._start(name, command)
        self._children.append(child)
        return child

    def peer(
        self, python: Path, name: str, host: str = "127.0.0.1", prefix: Sequence[str] = ()
    ) -> Child:
        """A process of the peer (`bench/broadcast_peer_worker.py`)."""
        script = str(ROOT / "bench" / "broadcast_peer_worker.py")
        own = self.fresh(f"own-{name}")
        return self._start(name, [*prefix, str(python), script, host, str(own)])

    def fresh(self, name: str) -> Path:
        """A new path in the scratch folder (nothing is there yet)."""
        self._made += 1
        return self.scratch / f"{self._made:04d}-{name}"

    def peaks(self) -> dict[str, int]:
        """Name → peak RssAnon so far, bytes."""
        return {child.name: child.peak_anon for child in self._children}

    def _start(self, name: str, command: list[str]) -> Child:
        child = Child(name, command, self.scratch / f"{name}.log")
        self._stack.callback(child.close)
        return child

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            for child in list(self._children):
                child.peak_anon = max(child.peak_anon, child.anon())


@contextmanager
def stage() -> Iterator[Stage]:
    """A scratch folder under var/bench, removed at the end with all processes ended."""
    scratch = ROOT / "var" / "bench" / f"broadcast-{os.getpid()}"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        yield Stage(stack, scratch)


def peer_python() -> tuple[Path | None, str]:
    """The Python of an environment with the peer, made under var/bench on first use; or None and
    one sentence that says why not."""
    if shutil.which("wget") is None:
        return None, "shardcast needs wget: install wget"
    folder = ROOT / "var" / "bench" / "shardcast"
    python = folder / "bin" / "python"
    if not _has_peer(python):
        for command in (
            [sys.executable, "-m", "venv", str(folder)],
            [str(python), "-m", "pip", "install", "--quiet", PEER_REQUIREMENT],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                return None, f"{PEER_REQUIREMENT} cannot be installed: {done.stderr[-300:].strip()}"
    return python, ""


def _has_peer(python: Path) -> bool:
    if not python.exists():
        return False
    probe = "import importlib.metadata as m; print('shardcast==' + m.version('shardcast'))"
    done = subprocess.run([str(python), "-c", probe], capture_output=True, text=True, check=False)
    return done.stdout.strip() == PEER_REQUIREMENT


def remove(folder: Path) -> None:
    """Removes a folder in which a process may still be tidying up (the fsync behind a rename takes
    its note away when it is done): what is gone already is not an error."""
    while True:
        try:
            shutil.rmtree(folder)
            return
        except FileNotFoundError:
            if not folder.exists():
                return


def settle(needed: int = 0) -> None:
    """Prepares a timed part: writes dirty pages to disk and touches `needed` bytes of memory.

    The host of a virtual machine takes free pages back and returns each on first use, at 0.8 s of
    processor time a GiB here. Without this, the first part would pay for the others.
    """
    os.sync()
    needed = min(needed, _available() // 2)
    if needed:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        mmap.mmap(-1, needed, flags=flags).close()


def _available() -> int:
    """Bytes of memory that can be had without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def copy_seconds(file: Path, target: Path) -> float:
    """`cp`, timed."""
    begun = time.perf_counter()
    subprocess.run(["cp", "--reflink=never", str(file), str(target)], check=True)
    return time.perf_counter() - begun


def curl_seconds(file: Path, first: Path, second: Path) -> float:
    """Two hops without any checking: curl from a sendfile server to `first`, then curl from a
    sendfile server over that to `second`."""
    with sendfile_server(file) as one, sendfile_server(first) as two:
        begun = time.perf_counter()
        for url, target in ((one, first), (two, second)):
            subprocess.run(["curl", "-sS", "-f", "-o", str(target), url], check=True)
        return time.perf_counter() - begun


@contextmanager
def sendfile_server(file: Path) -> Iterator[str]:
    """A process that answers any GET with `file` by sendfile, and nothing else."""
    process = subprocess.Popen(
        [sys.executable, "-c", _SENDFILE, str(file)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/"
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


_SENDFILE = """
import os, socket, sys
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
while True:
    sock, _ = server.accept()
    asked = b""
    while b"\\r\\n\\r\\n" not in asked:
        asked += sock.recv(4096)
    with open(sys.argv[1], "rb") as file:
        size = os.fstat(file.fileno()).st_size
        sock.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: %d\\r\\n\\r\\n" % size)
        sent = 0
        while sent < size:
            sent += os.sendfile(sock.fileno(), file.fileno(), sent, size - sent)
    sock.close()
"""
