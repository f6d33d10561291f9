"""A program stops on request at any point of its main thread."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

HOLDS_THE_LOCK = """
with stop._cond:  # where a main thread is that was interrupted inside stop.wait()
    os.kill(os.getpid(), SIGNAL)
    sum(range(100_000))  # instructions, between which a handler runs
"""
IGNORES_SIGNALS = """
signal.pthread_sigmask(signal.SIG_BLOCK, [SIGNAL])  # the other thread gets it; nothing wakes us
os.kill(os.getpid(), SIGNAL)
"""
PROGRAM = """
import os, signal, threading
from prime_core.waiting import until_stopped
SIGNAL = signal.{name}
stop = until_stopped({how})
{doing}
stop.wait()
print("ended cleanly")
"""


def ran(doing: str, name: str = "SIGTERM", how: str = "") -> subprocess.CompletedProcess[str]:
    program = PROGRAM.format(doing=doing, name=name, how=how)
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("doing", [HOLDS_THE_LOCK, IGNORES_SIGNALS], ids=["locked", "deaf"])
def test_a_signal_ends_a_wait_wherever_the_main_thread_was(doing: str, name: str) -> None:
    ended = ran(doing, name)
    assert (ended.returncode, ended.stdout) == (0, "ended cleanly\n"), ended.stderr


def test_other_signals_end_nothing() -> None:
    asked = "signal.signal(signal.SIGUSR1, lambda *_: None); os.kill(os.getpid(), signal.SIGUSR1)"
    ended = ran(asked + "\nassert not stop.wait(0.2)\nos.kill(os.getpid(), SIGNAL)")
    assert (ended.returncode, ended.stdout) == (0, "ended cleanly\n"), ended.stderr


def test_a_second_signal_ends_at_once_where_that_is_wanted() -> None:
    twice = "os.kill(os.getpid(), SIGNAL)\nstop.wait()\nos.kill(os.getpid(), SIGNAL)"
    assert ran(twice).returncode == 0
    assert ran(twice, how="second_ends=True").returncode == -signal.SIGTERM
