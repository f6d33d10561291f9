"""The trainer's origin: it knows who has begun to carry a policy, and forgets none."""

from __future__ import annotations

import threading
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from broadcast_world import Run

from prime_broadcast.server import Server

publish = pytest.importorskip("prime_trainer.publish", reason="needs the trainer's extra: torch")


def test_a_publication_is_over_once_the_first_relay_asks_for_it(run: Run) -> None:
    run.publish()
    asked = publish._Asked(run.root)
    assert not asked.wait(0, 60.0), "no reader ever came: none is waited for"
    with Server(asked) as server:
        urlopen(f"{server.url}/policies/0/manifest.json").read()
        assert asked.wait(0, 60.0)
        assert not asked.wait(1, 0.01)
        run.publish()
        taken: list[bool] = []
        waiter = threading.Thread(target=lambda: taken.append(asked.wait(1, 60.0)))
        waiter.start()
        urlopen(f"{server.url}/policies/1/delta-0").read()
        waiter.join()
    assert taken == [True]


def test_the_address_of_nothing_counts_as_no_version(run: Run, tmp_path: Path) -> None:
    run.publish()
    asked = publish._Asked(run.root)
    for path in ("/policies/index.json", "/", "/policies/../../etc/passwd"):
        asked.find(path)
    assert not asked.wait(0, 60.0)


def test_a_version_that_is_not_there_ends_no_wait_however_high_its_number(run: Run) -> None:
    run.publish()
    run.publish()
    asked = publish._Asked(run.root)
    with Server(asked) as server:
        for path in ("999999999/x", "999999999/manifest.json", "1/no-such-file"):
            with pytest.raises(HTTPError, match="404"):
                urlopen(f"{server.url}/policies/{path}")
        assert not asked.wait(0, 60.0), "no reader took anything yet"
        urlopen(f"{server.url}/policies/0/manifest.json").read()
        assert asked.wait(0, 60.0)
        assert not asked.wait(1, 0.01), "only what was taken counts"
