"""How long the manager's loops stand still when the process that runs them is killed.

Processes on one PostgreSQL run the loop of their lease as `orchestrator serve` does
(store/leaders.py), and each prints a line when it holds the lease. The holder gets SIGKILL at a
random instant of its beat; `takeover_s` is the longest time until another process holds the lease.
"""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from contextlib import closing
from statistics import mean

from bench.form import Row
from bench.servers import Database, empty, end, line, start
from prime_core.loops import Loops
from prime_orchestrator.store import open_store
from prime_orchestrator.store.leaders import BEAT_SECONDS, LoopLease

KILLS, QUICK_KILLS = 10, 1


def rows(quick: bool, database: Database) -> list[Row]:
    """The rows of `bench orchestrator`; empties the database."""
    empty(database)
    with closing(open_store(database.url)) as store:
        store.migrate()
    kills, draw = QUICK_KILLS if quick else KILLS, random.Random(7)
    children = [start("bench.takeover", database.url, "0")]
    try:
        _wait_for(children[0])
        seconds = []
        for number in range(1, kills + 1):
            holder, other = children[-1], start("bench.takeover", database.url, str(number))
            children.append(other)
            if line(other) != "watches":
                raise RuntimeError("a process did not start")
            time.sleep(2 * BEAT_SECONDS + BEAT_SECONDS * draw.random())
            killed = time.monotonic()
            holder.kill()
            _wait_for(other)
            seconds.append(time.monotonic() - killed)
    finally:
        end(children)
    return [
        Row("takeover_s", max(seconds),
            f"s from SIGKILL of the process that runs the loops until another may, most of {kills}",
            bar=None if quick else 5),
        Row("takeover_mean_s", mean(seconds), "s, mean"),
    ]  # fmt: skip


def _wait_for(child: subprocess.Popen[str]) -> None:
    """Returns once the process says that it holds the lease."""
    while (said := line(child)) != "holds":
        if not said:
            raise RuntimeError("a process ended")


def _main(url: str, name: str) -> None:
    """Watches or holds the lease until it is killed."""
    lease = LoopLease(open_store(url), f"process {name}", now=time.monotonic)
    crashed, said = threading.Event(), ""

    def tick() -> None:
        nonlocal said
        now = "holds" if lease.tick() else "watches"
        if now != said:
            print(now, flush=True)
            said = now

    Loops(on_crash=crashed.set).start("lease", tick, BEAT_SECONDS)
    crashed.wait()


if __name__ == "__main__":
    _main(*sys.argv[1:])
