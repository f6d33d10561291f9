"""A registry of images on loopback."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from devnet.ports import free_port


@contextmanager
def registry(folder: Path) -> Iterator[str]:
    """Debian's docker-registry on loopback; yields its host and port."""
    program = shutil.which("docker-registry")
    if program is None:
        pytest.skip("no docker-registry (Debian: apt-get install docker-registry)")
    where = f"127.0.0.1:{free_port()}"
    (folder / "registry.yml").write_text(
        f"version: 0.1\nlog: {{level: warn}}\nhttp: {{addr: '{where}'}}\n"
        f"storage: {{filesystem: {{rootdirectory: '{folder / 'registry'}'}}}}\n"
    )
    with (folder / "registry.log").open("wb") as log:
        child = subprocess.Popen(
            [program, "serve", folder / "registry.yml"], stdout=log, stderr=log
        )

    try:
        deadline = time.monotonic() + 20
        while not _answers(f"http://{where}/v2/"):
            assert child.poll() is None, (folder / "registry.log").read_text()
            assert time.monotonic() < deadline, "the registry does not answer"
            time.sleep(0.05)
        yield where
    finally:
        child.terminate()
        child.wait(20)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False
