"""The archive: files that are over leave the tables, and everything still answers for them."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from fastapi.testclient import TestClient
from money_kit import VALIDATOR, ManagerSide, key, open_manager
from pools import deployment
from prometheus_client import generate_latest
from typer.testing import CliRunner

from devnet.s3 import BUCKET, S3Server
from prime_core.deployment import Periods
from prime_core.encoding import sha256
from prime_core.errors import ConflictError, NotFoundError, PrimeError, UserError
from prime_core.ids import ZERO_DIGEST, Digest
from prime_core.signing import LocalSigner
from prime_core.storage.base import ObjectStore, digest_key, put_object
from prime_core.storage.directory import DirectoryStore
from prime_core.storage.s3 import S3Store
from prime_core.transport.client import OrchestratorClient
from prime_core.verdict import Reason
from prime_orchestrator import rollouts, scheduler
from prime_orchestrator.api import intake, status
from prime_orchestrator.api.app import create_app
from prime_orchestrator.api.kept import KeptFor
from prime_orchestrator.api.metrics import PoolMetrics, RequestCounts
from prime_orchestrator.cli.main import app
from prime_orchestrator.manager.archiving import KEPT_SECONDS, Archiver
from prime_orchestrator.manager.endings import void
from prime_orchestrator.manager.planting import Planted, reveal
from prime_orchestrator.manager.roots import post_roots
from prime_orchestrator.manager.settlement import (
    CHAIN_BLOCK,
    CHAIN_TIME,
    refresh_credits,
    settle_epochs,
)
from prime_orchestrator.serve import place_of
from prime_orchestrator.store import (
    archive,
    backup,
    chain,
    evaluations,
    groups,
    leases,
    meta,
    nodes,
    open_store,
    opinions,
    removal,
    rewards,
    schema,
    slashes,
    sqlite_url,
    submissions,
)
from prime_orchestrator.store.archive import Page
from prime_orchestrator.store.opinions import OpinionRow
from prime_orchestrator.store.removal import DAY_SECONDS, KEPT_POLICIES, Removed
from prime_orchestrator.store.slashes import SlashRow
from prime_orchestrator.store.submissions import SubmissionRow, Wanted

HONEST, OTHER, LIAR, OPEN, PLANT = (key(number) for number in range(10, 15))
EVERYONE = (HONEST, OTHER, LIAR, OPEN, PLANT)
PLANTED = Planted(frozenset({PLANT.address}), b"s" * 32)
FILES = 12


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def pool(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> ManagerSide:
    """A pool of two nodes, whose readers look at no more than the archiver of these tests keeps."""
    monkeypatch.setattr(opinions, "RECENT", 1)
    monkeypatch.setattr(submissions, "COMPUTE_FILES", 1)
    monkeypatch.setattr(scheduler, "window", lambda _: 1)
    monkeypatch.setattr(status, "LEASES_SHOWN", 3)
    url = request.getfixturevalue("empty_postgres") if request.param == "postgres" else None
    made = open_manager(tmp_path, url=url)
    made.publish(0)
    for node in (HONEST, OTHER):
        made.admit(node)
    with made.store.begin() as connection:
        meta.put(connection, meta.SERVES, "31337/0xPools/1")
        meta.put(connection, meta.RUN, made.context.run.raw().decode())
    return made


def filled(mgr: ManagerSide, copies: bool = False) -> list[SubmissionRow]:
    """Twelve files of two nodes, oldest first, of which two are void. `copies`: the second of these
    has the bytes of the third file."""
    rows: list[SubmissionRow] = []
    for at in range(FILES):
        make = partial(bytes_of, mgr, rows[2]) if copies and at == 5 else None
        rows.append(mgr.submit((HONEST, OTHER)[at % 2], make=make))
    ended = []
    for at, row in enumerate(rows):
        ended.append(mgr.judge(row, Reason.MALFORMED if at in (1, 5) else Reason.NONE))
        mgr.now.time += 1
    settle(mgr)
    return ended


def bytes_of(mgr: ManagerSide, row: SubmissionRow, *_: object) -> bytes:
    return mgr.objects.get(digest_key(row.sha256), row.size)


def settle(mgr: ManagerSide) -> None:
    """All files are settled by a reward root that has been claimable for an epoch."""
    mgr.now.time += mgr.context.run.root_seconds
    post_roots(mgr.store, mgr.objects, mgr.context, mgr.now, PLANTED.accounts)
    run, periods = mgr.context.run, mgr.context.deployment.periods
    posted_at = int(mgr.now())
    epoch = posted_at // run.epoch_seconds
    end = (epoch + 2) * run.epoch_seconds + run.validity_seconds + periods.accountable
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


def archiver(mgr: ManagerSide, page_files: int = 3) -> Archiver:
    def a_day_later() -> float:
        return mgr.now() + KEPT_SECONDS

    return Archiver(
        *(mgr.store, mgr.objects, mgr.context, a_day_later),
        page_files=page_files,
        kept=1,
        kept_of_node=1,
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
        for node in EVERYONE:
            said[f"leases {node.address}"] = listed_leases(http, node)
    with mgr.store.read() as connection:
        for row in rows:
            found, archived = rollouts.find(connection, row.digest[:20], mgr.objects)
            lease = rollouts.lease_of(connection, found, archived)
            file = [archived] if archived is not None else []
            said[row.digest] = rollouts.facts(connection, [found], file), lease
        for wanted in (Wanted(), Wanted(status="void"), Wanted(node=OTHER.address)):
            for before, most in itertools.product((None, rows[5]), (3, 99)):
                newest, files = rollouts.newest(
                    connection, mgr.objects, wanted, most, before=before
                )
                name = f"newest {wanted} {before and before.digest} {most}"
                said[name] = rollouts.facts(connection, newest, files)
        said["counts"] = submissions.counts(connection)
        said["accepted"] = submissions.accepted_among(connection, [HONEST.address, OTHER.address])
        said["void"] = submissions.expired_unjudged(connection)
        said["records"] = opinions.track_records(connection)
        for node in EVERYONE:
            said[f"pending {node.address}"] = rewards.pending_units(connection, node.address, 10**6)
        said["shadow"] = submissions.counts_by_node(connection, None, shadow=True)
        said["slashes"] = sorted(slashes.with_receipts(connection))
        said["indices"] = [leases.next_index(connection, step) for step in range(3)]
        for row in evaluations.newest(connection, 9):
            said[f"evaluation {row.id}"] = evaluations.results(connection, row.id, 10)
    for node in EVERYONE:
        said[f"reward {node.address}"] = status.reward_info(mgr.backend, KeptFor(), node.address)
    said["nodes"] = status.NodeList(mgr.backend).__dict__
    said["status"] = status.status(mgr.backend)
    said["metrics"] = generate_latest(PoolMetrics(mgr.backend, RequestCounts()))
    return said


def listed_leases(http: TestClient, node: LocalSigner) -> list[tuple[str, str]]:
    """Every lease of the node and what became of it, as the public list says page by page."""
    url, found = f"/v1/nodes/{node.address}/leases", list[tuple[str, str]]()
    while url:
        answer = http.get(url)
        assert answer.status_code == 200, url
        page = answer.json()
        times = [one["created_at"] for one in page]
        assert times == sorted(times)
        found += [(one["digest"], one["status"]) for one in page]
        url = answer.links["next"]["url"] if "next" in answer.links else ""
    assert len(dict(found)) == len(found)
    return sorted(found)


def archived_names(mgr: ManagerSide) -> list[Digest]:
    with mgr.store.read() as connection:
        return [one.submission.digest for one in archive.every(connection, mgr.objects, Wanted())]


@pytest.mark.slow
def test_an_archived_file_answers_as_before_and_survives_a_kill_and_a_restore(
    pool: ManagerSide, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = filled(pool)  # one has a slash that is proposed, one a group that may be trained on
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
    assert worker.tick() == 3
    assert {*pool.objects.keys()} - objects == {orphan}, "the same object again"
    assert [worker.tick() for _ in range(3)] == [3, 0, 0]
    names = archived_names(pool)
    over = [row.digest for at, row in enumerate(rows) if at not in (2, 3, 4)]
    assert names == over[:6]
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


def test_a_nodes_list_reaches_its_archived_files_a_page_of_the_archive_an_answer(
    pool: ManagerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = filled(pool)
    worker = archiver(pool, page_files=1)  # so most pages have no file of the other node
    for _ in rows:
        worker.tick()
    assert len(archived_names(pool)) == 10
    read: list[Digest] = []
    real = archive.read

    def counted(objects: ObjectStore, page: Digest) -> list[str]:
        read.append(page)
        return real(objects, page)

    monkeypatch.setattr(archive, "read", counted)
    with TestClient(create_app(pool.backend)) as http:
        client = OrchestratorClient("http://testserver")
        client._http = http
        for node in (HONEST, OTHER):
            listed = [info.submission_digest for info in client.submissions(node.address)]
            assert listed == [row.digest for row in rows if row.node == node.address][::-1]
        first = f"/v1/submissions?node={HONEST.address}"
        read.clear()
        answer = http.get(first)
        assert not read
        for _ in range(3):
            read.clear()
            answer = http.get(answer.links["next"]["url"])
            assert len(read) == 1
        for wrong in ("-1", "x", "9" * 30):
            assert http.get(f"{first}&archived={wrong}").status_code == 400
        assert http.get(f"{first}&archived=0").json() == []
        (last,) = read
        for wrong, code in (("archived=x", 400), ("before=x", 400), (f"before={ZERO_DIGEST}", 404)):
            assert http.get(f"/v1/nodes/{OTHER.address}/leases?{wrong}").status_code == code
        read.clear()
        assert http.get(f"/v1/nodes/{OTHER.address}/leases?archived=5").status_code == 200
        assert len(read) == 1
        (own, *_), (others, *_) = (listed_leases(http, node) for node in (HONEST, OTHER))
        foreign = f"/v1/nodes/{OTHER.address}/leases?before={own[0]}"
        assert http.get(foreign).status_code == 404
        assert http.get(foreign.replace(own[0], others[0])).status_code == 200
        pool.objects.delete(digest_key(last))
        assert http.get(answer.request.url).status_code == 503


# ── files of every kind ──

GOES = (
    *("accepted", "repeated", "malformed", "unjudged", "lapsed", "unrooted"),
    *("executed", "cancelled", "planted", "planted lie", "planted, rejected", "planted, unjudged"),
    *("evaluation", "evaluation, rejected"),
)
STAYS = ("slash is open", "evaluation goes on", "shadow", "planted, then posted")
"""Kinds of files that are archived, and those that are not yet, or by another rule not at all."""
LIARS = {"executed": LIAR, "cancelled": LIAR, "slash is open": OPEN}
REJECTED = {
    "malformed": Reason.MALFORMED,
    **dict.fromkeys((*LIARS, "planted lie"), Reason.WRONG_SKETCH),
    "planted, rejected": Reason.WRONG_PROMPTS,
    "evaluation, rejected": Reason.WRONG_CLASS,
}


@dataclass
class Mixed:
    """A pool with files of every kind, in an order drawn from `draw`."""

    mgr: ManagerSide
    draw: random.Random
    rows: dict[Digest, str] = field(default_factory=dict)
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(5000))
    blocks: itertools.count[int] = field(default_factory=itertools.count)

    def fill(self) -> None:
        for node in EVERYONE[2:]:
            self.mgr.admit(node)
        with self.mgr.store.begin() as connection:
            self.ended = evaluations.start(connection, 0, 5, now=0.0)
            self.running = evaluations.start(connection, 0, 5, now=0.0)
        kinds = [*GOES, *STAYS, *self.draw.choices(GOES, k=6)]
        self.draw.shuffle(kinds)
        for kind in kinds:
            self.rows[self.add(kind).digest] = kind
            self.expired(self.draw.choice((HONEST, OTHER)), self.draw.choice((None, self.ended)))
        self.expired(HONEST, self.running)
        self.mgr.now.time += 1
        for node in EVERYONE:  # the newest of each node stay
            self.rows[self.judged(node).digest] = "newest"
        with self.mgr.store.begin() as connection:
            evaluations.end(connection, self.ended, now=1.0)
        settle(self.mgr)

    def judged(
        self, node: LocalSigner, reason: Reason = Reason.NONE, evaluation: int | None = None,
        *, shadow: bool = False,
    ) -> SubmissionRow:  # fmt: skip
        """A file with its verdict; it makes the node active again."""
        row = self.mgr.submit(node, shadow=shadow)
        if evaluation is not None:
            heldout = 2 * next(self.blocks)
            self.change(schema.leases, row.lease_digest, evaluation=evaluation, heldout=heldout)
        row = self.mgr.judge(row, reason)
        self.mgr.now.time += self.draw.choice((0, 1))
        if node is PLANT:
            assert reveal(self.mgr.store, self.mgr.context, PLANTED, self.mgr.now) == [row.digest]
        with self.mgr.store.begin() as connection:
            nodes.set_status(connection, node.address, "active", last_heartbeat=self.mgr.now())
        return self.mgr.row(row.digest)

    def change(self, table: sa.Table, digest: Digest, **values: object) -> None:
        with self.mgr.store.begin() as connection:
            connection.execute(sa.update(table).where(table.c.digest == digest).values(**values))

    def unjudged(self, node: LocalSigner, reason: Reason) -> SubmissionRow:
        """A file that ends void without a verdict."""
        row = self.mgr.submit(node)
        with self.mgr.store.begin() as connection:
            void(connection, row.digest, reason, self.mgr.now())
        return self.mgr.row(row.digest)

    def expired(self, node: LocalSigner, evaluation: int | None) -> Digest:
        """A lease that ended without a file."""
        number = next(self.numbers)
        digest = sha256(f"lease {number}".encode())
        with self.mgr.store.begin() as connection:
            some = leases.get(connection, self.mgr.row(next(iter(self.rows))).lease_digest)
            assert some is not None
            row = replace(
                some, digest=digest, node=node.address, status="expired",
                lease_index=number, evaluation=evaluation, heldout=2 * number,
                step=self.draw.randrange(3), created_at=self.mgr.now(), shadow=False,
            )  # fmt: skip
            leases.add(connection, [row])
        return digest

    def add(self, kind: str) -> SubmissionRow:
        honest = PLANT if kind.startswith("planted") else self.draw.choice((HONEST, OTHER))
        node = LIARS.get(kind, honest)
        if kind in ("unjudged", "lapsed", "planted, unjudged"):
            row = self.unjudged(node, Reason.UNAVAILABLE)
        else:
            number = self.running if kind == "evaluation goes on" else self.ended
            evaluation = number if kind.startswith("evaluation") else None
            row = self.judged(
                node, REJECTED.get(kind, Reason.NONE), evaluation, shadow=kind == "shadow"
            )
        if kind == "repeated":
            self.change(schema.submissions, row.digest, repeated_rows=1)
        elif kind == "planted, unjudged":
            reveal(self.mgr.store, self.mgr.context, PLANTED, self.mgr.now)
        with self.mgr.store.begin() as connection:
            match kind:
                case "lapsed":
                    said = OpinionRow(row.digest, VALIDATOR.address, Reason.WRONG_SKETCH, "{}", 1.0)
                    opinions.add(connection, said)
                case "unrooted":
                    void(connection, row.digest, Reason.UNROOTED, self.mgr.now(), of=["accepted"])
                case "executed" | "cancelled" | "slash is open":
                    state = "queued" if node is OPEN else kind
                    slashes.change(connection, row.digest, status=state)
                    refresh_credits(connection, node.address)
                case "planted, then posted":
                    name = sha256(row.digest.encode())
                    args = {"root": row.digest, "epoch": 0, "seq": 1, "leaves_object": ZERO_DIGEST}
                    chain.add_event(
                        connection, block_hash=name, log_index=0, block=1, block_time=1,
                        tx_hash=name, name="RootPosted", args=args,
                    )  # fmt: skip
        return self.mgr.row(row.digest)


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [0, pytest.param(1, marks=pytest.mark.soak), pytest.param(2, marks=pytest.mark.soak)]
)
def test_files_of_every_kind_are_archived_once_over_and_all_else_says_the_same(
    pool: ManagerSide, tmp_path: Path, seed: int
) -> None:
    mixed = Mixed(pool, random.Random(seed))
    mixed.fill()
    rows = [pool.row(digest) for digest in mixed.rows]
    before = everything(pool, rows)
    worker = archiver(pool, page_files=1)
    while worker.tick():
        pass
    kinds = {name: mixed.rows[name] for name in archived_names(pool)}
    assert everything(pool, rows) == before
    assert {*kinds.values()} == {*GOES}
    left = mixed.rows.keys() - kinds.keys()
    assert {mixed.rows[name] for name in left} == {"newest", *STAYS}
    with pool.store.read() as connection:
        planted = connection.execute(sa.select(schema.planted.c.submission_digest)).scalars()
        found = {*planted}
        assert found <= left
        assert "planted, then posted" in {mixed.rows[Digest(name)] for name in found}
        query = sa.select(schema.leases.c.evaluation).where(schema.leases.c.status == "expired")
        assert connection.execute(query).scalars().all() == [mixed.running]
        pages = archive.pages(connection)
        (ended, *_) = archive.read(pool.objects, next(p for p in pages if not p.files).digest)
        assert json.loads(ended)["leases"][0]["status"] == "expired"
        names = evaluations.archived(connection, mixed.ended)
        assert {mixed.rows[name] for name in names} == {"evaluation"}
    for row in rows:  # handed in once more
        if mixed.rows[row.digest] in GOES:
            assert intake.submit(pool.backend, row.signed()) == row.receipt_answer()
    backup.backup(pool.store, pool.objects, tmp_path / "backup")
    new = open_store(sqlite_url(tmp_path / "new.sqlite"))
    copy = DirectoryStore(tmp_path / "new-objects", "http://testserver", b"s" * 32)
    backup.restore(tmp_path / "backup", new, copy)
    assert backup.check(new, copy, read=True).absent == ()
    assert everything(replace(pool, store=new, objects=copy), rows) == before
    new.close()


# ── rollout files that are removed ──

DAYS = 40
on_one_database = pytest.mark.parametrize("pool", ["sqlite"], indirect=True)


def removed(
    mgr: ManagerSide, objects: ObjectStore | None = None, *, days: int = DAYS, dry_run: bool = False
) -> Removed:
    """Removes files DAYS and a day after the newest was received."""
    later = mgr.now() + (DAYS + 1) * DAY_SECONDS
    return removal.remove(mgr.store, objects or mgr.objects, later, days, dry_run=dry_run)


def absent(mgr: ManagerSide) -> tuple[Digest, ...]:
    return backup.check(mgr.store, mgr.objects, read=True).absent


def all_archived(mgr: ManagerSide, page_files: int) -> set[Digest]:
    worker = archiver(mgr, page_files)
    while worker.tick():
        pass
    return set(archived_names(mgr))


@pytest.mark.slow
@on_one_database
def test_old_files_are_removed_unless_an_audit_may_ask_for_them(pool: ManagerSide) -> None:
    """Files of every kind: only those of accepted work go, of which no part is planted."""
    mixed = Mixed(pool, random.Random(1))
    mixed.fill()
    rows = [pool.row(digest) for digest in mixed.rows]
    names = all_archived(pool, page_files=1)
    objects = set(pool.objects.keys())
    assert removed(pool) == Removed(), "a trainer may train policy 0 again"
    pool.publish(KEPT_POLICIES)
    assert removed(pool) == Removed()
    pool.publish(KEPT_POLICIES + 1)
    before = everything(pool, rows)
    assert removed(pool, days=DAYS + 2) == Removed(), "too young"

    would = removed(pool, dry_run=True)
    assert set(pool.objects.keys()) == objects
    assert backup.check(pool.store, pool.objects).pages == 0
    assert removed(pool) == would
    gone = [row for row in rows if not pool.objects.exists(digest_key(row.sha256))]
    assert {mixed.rows[row.digest] for row in gone} == {"accepted", "repeated", "evaluation"}
    due = {name for name in names if mixed.rows[name] in ("accepted", "repeated", "evaluation")}
    assert {row.digest for row in gone} == due
    assert objects - set(pool.objects.keys()) == {digest_key(row.sha256) for row in gone}
    assert would == Removed(len(names), len(gone), sum(row.size for row in gone), 0)
    assert absent(pool) == ()
    assert backup.check(pool.store, pool.objects).pages == len(names)
    assert everything(pool, rows) == before
    assert removed(pool) == Removed(), "once"
    with pytest.raises(NotFoundError, match=rf"lacks a file: .* {DAYS} days after"):
        rollouts.grade_evaluation(
            *(pool.store, pool.objects, mixed.ended, Path("none")), begins=print, went=print
        )


@on_one_database
def test_bytes_that_something_else_names_stay_and_a_killed_round_goes_on(
    pool: ManagerSide, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = filled(pool, copies=True)
    names = all_archived(pool, page_files=3)
    pool.publish(KEPT_POLICIES + 1)
    third = bytes_of(pool, rows[0])
    again = pool.submit(OTHER, make=lambda *_: third)  # is in the tables
    assert again.sha256 == rows[0].sha256
    old = [row for row in rows if row.digest in names and row.status == "accepted"]
    batch = {"step": 10, "digest": rows[8].sha256, "body": "", "rows": 1, "mean_reward_micro": 0}
    with pool.store.begin() as connection:
        new = sa.insert(schema.batches).values(**batch, staleness_max=0, sealed_at=0.0)
        connection.execute(new)
    stay = {rows[0].sha256, rows[2].sha256, rows[8].sha256}

    def there() -> set[Digest]:
        return {row.sha256 for row in old if pool.objects.exists(digest_key(row.sha256))}

    def kill(*_: object) -> None:
        raise KeyboardInterrupt

    would = removed(pool, dry_run=True)

    real = DirectoryStore.delete

    def delete_one(self: DirectoryStore, name: str) -> None:
        if len(there()) < len(old):
            raise KeyboardInterrupt
        real(self, name)

    monkeypatch.setattr(removal, "_DELETERS", 1)
    for target, name, instead, left in (
        (archive, "mark", kill, len(old)),
        (DirectoryStore, "delete", delete_one, len(old) - 1),
        (archive, "set_removed", kill, len(old) - 2),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(target, name, instead)
            with pytest.raises(KeyboardInterrupt):
                removed(pool)
        assert len(there()) == left
        assert absent(pool) == ()
    done = removed(pool, days=DAYS + 99)  # goes on with what was begun: the first page is done
    assert (done.pages, done.files) == (len(names) // 3 - 1, len(old) - len(stay))
    assert (would.pages, would.files) == (len(names) // 3, len(old) - len(stay))
    assert (would.shared, done.shared) == (len(stay), 1)
    assert there() == stay
    assert absent(pool) == ()
    with pool.store.read() as connection:
        assert archive.files_marked(connection) == (len(names) // 3, DAYS)
    assert removed(pool) == Removed()


def test_a_file_that_comes_meanwhile_keeps_its_bytes(
    pool: ManagerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the tables, or on a page that is written after the archive was looked through."""
    rows = filled(pool, copies=True)
    worker = archiver(pool, page_files=3)
    assert worker.tick() == 3
    pool.publish(KEPT_POLICIES + 1)
    first, real = bytes_of(pool, rows[0]), removal._Search.read

    def read(self: removal._Search, pages: Sequence[Page]) -> None:
        monkeypatch.setattr(removal._Search, "read", real)
        real(self, pages)
        pool.submit(OTHER, make=lambda *_: first)
        assert worker.tick() == 3

    monkeypatch.setattr(removal._Search, "read", read)
    done = removed(pool)  # the new page is old enough for a round of its own
    assert (done.pages, done.files, done.shared) == (2, 2, 2)
    assert rows[5].digest in archived_names(pool)
    assert absent(pool) == ()


@on_one_database
def test_a_backup_notices_that_files_were_removed_meanwhile(
    pool: ManagerSide, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = filled(pool)
    all_archived(pool, page_files=3)
    pool.publish(KEPT_POLICIES + 1)
    real = backup._save

    def save(objects: ObjectStore, target: DirectoryStore) -> int:
        assert removed(pool).files > 0
        return real(objects, target)

    with monkeypatch.context() as patched:
        patched.setattr(backup, "_save", save)
        with pytest.raises(ConflictError, match="removed meanwhile"):
            backup.backup(pool.store, pool.objects, tmp_path / "backup")
    assert not (tmp_path / "backup" / "store.sqlite").exists()
    backup.backup(pool.store, pool.objects, tmp_path / "backup")
    new = open_store(sqlite_url(tmp_path / "new.sqlite"))
    copy = DirectoryStore(tmp_path / "new-objects", "http://testserver", b"s" * 32)
    backup.restore(tmp_path / "backup", new, copy)
    assert backup.check(new, copy, read=True).absent == ()
    assert not copy.exists(digest_key(rows[0].sha256))
    new.close()


@on_one_database
def test_each_page_of_the_archive_is_read_three_times_however_many_there_are(
    pool: ManagerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To choose it, to search it and to delete its files. A page that is not old, twice less."""
    rows = filled(pool)
    all_archived(pool, page_files=1)
    pool.publish(KEPT_POLICIES + 1)
    with pool.store.begin() as connection:
        young = max(page.id for page in archive.pages(connection))
        late = pool.now() + 99 * DAY_SECONDS
        pages = schema.archive_pages
        connection.execute(sa.update(pages).where(pages.c.id == young).values(last_received=late))
    read: Counter[Digest] = Counter()
    real = archive.read

    def counted(objects: ObjectStore, page: Digest) -> list[str]:
        read[page] += 1
        return real(objects, page)

    monkeypatch.setattr(archive, "read", counted)
    assert removed(pool).pages == len(read) - 1
    assert sorted(read.values()) == [1, *[3] * (len(read) - 1)]
    assert len(read) > len(rows) // 2


def test_a_filter_has_all_names_that_were_added_and_few_others() -> None:
    names = [sha256(str(number).encode()) for number in range(20_000)]
    filtered = removal._Filter(1000)
    for name in names[:1000]:
        filtered.add(name)
    assert all(name in filtered for name in names[:1000])
    assert sum(name in filtered for name in names[1000:]) < 100  # 19,000 / 400 are expected


@on_one_database
def test_a_check_that_files_are_removed_under_asks_to_be_repeated(
    pool: ManagerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(pool)
    all_archived(pool, page_files=3)
    pool.publish(KEPT_POLICIES + 1)
    real = backup._is_there

    def look(*arguments: Any) -> bool:
        removed(pool)
        return real(*arguments)

    monkeypatch.setattr(backup, "_is_there", look)
    with pytest.raises(ConflictError, match="removed meanwhile"):
        absent(pool)
    assert absent(pool) == ()


@on_one_database
def test_programs_say_why_a_file_is_gone(
    pool: ManagerSide, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = filled(pool)
    names = all_archived(pool, page_files=3)
    place = deployment(Periods(), block=1)
    place.save(tmp_path / "deployment.json")
    monkeypatch.setenv("PRIME_ORCHESTRATOR_DATABASE", pool.url)
    monkeypatch.setenv("PRIME_ORCHESTRATOR_OBJECTS", str(pool.objects.root))

    def run(*words: str) -> str:
        done = CliRunner().invoke(app, [*words, "--data", str(tmp_path / "data")])
        if isinstance(done.exception, PrimeError):
            raise done.exception
        assert done.exit_code == 0, done.output
        return done.stdout

    def prune(*words: str) -> str:
        return run("store", "prune-files", *words)

    given = ("--deployment", str(tmp_path / "deployment.json"), "--days", str(DAYS))
    with pytest.raises(UserError, match="not to a pool of this deployment"):
        prune(*given)
    with pool.store.begin() as connection:
        meta.put(connection, meta.SERVES, place_of(place, 1))
        connection.execute(sa.update(schema.submissions).values(status="rejected"))
    with pytest.raises(UserError, match="for longer than 34 days") as caught:
        prune(*given[:2], "--days", "34")
    assert caught.value.hint == "--days 35 or more"
    pool.publish(KEPT_POLICIES + 1)
    key = digest_key(rows[0].sha256)
    url = pool.objects.signed_get(key, int(pool.now()) + 99)
    would = json.loads(prune(*given, "--dry-run", "--json"))
    assert would["files"] == len(names) - 2
    assert f"{would['files']} rollout files (0.0 GB)" in prune(*given)
    assert json.loads(prune(*given, "--json")) == asdict(Removed())

    assert f"of {len(names) // 3} pages" in run("store", "check")
    said = run("rollouts", "show", rows[0].digest)
    assert "accepted" in said
    assert f"its rows cannot be shown: rollout files are removed {DAYS} days after" in said
    assert json.loads(run("rollouts", "show", rows[0].digest, "--json"))["samples"] == []
    assert rows[0].digest[:12] in run("rollouts", "list")
    out = tmp_path / "rollouts.parquet"
    said = run("rollouts", "export", "--out", str(out))
    assert said == f"0 rows of 0 files in {out}; {would['files']} files were removed " \
        "(docs/retention.md)\n"  # fmt: skip
    with TestClient(create_app(pool.backend)) as http:
        client = OrchestratorClient("http://testserver")
        client._http = http
        for ask in (
            partial(client.get_object, rows[0].sha256),
            partial(client.download, url, limit=99),
        ):
            with pytest.raises(NotFoundError, match=f"removed {DAYS} days after"):
                ask()


@on_one_database
def test_files_in_a_bucket_are_removed(pool: ManagerSide, s3: S3Server, tmp_path: Path) -> None:
    rows = filled(pool)
    names = all_archived(pool, page_files=3)
    pool.publish(KEPT_POLICIES + 1)
    bucket = S3Store(BUCKET, prefix=tmp_path.name, endpoint=s3.url)
    for name in pool.objects.keys("sha256/"):
        bucket.put_file(name, pool.objects.root / name)
    assert removed(pool, bucket).files == len(names) - 2
    assert not bucket.exists(digest_key(rows[0].sha256))
    assert backup.check(pool.store, bucket).absent == ()
