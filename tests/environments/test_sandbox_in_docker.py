"""The sandbox inside a task's container: no privilege, and the same walls."""

from __future__ import annotations

import io
import json
import os
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest
from docker_engine import docker_engine

pytestmark = pytest.mark.docker
ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = {
    "sum": "print(20 + 22)",
    "fork": "import os\nos.fork()",
    "read": "print(open('/etc/hostname').read())",
    "write": "open('/tmp/x', 'w')",
    "spin": "while True: pass",
    "hog": "x = bytearray(10**10)",
    "threads": (
        "import threading\nthreading.stack_size(1 << 16)\n"
        "for i in range(1000): threading.Thread(target=threading.Event().wait, daemon=True).start()"
    ),
}
INSIDE = """
import json, sys
sys.path.insert(0, sys.argv[1])
from prime_envs.sandbox.client import ProgramLimits, Program, Sandbox
with Sandbox() as box:
    found = {n: box.run(Program(s), ProgramLimits(cpu_seconds=0.5)) for n, s in json.loads(sys.argv[2]).items()}
    print(json.dumps({"level": box.level, **{n: [o.status, o.output] for n, o in found.items()}}))
"""  # noqa: E501


@pytest.fixture(scope="module")
def image() -> Iterator[tuple[docker.DockerClient, str]]:
    """An image with nothing in it: what runs is mounted."""
    empty = io.BytesIO()
    with tarfile.open(fileobj=empty, mode="w") as archive:
        for name in ("tmp", "etc"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(folder)
    with docker_engine() as client:
        made = client.api.import_image_from_data(empty.getvalue())
        identity = json.loads(made.splitlines()[-1])["status"]
        yield client, identity
        client.images.remove(identity, force=True)


def test_programs_are_confined_where_the_container_gives_no_privilege(
    image: tuple[docker.DockerClient, str],
) -> None:
    client, identity = image
    places = {ROOT, Path(sys.prefix), Path(sys.base_prefix)}
    places |= {Path(p) for p in ("/usr", "/lib", "/lib64") if Path(p).exists()}
    said = client.containers.run(
        identity,
        [sys.executable, "-c", INSIDE, str(ROOT), json.dumps(PROGRAMS)],
        # as the agent starts a task (prime_node/runtime/docker.py)
        user="65532:65532",
        cap_drop=["ALL"],
        security_opt=["no-new-privileges:true"],
        read_only=True,
        network_mode="none",
        pids_limit=256,
        mem_limit="2g",
        tmpfs={"/tmp": "rw,nosuid,nodev,size=64m,mode=1777"},
        volumes={str(p): {"bind": str(p), "mode": "ro"} for p in places},
        environment={"HOME": "/tmp", "PATH": os.environ.get("PATH", "")},
        working_dir="/tmp",
        remove=True,
    )
    found = json.loads(said.splitlines()[-1])
    assert found.pop("level") == "limits"
    assert found.pop("sum") == ["ok", "42\n"]
    counted = {"failed", "threads"}  # threads are counted by the kernel, or by us
    assert found.pop("threads")[0] in counted
    assert {name: status for name, (status, _output) in found.items()} == {
        "fork": "failed",
        "read": "failed",
        "write": "failed",
        "spin": "cpu",
        "hog": "failed",
    }
