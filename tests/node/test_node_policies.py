"""The keeper of policies: which it fetches, what it writes down of each, whom it calls a liar."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from bridge_kit import Bench, Flag, Kit, heartbeat_loop
from command import prime_node
from node_world import NODE, POOL, TRAINER, publish_model, until
from served import served

from prime_broadcast.client import FetchStats
from prime_broadcast.folder import PolicyFolder
from prime_broadcast.manifest import Trust
from prime_broadcast.plans import FARTHEST, between
from prime_core.checkpoint import FileEntry, Manifest
from prime_core.errors import UnavailableError
from prime_core.ids import Address, Digest
from prime_node import policies as node_policies
from prime_node import policy_log
from prime_node.api import NodeApi
from prime_node.policies import CATCH_UP, PolicyKeeper
from prime_node.worker.loop import work
from prime_node.worker.rollout_builder import Built, Job
from prime_orchestrator.store import batches, policies


class Liar(SimpleHTTPRequestHandler):
    """Answers with one bit of each byte flipped."""

    def copyfile(self, source: Any, outputfile: Any) -> None:
        outputfile.write(bytes(byte ^ 1 for byte in source.read()))

    def log_message(self, *args: object) -> None:
        pass


def liar_of(folder: Path) -> AbstractContextManager[str]:
    return served(partial(Liar, directory=str(folder)))


@contextmanager
def started(keeper: PolicyKeeper) -> Iterator[PolicyKeeper]:
    keeper.start()
    try:
        yield keeper
    finally:
        keeper.stop(10)


def origin_of(kit: Kit) -> str:
    with kit.world.store.read() as connection:
        (relay,) = policies.relays(connection, since=0)
    return relay.url


def test_a_liar_is_logged_written_down_and_reported_to_the_orchestrator(
    kit: Kit, caplog: pytest.LogCaptureFixture
) -> None:
    origin = origin_of(kit)
    loop, _ = heartbeat_loop(kit, threading.Event.set)
    with liar_of(kit.world.folder / "layout") as liar:
        with kit.world.store.begin() as connection:
            account = Address("0x" + "12" * 20)
            policies.see_relay(connection, liar, account, (0,), now=kit.world.backend.now())
        keeper = loop._keeper
        with caplog.at_level(logging.INFO), started(keeper):
            keeper.note_answer(0, (liar, origin))
            until(lambda: keeper.newest() == 0, "the policy arrives from the origin")
        assert "policy 0 is fetched from 2 relay(s)" in caplog.text
        assert f"{liar} sent false data: it sent a wrong chunk" in caplog.text
        assert keeper.bad_sources() == (liar,)
        line = policy_log.last(kit.folder.parent)
        assert line is not None
        lies = [fault for fault in line["faults"] if fault["kind"] == "bad_data"]
        assert {fault["url"] for fault in lies} == {liar}
        assert line["refetched"] == len(lies)
        assert line["sources"].keys() == {origin}
        assert sum(line["sources"].values()) == line["policy_bytes"]
        assert line["verified"] > 0

        assert loop.run() == 0
        assert keeper.bad_sources() == (), "the heartbeat that got through reported it"
        reported = requests.get(f"{kit.world.url}/metrics", timeout=20).text
        assert f'prime_relay_lies_reported{{relay="{liar}"}} 1.0\n' in reported
        assert origin not in reported


def test_what_a_kill_cut_off_in_the_policy_log_hides_no_earlier_line(tmp_path: Path) -> None:
    assert policy_log.last(tmp_path) is None
    (tmp_path / policy_log.NAME).write_text(
        json.dumps({"version": 4}) + "\n" + '{"version": 5, "by'
    )
    assert policy_log.last(tmp_path) == {"version": 4}


def test_a_line_that_was_cut_off_in_the_policy_log_takes_none_that_comes_after_it_along(
    tmp_path: Path,
) -> None:
    digest = Digest("0x" + "11" * 32)
    file = FileEntry(name="a", size=1, digest=digest, chunks=(digest,))
    manifest = Manifest(
        pool=POOL, version=6, step=6, chunk_size=1 << 16, files=(file,), result_digest=digest
    )
    path = tmp_path / policy_log.NAME
    policy_log.record(tmp_path, manifest, FetchStats(6), 1.0)
    assert path.read_text().startswith('{"version": 6,'), "no blank line before the first"
    path.write_text(json.dumps({"version": 4}) + "\n" + '{"version": 5, "by')
    for _ in range(2):
        policy_log.record(tmp_path, manifest, FetchStats(6), 1.0)
    first, cut, *whole = path.read_text().splitlines()
    assert json.loads(first) == {"version": 4}
    assert cut == '{"version": 5, "by'
    assert [json.loads(line)["version"] for line in whole] == [6, 6]
    found = policy_log.last(tmp_path)
    assert found is not None
    assert found["version"] == 6


def test_status_shows_how_the_newest_policy_came(tmp_path: Path) -> None:
    settings = ("--data", str(tmp_path))
    assert "last_fetch" not in json.loads(prime_node("status", *settings, "--json").stdout)
    line: dict[str, Any] = {
        "version": 7, "digest": "0x1", "result_digest": "0x2", "route": "delta", "bytes": 3_000_000,
        "policy_bytes": 9_000_000, "seconds": 1.5, "sources": {"http://a": 3_000_000},
        "verified": 3, "kept": 1, "refetched": 1, "at": 5.0,
        "faults": [{"url": "http://b", "kind": "bad_data", "reason": "it sent a wrong chunk"}],
    }  # fmt: skip
    (tmp_path / policy_log.NAME).write_text(json.dumps(line) + "\n")
    shown = json.loads(prime_node("status", *settings, "--json").stdout)["last_fetch"]
    assert shown["bytes_per_second"] == 2_000_000
    assert shown.items() >= {"version": 7, "route": "delta", "refetched": 1, "kept": 1}.items()
    assert shown["faults"] == line["faults"]
    said = " ".join(prime_node("status", *settings).stdout.split())
    for part in (
        "policy 7 by deltas", "3,000,000 bytes in 1.5 s (2 MB/s)", "from http://a (3,000,000)",
        "chunks fetched again: 1", "http://b sent wrong data (1×)",
    ):  # fmt: skip
        assert part in said


class Folder:
    """A folder of policies in memory: which versions are brought, in which order."""

    def __init__(self, root: Path, here: tuple[int, ...], never: tuple[int, ...] = ()) -> None:
        self.root = root / "policies"
        self.here, self.never, self.tried = [*here], never, list[int]()
        self.others: list[list[int]] = []
        self.has_base_model = False
        self.unavailable = set[int]()
        """Versions whose manifests are not to be had at the next request."""
        self.on_failure: Callable[[], None] = lambda: None

    def versions(self) -> list[int]:
        return self.here

    def manifest(self, version: int) -> Any:
        if version in self.unavailable:
            self.unavailable.remove(version)
            raise UnavailableError("the orchestrator does not answer")
        deltas = [SimpleNamespace(base=base) for base in (version - 2, version - 1) if base >= 0]
        inner = SimpleNamespace(
            version=version, digest=lambda: f"{version}", result_digest="", deltas=deltas
        )
        return SimpleNamespace(manifest=inner)

    def ensure(self, version: int, *arguments: object, **options: object) -> Any:
        self.tried.append(version)
        others: Any = options["others"]
        self.others.append([one.manifest.version for one in others])
        if version in self.never:
            self.on_failure()
            raise UnavailableError("no relay has it")
        self.here.append(version)
        return SimpleNamespace(stats=FetchStats(version))

    def prune(self, keep: int, pinned: object) -> list[int]:
        return []


def keeper_over(folder: Folder, newest: int) -> PolicyKeeper:
    """Its orchestrator lists every version up to `newest`."""
    listed = SimpleNamespace(policies=[folder.manifest(n) for n in range(newest + 1)])
    api: Any = SimpleNamespace(policy=folder.manifest, policies=lambda: listed, close=lambda: None)
    stand_in: Any = folder
    return PolicyKeeper(stand_in, lambda: api, keep=99, on_arrival=lambda: None, pinned=lambda: ())


@pytest.mark.parametrize(
    ("here", "newest", "tried", "others"),
    [
        ((), 3, [3], [[]]),
        ((0,), 3, [1, 2, 3], [[], [], []]),
        ((2,), 2 + CATCH_UP, [3, 4, 5, 6, 7], [[]] * 5),
        ((2,), 3 + CATCH_UP, [3 + CATCH_UP], [[3, 4, 5, 6, 7]]),
        ((2,), 3 + FARTHEST, [3 + FARTHEST], [[]]),
    ],
    ids=["nothing is here", "a little behind", "just not too far", "too far", "no chain leads"],
)
def test_a_node_a_little_behind_takes_each_version_in_turn_and_one_far_behind_the_newest(
    tmp_path: Path, here: tuple[int, ...], newest: int, tried: list[int], others: list[list[int]]
) -> None:
    """The manifests between are asked for only where a chain of deltas passes them."""
    folder = Folder(tmp_path, here)
    with started(keeper_over(folder, newest)) as keeper:
        keeper.note_answer(newest, ("http://relay",))
        until(lambda: keeper.newest() == newest, "the newest arrives")
    assert (folder.tried, folder.others) == (tried, others)


@pytest.mark.parametrize(
    ("here", "announced", "tried"),
    [((), [3, 3, 3], [3, 3, 3]), ((), [3, 4, 5], [3, 4, 5]), ((3,), [5, 5, 5], [4, 5, 4])],
    ids=["the same again", "a newer one at each try", "the next and the newest in turn"],
)
def test_the_list_of_manifests_is_asked_for_once_a_version_was_not_delivered(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    here: tuple[int, ...],
    announced: list[int],
    tried: list[int],
) -> None:
    monkeypatch.setattr(node_policies, "FIRST_PAUSE", 0.0)
    folder = Folder(tmp_path, here, never=(3, 4, 5))
    keeper = keeper_over(folder, 5)
    versions = iter(announced)
    folder.on_failure = lambda: keeper.note_answer(next(versions, None), ("http://relay",))
    folder.on_failure()
    with started(keeper):
        until(lambda: len(folder.others) > 2, "the third try")
    assert folder.tried[:3] == tried
    assert folder.others[:3] == [[], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]


def test_a_manifest_is_checked_against_the_version_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PolicyFolder.ensure refuses a manifest of another version than the one that it is given."""
    monkeypatch.setattr(node_policies, "FIRST_PAUSE", 0.0)
    folder = Folder(tmp_path, (), never=(3,))
    other = folder.manifest(2)
    monkeypatch.setattr(folder, "manifest", lambda version: other)
    with started(keeper_over(folder, 3)) as keeper:
        keeper.note_answer(3, ("http://relay",))
        until(lambda: folder.tried, "the policy is asked for")
    assert folder.tried[0] == 3


def test_the_list_of_manifests_is_not_asked_for_because_the_orchestrator_was_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_policies, "FIRST_PAUSE", 0.0)
    folder = Folder(tmp_path, (2,))
    keeper = keeper_over(folder, 8)
    folder.unavailable = {4}
    with started(keeper):
        keeper.note_answer(8, ("http://relay",))
        until(lambda: keeper.newest() == 8, "the newest arrives")
    assert not folder.unavailable
    assert folder.others == [[3, 4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("version", "here", "base_model", "passed"),
    [
        (5, (), True, [0, 1, 2, 3, 4]),
        (2, (), True, [0, 1]),
        (FARTHEST, (), True, []),
        (5, (9,), False, []),
        (5, (1, 3), False, []),
        (5, (1, 2, 9), False, [3, 4]),
    ],
    ids=["from the base model", "its manifest, too", "too far from it", "a newer one is here",
         "a delta begins here", "from the newest before"],
)  # fmt: skip
def test_the_manifests_between_are_those_that_a_chain_of_deltas_passes(
    tmp_path: Path, version: int, here: tuple[int, ...], base_model: bool, passed: list[int]
) -> None:
    manifest = Folder(tmp_path, ()).manifest(version).manifest
    assert list(between(manifest, here, base_model=base_model)) == passed


def test_a_version_in_between_that_does_not_arrive_holds_up_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_policies, "FIRST_PAUSE", 0.0)
    folder = Folder(tmp_path, (0,), never=(2,))
    with started(keeper_over(folder, 4)) as keeper:
        keeper.note_answer(4, ("http://relay",))
        until(lambda: keeper.newest() == 4, "the newest arrives")
        keeper.want(5)
        until(lambda: keeper.newest() == 5, "one more arrives")
    assert folder.tried == [1, 2, 4, 5]
    assert folder.others == [[], [], [0, 1, 2, 3, 4], []]


def test_a_version_that_an_answer_named_wrongly_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_policies, "FIRST_PAUSE", 0.0)
    folder = Folder(tmp_path, (0,), never=(10**9,))
    with started(keeper_over(folder, 1)) as keeper:
        keeper.note_answer(10**9, ("http://relay",))
        until(lambda: folder.tried, "the wrong version is tried")
        keeper.note_answer(1, ("http://relay",))
        until(lambda: keeper.newest() == 1, "the right one arrives")


class Overtaken(Bench):
    """While its first file is made, a newer policy is published and arrives."""

    def __init__(self, kit: Kit, stop: Flag, keeper: PolicyKeeper, pruned: list[int]) -> None:
        super().__init__(kit, stop, files=2)
        self._kit, self._keeper, self._pruned = kit, keeper, pruned
        self.by: list[int] = []

    def build(self, job: Job) -> Built:
        self.by.append(job.signed.policy_version)
        if len(self.by) == 1:
            context, store = self._kit.world.backend.context, self._kit.world.store
            signed = publish_model(
                self._kit.world.folder, context.deployment, context.pool, version=1
            )
            with store.begin() as connection:
                policies.add(connection, signed, now=self._kit.world.backend.now())
            self._keeper.note_answer(1, (origin_of(self._kit),))
            until(lambda: self._keeper.newest() == 1, "policy 1 arrives while a file is made")
            until(lambda: len(self._pruned) == 2, "what is old is looked through")
            assert self._kit.broker.open_leases() == (job.lease_digest,)
            assert self._kit.open_leases.versions() == {0}
            assert self._keeper.digest(0) is not None, "the open lease's policy stays"
        return super().build(job)


def test_a_policy_that_arrives_while_a_file_is_made_waits_for_the_next_lease(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    trust = Trust(TRAINER.address, kit.world.backend.context.deployment.domain("pools"), POOL)
    folder = PolicyFolder(kit.folder.parent / "policies", trust)
    pruned: list[int] = []
    prune = folder.prune

    def counted(keep: int, pinned: Collection[int] = ()) -> list[int]:
        gone = prune(keep, pinned)
        pruned.append(len(gone))
        return gone

    monkeypatch.setattr(folder, "prune", counted)
    keeper = PolicyKeeper(
        folder,
        lambda: NodeApi(kit.world.url, NODE),
        keep=1,
        on_arrival=kit.open_leases.nudge,
        pinned=kit.open_leases.versions,
    )
    monkeypatch.setattr(kit.broker, "_policies", keeper)
    monkeypatch.setattr(  # a policy is published once the batch before it is sealed
        batches, "next_step", lambda connection: policies.latest_version(connection) or 0
    )
    kit.uploader.start()
    with started(keeper):
        keeper.note_answer(0, (origin_of(kit),))
        until(lambda: keeper.newest() == 0, "policy 0 arrives")
        stop = Flag()
        builder: Any = Overtaken(kit, stop, keeper, pruned)
        work(kit.client, builder, stop)
    assert builder.by == [0, 1]
    assert pruned[:2] == [0, 0]
    assert len(kit.world.submissions()) == 2
    assert kit.uploader.stop(10) == 0
