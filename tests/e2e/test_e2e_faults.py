"""One pool under faults of every kind, in turn; `make soak ARGS=faults` is the long run."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e_kit import processes_of, require_anvil

from devnet.faults import KINDS, Sizes, play
from prime_core.deployment import DEMO_PERIODS
from prime_core.errors import UserError

SHORT = tuple(kind for kind in KINDS if kind not in ("disk-full-postgres", "disk-full-s3"))
"""The long run fills the servers' disks as well."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def test_a_pool_under_every_fault_loses_nothing_and_slashes_a_liar(tmp_path: Path) -> None:
    """The throughput is not judged here: other tests run at the same time."""
    require_anvil()
    sizes = Sizes(
        nodes=8, quiet=5, seconds=48, lasts=2, faults=len(SHORT), throttle=2, groups=16,
        rest=0, periods=DEMO_PERIODS, kinds=SHORT, lease_seconds=60, least_kept=0,
    )  # fmt: skip
    root = tmp_path / "run"
    root.mkdir()
    try:
        report = play(root, sizes, print)
    except UserError as error:
        pytest.skip(f"{error}; {error.hint}")
    print(report.summary())
    assert report.wrong == []
    assert {window.kind for window in report.windows} == set(SHORT)
    assert report.survived == len(SHORT)
    assert report.steps > 0
    assert report.receipts > 0
    assert report.liars_slashed == 1
    assert processes_of(root) == []
