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


def test_a_port_is_drawn_by_one_process_at_a_time_and_not_twice_in_a_row() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with child:
        assert child.stdout is not None
        theirs = [int(port) for port in child.stdout.readline().split()]
        ours = [free_port() for _ in range((LAST - FIRST) // 2)]
        child.communicate("\n")
    assert child.returncode == 0
    assert len(set(theirs)) == 2 * BLOCK
    assert not set(theirs) & set(ours)
    last = ours[-2 * BLOCK :]
    assert len(set(last)) == 2 * BLOCK
    assert all(FIRST <= port <= LAST for port in ours)
