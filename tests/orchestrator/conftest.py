"""Fixtures of the orchestrator's tests: a world over SQLite, and stores of both kinds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from judges import commit_draws
from operator_kit import operator as operator
from orchestrator_world import (
    AUDIENCE,
    VERSIONED,
    Clock,
    MakeWorld,
    World,
    deployment,
    run_definition,
    signer,
)
from stores import migrate

from prime_core.storage.directory import DirectoryStore
from prime_orchestrator.api.app import create_app
from prime_orchestrator.api.backend import Backend
from prime_orchestrator.context import PoolContext
from prime_orchestrator.store import Store, open_store, sqlite_url


@pytest.fixture
def make_world(store: Store, tmp_path: Path) -> Iterator[MakeWorld]:
    """Builds an orchestrator over `store`; keyword arguments change its run definition."""
    clients: list[TestClient] = []

    def make(**changes: Any) -> World:
        clock, manager, trainer = Clock(), signer(200), signer(201)
        backend = Backend(
            context=PoolContext(
                deployment=deployment(),
                pool=1,
                manager=manager.address,
                run=run_definition(**changes),
            ),
            store=store,
            objects=DirectoryStore(tmp_path / "objects", AUDIENCE, b"s" * 32),
            manager=manager,
            trainer=trainer.address,
            audience=AUDIENCE,
            relay_accounts=frozenset({signer(5).address, signer(6).address}),
            now=clock,
            random=random.Random(7).randbytes,
        )
        commit_draws(store, backend.context, signer(202), clock)
        http = TestClient(create_app(backend), base_url=AUDIENCE, headers=VERSIONED)
        http.follow_redirects = False
        clients.append(http)
        return World(backend, clock, http, manager, trainer)

    yield make
    for client in clients:
        client.close()


@pytest.fixture(autouse=True)
def _fresh_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that look at the status twice see what happened between."""
    monkeypatch.setattr("prime_orchestrator.api.kept.EVERY_SECONDS", 0.0)


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    """The small run with policy 0 published."""
    made = make_world()
    made.publish(0)
    return made


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A migrated SQLite store."""
    opened = open_store(sqlite_url(tmp_path / "orchestrator.sqlite"))
    migrate(opened)
    yield opened
    opened.close()


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def empty_database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """An empty database of each kind, not yet migrated."""
    if request.param == "sqlite":
        opened = open_store(sqlite_url(tmp_path / "either.sqlite"))
    else:
        opened = open_store(request.getfixturevalue("empty_postgres"))
    yield opened
    opened.close()


@pytest.fixture
def either_store(empty_database: Store) -> Store:
    """A migrated store of each kind."""
    migrate(empty_database)
    return empty_database
