"""Files that were uploaded and never handed in: deleted, and nothing else ever is."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import re
import threading
from typing import Any

import httpx
import pytest
from judges import only
from orchestrator_world import AUDIENCE, Session, World, sweep

from prime_core.encoding import sha256
from prime_core.errors import ConflictError, NotFoundError, UntrustedError
from prime_core.messages import UploadRequest
from prime_core.storage.base import digest_key, put_object
from prime_core.storage.directory import DirectoryStore
from prime_core.task import SignedLease
from prime_orchestrator.api import intake, leasing
from prime_orchestrator.manager import uploads
from prime_orchestrator.store import submissions


def staged(world: World) -> list[str]:
    return list(world.backend.objects.keys(uploads.PREFIX))


def test_what_is_handed_in_stays_and_what_is_not_goes_after_the_grace(world: World) -> None:
    first, second = world.member(1), world.member(2)
    world.hand_in(first, b"handed in")
    assert staged(world) == [], "no second copy is kept"
    lease = world.lease(second)
    assert world.upload(second, lease, b"never handed in").status_code == 204
    (key,) = staged(world)
    world.clock.advance(lease.lease.deadline - world.clock() + uploads.GRACE_SECONDS)
    assert sweep(world.backend) == 0, "the grace is not over"
    assert staged(world) == [key]
    world.clock.advance(1)
    assert sweep(world.backend) == 1
    assert staged(world) == []
    assert sweep(world.backend) == 0
    assert world.backend.objects.get(digest_key(sha256(b"handed in")), 100) == b"handed in"
    assert "\nprime_uploads_swept_total 1.0\n" in world.http.get("/metrics").text


def test_a_node_cannot_have_an_object_of_ours_deleted(world: World) -> None:
    """It uploads the very bytes of one, before or after we write it."""
    session = world.member(1)
    lease = world.lease(session)
    assert world.upload(session, lease, b"a root's leaves").status_code == 204
    ours = put_object(world.backend.objects, b"a root's leaves")
    world.clock.advance(lease.lease.deadline - world.clock() + uploads.GRACE_SECONDS + 1)
    assert sweep(world.backend) == 1
    assert world.backend.objects.get(digest_key(ours), 100) == b"a root's leaves"


def test_an_upload_is_handed_in_at_the_last_moment_while_others_sweep(world: World) -> None:
    """Another orchestrator on the store, whose clock runs ahead by less than the grace."""
    session = world.member(1)
    lease = world.lease(session)
    assert world.upload(session, lease, b"late").status_code == 204
    world.clock.advance(lease.lease.deadline - world.clock())
    now = world.clock() + uploads.GRACE_SECONDS
    other = dataclasses.replace(world.backend, now=lambda: now)
    assert sweep(other) == 0
    answer = world.post("/v1/submissions", world.claim(session.account, lease, b"late"))
    assert answer.status_code == 200, answer.text
    assert world.backend.objects.get(digest_key(sha256(b"late")), 100) == b"late"


def test_every_file_of_a_lease_is_swept_however_many_it_announced(world: World) -> None:
    session = world.member(1)
    lease = world.lease(session)
    for number in range(4):
        assert world.upload(session, lease, b"file %d" % number).status_code == 204
    assert len(staged(world)) == 4
    assert all(re.fullmatch(r"uploads/\d+-[0-9a-f]{64}", key) for key in staged(world))
    signed = world.claim(session.account, lease, b"file 2")
    assert world.post("/v1/submissions", signed).status_code == 200
    world.clock.advance(lease.lease.deadline - world.clock() + uploads.GRACE_SECONDS + 1)
    assert sweep(world.backend) == 3


def test_nothing_is_left_on_a_disk_of_files_that_were_handed_in_or_swept(world: World) -> None:
    """Not even empty folders, of which there would be one for each second of leases."""
    first, second = world.member(1), world.member(2)
    world.hand_in(first, b"handed in")
    lease = world.lease(second)
    assert world.upload(second, lease, b"never handed in").status_code == 204
    world.clock.advance(lease.lease.deadline - world.clock() + uploads.GRACE_SECONDS + 1)
    assert sweep(world.backend) == 1
    objects = world.backend.objects
    assert isinstance(objects, DirectoryStore)
    assert not list((objects.root / uploads.PREFIX).iterdir())


def kept(world: World) -> set[str]:
    return set(world.backend.objects.keys("sha256/"))


def test_of_files_handed_in_at_once_for_one_lease_only_the_one_that_is_taken_stays(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has passed every check when the first of them is written down."""
    session = world.member(1)
    lease = world.lease(session)
    files = [b"file %d" % number for number in range(4)]
    for data in files:
        assert world.upload(session, lease, data).status_code == 204
    before, real, together = kept(world), intake._check_file, threading.Barrier(4, timeout=60)

    def checked(*arguments: Any) -> None:
        real(*arguments)
        together.wait()

    monkeypatch.setattr(intake, "_check_file", checked)
    ended: list[Exception | None] = []

    def hand_in(data: bytes) -> None:
        try:
            intake.submit(world.backend, world.claim(session.account, lease, data))
        except ConflictError as error:
            ended.append(error)
        else:
            ended.append(None)

    threads = [threading.Thread(target=hand_in, args=(data,)) for data in files]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(one is None for one in ended) == [False, False, False, True]
    with world.backend.store.read() as connection:
        taken = submissions.of_lease(connection, world.lease_digest(lease))
    assert taken is not None
    assert kept(world) - before == {digest_key(taken.sha256)}
    world.clock.advance(lease.lease.deadline - world.clock() + uploads.GRACE_SECONDS + 1)
    assert sweep(world.backend) == 3
    assert kept(world) - before == {digest_key(taken.sha256)}


def test_a_file_that_is_handed_in_again_while_it_moves_is_the_same_file(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node whose first request timed out asks again. The answer that the file is nowhere would be
    final: it would drop the file and never have its receipt."""
    session = world.member(1)
    lease = world.lease(session)
    size, data = DirectoryStore.size, b"handed in"
    again = UploadRequest(sha256=sha256(data), size=len(data))
    claim = world.claim(session.account, lease, data)

    def moves_first(store: DirectoryStore, key: str) -> int:
        if key.startswith(uploads.PREFIX):
            monkeypatch.setattr(DirectoryStore, "size", size)
            uploads.keep(store, lease.lease.deadline, sha256(data))
        return size(store, key)

    assert world.upload(session, lease, data).status_code == 204
    monkeypatch.setattr(DirectoryStore, "size", moves_first)
    ask = leasing.UploadAsk(session.account.address, world.lease_digest(lease), again)
    answer = leasing.place(world.backend, again, only(leasing.upload_all(world.backend, [ask])))
    assert answer.exists
    world.backend.objects.put(uploads.staged_key(lease.lease.deadline, sha256(data)), data)
    world.backend.objects.delete(digest_key(sha256(data)))
    monkeypatch.setattr(DirectoryStore, "size", moves_first)
    assert intake.submit(world.backend, claim).receipt.received_at == world.clock()


def test_a_repeated_announcement_keeps_no_other_node_waiting(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, other = world.member(1), world.member(2)
    first, second = world.lease(slow), world.lease(other)
    assert world.upload(slow, first, b"again").status_code == 204
    asked, free = threading.Event(), threading.Event()

    def stalls(store: DirectoryStore, key: str) -> int:
        asked.set()
        assert free.wait(20)
        raise NotFoundError("no such object")

    monkeypatch.setattr(DirectoryStore, "size", stalls)

    async def ask() -> tuple[httpx.Response, httpx.Response]:
        transport = httpx.ASGITransport(world.http.app)
        async with httpx.AsyncClient(transport=transport, base_url=AUDIENCE) as client:

            def announce(session: Session, lease: SignedLease, data: bytes) -> Any:
                path = f"/v1/leases/{world.lease_digest(lease)}/upload"
                request = UploadRequest(sha256=sha256(data), size=len(data))
                raw = request.model_dump_json().encode()
                signed = world.signature("POST", path, raw, session)
                return client.post(path, content=raw, headers=signed)

            repeated = asyncio.create_task(announce(slow, first, b"again"))
            assert await asyncio.to_thread(asked.wait, 20)
            try:
                answered = await asyncio.wait_for(announce(other, second, b"new"), 10)
            finally:
                free.set()
            return answered, await repeated

    for answer in asyncio.run(ask()):
        assert answer.status_code == 200
        assert answer.json()["url"]


def test_a_file_whose_intake_was_killed_before_it_was_moved_is_never_swept_away(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has its receipt: validators read it where it lies, and the sweep moves it."""
    session = world.member(1)
    lease = world.lease(session)
    data = b"handed in"
    assert world.upload(session, lease, data).status_code == 204

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(uploads, "keep", killed)
        with pytest.raises(KeyboardInterrupt):
            intake.submit(world.backend, world.claim(session.account, lease, data))
    objects, deadline = world.backend.objects, lease.lease.deadline
    assert uploads.read(objects, deadline, sha256(data), 100) == data
    world.clock.advance(deadline - world.clock() + uploads.GRACE_SECONDS + 1)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        assert sweep(world.backend) == 0
    assert len(staged(world)) == 1, "no room to move it: it stays where it is"
    assert sweep(world.backend) == 0
    assert staged(world) == []
    assert uploads.read(objects, deadline, sha256(data), 100) == data
    assert objects.get(digest_key(sha256(data)), 100) == data


def test_a_full_disk_after_the_receipt_was_written_takes_no_file_away(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = world.member(1)
    lease = world.lease(session)
    assert world.upload(session, lease, b"file").status_code == 204
    signed = world.claim(session.account, lease, b"file")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        assert world.post("/v1/submissions", signed).status_code == 200
    assert uploads.read(world.backend.objects, lease.lease.deadline, sha256(b"file"), 9) == b"file"
    assert sweep(world.backend) == 0
    assert staged(world) == []
    assert digest_key(sha256(b"file")) in kept(world)


def test_a_damaged_file_is_not_read_as_what_it_was(world: World) -> None:
    session = world.member(1)
    lease = world.lease(session)
    assert world.upload(session, lease, b"file").status_code == 204
    (key,) = staged(world)
    world.backend.objects.put(key, b"fil3")
    with pytest.raises(UntrustedError, match="does not hash"):
        uploads.read(world.backend.objects, lease.lease.deadline, sha256(b"file"), 100)
    with pytest.raises(NotFoundError):
        uploads.read(world.backend.objects, lease.lease.deadline, sha256(b"none"), 100)


def full(_descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
