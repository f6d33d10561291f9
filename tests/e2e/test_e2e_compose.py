"""deploy/compose as containers: our services of it make a pool, with this machine's own programs in
place of other projects' images."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import docker
import httpx
import pytest
from compose_file import OURS
from compose_kit import Project, project
from docker_engine import docker_engine
from docker_registry import registry
from e2e_kit import ROOT, require_anvil, until

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(1200)]
HOSTS = {"host": "localhost:8700"}
USER = "65532"
LISTED = """
import boto3, botocore.exceptions as found

s3 = boto3.client("s3", endpoint_url="http://s3:8333", region_name="us-east-1")
for name in ("pools", "policies"):
    try:
        s3.list_objects_v2(Bucket=name)
        print(name)
    except found.ClientError as error:
        assert error.response["Error"]["Code"] == "AccessDenied", error
"""
"""Prints the buckets that a service's own key opens."""


@pytest.fixture
def engine() -> Iterator[docker.DockerClient]:
    """The Docker engine, for one test at a time: the file names the network's addresses."""
    require_anvil()
    lock = Path(tempfile.gettempdir()) / "prime-tests-compose.lock"
    with docker_engine() as client, lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield client


@pytest.fixture
def image(engine: docker.DockerClient, tmp_path: Path) -> Iterator[str]:
    """Our image by digest, built without a registry and pushed to one on loopback."""
    with registry(tmp_path) as where:
        words = ["services", "--tag", "prime-e2e-services", "--push", f"{where}/prime-open"]
        built = subprocess.run(
            [sys.executable, ROOT / "deploy/build_image.py", *words],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert built.returncode == 0, built.stderr
        name = built.stdout.strip()
        assert name.startswith(f"{where}/prime-open@sha256:")
        try:
            yield name
        finally:
            engine.images.remove(engine.images.get(name).id, force=True)


def status(pool: Project) -> dict[str, Any]:
    """What the pool says of itself through Caddy."""
    url = f"http://{pool.published('caddy', 8700)}/v1/status"
    found: dict[str, Any] = httpx.get(url, headers=HOSTS, timeout=60).raise_for_status().json()
    return found


def test_our_services_of_deploy_compose_train(image: str, engine: docker.DockerClient) -> None:
    with project(engine, image) as pool:
        ours = [name for name, one in pool.services.items() if one["image"] == OURS]
        running = [name for name in ours if name not in ("keys", "pool")]
        pool.up()
        for name in ("orchestrator-1", "orchestrator-2"):
            assert httpx.get(f"http://{pool.address(name)}:8700/readyz").status_code == 200
        until(lambda: status(pool)["files"].get("accepted"), "a file of the node is accepted", 600)
        # A validator is listed while its last request is recent: on a busy machine it may be late.
        until(lambda: len(status(pool)["validators"]) == 1, "the validator is listed")
        until(lambda: status(pool)["chain_reachable"], "the chain is reachable")
        seen = status(pool)
        assert (seen["pool"], len(seen["nodes"])) == (1, 1)
        until(lambda: status(pool)["latest_version"], "the trainer has learned from a batch", 600)
        url = f"http://{pool.published('caddy', 8700)}/v1/relays"
        known = {"http://relay:8480", "http://trainer:8475"}

        def buckets() -> set[str]:
            listed = {one["url"] for one in httpx.get(url, headers=HOSTS).json()}
            return listed - known if known < listed else set()

        until(lambda: len(buckets()) == 1, "relay, origin and bucket are listed")
        bucket = urlsplit(buckets().pop())
        assert bucket.netloc == "s3:8333"
        s3 = f"http://{pool.address('s3')}:8333"
        assert httpx.get(f"{s3}{bucket.path}/policies/0/manifest.json").status_code == 200
        for path in ("/policies?list-type=2", "/pools?list-type=2", "/pools/x"):
            assert httpx.get(s3 + path).status_code == 403, "everyone may read policies only"
        assert httpx.put(f"{s3}/policies/x", content=b"x").status_code == 403
        for name, its_own in (("trainer", b"policies\n"), ("orchestrator-1", b"pools\n")):
            assert pool.containers[name].exec_run(["python", "-c", LISTED]) == (0, its_own)
        for name in (one for one in pool.services if "healthcheck" in pool.services[one]):
            until(lambda name=name: pool.health(name) == "healthy", f"{name} is healthy")
        for name in running:
            container = pool.containers[name]
            assert pool.state(name)["Running"], pool.logs(name)
            assert container.attrs["RestartCount"] == 0, pool.logs(name)
            assert container.attrs["Config"]["Image"] == image
            assert {row[0] for row in container.top()["Processes"]} == {USER}, name
        with ThreadPoolExecutor(len(running)) as threads:
            list(threads.map(pool.stop, running))
        for name in running:
            assert pool.state(name)["ExitCode"] == 0, pool.logs(name)
