"""Waiting for what does not answer: forever once it was there, bounded before; and how times and
log lines look."""

from __future__ import annotations

import logging
import re
import threading

import pytest

from prime_core.errors import UnavailableError
from prime_core.logs import log_to_stderr
from prime_core.times import utc
from prime_core.waiting import StoppedError, until_answered


class Away:
    """A clock that each question moves by a second; a peer that is away for `silent` of them."""

    def __init__(self, silent: int) -> None:
        self.time, self.silent = 0.0, silent
        self.reported: list[float] = []

    def clock(self) -> float:
        return self.time

    def ask(self) -> str:
        self.time += 1.0
        if self.time <= self.silent:
            raise UnavailableError("127.0.0.1:9 does not answer")
        return "here"

    def tell(self, error: UnavailableError, wait: float) -> None:
        self.reported.append(wait)


class Impatient(threading.Event):
    """Waits no time, and is not set by it."""

    def wait(self, timeout: float | None = None) -> bool:
        return self.is_set()


def test_who_once_answered_is_asked_until_there_is_an_answer() -> None:
    peer = Away(silent=500)
    assert until_answered(peer.ask, Impatient(), peer.tell, clock=peer.clock) == "here"
    assert peer.reported[:7] == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert len(peer.reported) == 500


def test_who_never_answered_is_given_up_with_what_to_check() -> None:
    peer = Away(silent=500)
    with pytest.raises(UnavailableError) as caught:
        until_answered(peer.ask, Impatient(), peer.tell, give_up=10.0, clock=peer.clock)
    assert peer.time == 10
    assert peer.reported[-1] == 1.0, "the last pause is no longer than what is left"
    said = str(caught.value)
    assert said.startswith("127.0.0.1:9 does not answer; no answer for 10 s")
    assert "--orchestrator, --rpc" in said
    assert "\n" not in said


def test_an_answer_in_time_counts_at_the_first_start_too() -> None:
    peer = Away(silent=9)
    found = until_answered(peer.ask, Impatient(), peer.tell, give_up=10.0, clock=peer.clock)
    assert found == "here"


def test_a_stop_ends_a_wait() -> None:
    stop, peer = Impatient(), Away(silent=1)
    stop.set()
    with pytest.raises(StoppedError):
        until_answered(peer.ask, stop, peer.tell, clock=peer.clock)


def test_times_are_utc_and_say_so() -> None:
    assert utc(0) == "1970-01-01 00:00:00Z"
    assert utc(1_763_688_425.9) == "2025-11-21 01:27:05Z"


def test_a_log_line_begins_with_its_time_in_utc(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", logging.WARNING)
    log_to_stderr("info")
    logging.getLogger("prime.test").info("hello")
    line = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ \[info {5}\] hello\n"
    assert re.fullmatch(line, capsys.readouterr().err)
