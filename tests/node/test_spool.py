"""Finished files survive: crashes between any two steps, outages, refusals, a full disk."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from bridge_kit import Kit, hand_in
from node_world import NODE

from prime_core.clock import Clock
from prime_core.errors import ConflictError, PrimeError, UnavailableError, UntrustedError
from prime_core.logs import fields
from prime_core.messages import ReceiptAnswer
from prime_core.rollout import SignedSubmission
from prime_core.signing import Statement
from prime_node import uploader as node_uploader
from prime_node.api import NodeApi
from prime_node.spool import Spool
from prime_node.uploader import Uploader, deliver


def api(kit: Kit) -> NodeApi:
    return NodeApi(kit.world.url, NODE)


def restarted(kit: Kit) -> Spool:
    return Spool(kit.folder.parent / "spool", now=time.time)


def test_file_is_delivered_by_the_next_agent(kit: Kit) -> None:
    lease = hand_in(kit)
    again = restarted(kit)
    uploader = Uploader(again, lambda: api(kit), rng=random.Random(0))
    uploader.start()
    uploader.drain(20, time.monotonic)
    assert uploader.stop(10) == 0
    entry = again.find(lease)
    assert entry is not None
    assert entry.state == "receipted"
    assert entry.receipt is not None
    assert not entry.path.exists()
    assert len(kit.world.submissions()) == 1


class _Killed(BaseException):
    """A crash at one point of the delivery."""


@pytest.mark.parametrize("dies_in", ["upload_target", "upload", "submit"])
def test_delivery_killed_after_any_step_is_finished_and_counts_once(
    kit: Kit, dies_in: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lease = hand_in(kit)
    (entry,) = kit.spool.waiting()
    real = getattr(NodeApi, dies_in)

    def does_and_dies(*arguments: object) -> object:
        real(*arguments)
        raise _Killed

    monkeypatch.setattr(NodeApi, dies_in, does_and_dies)
    with pytest.raises(_Killed):
        deliver(entry, kit.spool, api(kit))
    monkeypatch.undo()

    again = restarted(kit)
    (entry,) = again.waiting()
    with caplog.at_level("INFO", "prime.node.uploader"):
        assert deliver(entry, again, api(kit)) is not None
    about = fields(kind="file", status="delivered", node=NODE.address, lease=lease, step=0)
    assert [one for one in caplog.records if vars(one).items() >= about.items()]
    assert len(kit.world.submissions()) == 1
    assert again.find(lease).state == "receipted"  # type: ignore[union-attr]


def test_a_file_that_cannot_be_delivered_holds_up_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting, done = ["unreadable", "good"], threading.Event()

    def one_try(entry: str, *_: object) -> None:
        if entry == "unreadable":
            raise UnavailableError("it cannot be read: Input/output error")
        waiting.remove(entry)
        done.set()

    monkeypatch.setattr(node_uploader, "deliver", one_try)
    monkeypatch.setattr(node_uploader, "FIRST_PAUSE", 0.01)
    spool: Any = SimpleNamespace(changed=threading.Condition(), waiting=lambda: list(waiting))
    connection: Any = SimpleNamespace(close=lambda: None)
    uploader = Uploader(spool, lambda: connection, rng=random.Random(0))
    uploader.start()
    assert done.wait(60)
    assert uploader.stop(10) == 1


def test_orchestrator_down_keeps_the_file(kit: Kit) -> None:
    hand_in(kit)
    kit.world.stop_api()
    (entry,) = kit.spool.waiting()
    with pytest.raises(UnavailableError):
        deliver(entry, kit.spool, api(kit))
    assert entry.path.exists()
    kit.world.start_api()
    assert deliver(entry, kit.spool, api(kit)) is not None


def test_refusal_is_final_and_says_why(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = hand_in(kit)
    (entry,) = kit.spool.waiting()
    late = time.time() + 10_000
    object.__setattr__(kit.world.backend, "now", lambda: late)
    monkeypatch.setattr(time, "time", lambda: late)
    late_api = NodeApi(kit.world.url, NODE)
    late_api.client._clock = Clock(now=lambda: late)
    assert deliver(entry, kit.spool, late_api) is None
    refused = kit.spool.find(lease)
    assert refused is not None
    assert refused.state == "refused"
    assert "deadline" in refused.reason
    assert not refused.path.exists()


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(404, text="<html>no such page</html>"),
        httpx.Response(400, json={"type": "about:blank", "detail": "bad gateway"}),
        httpx.Response(200, json={"a field of a later version": 1}),
        httpx.Response(200, text="<html>log in</html>"),
    ],
    ids=["bare 404", "foreign 400", "unknown field", "no JSON"],
)
@pytest.mark.parametrize("route", ["/upload", "/v1/submissions"])
def test_answer_that_is_not_the_orchestrators_keeps_the_file(
    kit: Kit, answer: httpx.Response, route: str
) -> None:
    hand_in(kit)
    (entry,) = kit.spool.waiting()
    between, network = api(kit), httpx.HTTPTransport()

    def proxy(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith(route):
            return answer
        return network.handle_request(request)

    between.client._http = httpx.Client(transport=httpx.MockTransport(proxy))
    with pytest.raises(PrimeError):
        deliver(entry, kit.spool, between)
    assert entry.path.exists()
    assert deliver(entry, kit.spool, api(kit)) is not None


def test_receipt_of_another_key_is_not_taken(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    hand_in(kit)
    (entry,) = kit.spool.waiting()
    backend = kit.world.backend

    def forged(statement: Statement) -> object:
        return NODE.sign(statement, backend.context.domain(statement))

    with monkeypatch.context() as patched:
        patched.setattr(type(backend), "sign", lambda self, statement: forged(statement))
        uploader = Uploader(kit.spool, lambda: api(kit), rng=random.Random(0))
        with pytest.raises(Exception, match="receipt is not the pool manager's"):
            deliver(entry, kit.spool, api(kit))
    assert kit.spool.waiting(), "it is kept until a true receipt comes"
    del uploader


def test_receipt_from_the_future_is_not_taken(kit: Kit) -> None:
    """It would put off the time from which the node may post its own leaf."""
    hand_in(kit)
    (entry,) = kit.spool.waiting()
    early = NodeApi(kit.world.url, NODE, now=lambda: time.time() - 3600)
    with pytest.raises(UntrustedError, match="s ahead"):
        deliver(entry, kit.spool, early)
    assert kit.spool.waiting(), "it is kept until a true receipt comes"


def test_one_lease_takes_one_file(kit: Kit) -> None:
    lease = hand_in(kit)
    (entry,) = kit.spool.waiting()
    other = entry.body.model_copy(
        update={"submission": entry.body.submission.model_copy(update={"sha256": "0x" + "33" * 32})}
    )
    with pytest.raises(ConflictError, match="another file"):
        kit.spool.add(entry.submission_digest, SignedSubmission.model_validate(other), entry.lease)
    again = kit.spool.add(entry.submission_digest, entry.body, entry.lease)
    assert again.lease_digest == lease


def test_copy_that_was_never_journalled_is_swept_away(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    Spool(folder, now=time.time)
    (folder / ("ab" * 32 + ".parquet")).write_bytes(b"left by a crash")
    (folder / "incoming-1.parquet.part").write_bytes(b"left by a crash")
    Spool(folder, now=time.time)
    assert sorted(path.suffix for path in folder.iterdir() if "parquet" in path.name) == []


def test_full_disk_is_said_and_leaves_no_half_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(tmp_path / "spool", now=time.time)
    (tmp_path / "f").write_bytes(b"x" * 100)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UnavailableError, match="No space left on device"):
        spool.take_in(tmp_path, "f")
    assert not list((tmp_path / "spool").glob("*.parquet*"))


def test_receipt_is_kept_with_its_entry(kit: Kit) -> None:
    lease = hand_in(kit)
    (entry,) = kit.spool.waiting()
    receipt = deliver(entry, kit.spool, api(kit))
    kept = restarted(kit).find(lease)
    assert kept is not None
    assert isinstance(kept.receipt, ReceiptAnswer)
    assert kept.receipt == receipt
