"""Ports for test servers: two processes draw none twice."""

from __future__ import annotations

import subprocess
import sys

from devnet.ports import BLOCK, FIRST, LAST, free_port

_CHILD = f"""
from devnet.ports import free_port
print(*(free_port() for _ in range({2 * BLOCK})), flush=True)
input()
"""
_FORKS = f"""
import os
from devnet.ports import free_port
free_port()
if (child := os.fork()) == 0:
    print(free_port(), flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(*(free_port() for _ in range({BLOCK})))
"""


def test_a_port_is_drawn_by_one_process_at_a_time_and_not_twice_in_a_row() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with child:
        assert child.stdout is not None
        theirs = {int(port) for port in child.stdout.readline().split()}
        ours = [free_port() for _ in range(4 * (LAST - FIRST))]
        child.communicate("\n")
    assert child.returncode == 0
    assert len(theirs) == 2 * BLOCK
    assert not theirs & set(ours)
    assert all(FIRST <= port <= LAST for port in ours)
    drawn: dict[int, int] = {}
    for number, port in enumerate(ours):
        assert number - drawn.get(port, -LAST) > BLOCK
        drawn[port] = number


def test_a_forked_process_draws_no_port_of_its_parent() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FORKS], capture_output=True, text=True, check=True, timeout=60
    )
    theirs, *ours = map(int, done.stdout.split())
    assert len(ours) == BLOCK
    assert theirs not in ours
