"""The Docker engine of this machine, for tests that need one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import docker
import pytest
import requests
from docker.errors import DockerException


@contextmanager
def docker_engine() -> Iterator[docker.DockerClient]:
    """Yields its client. Skips the test where no engine answers."""
    try:
        client = docker.from_env(timeout=600)
        client.ping()
    except (DockerException, requests.RequestException) as error:
        pytest.skip(f"no Docker engine (scripts/ci_docker.sh start, or install docker.io): {error}")
    try:
        yield client
    finally:
        client.close()
