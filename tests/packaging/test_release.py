"""`scripts/release --dry-run`: what a release consists of, and that it changes nothing here."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest
from docker.errors import ImageNotFound
from docker_engine import docker_engine

ROOT = Path(__file__).parents[2]


def git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


DRY_RUN = (ROOT / "scripts/release", "--dry-run", "--out")
IMAGES = ("prime-open", "prime-worker")


@pytest.fixture
def engine() -> Iterator[docker.DockerClient]:
    """The Docker engine; afterwards its tags of IMAGES are as they were."""
    if shutil.which("docker-registry") is None:
        pytest.skip("no docker-registry (Debian: apt-get install docker-registry)")
    tags = [f"{name}:{version()}" for name in IMAGES]
    with docker_engine() as client:
        before = {tag: image for tag in tags if (image := found(client, tag)) is not None}
        yield client
        for tag in tags:
            if found(client, tag) is not None:
                client.images.remove(tag)
            if tag in before:
                before[tag].tag(*tag.split(":"))


def version() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return str(project["version"])


def found(client: docker.DockerClient, tag: str) -> docker.models.images.Image | None:
    try:
        return client.images.get(tag)
    except ImageNotFound:
        return None


def released(out: Path, **environment: str) -> None:
    """Runs a dry run into `out`. It must change neither tags nor files here."""
    before = git("tag"), git("status", "--porcelain")
    done = subprocess.run(
        [*DRY_RUN, out], capture_output=True, text=True, timeout=1100, check=False,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (git("tag"), git("status", "--porcelain")) == before


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_dry_run_makes_everything_but_images_and_changes_nothing(tmp_path: Path) -> None:
    """Without an engine. Images by digest: the test below."""
    out = tmp_path / "release"
    released(out, DOCKER_HOST=f"unix://{tmp_path}/no-engine.sock")

    [wheel], [sdist] = out.glob("*.whl"), out.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as held:
        examples = {name for name in held.namelist() if "/examples/" in name}
    assert any(name.endswith("run-local.toml") for name in examples)
    with tarfile.open(sdist) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    assert {"pyproject.toml", "docs/examples/run-local.toml", "LICENSE"} <= names

    bill = json.loads((out / "sbom.cdx.json").read_text())
    assert bill["bomFormat"] == "CycloneDX"
    assert bill["metadata"]["component"]["name"] == "prime-open"
    versions = {one["name"].lower(): one["version"] for one in bill["components"]}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line.startswith(("coincurve==", "httpx==", "pydantic==")):
            name, _, pinned = line.partition("==")
            assert versions[name] == pinned
    assert str(ROOT) not in (out / "sbom.cdx.json").read_text()

    assert "### Added" in (out / "notes.md").read_text()
    assert (out / "commit.txt").read_text() == git("rev-parse", "HEAD")
    sums = dict(line.split()[::-1] for line in (out / "SHA256SUMS").read_text().splitlines())
    assert "images.txt" not in sums
    assert sums.keys() == {file.name for file in out.iterdir()} - {"SHA256SUMS"}
    for name, digest in sums.items():
        assert hashlib.sha256((out / name).read_bytes()).hexdigest() == digest

    again = subprocess.run([*DRY_RUN, out], capture_output=True, text=True, check=False)
    assert (again.returncode, "exists already" in again.stderr) == (64, True)


@pytest.mark.soak
@pytest.mark.docker
@pytest.mark.timeout(1200)
def test_a_dry_run_names_its_images_by_digest(engine: docker.DockerClient, tmp_path: Path) -> None:
    out = tmp_path / "release"
    released(out)
    lines = (out / "images.txt").read_text().splitlines()
    assert [line.split("@")[0] for line in lines] == [*IMAGES]
    digests = {line.split("@")[1] for line in lines}
    assert len(digests) == 2
    assert all(re.fullmatch("sha256:[0-9a-f]{64}", one) for one in digests)
    said = engine.containers.run(
        f"prime-open:{version()}", ["orchestrator", "--version"], remove=True, network_mode="none"
    )
    assert version() in said.decode()
    assert "images.txt" in (out / "SHA256SUMS").read_text()
