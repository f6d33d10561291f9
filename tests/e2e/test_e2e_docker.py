"""Three nodes, three steps, every task in a container."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from docker_engine import docker_engine
from e2e_kit import ROOT, devnet, findings, processes_of, require_anvil, run

pytestmark = [pytest.mark.docker, pytest.mark.soak, pytest.mark.timeout(1200)]


def test_three_nodes_train_three_steps_in_containers(tmp_path: Path) -> None:
    require_anvil()
    root = tmp_path / "run"
    with docker_engine() as engine:
        built = subprocess.run(
            [sys.executable, ROOT / "deploy" / "build_image.py", "worker", "--tag", "prime-e2e"],
            capture_output=True,
            text=True,
            check=True,
        )
        try:
            words = ("up", "--plain", "--quick", "--steps", "3", "--nodes", "3", "--liars", "0")
            image = ("--runtime", "docker", "--image", built.stdout.strip())
            done = run(devnet(*words, *image, "--root", str(root)), 900)
            assert all(findings(root).values())
            assert done.returncode == 0
            assert engine.containers.list(filters={"ancestor": "prime-e2e"}) == []
        finally:
            engine.images.remove("prime-e2e", force=True)
    assert processes_of(root) == []
