"""A mirror of a pool: what it copies, and rewards paid from it when the manager is gone."""

from __future__ import annotations

import json
import shutil
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from anvil_kit import needs_anvil
from chain_kit import World, run_indexer_tick
from fastapi.testclient import TestClient
from money_kit import RUN, VALIDATOR, key
from programs import typed
from starlette.types import Receive, Scope, Send
from walk_kit import HONEST, LIAR, OWNER, one, settled

from prime_chain.claims import Payable
from prime_chain.contracts import Claim
from prime_chain.event import Event
from prime_chain.events import EVENTS, FileRestored, RewardRootPosted, RootPosted
from prime_chain.history import read_events, read_slashes
from prime_chain.mirror import (
    MAX_OBJECT_BYTES,
    AnnouncedMirrors,
    AnySource,
    Copied,
    Follower,
    HttpSource,
    Mirror,
    MirrorServer,
)
from prime_chain.rewards import Rebuilder, history_of
from prime_chain.watcher import FREE_FOR_ALL, pool_queries
from prime_core.encoding import sha256
from prime_core.errors import (
    MalformedError,
    NotFoundError,
    UnavailableError,
    UntrustedError,
    UserError,
)
from prime_core.ids import Digest
from prime_core.messages import SubmissionInfo
from prime_core.settlement import load_settlement
from prime_core.storage.base import digest_key, put_object
from prime_core.storage.directory import DirectoryStore
from prime_core.transport.client import OrchestratorClient, run_bytes
from prime_core.verdict import Reason, Verdict
from prime_orchestrator.api.app import create_app
from prime_orchestrator.cli.main import main as orchestrator
from prime_orchestrator.manager.indexer import _take
from prime_orchestrator.manager.settlement import settle_epochs
from prime_orchestrator.store import meta, roots, schema

pytestmark = needs_anvil
STRANGER = key(30)


class Orchestrator(HttpSource):
    """The API itself, without a socket."""

    def __init__(self, world: World, *, older: bool = False) -> None:
        """`older`: a server of before `GET /v1/copies`."""
        app, client = create_app(world.mgr.backend), OrchestratorClient("http://testserver")

        async def before(scope: Scope, receive: Receive, send: Send) -> None:
            path = scope["path"].replace("copies", "unknown") if older else scope["path"]
            await app(scope | {"path": path}, receive, send)

        client._http = TestClient(before, follow_redirects=False)
        super().__init__(client)


def follower(world: World, source: HttpSource, *, max_bytes: int = 10**8) -> Follower:
    mirror = Mirror(world.folder / "mirror", world.deployment, 1, source, max_bytes=max_bytes)
    return Follower(mirror, world.client, world.deployment)


@pytest.fixture
def worked(members: World) -> World:
    """One epoch that the manager settled, and a second whose work it rooted and did not settle."""
    world, mgr = members, members.mgr
    world.start_of_an_epoch()
    mgr.judge(mgr.submit(HONEST))
    world.until_settled(4)
    world.start_of_an_epoch()
    mgr.judge(mgr.submit(HONEST))
    mgr.judge(mgr.submit(LIAR), Reason.WRONG_SKETCH)
    mgr.submit(HONEST)  # never judged
    world.until_rooted()
    return world


@pytest.fixture
def mirrored(worked: World) -> Iterator[str]:
    """URL of a mirror, after the orchestrator's objects are gone."""
    follower(worked, Orchestrator(worked)).tick()
    shutil.rmtree(worked.folder / "objects")
    server = MirrorServer(worked.folder / "mirror", "127.0.0.1:0")
    yield f"http://127.0.0.1:{server.port}"
    server.close()


def test_rewards_of_a_silent_manager_are_settled_tabled_and_claimed_from_a_mirror(
    worked: World, mirrored: str
) -> None:
    world, c = worked, worked.contracts
    with OrchestratorClient(mirrored) as client:
        events = read_events(world.client, world.deployment)
        runs = history_of(events, 1, lambda name: run_bytes(client, name))
        books = Rebuilder(events, world.deployment, 1, runs, client)
        first = books.posted()[-1]
        assert books.rebuild(first.epoch).match
        with pytest.raises(NotFoundError, match="is settled"):
            books.settle(first.epoch, HttpSource(client).submission)
        roots = [e.epoch for e in events if type(e).__name__ == "RootPosted"]
        found = books.settle(max(roots), HttpSource(client).submission)
    assert sorted(f.state for f in found.files) == ["paid", "rejected", "unjudged"]
    assert found.amounts()[HONEST.address] == 2 * 20 * RUN.price_per_unit
    assert found.previous == first.object

    table = found.table()
    signature = VALIDATOR.sign(table, world.deployment.domain_of(table))
    silent = c.rewards.silent_from(1)
    assert silent is not None
    world.anvil.forward(silent - world.client.block("latest").time)
    before = c.token.balance_of(OWNER.address)
    with OrchestratorClient(mirrored) as client:
        payable = Payable(client, c, 1)
        of_first = payable.claim_of(HONEST.address)
        with pytest.raises(UserError, match="no settled rewards yet"):
            payable.claim_of(LIAR.address)
    world.send(STRANGER, c.rewards.claim(of_first))
    assert c.token.balance_of(OWNER.address) - before == 20 * RUN.price_per_unit
    world.send(STRANGER, c.rewards.post_table(table, [signature]))
    with (
        OrchestratorClient(mirrored) as client,
        pytest.raises(UserError, match=f"of epoch {first.epoch} and before are paid already"),
    ):
        Payable(client, c, 1).claim_of(HONEST.address)  # the table is not payable yet
    world.anvil.forward(world.deployment.periods.reward_delay + 1)
    with (
        OrchestratorClient(mirrored) as client,
        pytest.raises(NotFoundError, match="this mirror has no"),
    ):
        Payable(client, c, 1).claim_of(HONEST.address)  # of the table, which it does not hold
    amount, proof = found.proof(HONEST.address)
    claim = Claim(1, found.epoch, HONEST.address, amount, tuple(proof))
    world.send(STRANGER, c.rewards.claim(claim))
    assert c.token.balance_of(OWNER.address) - before == amount


def test_a_table_of_others_is_settled_upon_once_its_object_was_imported(
    worked: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prime_core.settlement.PAGE_FILES", 2)
    world, mgr = worked, worked.mgr
    events = read_events(world.client, world.deployment)
    source = Orchestrator(world)
    books = Rebuilder(
        events, world.deployment, 1, history_of(events, 1, source.run), source._client
    )
    last = max(event.epoch for event in events if isinstance(event, RootPosted))
    table = books.settle(last, source.submission)
    head, pages = table.published()
    assert len(pages) == 2
    silent = world.contracts.rewards.silent_from(1)
    assert silent is not None
    world.forward(silent - world.client.block("latest").time)
    said = table.table()
    signature = VALIDATOR.sign(said, world.deployment.domain_of(said))
    file = world.folder / "table.json"
    file.write_bytes(head)
    options = (
        "--database", mgr.url, "--objects", str(world.folder / "objects"), "--json",
    )  # fmt: skip
    typing = ("orchestrator", "rewards", "import", str(file), *options)
    with mgr.store.begin() as connection:
        meta.put(connection, meta.SERVES, f"31337/{world.deployment.contracts.pools}/1")
    status, _, answer = typed(orchestrator, *typing)
    assert status == NotFoundError.exit_code
    assert "is not the settlement of any reward root" in answer
    world.send(STRANGER, world.contracts.rewards.post_table(said, [signature]))

    mgr.submit(HONEST)  # never judged
    run_indexer_tick(mgr.store, mgr.context, world.loops.watcher, mgr.now)
    world.anvil.mine(2)
    run_indexer_tick(mgr.store, mgr.context, world.loops.watcher, mgr.now)
    with pytest.raises(UnavailableError, match="orchestrator rewards import"):
        world.until_rooted()
    status, _, answer = typed(orchestrator, *typing)
    assert (status, pages and sha256(pages[0]) in answer) == (UserError.exit_code, True), answer
    assert not mgr.objects.exists(digest_key(sha256(head))), "nothing is written in part"
    for page in pages:
        (world.folder / f"table.json.{sha256(page)}").write_bytes(page)
    (world.folder / f"table.json.{sha256(pages[0])}").write_bytes(pages[1])
    status, _, answer = typed(orchestrator, *typing)
    assert (status, "do not hash" in answer) == (UntrustedError.exit_code, True), answer
    (world.folder / f"table.json.{sha256(pages[0])}").write_bytes(pages[0])
    status, out, answer = typed(orchestrator, *typing)
    assert (status, json.loads(out)) == (0, {"epoch": last, "digest": sha256(head)}), answer
    world.until_settled(4)
    assert settled(world).previous == sha256(head)
    assert settled(world).amounts() == table.amounts()


def _restore_the_unjudged_file(world: World) -> FileRestored:
    """The event as if the arbiter had it paid."""
    events = read_events(world.client, world.deployment)
    root = [event for event in events if isinstance(event, RootPosted)][-1]
    place = {f.name: getattr(root, f.name) for f in fields(Event)} | {"log_index": 900}
    with world.mgr.store.begin() as connection:
        query = sa.select(schema.submissions).where(schema.submissions.c.status == "submitted")
        row = connection.execute(query).mappings().one()
        restored = FileRestored(
            **place, leaf=row["digest"], pool=1, node=row["node"], step=row["step"], amount=5
        )
        _take(connection, [restored])
    return restored


@pytest.mark.slow
def test_a_mirrors_settlement_is_the_managers_own(
    worked: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prime_core.settlement.PAGE_FILES", 1)
    world, source = worked, Orchestrator(worked)
    restored = _restore_the_unjudged_file(world)
    world.forward(RUN.validity_seconds + RUN.epoch_seconds)
    world.ticks(4)
    published = settled(world)
    assert [one.submission_digest for one in published.restored] == [restored.leaf]
    events = [*read_events(world.client, world.deployment), restored]
    until_then = [e for e in events if e.block <= published.as_of_block]
    runs = history_of(events, 1, source.run)
    books = Rebuilder(until_then, world.deployment, 1, runs, source._client)
    mine = books.settle(published.epoch, source.submission, published.as_of_block)
    assert mine.digest() == published.digest()

    assert follower(world, source).tick().missing == {}
    copy = DirectoryStore(world.folder / "mirror")
    kept = load_settlement(published.digest(), lambda name: copy.get(digest_key(name), 10**6))
    assert len(kept.files) == 3
    assert kept == published


def test_a_slashs_evidence_file_and_lease_outlive_the_orchestrator(
    worked: World, mirrored: str
) -> None:
    leaf = one(worked, schema.slashes)["submission_digest"]
    with OrchestratorClient(mirrored) as client:
        source = HttpSource(client)
        info = source.submission(leaf)
        assert info.receipt is not None
        assert info.evidence is not None
        evidence = json.loads(source.object(info.evidence, 1 << 20))
        assert evidence["submission"]["submission"]["sha256"] == info.sha256
        assert source.object(info.sha256, 1 << 20)
        assert source.lease(info.lease_digest).lease.pool == 1
        with pytest.raises(NotFoundError, match="this mirror has no"):
            source.object(Digest("0x" + "ab" * 32), 1)
        for path in ("/v1/pool", "/v1/objects/../../etc/passwd", "/v1/objects/0x12", "/"):
            with pytest.raises(NotFoundError):
                client.request("GET", path, b"", signed=False)


def test_evidence_that_the_orchestrator_withholds_comes_from_its_authors_mirrors(
    worked: World,
) -> None:
    world, source = worked, Orchestrator(worked)
    follower(world, source).tick()
    shutil.rmtree(world.folder / "objects")
    (world.folder / "objects").mkdir()
    (slash,) = read_slashes(world.client, world.deployment)
    with ExitStack() as stack:
        unnamed = AnnouncedMirrors(world.client, world.deployment, 1)
        with pytest.raises(NotFoundError, match="names a mirror"):
            unnamed.object(slash.evidence, 1 << 20)

        server = MirrorServer(world.folder / "mirror", "127.0.0.1:0")
        stack.callback(server.close)
        url = f"http://127.0.0.1:{server.port}"
        copy = Mirror(world.folder / "mirror", world.deployment, 1, source, max_bytes=10**8)
        copy.describe(source._client.pool(), url)
        world.send(VALIDATOR, world.contracts.work.announce_mirror(1, url))
        mirrors = AnnouncedMirrors(world.client, world.deployment, 1, allow_private=True)
        stack.callback(mirrors.close)
        assert [mirrors.urls[who] for who in slash.authors] == [url]
        with pytest.raises(NotFoundError):
            source.object(slash.evidence, 1 << 20)
        anywhere = AnySource([source, mirrors])
        assert sha256(anywhere.object(slash.evidence, 1 << 20)) == slash.evidence
        info = anywhere.submission(slash.leaf)
        assert anywhere.lease(info.lease_digest).lease.pool == 1
        with pytest.raises(NotFoundError):
            anywhere.object(Digest("0x" + "ab" * 32), 1)


def test_a_mirror_goes_on_where_it_was_and_lists_what_is_withheld(worked: World) -> None:
    world = worked
    settlement = settled(world).digest()
    evidence = next(
        e.evidence for e in read_events(world.client, world.deployment)
        if type(e).__name__ == "SlashProposed"
    )  # fmt: skip

    class Withholding(Orchestrator):
        hidden: tuple[Digest, ...] = (settlement, evidence)
        fetched = 0

        def object(self, digest: Digest, limit: int) -> bytes:
            if digest in self.hidden:
                raise MalformedError("another answer")
            data = super().object(digest, limit)
            self.fetched += 1
            return data

        def copies(self, names: Sequence[str]) -> dict[str, bytes]:
            asked.extend(Digest(name.partition("/")[2]) for name in names if "sub" in name)
            shown = [name for name in names if name.partition("/")[2] not in self.hidden]
            found = super().copies(shown)
            self.fetched += sum("objects" in name for name in found)
            return found

        def submission(self, digest: Digest) -> SubmissionInfo:
            asked.append(digest)
            return super().submission(digest)

    asked: list[Digest] = []
    source = Withholding(world)
    following = follower(world, source)
    first = following.tick()
    assert set(first.missing) == {digest_key(settlement), digest_key(evidence)}
    assert first.waiting == 1
    source.hidden = ()
    again = following.tick()
    assert (again.missing, again.waiting) == ({}, 1)
    # a later start fetches no byte twice
    source.fetched = 0
    assert len(set(asked)) > 1
    asked.clear()
    later = follower(world, source).tick()
    assert (later.new, later.bytes, source.fetched) == (0, 0, 0)
    assert later.waiting == 1
    assert len(asked) == 2, "of the file that waits for its verdict, and of the slash"


def test_what_a_manager_names_in_place_of_a_verdict_is_missing(worked: World) -> None:
    """Its events may name any object; the mirror goes on with the others."""
    world, source = worked, Orchestrator(worked)
    settlement = settled(world)
    kept = digest_key(Digest(settlement.files[0].verdict))
    verdict = Verdict.model_validate_json(world.mgr.objects.get(kept, 1 << 20))
    (said,) = verdict.opinions
    unknown = said.model_copy(update={"opinion": said.opinion.model_copy(update={"outcome": 9})})
    made = [
        put_object(world.mgr.objects, false.canonical())
        for false in (
            verdict.model_copy(update={"outcome": 3}),
            verdict.model_copy(update={"outcome": 9, "opinions": (unknown,)}),
        )
    ]
    file = settlement.files[0].model_copy(update={"verdict": made[0]})
    other = settlement.files[0].model_copy(update={"verdict": made[1]})
    false_settlement = settlement.model_copy(update={"files": (file, other)})
    name = put_object(world.mgr.objects, false_settlement.canonical())
    events = read_events(world.client, world.deployment)

    def update(named: Digest) -> dict[str, str]:
        changed = [
            replace(event, object=named) if isinstance(event, RewardRootPosted) else event
            for event in events
        ]
        return mirror.update(changed).missing

    mirror = Mirror(world.folder / "mirror", world.deployment, 1, source, max_bytes=10**8)
    assert update(name) == {str(made[0]): "no opinion has the verdict's outcome"}
    large = bytes(MAX_OBJECT_BYTES + 1)
    mirror.hold(large)
    assert "is larger than" in update(sha256(large))[digest_key(sha256(large))]


def test_a_mirror_asks_for_many_things_at_once_where_its_source_answers_that(
    worked: World, tmp_path: Path
) -> None:
    """Four requests bring records, then leases, verdicts and tables of any 64 files."""

    def copied(name: str, source: HttpSource) -> tuple[dict[str, bytes], Counter[str]]:
        paths: Counter[str] = Counter()
        count = [lambda request: paths.update([request.url.path.split("/")[2]])]
        source._client._http.event_hooks = {"request": count}
        mirror = Mirror(tmp_path / name, worked.deployment, 1, source, max_bytes=10**8)
        assert mirror.update(read_events(worked.client, worked.deployment)).missing == {}
        return {key: mirror.store.get(key, 10**6) for key in mirror.store.keys("")}, paths

    whole, by_hand = copied("older", Orchestrator(worked, older=True))
    found, asked = copied("now", Orchestrator(worked))
    assert found == whole
    assert by_hand["copies"] == 1, "an older server is asked once"
    assert by_hand["submissions"] == 4, "of one file in the first root and three in the second"
    assert (asked["submissions"], asked["leases"]) == (1, 1), "the slash's"
    assert by_hand["objects"] - asked["objects"] == 4, "verdicts and tables of accepted files"
    assert asked["copies"] == 9, "secrets; 2 of a settlement; 2 and 4 of roots of one and 3 files"
    server = MirrorServer(tmp_path / "now", "127.0.0.1:0")
    with ExitStack() as stack:
        stack.callback(server.close)
        url = f"http://127.0.0.1:{server.port}"
        again, of_mirror = copied(
            "second", HttpSource(stack.enter_context(OrchestratorClient(url)))
        )
        wrong = httpx.get(f"{url}/v1/copies?names=pool,objects/0x12", timeout=20)
    assert again == whole
    assert of_mirror["copies"] == asked["copies"], "a mirror answers it, too"
    assert wrong.status_code == 400


def test_a_full_mirror_says_so_and_one_without_a_source_waits(worked: World) -> None:
    class Counting(Orchestrator):
        def copies(self, names: Sequence[str]) -> dict[str, bytes]:
            asked.extend(name for name in names if "submissions" in name)
            return super().copies(names)

        def submission(self, digest: Digest) -> SubmissionInfo:
            asked.append(f"{digest}")
            return super().submission(digest)

    asked: list[str] = []
    found = follower(worked, Counting(worked), max_bytes=2000).tick()
    assert found.missing
    assert all("full" in why for why in found.missing.values())
    events = read_events(worked.client, worked.deployment)
    root = next(e for e in events if isinstance(e, RootPosted) and e.count > 1)
    room = worked.mgr.objects.size(digest_key(root.leaves_object)) + 10
    lacking = Mirror(
        worked.folder / "lacking", worked.deployment, 1, Counting(worked), max_bytes=room
    )
    asked.clear()
    assert "full" in str(lacking.update([root, replace(root, log_index=99)]).missing)
    assert len(asked) == len(set(asked)) == root.count, "no record is asked for a second time"
    small = Mirror(worked.folder / "small", worked.deployment, 1, Orchestrator(worked), max_bytes=5)
    for data in (b"four", b"four", b"more"):
        small.hold(data)
    assert small.held == 4
    assert small.store.get(digest_key(sha256(b"four")), 4) == b"four"
    with pytest.raises(UnavailableError), OrchestratorClient(unused_url()) as client:
        follower(worked, HttpSource(client)).tick()
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(UserError, match="cannot listen"),
    ):
        MirrorServer(Path(worked.folder), f"127.0.0.1:{taken.getsockname()[1]}")
    server = MirrorServer(Path(worked.folder), "[::1]:0")
    socket.create_connection(("::1", server.port)).close()
    server.close()
    assert Copied().as_json()["missing"] == {}


def test_a_mirror_asks_for_its_pools_events_only_and_misses_none(
    worked: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    indexed = {kind.__name__ for kind in EVENTS.values() if "pool" in kind.__annotations__}
    indexed -= FREE_FOR_ALL
    queries = pool_queries(worked.deployment, 1)
    assert sum(len(query.topics[0] or ()) for query in queries) == len(indexed)

    asked, ask = list[Any](), worked.client.agreed_logs

    def agreed_logs(first: int, last: int, addresses: Any, topics: Any = ()) -> Any:
        asked.append(topics)
        return ask(first, last, addresses, topics)

    everything = read_events(worked.client, worked.deployment)
    monkeypatch.setattr(worked.client, "agreed_logs", agreed_logs)
    found = read_events(worked.client, worked.deployment, pool=1)
    mine = [event for event in everything if getattr(event, "pool", None) == 1]
    assert found == [event for event in mine if event.name not in FREE_FOR_ALL] != mine
    assert follower(worked, Orchestrator(worked)).tick().new > 0
    assert all((1).to_bytes(32, "big") in topics for topics in asked)


def test_clients_that_never_finish_a_request_keep_no_other_out_of_a_mirror(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prime_chain.mirror.MOST_CONNECTIONS", 3)
    server = MirrorServer(tmp_path, "127.0.0.1:0")
    with ExitStack() as stack:
        stack.callback(server.close)
        slow = []
        for _ in range(5):
            slow.append(socket.create_connection(("127.0.0.1", server.port), timeout=20))
            stack.callback(slow[-1].close)
            slow[-1].sendall(b"GET /v1/pool HT")
        assert [one.recv(1) for one in slow[:2]] == [b"", b""], "the oldest give way"
        answer = httpx.get(f"http://127.0.0.1:{server.port}/v1/pool", timeout=20)
        assert answer.status_code == 404
        assert slow[2].recv(1) == b""


def unused_url() -> str:
    """Of a port at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def test_a_store_that_lacks_a_root_settles_nothing_of_its_epoch(worked: World) -> None:
    """As after the restore of a backup that was made before the root: its files are rooted again
    with later work, and would be paid a second time after a table of the validators."""
    world, mgr = worked, worked.mgr
    with mgr.store.begin() as connection:
        newest = connection.execute(sa.select(sa.func.max(schema.roots.c.id))).scalar_one()
        mine = schema.submissions.c.root_id == newest
        connection.execute(
            sa.update(schema.submissions).where(mine).values(root_id=None, leaf_index=None)
        )
        connection.execute(sa.delete(schema.roots).where(schema.roots.c.id == newest))
        ((seq, epoch),) = roots.unknown(connection)
    assert world.contracts.work.root_of(1, seq) is not None
    mgr.submit(HONEST)
    world.until_rooted()
    world.forward(RUN.validity_seconds + RUN.epoch_seconds)
    world.anvil.mine(2)
    run_indexer_tick(mgr.store, mgr.context, world.loops.watcher, mgr.now)
    with pytest.raises(UnavailableError, match=f"root {seq} of epoch {epoch} is on chain and not"):
        settle_epochs(mgr.store, mgr.objects, mgr.context, mgr.now)
