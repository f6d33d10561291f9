"""Three nodes, three steps, every task in a container."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import docker
import pytest
from docker.errors import DockerException
from e2e_kit import ROOT, devnet, findings, processes_of, require_anvil, run

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(1200)]


def test_three_nodes_train_three_steps_in_containers(tmp_path: Path) -> None:
    require_anvil()
    try:
        engine = docker.from_env(timeout=300)
        engine.ping()
    except DockerException as error:
        pytest.skip(f"no Docker engine (scripts/ci_docker.sh start, or install docker.io): {error}")
    built = subprocess.run(
        [sys.executable, str(ROOT / "deploy" / "build_image.py"), "worker", "--tag", "prime-e2e"],
        capture_output=True,
        text=True,
        check=True,
    )
    root = tmp_path / "run"
    try:
        words = ("up", "--plain", "--quick", "--steps", "3", "--nodes", "3", "--liars", "0")
        image = ("--runtime", "docker", "--image", built.stdout.strip())
        done = run(devnet(*words, *image, "--root", str(root)), 900)
        assert all(findings(root).values())
        assert done.returncode == 0
        assert engine.containers.list(filters={"ancestor": "prime-e2e"}) == []
    finally:
        engine.images.remove("prime-e2e", force=True)
        engine.close()
    assert processes_of(root) == []
