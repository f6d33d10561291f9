"""Runs a command that dies with its parent: `guard.py PARENT_PID command …`.

It is a small separate program, not a `preexec_fn`, because the agent has threads. On Linux,
PR_SET_PDEATHSIG (prctl(2)), which survives execve, kills the process; elsewhere nothing does.
Standard library only: it runs with `-I -S`.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent = int(sys.argv[1])
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
        if os.getppid() != parent:  # the parent died before prctl
            sys.exit(0)
    os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606 - the agent's own command


if __name__ == "__main__":
    main()
