"""The trainer's side of the broadcast: during the next step, served until others have it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
import trainer_kit as kit
from trainer_pool import Pool, asked_to_stop, finished, started, until

from prime_broadcast import layout
from prime_broadcast.folder import PolicyFolder
from prime_broadcast.manifest import Trust
from prime_broadcast.relay import Relay
from prime_core.errors import UnavailableError, UntrustedError, UserError
from prime_core.ids import Step
from prime_core.messages import RelayAnnouncement
from prime_core.transport.client import Empty, OrchestratorClient
from prime_orchestrator.store import policies, schema
from prime_trainer import feed, publish, run
from prime_trainer.checkpoint import TrainerState
from prime_trainer.data import BadBatch, TrainingBatch
from prime_trainer.feed import pool_facts
from prime_trainer.metrics import Stopwatch
from prime_trainer.parallel import World
from prime_trainer.publish import Publishing, TrainerOrigin
from prime_trainer.run import new_origin, new_publisher, publish_by_hand
from prime_trainer.train import Trainer


@contextmanager
def trainer_of(
    pool: Pool, data: Path, world: World, **changes: object
) -> Iterator[tuple[Trainer, TrainerOrigin]]:
    """A trainer as `trainer run` wires it, whose batches a test hands in itself."""
    set_ = pool.settings(data)
    with OrchestratorClient(pool.url, kit.TRAINER, "trainer") as client:
        facts = pool_facts(client, None)
        learner = kit.learner(
            pool.model, data, world, pool.run, orchestrator=pool.url, wallet=pool.wallet, **changes
        )
        publisher = new_publisher(set_, facts, kit.TRAINER, client)
        with new_origin(set_, publisher.root, kit.TRAINER) as origin:
            trainer = Trainer(
                learner, facts, client, Publishing(publisher, origin), threading.Event()
            )
            try:
                yield trainer, origin
            finally:
                trainer.stop.set()
                trainer.keeper.shutdown(wait=True)


def test_a_bad_batch_after_a_gap_is_skipped_once_by_its_own_number(
    pool: Pool, tmp_path: Path, world: World
) -> None:
    pool.seal(3, kit.rows(3, pool.run.samples_per_group, seed=3, version=4))
    with trainer_of(pool, tmp_path / "data", world, bad_batch="skip") as (trainer, _):
        trainer.newest = 3  # batches 1 and 2 were never sealed
        bad = trainer.verified_batch(1, Stopwatch())
        assert isinstance(bad, BadBatch)
        assert (bad.step, "policy 4" in bad.why) == (3, True)
        state = replace(trainer.resume(), step=1)
        assert trainer.train(bad, state, Stopwatch())["step"] == 3


def test_no_batch_is_skipped_for_what_something_between_answers(
    pool: Pool, tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.seal(0, kit.rows(2, pool.run.samples_per_group, seed=3))
    with trainer_of(pool, tmp_path / "data", world, bad_batch="skip") as (trainer, _):
        request, pages = trainer.client.request, [b"<html>busy</html>"]

        def garbled(method: str, path: str, body: bytes, *, signed: bool) -> bytes:
            if path == "/v1/batches/0" and pages:
                return pages.pop()
            return request(method, path, body, signed=signed)

        monkeypatch.setattr(trainer.client, "request", garbled)
        assert isinstance(trainer.verified_batch(0, Stopwatch()), TrainingBatch)
        assert not pages
        monkeypatch.setattr(feed, "FETCH_TRIES", 1)
        monkeypatch.setattr(trainer.client, "_stream", lambda url: iter([b"<html>busy</html>"]))
        with pytest.raises(UnavailableError, match=r"cannot be fetched.* with --skip-batch 0"):
            trainer.verified_batch(0, Stopwatch())
        settings = trainer.learner.settings.model_copy(update={"skip_batch": 0})
        trainer.learner = replace(trainer.learner, settings=settings)
        assert isinstance(trainer.verified_batch(0, Stopwatch()), BadBatch)
        trainer.rules = replace(trainer.rules, manager=kit.STRANGER.address)
        with pytest.raises(UntrustedError, match="is signed by"):
            trainer.verified_batch(0, Stopwatch())


def begins(origin: TrainerOrigin, version: int) -> None:
    """A relay begins to fetch a version."""
    httpx.get(f"{origin.url}/policies/{version}/manifest.json").raise_for_status()


def test_a_publication_runs_during_the_next_step_and_the_step_after_waits_for_it(
    pool: Pool, tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "FIRST_RELAY_SECONDS", 60.0)
    why = "a batch that is skipped: its weights are published unchanged"
    with trainer_of(pool, tmp_path / "data", world) as (trainer, origin):
        state = trainer.resume()
        trainer.publish_first(state, Stopwatch())  # no relay ever came: no one is waited for
        assert [s.manifest.version for s in pool.published()] == [0]
        begins(origin, 0)

        def step(watch: Stopwatch) -> None:
            nonlocal state
            batch = BadBatch(Step(state.step), why)
            state = trainer.keep(state, batch, trainer.train(batch, state, watch), watch)

        step(Stopwatch())  # returns, though no relay has begun with policy 1
        until(lambda: len(pool.published()) == 2, "policy 1, in the background")
        assert trainer.kept is not None
        assert not trainer.kept.done()

        waits: list[str] = []
        second = threading.Thread(target=step, args=(Stopwatch(begins=waits.append),))
        second.start()
        until(lambda: "wait_kept" in waits, "the step after waits")
        httpx.get(f"{origin.url}/policies/999999999/x")
        begins(origin, 0)
        assert second.is_alive()
        assert waits == ["wait_kept"]
        assert state.step == 1
        begins(origin, 1)
        second.join()
        assert waits[:2] == ["wait_kept", "snapshot"]
        until(lambda: len(pool.published()) == 3, "policy 2")
        assert trainer.kept is not None
        assert not trainer.kept.done()
        begins(origin, 2)
        trainer.wait_kept(Stopwatch())
        assert state.step == 2


def test_an_orchestrator_restored_from_an_older_backup_gets_the_policies_that_it_lacks(
    pool: Pool, tmp_path: Path, world: World
) -> None:
    """Without them it refuses every later one, and the pool trains no more."""

    def step(trainer: Trainer, state: TrainerState) -> TrainerState:
        batch = BadBatch(Step(state.step), "skipped: its weights are published unchanged")
        return trainer.keep(state, batch, trainer.train(batch, state, Stopwatch()), Stopwatch())

    with trainer_of(pool, tmp_path / "data", world) as (trainer, _):
        state = trainer.resume()
        trainer.publish_first(state, Stopwatch())
        for _ in range(3):
            state = step(trainer, state)
        trainer.wait_kept(Stopwatch())
    made = pool.published()
    assert [one.manifest.version for one in made] == [0, 1, 2, 3]
    with pool.store.begin() as connection:
        connection.execute(sa.delete(schema.policies).where(schema.policies.c.version > 0))
    with trainer_of(pool, tmp_path / "data", world) as (trainer, _):
        trainer.publish_first(trainer.resume(), Stopwatch())
    assert pool.published() == made


@contextmanager
def published_by_hand(pool: Pool, data: Path) -> Iterator[tuple[threading.Thread, str]]:
    """The command in a thread, once it serves; and where."""
    stop = threading.Event()
    call = threading.Thread(
        target=publish_by_hand, args=(pool.settings(data), pool.model, 0), kwargs={"stop": stop}
    )
    call.start()
    try:
        until(lambda: bool(pool.published()) and bool(pool.relays()), "the announcement")
        yield call, pool.relays()[0]
    finally:
        stop.set()
        call.join()


def trust(pool: Pool) -> Trust:
    domain = pool.backend.context.deployment.domain("pools")
    return Trust(kit.TRAINER.address, domain, kit.POOL)


def a_node_names(pool: Pool, version: int) -> None:
    """As a heartbeat does."""
    with pool.store.begin() as connection:
        policies.note_arrivals(connection, [(kit.MANAGER.address, version)], now=time.time())


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """What the command received each time that it asked who has the policy."""
    received: list[str | None] = []
    ask = run.whole_at

    def asked(*args: Any) -> str | None:
        received.append(ask(*args))
        return received[-1]

    monkeypatch.setattr(run, "whole_at", asked)
    monkeypatch.setattr(run, "LOOK_SECONDS", 0.02)
    return received


def test_a_policy_published_by_hand_is_served_until_a_relay_has_all_of_it(
    pool: Pool, tmp_path: Path, looks: list[str | None], capfd: pytest.CaptureFixture[str]
) -> None:
    with (
        Relay(tmp_path / "relay", trust(pool)) as relay,
        OrchestratorClient(pool.url, kit.TRAINER, "relay") as client,
    ):
        with published_by_hand(pool, tmp_path / "data") as (call, url):
            [signed] = pool.published()
            client.post("/v1/relays", RelayAnnouncement(url=relay.url, versions=(0,)), Empty)
            began = len(looks)
            until(lambda: len(looks) > began + 1, "a look at the relay, which has nothing yet")
            assert call.is_alive()
            relay.offer([signed], [[url]])
            call.join()
        until(lambda: relay.complete() == [0], "the relay has checked what it serves")
        assert set(looks[:-1]) == {None}
        said = capfd.readouterr()
        assert said.out == f"policy 0: {signed.manifest.digest()}\n"
        first, last = said.err.strip().splitlines()[-2:]
        assert first.startswith(f"serving policy 0 at {url} until a relay, or a node's heartbeat,")
        assert last.startswith(f"the relay {relay.url} has all of policy 0;")
        with pytest.raises(httpx.ConnectError):
            httpx.get(url)

        publish_by_hand(pool.settings(tmp_path / "data"), pool.model, 0)  # ends at once
        assert capfd.readouterr().err.splitlines() == [
            f"the relay {relay.url} has all of policy 0 already: it is not served again"
        ]
    assert len(pool.published()) == 1


def test_a_nodes_heartbeat_ends_the_serving_too(
    pool: Pool, tmp_path: Path, looks: list[str | None], capfd: pytest.CaptureFixture[str]
) -> None:
    with published_by_hand(pool, tmp_path / "data") as (call, _):
        a_node_names(pool, 0)
        call.join()
    assert looks[-1] == "a node"
    assert "a node has all of policy 0; who still reads it" in capfd.readouterr().err


def test_a_strangers_reading_ends_nothing(
    pool: Pool, tmp_path: Path, looks: list[str | None], capfd: pytest.CaptureFixture[str]
) -> None:
    with published_by_hand(pool, tmp_path / "data") as (call, url):
        PolicyFolder(tmp_path / "stranger", trust(pool)).ensure(0, pool.published()[0], [url])
        began = len(looks)
        until(lambda: len(looks) > began + 1, "a look after it")
        assert call.is_alive()
    assert "no source is known to have all of policy 0 yet" in capfd.readouterr().err


def test_a_user_who_stops_earlier_learns_that_no_one_has_the_key_and_may_start_again(
    pool: Pool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stop = threading.Event()
    stop.set()
    reported = "no source is known to have all of policy 0 yet; `trainer run`"
    for _ in range(2):
        publish_by_hand(pool.settings(tmp_path / "data"), pool.model, 0, stop=stop)
        assert reported in capfd.readouterr().err
    assert len(pool.published()) == 1


def by_hand(pool: Pool, data: Path, *more: str) -> list[str]:
    """`trainer publish` as an operator types it."""
    command = pool.command(data)
    flags = [word for name in ("--orchestrator", "--model", "--data", "--wallet", "--password-file")
             for word in (name, command[command.index(name) + 1])]  # fmt: skip
    return [*command[:3], "publish", *flags, "--version", "0", *more]


@pytest.mark.slow
def test_ctrl_c_ends_the_serving_and_is_no_error(pool: Pool, tmp_path: Path) -> None:
    with started(by_hand(pool, tmp_path / "data")) as child:
        assert child.stdout is not None
        assert any(line.startswith("serving policy 0 at") for line in child.stdout)
        code, said = asked_to_stop(child, signal.SIGINT)
        assert code == 0
        assert "no source is known to have all of policy 0 yet" in said


@pytest.mark.slow
def test_a_mirrors_policy_is_only_signed_and_handed_in(pool: Pool, tmp_path: Path) -> None:
    data = tmp_path / "data"
    ended = finished(by_hand(pool, data, "--no-serve"))
    assert ended.returncode == 0, ended.stdout
    [signed] = pool.published()
    assert ended.stdout.splitlines() == [f"policy 0: {signed.manifest.digest()}"]
    assert pool.relays() == []
    assert layout.versions(data / "origin") == [0]


def test_nothing_is_announced_where_it_cannot_be_served(pool: Pool, tmp_path: Path) -> None:
    taken = int(pool.url.rpartition(":")[2])
    with pytest.raises(UserError, match="cannot listen"):
        publish_by_hand(pool.settings(tmp_path / "data", origin_port=taken), pool.model, 0)
    assert pool.published() == []


def test_one_address_cannot_take_every_place_at_the_origin(pool: Pool, tmp_path: Path) -> None:
    root = tmp_path / "data" / "origin"
    root.mkdir(parents=True)
    with (
        new_origin(
            pool.settings(tmp_path / "data", origin_connections_each=1), root, kit.TRAINER
        ) as origin,
        httpx.Client() as first,
        httpx.Client() as second,
    ):
        assert first.get(f"{origin.url}/healthz").status_code == 200
        with pytest.raises(httpx.HTTPError):
            second.get(f"{origin.url}/healthz")
        assert first.get(f"{origin.url}/healthz").status_code == 200
    assert pool.settings(tmp_path).origin_connections_each == 256
