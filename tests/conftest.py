"""Fixtures that every room's tests may use: a local chain, and our contracts on it."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator

import pytest
from hypothesis import settings

from devnet.chain import Anvil, find_anvil
from devnet.deployed import Deployed, deploy_local
from protocol.core.errors import UserError

# No example fails for having taken long: on a busy machine any may.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

MISSING = ("needs ", "no Docker engine", "no busybox", "PostgreSQL")
"""How a skip begins whose cause is a missing engine, and not who runs the tests or on what."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With PRIME_TESTS_SKIP_NOTHING set (`make test-all`), a missing engine is a failure."""
    report = yield
    if report.skipped and os.environ.get("PRIME_TESTS_SKIP_NOTHING") and call.excinfo is not None:
        reason = str(call.excinfo.value)
        if reason.startswith(MISSING) and "CUDA" not in reason:
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
