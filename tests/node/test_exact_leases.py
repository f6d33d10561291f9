"""Exact leases from announcement to verdict, by the worker's and the validator's own code."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'prime-open[torch]'")

import torch
from bridge_kit import Flag, Kit, bridge_kit
from judges import Bench, arm, bench
from node_world import VALIDATOR, NodeWorld, node_world, until

from prime_core.encoding import sha256
from prime_core.errors import (
    ConflictError,
    FatalError,
    NotFoundError,
    PolicyError,
    UnavailableError,
)
from prime_core.ids import Digest
from prime_core.messages import ClassAnswer, ClassInfo, ClassRequest, PolicyList
from prime_core.signing import LocalSigner
from prime_core.storage.base import digest_key
from prime_core.task import SignedLease
from prime_core.verdict import VerdictTable
from prime_engine.base import Engine
from prime_engine.exact import RANKS, NumericClass
from prime_node.worker.client import BridgeClient
from prime_node.worker.loop import work
from prime_node.worker.rollout_builder import Built, Job, Options, RolloutBuilder, _measured
from prime_orchestrator.api import classes
from prime_orchestrator.api.validators import LIVE_SECONDS
from prime_orchestrator.store import leases, schema, submissions
from prime_validator.run import Announcer
from prime_verify.engines import FolderEngines, load_engine
from prime_verify.provers import Provers
from prime_verify.rollout_file import read_rollout_file

MODEL = Path(__file__).parents[2] / "devnet" / "model"


class OneFile(RolloutBuilder):
    """The honest builder, whose loop ends after one file."""

    flag: Flag

    def build(self, job: Job) -> Built:
        built = super().build(job)
        self.flag.set()
        return built


@dataclass
class Party:
    """A node's worker, a validator and the pool between them."""

    kit: Kit
    judge: Bench
    announcer: Announcer
    builder: OneFile
    policies: Path

    @property
    def world(self) -> NodeWorld:
        return self.kit.world

    def make_file(self) -> SignedLease:
        """The worker announces, takes a lease and hands a file in; the lease."""
        stop = Flag()
        self.builder.flag = stop
        work(self.kit.client, self.builder, stop)
        with self.world.store.read() as connection:
            rows = self.world.leases()
            row = leases.get(
                connection, Digest(max(rows, key=lambda r: r["lease_index"])["digest"])
            )
        assert row is not None
        return row.signed()

    def live(self) -> None:
        """The validator asks for work, as it does all the time."""
        assert self.judge.claim() is None

    def records(self) -> list[tuple[int, int, int, int]]:
        """(files, mismatched files, equal rows, longest of them) by class and node."""
        equal = {
            (row["key"], row["node"]): (row["rows"], row["longest"])
            for row in self.world.rows(schema.class_rows)
        }
        return [
            (row["files"], row["mismatched"], *equal.get((row["key"], row["node"]), (0, 0)))
            for row in self.world.rows(schema.class_records)
        ]

    def engine(self) -> Engine:
        found = self.builder.engines.newest()
        assert found is not None
        return self.builder.engines.engine(*found)


@pytest.fixture
def party(tmp_path: Path) -> Iterator[Party]:
    torch.set_num_threads(1)
    with node_world(tmp_path, model=MODEL) as world, bridge_kit(world, tmp_path / "k") as kit:
        listed = kit.broker._api.client.get("/v1/policies", PolicyList).policies
        policies, outbox = tmp_path / "policies", tmp_path / "outbox"
        outbox.mkdir()
        shutil.copytree(MODEL, policies / "0")
        (policies / "0" / "manifest.json").write_text(listed[0].model_dump_json())
        engines = FolderEngines(policies, load_engine)
        judge = arm(bench(world.backend, VALIDATOR, tmp_path, seed=None), policies, engines)
        assert judge.validator is not None
        announcer = Announcer(judge.api, judge.validator._policies, engines, "float32")
        ticking = itertools.count(step=100)
        builder = OneFile(
            world.backend.context.run,
            Options(kit.socket_path, policies, outbox),
            clock=lambda: float(next(ticking)),
        )
        kit.uploader.start()
        yield Party(kit, judge, announcer, builder, policies)
        assert kit.uploader.stop(20) == 0
        judge.close()


@pytest.mark.slow
def test_a_class_is_announced_leased_proved_and_compared_bit_for_bit(party: Party) -> None:
    assert party.make_file().numeric_class() is None, "no validator announced a class"
    assert party.judge.judge_next() is not None
    party.live()
    party.announcer.tick()
    own = party.engine().numeric_class()
    lease = party.make_file()
    assert lease.numeric_class() == own.digest()
    assert lease.opens(), "the salt that the manager signed binds the class"

    digest = party.judge.judge_next()
    assert digest is not None
    with party.world.store.read() as connection:
        row = submissions.get(connection, digest)
    assert row is not None
    assert row.status == "accepted"
    file = read_rollout_file(party.world.backend.objects.get(digest_key(row.sha256), 1 << 22))
    assert file.metadata.numeric_class == own.digest()
    assert all(one.digests for one in file.rows)
    assert row.verdict_table is not None
    raw = party.world.backend.objects.get(digest_key(row.verdict_table), 1 << 22)
    table = VerdictTable.model_validate_json(raw)
    assert table.statistics["exact_mismatches"] == "0"
    compared = int(table.statistics["exact_rows"])
    assert compared == len(table.rows_drawn) > 0
    lengths = [table.rows[n].output_tokens for n in table.rows_drawn]
    assert party.records() == [(1, 0, compared, max(lengths))]

    info = party.kit.broker._api.client.get(f"/v1/classes/{own.digest()}", ClassInfo)
    again = NumericClass(info.facts, Digest(info.fingerprint))
    assert again.digest() == own.digest(), "anyone can check the answer"
    assert info.facts["engine"] == "plain/1"
    assert party.judge.api.exact_class(own.digest()) == own
    assert party.judge.api.exact_class(Digest(sha256(b"unknown"))) is None


@pytest.mark.slow
def test_exact_leases_end_when_the_validators_of_the_class_vanish(party: Party) -> None:
    party.live()
    party.announcer.tick()
    party.builder.announce(party.kit.client)
    now = party.world.backend.now
    object.__setattr__(party.world.backend, "now", lambda: now() + LIVE_SECONDS + 1)
    assert party.make_file().numeric_class() is None
    assert party.judge.judge_next() is not None, "it is judged by statistics, and paid"
    assert party.world.submissions()[0]["status"] == "accepted"
    assert party.records() == []


@pytest.mark.slow
def test_a_file_of_an_exact_lease_is_paid_by_statistics_if_no_machine_of_the_class_is_left(
    party: Party,
) -> None:
    party.live()
    party.announcer.tick()
    assert party.make_file().numeric_class() is not None
    engines = FolderEngines(party.policies, lambda folder: load_engine(folder, batch_rows=2))
    other = arm(party.judge, party.policies, _OtherClass(engines))
    assert other.judge_next() is not None
    assert party.world.submissions()[0]["status"] == "accepted"
    assert party.records() == []


@pytest.mark.slow
def test_a_validator_repeats_proof_passes_by_another_engine_than_the_one_that_judges(
    party: Party,
) -> None:
    """As one whose interpreter has vLLM; the plain engine stands in for it."""
    provers = Provers(party.policies, load=lambda folder, dtype: load_engine(folder, dtype=dtype))
    engines = FolderEngines(party.policies, lambda folder: load_engine(folder, batch_rows=2))
    judge = arm(party.judge, party.policies, _OtherClass(engines), provers=provers)
    assert judge.validator is not None
    party.live()
    Announcer(judge.api, judge.validator._policies, provers, "float32").tick()
    assert party.make_file().numeric_class() == party.engine().numeric_class().digest()
    assert judge.judge_next() is not None
    assert party.world.submissions()[0]["status"] == "accepted"
    ((files, mismatched, compared, _),) = party.records()
    assert (files, mismatched) == (1, 0)
    assert compared > 0
    provers.close()


class _OtherClass:
    """Engines of a machine whose facts differ."""

    def __init__(self, engines: FolderEngines) -> None:
        self._engines = engines

    def engine(self, version: int, policy_digest: Digest) -> Engine:
        found = self._engines.engine(version, policy_digest)
        other = NumericClass({"engine": "another"}, sha256(b"another"))
        found.__dict__["_numeric_class"] = other
        return found

    def earlier(self, version: int) -> Iterator[tuple[int, Engine]]:
        return self._engines.earlier(version)


def test_a_machine_with_other_facts_or_weights_measures_little_and_gets_no_exact_lease(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    party.live()
    party.announcer.tick()
    engine = party.engine()
    facts = dict(engine.facts())
    measured: list[bool] = []

    def measure(self: Engine) -> NumericClass:
        measured.append(True)
        return NumericClass(facts, sha256(b"8-bit"))

    with monkeypatch.context() as patch:
        patch.setattr(type(engine), "facts", lambda self: facts | {"threads": "77"})
        patch.setattr(type(engine), "numeric_class", measure)
        party.builder.announce(party.kit.client)
        assert not measured, "no validator has these facts: nothing is measured"
    with monkeypatch.context() as patch:
        patch.setattr(type(engine), "numeric_class", measure)
        party.builder.announce(party.kit.client)
        assert measured, "the facts are those of a validator"
    assert party.world.rows(schema.class_members)[0]["account"] == VALIDATOR.address
    assert len(party.world.rows(schema.class_members)) == 1, "its fingerprint is another"
    assert len(party.world.rows(schema.classes)) == 1, "nodes add no classes"


@pytest.mark.parametrize(("ranks", "fatal"), [("1", False), ("2", True)])
def test_an_engine_of_several_ranks_ends_if_memory_is_short_in_its_proof_pass(
    ranks: str, fatal: bool
) -> None:
    def short() -> None:
        raise MemoryError

    engine: Any = SimpleNamespace(numeric_class=short, facts=lambda: {RANKS: ranks})
    with pytest.raises(FatalError) if fatal else nullcontext():
        assert _measured(engine) is None


def test_what_strangers_announce_is_refused(party: Party) -> None:
    backend = party.world.backend
    (policy,) = party.world.rows(schema.policies)
    facts = {"engine": "plain/1"}
    good = ClassRequest(policy_version=0, policy_digest=policy["digest"], facts=facts)
    stranger = LocalSigner(b"\x77" * 32).address
    with pytest.raises(PolicyError, match="active node"):
        classes.announce(backend, stranger, good)
    node = party.kit.broker._signer.address
    for version, digest, error in (
        (0, sha256(b"another"), ConflictError), (7, policy["digest"], NotFoundError),
    ):  # fmt: skip
        bad = ClassRequest(policy_version=version, policy_digest=digest, facts=facts)
        with pytest.raises(error):
            classes.announce(backend, node, bad)
    with pytest.raises(NotFoundError):
        classes.info(backend, Digest(sha256(b"unknown")))
    for wrong in ({}, {"x" * 65: "1"}, {"x": "1" * 257}, {str(n): "1" for n in range(33)}):
        with pytest.raises(ValueError, match="facts"):
            ClassRequest(policy_version=0, policy_digest=policy["digest"], facts=wrong)


def test_a_worker_of_this_release_works_with_an_older_agent_and_pool(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def refuse(self: BridgeClient, request: ClassRequest) -> None:
        asked.append(request.policy_version)
        raise NotFoundError("the bridge has no POST /class")

    monkeypatch.setattr(BridgeClient, "exact_class", refuse)
    assert party.make_file().numeric_class() is None
    party.builder.announce(party.kit.client)
    assert asked == [0], "it asks once for each policy"


def test_a_worker_that_has_no_class_any_more_takes_its_announcement_back(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease of the class could not be fulfilled."""
    party.live()
    party.announcer.tick()
    party.builder.announce(party.kit.client)
    assert len(party.world.rows(schema.class_members)) == 2

    def refuse(self: Engine) -> dict[str, str]:
        raise UnavailableError("this engine has no proof pass")

    monkeypatch.setattr(type(party.engine()), "facts", refuse)
    started_again = OneFile(party.builder.run, party.builder.options)
    started_again.announce(party.kit.client)
    assert [row["account"] for row in party.world.rows(schema.class_members)] == [VALIDATOR.address]


def test_a_machine_that_does_not_repeat_its_own_bits_works_on_without_a_class(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    party.live()
    party.announcer.tick()

    def refuse(self: Engine) -> NumericClass:
        raise UnavailableError("it does not repeat its own bits")

    monkeypatch.setattr(type(party.engine()), "numeric_class", refuse)
    assert party.make_file().numeric_class() is None


def test_a_worker_whose_class_is_not_wanted_asks_ever_more_seldom(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    now = [0.0]

    def unwanted(self: BridgeClient, request: ClassRequest) -> ClassAnswer:
        asked.append(now[0])
        return ClassAnswer(wanted=False)

    monkeypatch.setattr(BridgeClient, "exact_class", unwanted)
    builder = OneFile(party.builder.run, party.builder.options, clock=lambda: now[0])
    while now[0] < 4000:
        builder.announce(party.kit.client)
        now[0] += 5
    assert asked == [0, 15, 45, 105, 225, 465, 945, 1905, 2865, 3825]


@pytest.mark.parametrize("error", [UnavailableError("no relay serves it"), MemoryError()])
def test_a_policy_that_a_validator_cannot_fetch_or_load_holds_up_nothing(
    party: Party, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    now, asked = [0.0], list[float]()
    held = party.judge.validator
    assert held is not None
    announcer = Announcer(
        party.judge.api, held._policies, held._engines, "float32", now=lambda: now[0]
    )

    def unreachable(version: int, digest: Digest) -> Path:
        asked.append(now[0])
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(held._policies, "ensure", unreachable)
        while now[0] < 150:
            announcer.tick()
            now[0] += 5
    assert asked == [0, 60, 120]
    now[0] += 60
    announcer.tick()
    assert len(party.world.rows(schema.class_members)) == 1


def test_a_validator_counts_as_live_while_it_loads_a_policy_for_its_class(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That may take minutes, in which it claims nothing."""
    monkeypatch.setattr("prime_validator.judging.KEEP_SECONDS", 0.01)
    held = party.judge.validator
    assert held is not None
    party.live()
    with party.world.store.begin() as connection:
        connection.execute(schema.validators.update().values(seen_at=0.0))

    def slow(version: int, digest: Digest) -> None:
        until(lambda: party.world.rows(schema.validators)[0]["seen_at"] > 0, "it is seen")

    monkeypatch.setattr(held._policies, "ensure", slow)
    Announcer(
        party.judge.api, held._policies, held._engines, "float32", meanwhile=held.present
    ).tick()
    assert len(party.world.rows(schema.class_members)) == 1


def test_a_validator_that_has_no_class_any_more_takes_its_announcement_back(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    party.announcer.tick()
    assert len(party.world.rows(schema.class_members)) == 1

    def refuse(self: Engine) -> NumericClass:
        raise UnavailableError("it does not repeat its own bits")

    monkeypatch.setattr(type(party.engine()), "numeric_class", refuse)
    held = party.judge.validator
    assert held is not None
    Announcer(party.judge.api, held._policies, held._engines, "float32").tick()
    assert party.world.rows(schema.class_members) == []
