"""Linux isolation through libc: namespaces, an empty root, no privileges, seccomp.

The system-call filter is an allowlist (seccomp(2), filter mode): memory, threads, time, and reading
and writing of open descriptors. Opening files, sockets, new processes, signals to others, sleeping
and random bytes are rejected with an error that the program sees. It needs no privileges, so it
works in a container as on a bare machine. Namespaces and the empty root are a second barrier where
available.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

CLONE_THREAD = 0x0001_0000
CLONE_NEWNS = 0x0002_0000
CLONE_NEWUTS = 0x0400_0000
CLONE_NEWIPC = 0x0800_0000
CLONE_NEWUSER = 0x1000_0000
CLONE_NEWPID = 0x2000_0000
CLONE_NEWNET = 0x4000_0000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT = 1, 2, 4, 8, 32
_MS_REC, _MS_PRIVATE, _MNT_DETACH = 0x4000, 1 << 18, 2
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _PR_SET_DUMPABLE = 1, 22, 38, 4
_SECCOMP_MODE_FILTER = 2
_FCNTL = (0, 1, 2, 3, 1030)
"""F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC."""
_F_SETFL, _O_ASYNC = 4, 0x2000
_AT_EMPTY_PATH = 0x1000

_X86_64 = {
    "read": 0, "write": 1, "close": 3, "fstat": 5, "poll": 7, "lseek": 8, "mmap": 9,
    "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14,
    "rt_sigreturn": 15, "readv": 19, "writev": 20, "select": 23, "sched_yield": 24, "mremap": 25,
    "madvise": 28, "dup": 32, "dup2": 33, "getpid": 39, "exit": 60, "fcntl": 72,
    "gettimeofday": 96, "getrlimit": 97, "getrusage": 98, "times": 100, "getuid": 102,
    "getgid": 104, "geteuid": 107, "getegid": 108, "getppid": 110, "sigaltstack": 131,
    "gettid": 186, "time": 201, "futex": 202, "restart_syscall": 219, "clock_gettime": 228,
    "clock_getres": 229, "exit_group": 231, "pselect6": 270, "ppoll": 271,
    "set_robust_list": 273, "dup3": 292, "rseq": 334,
    "ioctl": 16, "clone": 56, "tgkill": 234, "newfstatat": 262, "prlimit64": 302, "clone3": 435,
    "pivot_root": 155, "capset": 126,
}  # fmt: skip
_AARCH64 = {
    "dup": 23, "dup3": 24, "fcntl": 25, "close": 57, "lseek": 62, "read": 63, "write": 64,
    "readv": 65, "writev": 66, "pselect6": 72, "ppoll": 73, "fstat": 80, "exit": 93,
    "exit_group": 94, "futex": 98, "set_robust_list": 99, "clock_gettime": 113,
    "clock_getres": 114, "sched_yield": 124, "restart_syscall": 128, "sigaltstack": 132,
    "rt_sigaction": 134, "rt_sigprocmask": 135, "rt_sigreturn": 139, "times": 153,
    "getrlimit": 163, "getrusage": 165, "gettimeofday": 169, "getpid": 172, "getppid": 173,
    "getuid": 174, "geteuid": 175, "getgid": 176, "getegid": 177, "gettid": 178, "brk": 214,
    "munmap": 215, "mremap": 216, "mmap": 222, "mprotect": 226, "madvise": 233, "rseq": 293,
    "ioctl": 29, "clone": 220, "tgkill": 131, "newfstatat": 79, "prlimit64": 261, "clone3": 435,
    "pivot_root": 41, "capset": 91,
}  # fmt: skip
_JUDGED = frozenset({"ioctl", "clone", "tgkill", "newfstatat", "prlimit64", "clone3", "fcntl"})
"""Calls whose arguments are checked; all others in the tables except _OURS are allowed."""
_OURS = frozenset({"pivot_root", "capset"})
_MACHINES = {"x86_64": (0xC000_003E, _X86_64), "aarch64": (0xC000_00B7, _AARCH64)}

_LD, _JEQ, _JSET, _RET = 0x20, 0x15, 0x45, 0x06  # BPF: load word, jump if equal, if any bit, return
_ALLOW, _KILL, _ERRNO = 0x7FFF_0000, 0x8000_0000, 0x0005_0000

_libc = ctypes.CDLL(None, use_errno=True)


def supported() -> bool:
    """Whether the filter supports this machine."""
    return platform.system() == "Linux" and platform.machine() in _MACHINES


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """unshare(2). Raises OSError."""
    _checked(_libc.unshare(flags), "unshare")


def map_user(uid: int, gid: int) -> None:
    """Maps our user and group to themselves in a new user namespace. Raises OSError."""
    for name, text in (
        ("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")
    ):  # fmt: skip
        descriptor = os.open(f"/proc/self/{name}", os.O_WRONLY)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)


def empty_root() -> None:
    """Replaces the root with an empty, read-only file system. Requires our own mount namespace and
    its capabilities. Raises OSError."""
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    _checked(_libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None), "mount private")
    _checked(_libc.mount(b"tmpfs", b"/proc", b"tmpfs", flags, b"size=4k,mode=555"), "mount empty")
    os.chdir("/proc")
    numbers = _MACHINES[platform.machine()][1]
    _checked(_libc.syscall(numbers["pivot_root"], b".", b"."), "pivot_root")
    _checked(_libc.umount2(b".", _MNT_DETACH), "umount")
    os.chdir("/")
    _checked(_libc.mount(b"none", b"/", None, _MS_REMOUNT | _MS_RDONLY | flags, None), "remount")


def die_with_parent() -> None:
    """Requests SIGKILL when the parent ends."""
    _checked(_libc.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0), "prctl")


def undumpable() -> None:
    """Disables core dumps, and memory access by other processes of the same user."""
    _checked(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl")


def drop_capabilities() -> None:
    """Drops all capabilities from all sets (capset(2), version 3)."""
    header = ctypes.create_string_buffer(struct.pack("=Ii", 0x2008_0522, 0))
    nothing = ctypes.create_string_buffer(24)
    numbers = _MACHINES[platform.machine()][1]
    _checked(_libc.syscall(numbers["capset"], header, nothing), "capset")


def allow_only_computing() -> None:
    """Installs the filter permanently for this process and its threads. Raises OSError."""
    program = _filter(os.getpid())
    code = ctypes.create_string_buffer(program)
    described = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    )
    _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    _checked(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, described, 0, 0), "seccomp")


def _filter(own_pid: int) -> bytes:
    """BPF program over struct seccomp_data: number at 0, architecture at 4, argument i at 16 + 8i
    (low word first; both architectures are little-endian)."""
    architecture, numbers = _MACHINES[platform.machine()]
    steps: list[tuple[int, int, int, int]] = [
        (_LD, 0, 0, 4),
        (_JEQ, 1, 0, architecture),
        (_RET, 0, 0, _KILL),
        (_LD, 0, 0, 0),
    ]

    def when(name: str, body: list[tuple[int, int, int, int]]) -> None:
        """Adds `body` for the call `name`; it must end in a return."""
        steps.append((_JEQ, 0, len(body), numbers[name]))
        steps.extend(body)

    def refuse(number: int) -> tuple[int, int, int, int]:
        return (_RET, 0, 0, _ERRNO | number)

    allow = (_RET, 0, 0, _ALLOW)
    for name in numbers:
        if name not in _JUDGED | _OURS:
            when(name, [allow])
    when("ioctl", [refuse(errno.ENOTTY)])  # "is this a terminal?": no
    when("clone3", [refuse(errno.ENOSYS)])  # its flags are in memory; libc falls back to clone
    when("clone", [(_LD, 0, 0, 16), (_JSET, 0, 1, CLONE_THREAD), allow, refuse(errno.EPERM)])
    when(  # duplicates and flags; F_SETOWN, F_SETSIG and O_ASYNC could signal any process
        "fcntl",
        [(_LD, 0, 0, 24)]
        + [step for command in _FCNTL for step in ((_JEQ, 0, 1, command), allow)]
        + [(_JEQ, 0, 3, _F_SETFL), (_LD, 0, 0, 32), (_JSET, 1, 0, _O_ASYNC), allow,
           refuse(errno.EPERM)],
    )  # fmt: skip
    when("tgkill", [(_LD, 0, 0, 16), (_JEQ, 0, 1, own_pid), allow, refuse(errno.EPERM)])
    when(
        "newfstatat",
        [(_LD, 0, 0, 40), (_JSET, 0, 1, _AT_EMPTY_PATH), allow, refuse(errno.EACCES)],
    )
    when(  # reading limits, not setting them
        "prlimit64",
        [(_LD, 0, 0, 32), (_JEQ, 0, 3, 0), (_LD, 0, 0, 36), (_JEQ, 0, 1, 0), allow,
         refuse(errno.EPERM)],
    )  # fmt: skip
    steps.append(refuse(errno.EACCES))
    return b"".join(struct.pack("HBBI", *step) for step in steps)
