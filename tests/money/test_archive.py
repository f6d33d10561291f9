"""The archive: files that are over leave the tables, and everything still answers for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa
from fastapi.testclient import TestClient
from money_kit import ManagerSide, key, open_manager

from prime_core.encoding import sha256
from prime_core.errors import ConflictError
from prime_core.ids import Digest
from prime_core.storage.base import digest_key, put_object
from prime_core.storage.directory import DirectoryStore
from prime_core.verdict import Reason
from prime_orchestrator import rollouts
from prime_orchestrator.api import intake, status
from prime_orchestrator.api.app import create_app
from prime_orchestrator.manager.archiving import KEPT_SECONDS, Archiver
from prime_orchestrator.manager.roots import post_roots
from prime_orchestrator.manager.settlement import CHAIN_BLOCK, CHAIN_TIME, settle_epochs
from prime_orchestrator.store import (
    archive,
    backup,
    groups,
    meta,
    open_store,
    opinions,
    rewards,
    schema,
    slashes,
    sqlite_url,
    submissions,
)
from prime_orchestrator.store.slashes import SlashRow
from prime_orchestrator.store.submissions import SubmissionRow, Wanted

HONEST, OTHER = key(10), key(11)
FILES = 12


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> ManagerSide:
    """A pool with twelve judged files of two nodes in epoch 0: two are rejected, one has a slash
    that is proposed, one has a group that may still be trained on."""
    url = request.getfixturevalue("empty_postgres") if request.param == "postgres" else None
    made = open_manager(tmp_path, url=url)
    made.publish(0)
    for node in (HONEST, OTHER):
        made.admit(node)
    with made.store.begin() as connection:
        meta.put(connection, meta.SERVES, "31337/0xPools/1")
        meta.put(connection, meta.RUN, made.context.run.raw().decode())
    return made


def filled(mgr: ManagerSide) -> list[SubmissionRow]:
    """The files, oldest first, settled by a reward root that has been claimable for an epoch."""
    rows = [mgr.submit((HONEST, OTHER)[at % 2]) for at in range(FILES)]
    ended = []
    for at, row in enumerate(rows):
        ended.append(mgr.judge(row, Reason.MALFORMED if at in (1, 5) else Reason.NONE))
        mgr.now.time += 1
    mgr.now.time += mgr.context.run.root_seconds
    post_roots(mgr.store, mgr.objects, mgr.context, mgr.now)
    run = mgr.context.run
    posted_at = int(mgr.now())
    epoch = posted_at // run.epoch_seconds
    end = (epoch + 2) * run.epoch_seconds + run.validity_seconds
    with mgr.store.begin() as connection:
        posted = {"chain_seq": schema.roots.c.id, "epoch": epoch, "block": 1}
        posted["posted_at"] = posted_at
        connection.execute(sa.update(schema.roots).values(**posted))
        meta.put(connection, CHAIN_BLOCK, "9")
        meta.put(connection, CHAIN_TIME, str(end))
    assert settle_epochs(mgr.store, mgr.objects, mgr.context, mgr.now) is not None
    with mgr.store.begin() as connection:
        connection.execute(sa.update(schema.reward_roots).values(claimable_at=end))
        meta.put(connection, CHAIN_TIME, str(end + run.epoch_seconds))
        batch = put_object(mgr.objects, b"batch")
        sealed = {"step": 9, "digest": batch, "body": "", "rows": 1, "mean_reward_micro": 0}
        connection.execute(
            sa.insert(schema.batches).values(**sealed, staleness_max=0, sealed_at=0.0)
        )
    return ended


def archiver(mgr: ManagerSide) -> Archiver:
    def a_day_later() -> float:
        return mgr.now() + KEPT_SECONDS

    return Archiver(
        mgr.store, mgr.objects, mgr.context, a_day_later, page_files=3, kept=1, kept_of_node=1
    )


def everything(mgr: ManagerSide, rows: list[SubmissionRow]) -> dict[str, object]:
    """What the public API and the commands say of the files and their nodes."""
    said: dict[str, object] = {}
    with TestClient(create_app(mgr.backend)) as http:
        for row in rows:
            for path in (
                f"/v1/submissions/{row.digest}",
                f"/v1/submissions/{row.digest}/opinions",
                f"/v1/leases/{row.lease_digest}",
            ):
                answer = http.get(path)
                assert answer.status_code == 200, path
                said[path] = answer.content
    with mgr.store.read() as connection:
        for row in rows:
            found, archived = rollouts.find(connection, row.digest[:20], mgr.objects)
            lease = rollouts.lease_of(connection, found, archived)
            said[row.digest] = rollouts.facts(connection, [found], archived), lease
        said["counts"] = submissions.counts(connection)
        said["accepted"] = submissions.accepted_among(connection, [HONEST.address, OTHER.address])
        said["void"] = submissions.expired_unjudged(connection)
        said["records"] = opinions.track_records(connection)
        said["pending"] = rewards.pending_units(connection, HONEST.address, 10**6)
    said["nodes"] = status.NodeList(mgr.backend).__dict__
    return said


def archived_names(mgr: ManagerSide) -> list[Digest]:
    with mgr.store.read() as connection:
        return [one.submission.digest for one in archive.every(connection, mgr.objects, Wanted())]


def test_an_archived_file_answers_as_before_and_survives_a_kill_and_a_restore(
    pool: ManagerSide, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opinions, "RECENT", 1)  # no more than the archiver keeps
    rows = filled(pool)
    disputed, trainable, held_up = rows[2].digest, rows[3].digest, rows[4].digest
    with pool.store.begin() as connection:
        slash = SlashRow(
            disputed, HONEST.address, OTHER.address, sha256(b""), 1, "1", "proposed", 0.0
        )
        slashes.add(connection, replace(slash, node=key(30).address))
        connection.execute(
            sa.update(schema.groups)
            .where(schema.groups.c.submission_digest == trainable)
            .values(policy_version=9)
        )
        connection.execute(
            sa.update(schema.jobs)
            .where(schema.jobs.c.submission_digest == held_up)
            .values(status="quarantined")
        )
    before = everything(pool, rows)
    objects = set(pool.objects.keys())

    with monkeypatch.context() as patched:  # killed between the object and the transaction

        def kill(*_: object) -> None:
            raise KeyboardInterrupt

        patched.setattr(archive, "move", kill)
        with pytest.raises(KeyboardInterrupt):
            archiver(pool).tick()
    (orphan,) = set(pool.objects.keys()) - objects
    assert archived_names(pool) == []

    worker = archiver(pool)
    assert [worker.tick() for _ in range(3)] == [3, 0, 0]
    assert {*pool.objects.keys()} - objects == {orphan}, "the same object again"
    names = archived_names(pool)
    over = [row.digest for at, row in enumerate(rows) if at not in (1, 2, 3, 4, 5)]
    assert names == over[:3]
    with pool.store.read() as connection:
        assert submissions.those(connection, names) == {}
        assert opinions.of_those(connection, names) == groups.of(connection, names) == {}
    assert everything(pool, rows) == before

    with pool.store.begin() as connection:  # the disputes end, and a further epoch is settled
        connection.execute(sa.delete(schema.slashes))
        connection.execute(sa.update(schema.jobs).values(status="done"))
        connection.execute(sa.update(schema.groups).values(policy_version=0))
        newest = rewards.newest_root(connection)
        assert newest is not None
        rewards.add_root(connection, replace(newest, epoch=newest.epoch + 1))
    before = everything(pool, rows)
    assert [worker.tick() for _ in range(3)] == [3, 0, 0]
    assert set(archived_names(pool)) >= {disputed, trainable, held_up}
    assert everything(pool, rows) == before

    again = intake.submit(pool.backend, rows[0].signed())  # handed in once more
    assert again == rows[0].receipt_answer()
    changed = rows[0].signed().submission.model_copy(update={"size": 1})
    signature = HONEST.sign(changed, pool.context.domain(changed))
    with pytest.raises(ConflictError, match="another file"):
        intake.submit(
            pool.backend,
            rows[0].signed().model_copy(update={"submission": changed, "signature": signature}),
        )

    backup.backup(pool.store, pool.objects, tmp_path / "backup")
    new = open_store(sqlite_url(tmp_path / "new.sqlite"))
    copy = DirectoryStore(tmp_path / "new-objects", "http://testserver", b"s" * 32)
    backup.restore(tmp_path / "backup", new, copy)
    assert backup.check(new, copy, read=True).absent == ()
    assert everything(replace(pool, store=new, objects=copy), rows) == before
    copy.delete(digest_key(rows[0].sha256))
    copy.delete(orphan)
    absent = {Digest("0x" + orphan.removeprefix("sha256/"))}
    assert set(backup.check(new, copy, read=True).absent) == absent

    new.close()
