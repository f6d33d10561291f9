"""The sandbox's server: a warm interpreter that forks one confined child per program.

    start     import what programs may use → namespaces and an empty root, if available
              → drop the remaining privileges → "ready"
    request   fork → the child: descriptors, limits, no capabilities, the filter (kernel.py)
              → runs the program → exits; the server reads its output, measures its time, and
              kills it at a limit

Started by `client.Sandbox`; length-prefixed JSON on descriptors 0 and 1. Single-threaded.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import random
import resource
import select
import signal
import struct
import sys
import threading
import time
import traceback
from types import ModuleType
from typing import Any, NoReturn

from prime_envs.sandbox import kernel

MODULES = (
    "abc", "array", "ast", "base64", "binascii", "bisect", "builtins", "calendar", "cmath",
    "codecs", "collections", "collections.abc", "contextlib", "copy", "csv", "dataclasses",
    "datetime", "decimal", "difflib", "enum", "errno", "fractions", "functools", "gc", "graphlib",
    "hashlib", "heapq", "html", "inspect", "io", "itertools", "json", "keyword", "math", "numbers",
    "operator", "os", "pprint", "queue", "random", "re", "reprlib", "resource", "shlex", "signal",
    "statistics", "string", "stringprep", "struct", "sys", "textwrap", "threading", "time",
    "timeit", "traceback", "types", "typing", "unicodedata", "warnings", "weakref", "zlib",
    "_strptime", "encodings.ascii", "encodings.cp1252", "encodings.idna", "encodings.latin_1",
    "encodings.raw_unicode_escape", "encodings.unicode_escape", "encodings.utf_16",
    "encodings.utf_32", "encodings.utf_8", "encodings.utf_8_sig",
)  # fmt: skip
"""All modules that a program can import. They are loaded before it starts, because it cannot open
files."""
_HELPERS = frozenset({
    "copyreg", "dis", "encodings", "genericpath", "importlib", "linecache", "locale", "opcode",
    "posix", "posixpath", "sre_compile", "sre_constants", "sre_parse", "stat", "token", "tokenize",
    "zipimport",
})  # fmt: skip
_REFUSED = frozenset({"_ctypes", "_socket", "_posixsubprocess", "_ssl"})
OWN_UID = 65533
"""User of programs if the server is started by root."""
MAX_REQUEST = 64 << 20
ERROR_BYTES = 4096
_THREADS_LOOK = 0.02
_IDLE_LOOK = 0.25


def main() -> None:
    """argv: "namespaces" to isolate as far as the machine allows, or "limits"."""
    requests, answers = os.dup(0), os.dup(1)
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    for name in MODULES:
        importlib.import_module(name)
    level = _isolate(sys.argv[1])
    counted = level != "limits" and _counts_threads()
    _forget_modules()

    gc.collect()
    gc.freeze()  # children share these pages
    _send(answers, {"level": level, "threads_counted": counted})
    base = _virtual_bytes
    while (request := _receive(requests)) is not None:
        _send(answers, _run(request, counted, base, (requests, answers)))


_virtual_bytes = 0


def _isolate(wanted: str) -> str:
    """Sets up namespaces and an empty root, as far as possible, then drops the remaining
    privileges. This process is replaced by a child in the new process namespace."""
    global _virtual_bytes
    with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 - pathlib is not among MODULES
        _virtual_bytes = int(file.read().split()[0]) * resource.getpagesize()
    level = "limits"
    root = os.geteuid() == 0
    apart = (
        kernel.CLONE_NEWNS | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC
        | kernel.CLONE_NEWUTS | kernel.CLONE_NEWPID
    )  # fmt: skip
    # try it in a child first: a partial failure cannot be undone
    if wanted == "namespaces" and _works(lambda: _enter(root, apart)):
        _enter(root, apart)
        _become_first()
        level = "namespaces"
    if root:
        with contextlib.suppress(OSError):  # a container's root without that capability
            os.setgroups([])
            os.setresgid(OWN_UID, OWN_UID, OWN_UID)
            os.setresuid(OWN_UID, OWN_UID, OWN_UID)
    if level == "namespaces":
        kernel.die_with_parent()  # only now: a change of user clears it
    kernel.undumpable()
    return level


def _enter(root: bool, apart: int) -> None:
    uid, gid = os.getuid(), os.getgid()
    if root:
        kernel.unshare(apart)
    else:
        kernel.unshare(apart | kernel.CLONE_NEWUSER)
        kernel.map_user(uid, gid)
    kernel.empty_root()


def _works(attempt: Any) -> bool:
    pid = os.fork()
    if pid == 0:
        try:
            attempt()
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _become_first() -> None:
    """Continues as process 1 of the new process namespace: when it ends, all its children do."""
    pid = os.fork()
    if pid:
        os.close(0)
        _, status = os.waitpid(pid, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _counts_threads() -> bool:
    """Whether a program can have its own user namespace, in which its threads are counted."""
    return os.getuid() != 0 and _works(lambda: kernel.unshare(kernel.CLONE_NEWUSER))


def _forget_modules() -> None:
    """Gives programs the same modules on every machine, independent of what the interpreter had
    loaded."""
    wanted = {name.partition(".")[0] for name in MODULES} | _HELPERS
    for name in list(sys.modules):
        root = name.partition(".")[0]
        private = root.startswith("_") and root in sys.stdlib_module_names - _REFUSED
        if root not in wanted and not private:
            del sys.modules[name]
    sys.path.clear()
    sys.path_hooks.clear()
    sys.meta_path.clear()


# --- one program -------------------------------------------------------------------------------


def _run(
    request: dict[str, Any], counted: bool, base: int, ours: tuple[int, int]
) -> dict[str, Any]:
    stdin = os.memfd_create("stdin")
    _write_all(stdin, request["stdin"].encode("utf-8", "surrogatepass"))
    os.lseek(stdin, 0, os.SEEK_SET)
    pipes = [os.pipe() for _ in range(3)]  # output, errors, result
    pid = os.fork()
    if pid == 0:
        try:
            for descriptor in ours:
                os.close(descriptor)
            _confine(request, counted, base, stdin, [write for _, write in pipes])
        except BaseException:  # the program must never run unconfined
            os._exit(99)
        _execute(request)
    os.close(stdin)
    for _, write in pipes:
        os.close(write)
    try:
        return _watch(request, pid, [read for read, _ in pipes], counted)
    finally:
        for read, _ in pipes:
            os.close(read)


class _Watch:
    """Checks one child against its limits: CPU time, progress, wall time, threads."""

    def __init__(self, pid: int, limits: dict[str, Any], counted: bool) -> None:
        self._pid, self._limits, self._counted = pid, limits, counted
        self._start = self._progress = time.monotonic()
        self._clock = (~pid << 3) | 2  # the child's processor clock: clock_getcpuclockid(3)
        self._used = 0.0

    def broken(self) -> str:
        """The exceeded limit; "" if none (or if the child has ended)."""
        now = time.monotonic()
        try:
            spent = time.clock_gettime(self._clock)
        except OSError:
            return ""
        if spent > self._used + 0.001:
            self._used, self._progress = spent, now
        if self._used > self._limits["cpu_seconds"]:
            return "cpu"
        if now - self._progress > self._limits["idle_seconds"]:
            return "idle"
        if now - self._start > self._limits["wall_seconds"]:
            return "wall"
        if not self._counted and _threads(self._pid) > self._limits["threads"]:
            return "threads"
        return ""


def _watch(request: dict[str, Any], pid: int, reads: list[int], counted: bool) -> dict[str, Any]:
    """Collects the child's output until it ends or exceeds a limit; returns how it ended."""
    limits = request["limits"]
    watch = _Watch(pid, limits, counted)
    keep = [limits["output_bytes"], ERROR_BYTES, limits["output_bytes"]]
    got = [bytearray(), bytearray(), bytearray()]
    written = [0, 0, 0]
    killed = ""
    open_reads = dict(enumerate(reads))
    while open_reads and not killed:
        pause = _IDLE_LOOK if counted else _THREADS_LOOK
        ready = select.select(list(open_reads.values()), [], [], pause)[0]
        for index, descriptor in list(open_reads.items()):
            if descriptor not in ready:
                continue
            data = os.read(descriptor, 1 << 16)
            if not data:
                del open_reads[index]
            written[index] += len(data)
            got[index] += data
            del got[index][: -keep[index]]
            if written[index] > limits["output_bytes"]:
                killed = "output"
        killed = killed or watch.broken()
    status, usage, killed = _reap(pid, killed, watch)
    cpu = usage.ru_utime + usage.ru_stime
    code = os.waitstatus_to_exitcode(status)
    if not killed and (cpu > limits["cpu_seconds"] or code == -signal.SIGXCPU):
        killed = "cpu"
    return {
        "status": killed or ("ok" if code == 0 else "failed"),
        "code": code,
        "output": got[0].decode("latin-1"),
        "error": got[1].decode("utf-8", "replace"),
        "result": got[2].decode("latin-1"),
        "cpu_seconds": cpu,
        "peak_mb": usage.ru_maxrss // 1024,
    }


def _reap(pid: int, killed: str, watch: _Watch) -> tuple[int, Any, str]:
    """Waits for the child's end, and kills it if necessary: it may keep running after closing its
    descriptors."""
    while not killed:
        done, status, usage = os.wait4(pid, os.WNOHANG)
        if done:
            return status, usage, ""
        killed = watch.broken()
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    return status, usage, killed


def _threads(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/status", "rb") as file:  # noqa: PTH123
            for line in file:
                if line.startswith(b"Threads:"):
                    return int(line.split()[1])
    except OSError:
        pass  # it has just ended
    return 0


def _confine(
    request: dict[str, Any], counted: bool, base: int, stdin: int, writes: list[int]
) -> None:
    """Confines the child, irrevocably."""
    limits = request["limits"]
    high = [os.dup(descriptor) for descriptor in (stdin, *writes)]
    for place, descriptor in enumerate(high):
        os.dup2(descriptor, place)
    os.closerange(4, max(high) + 64)
    if counted:
        kernel.unshare(kernel.CLONE_NEWUSER)
    seconds = -(-limits["cpu_seconds"] // 1)
    memory = base + limits["memory_mb"] * (1 << 20)
    bounds = {
        resource.RLIMIT_CPU: (int(seconds), int(seconds) + 1),
        resource.RLIMIT_AS: (memory, memory),
        resource.RLIMIT_FSIZE: (0, 0),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_NOFILE: (8, 8),
    }
    if counted:
        bounds[resource.RLIMIT_NPROC] = (limits["threads"], limits["threads"])
    for what, bound in bounds.items():
        resource.setrlimit(what, bound)
    kernel.drop_capabilities()
    kernel.die_with_parent()
    kernel.allow_only_computing()


def _execute(request: dict[str, Any]) -> NoReturn:
    """Runs the program like a Python script; with a function, calls it and returns its result as
    JSON. Nothing here is trusted: a program that takes over any of it can only report what it could
    have reported anyway."""
    code = 1
    random.seed(0)  # programs without their own seed are deterministic
    try:
        sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0)), encoding="utf-8")
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w")), encoding="utf-8")
        sys.stderr = io.TextIOWrapper(
            io.BufferedWriter(io.FileIO(2, "w")), encoding="utf-8", errors="replace"
        )
        module = ModuleType("__main__")
        module.__dict__["__builtins__"] = __builtins__
        sys.modules["__main__"] = module
        sys.argv = ["program"]
        code = _call(request, module)
        threading._shutdown()  # type: ignore[attr-defined]
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:  # any exception ends the program
        with contextlib.suppress(BaseException):
            sys.stderr.write("".join(traceback.format_exception_only(error))[-2000:])
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        code = code or 120
    os._exit(code & 0xFF)


def _call(request: dict[str, Any], module: ModuleType) -> int:
    names = module.__dict__
    if request.get("prelude"):
        exec(compile(request["prelude"], "<prelude>", "exec"), names)  # noqa: S102
    exec(compile(request["source"], "<program>", "exec"), names)  # noqa: S102
    name = request.get("function")
    if name is None:
        return 0
    function = names.get(name)
    if not callable(function):
        owners = [c for c in names.values() if isinstance(c, type) and name in vars(c)]
        if not owners:
            raise NameError(f"there is no function {name!r}")
        function = getattr(owners[-1](), name)
    result = json.dumps(function(*request["arguments"])).encode()
    _write_all(3, result)
    return 0


# --- the wire ----------------------------------------------------------------------------------


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _send(descriptor: int, value: dict[str, Any]) -> None:
    data = json.dumps(value).encode()
    _write_all(descriptor, struct.pack("!I", len(data)) + data)


def _read_exactly(descriptor: int, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        data = os.read(descriptor, size - len(parts))
        if not data:
            return None
        parts += data
    return bytes(parts)


def _receive(descriptor: int) -> dict[str, Any] | None:
    head = _read_exactly(descriptor, 4)
    if head is None:
        return None
    size = struct.unpack("!I", head)[0]
    if size > MAX_REQUEST:
        raise ValueError(f"a request of {size} bytes")
    body = _read_exactly(descriptor, size)
    if body is None:
        return None
    parsed: dict[str, Any] = json.loads(body)
    return parsed


if __name__ == "__main__":
    main()
