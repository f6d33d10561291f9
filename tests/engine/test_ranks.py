"""The ranks of an engine: the end of one is named, and never waited for in silence."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from prime_core.errors import FatalError, UnavailableError
from prime_engine.batch import RowSet
from prime_engine.ranks import Ranks
from prime_engine.sizing import Cards

LOST = "rank 1 of the engine ended while in use: "


class Rank:
    """A rank's engine: it steps, or fails as rank 0 asks by the temperature of the rows."""

    def __init__(self, cards: Cards) -> None:
        self._fails = 0.0

    def add(self, requests: Any, temperature: float, sink: Any) -> RowSet:
        self._fails = temperature
        return RowSet(requests, temperature)

    def step(self) -> None:
        if self._fails:
            raise MemoryError("CUDA out of memory")

    def close(self) -> None:
        pass


def no_model(cards: Cards) -> Rank:
    raise UnavailableError("no model can be loaded")


@pytest.fixture
def start() -> Iterator[Callable[..., tuple[Ranks, queue.SimpleQueue[FatalError]]]]:
    started: list[Ranks] = []

    def made(load: Any = Rank) -> tuple[Ranks, queue.SimpleQueue[FatalError]]:
        lost: queue.SimpleQueue[FatalError] = queue.SimpleQueue()
        started.append(Ranks(load, Cards(2), lost.put))
        return started[-1], lost

    before = dict(os.environ)
    yield made
    for one in started:
        one.close()
    os.environ.clear()
    os.environ.update(before)


def test_a_rank_that_is_killed_is_named_and_ends_what_waits_for_it(start: Any) -> None:
    ranks, lost = start()
    ranks.require_loaded()
    ranks.step()
    os.kill(ranks._children[0].pid, signal.SIGKILL)
    assert str(lost.get(timeout=60)) == LOST + "status -9"
    with pytest.raises(FatalError, match=LOST), ranks.together():
        raise RuntimeError("Connection closed by peer")
    with pytest.raises(FatalError, match=LOST):
        ranks.require_loaded()


def test_what_a_rank_lacked_is_said(start: Any) -> None:
    ranks, lost = start()
    ranks.require_loaded()
    ranks.add(RowSet((), 1.0))
    ranks.step()
    assert str(lost.get(timeout=60)) == LOST + "CUDA out of memory"


def test_a_failure_while_all_ranks_live_stays_what_it_is(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prime_engine.ranks.NOTICE_SECONDS", 0.0)
    ranks, lost = start()
    ranks.require_loaded()
    with pytest.raises(RuntimeError, match="shapes"), ranks.together():
        raise RuntimeError("shapes cannot be multiplied")
    ranks.close()
    assert lost.empty(), "its own end is no loss"


def test_a_rank_that_cannot_load_says_why(start: Any) -> None:
    ranks, lost = start(no_model)
    with pytest.raises(UnavailableError, match="rank 1: no model can be loaded"):
        ranks.require_loaded()
    ranks.close()
    assert lost.empty()


STUCK = """
import os, signal, sys, threading
sys.path.insert(0, sys.argv[1])
from test_ranks import Rank
from prime_engine import ranks
from prime_engine.sizing import Cards
if __name__ == "__main__":
    ranks.END_SECONDS = 0.1
    made = ranks.Ranks(Rank, Cards(2), lambda error: print(error, flush=True))
    made.require_loaded()
    os.kill(made._children[0].pid, signal.SIGKILL)
    threading.Event().wait()  # as in a collective
"""


def test_a_process_that_waits_in_a_collective_ends(tmp_path: Path) -> None:
    script = tmp_path / "stuck.py"
    script.write_text(STUCK)
    done = subprocess.run(
        [sys.executable, script, Path(__file__).parent],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout == LOST + "status -9\n"
    assert done.returncode == FatalError.exit_code
