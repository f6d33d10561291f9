"""The gas bench compares what forge measures now with the committed snapshot."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from bench import gas
from bench.form import ROOT
from prime_core.errors import UnavailableError

pytestmark = pytest.mark.forge


@pytest.fixture(autouse=True)
def _forge_is_here() -> None:
    done = subprocess.run(
        [str(ROOT / "scripts" / "forge"), "--version"], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("needs the Foundry toolchain (make setup installs it)")


@pytest.mark.slow
def test_a_snapshot_that_the_sources_do_not_give_is_refused(tmp_path: Path) -> None:
    snapshots = tmp_path / "snapshots"
    shutil.copytree(gas.SNAPSHOT.parent, snapshots)
    gas.remeasure(snapshots)
    file = snapshots / gas.SNAPSHOT.name
    figures = json.loads(file.read_text())
    figures["reject of a leaf"] = str(int(figures["reject of a leaf"]) - 1)
    file.write_text(json.dumps(figures))
    with pytest.raises(UnavailableError, match="not the snapshot's"):
        gas.remeasure(snapshots)
    assert json.loads(file.read_text()) == figures, "the snapshot is left as it was"
