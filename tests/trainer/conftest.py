"""A process group of one for the trainer's tests, and a tiny model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import trainer_kit as kit
from trainer_pool import Pool, pool_server

from prime_trainer.parallel import World, joined_world


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """A process group for one file: others in the same process start groups of their own."""
    with joined_world() as joined:
        yield joined


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kit.tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao, from a folder of its own: transformers imports it wherever it is installed."""
    home = os.environ.get("PRIME_TORCHAO_HOME", "")
    if not Path(home, "torchao").is_dir():
        pytest.skip(
            "needs torchao: pip install --no-deps --target DIR torchao==0.18.0, and "
            "PRIME_TORCHAO_HOME=DIR"
        )
    monkeypatch.syspath_prepend(home)


@pytest.fixture
def pool(tmp_path: Path, model: Path) -> Iterator[Pool]:
    """An orchestrator whose nodes the tests play."""
    root = tmp_path / "pool"
    root.mkdir()
    with pool_server(root, model) as served:
        yield served
