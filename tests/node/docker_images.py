"""Images for tests of the container runtime, made on the spot: a bare busybox, and one that is
served by a registry of our own."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
import uuid
from pathlib import Path

import docker
import pytest


def import_root(engine: docker.DockerClient, files: dict[str, Path] | None = None) -> str:
    """Id of an image with a static busybox and `files` (place in the image: file here)."""
    program = shutil.which("busybox")
    if program is None:
        pytest.skip("no busybox (Debian: apt-get install busybox-static)")
    root = io.BytesIO()
    with tarfile.open(fileobj=root, mode="w") as tar:
        for place, here in {"bin/busybox": Path(program), **(files or {})}.items():
            tar.add(os.path.realpath(here), place)
        for folder in ("tmp", "prime", "proc", "dev", "sys", "etc"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
    tag = f"prime-test-{uuid.uuid4().hex[:12]}"
    engine.api.import_image_from_data(root.getvalue(), repository=tag)
    return str(engine.images.get(tag).id)


def build(engine: docker.DockerClient, image: str, *lines: str) -> str:
    """Id of an image that adds lines of a Dockerfile to another."""
    text = "\n".join((f"FROM {image}", *lines)).encode()
    made, _ = engine.images.build(fileobj=io.BytesIO(text), rm=True)
    return str(made.id)
