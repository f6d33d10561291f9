"""Attacks by a task in a container on its agent: each ends with one sentence that says why, writes
nothing outside the agent's inbox, and leaves the agent serving."""

from __future__ import annotations

import logging
import os
import socket
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import docker
import pytest
from bridge_kit import Kit, bridge_kit, take_lease
from docker_images import import_root
from node_world import NodeWorld
from programs import load_script

from prime_core.rollout import MAX_FILE_BYTES
from prime_core.task import Task
from prime_node.bridge import MAX_CONNECTIONS
from prime_node.runtime.base import LOG_TAIL_BYTES, Mounts, WorkerOptions
from prime_node.runtime.docker import UNPRIVILEGED_UID, DockerRuntime

pytestmark = pytest.mark.docker
ROOT = Path(__file__).resolve().parents[2]
BASE = Path(sys.base_prefix)
LOG_BYTES = 2 * (8 << 20) + (1 << 20)
"""What the engine keeps of a task's output (two files of 8 MB), and a last line."""
HELPERS = f"""
import os, socket, stat, sys, time, threading, json, signal
OUT = '/prime/outbox/'
def tried(what, *args, **kw):
    try: print(what.__name__, args, what(*args, **kw), flush=True)
    except OSError as error: print(what.__name__, args, error.strerror or error, flush=True)
def connect():
    bridge = socket.socket(socket.AF_UNIX)
    bridge.connect('/prime/bridge/agent.sock')
    return bridge
def ask(verb, path, length='0', body=()):
    bridge = connect()
    try:
        bridge.sendall(f'{{verb}} {{path}} HTTP/1.1\\r\\nPrime-Protocol: 1\\r\\nContent-Length: '
                       f'{{length}}\\r\\n\\r\\n'.encode())
        for piece in body: bridge.sendall(piece)
        bridge.shutdown(socket.SHUT_WR)
    except OSError: pass
    answer = b''
    try:  # a body longer than announced is not read: the agent answers, then the socket is reset
        while piece := bridge.recv(1 << 16): answer += piece
    except ConnectionResetError: pass
    print(answer.decode().partition('\\r\\n\\r\\n')[2], flush=True)
def submit(name):
    body = json.dumps({{'lease_digest': LEASE, 'file': name}}).encode()
    ask('POST', '/submit', len(body), [body])
MAX = {MAX_FILE_BYTES}
"""


@dataclass(frozen=True)
class Attack:
    """`says`: what the task reads, or the agent logs. `status`: what the task ends with."""

    name: str
    program: str
    says: tuple[str, ...]
    status: int = 0
    limits: dict[str, int] = field(default_factory=dict)


DENIED, READ_ONLY = "Operation not permitted", "Read-only file system"
ATTACKS = (
    Attack(
        "links and pipes as files",
        "os.symlink('/etc/passwd', OUT + 'l'); os.mkfifo(OUT + 'p')\n"
        "tried(os.symlink, '/etc/passwd', '/prime/bridge/l'); tried(os.mkfifo, '/prime/bridge/p')\n"
        "tried(os.rename, '/prime/bridge/agent.sock', '/prime/bridge/x')\n"
        "tried(os.link, '/prime/bridge/agent.sock', OUT + 'sock')\n"
        "submit('l'); submit('p')\n",
        (READ_ONLY, "Invalid cross-device link", "holds no readable file"),
    ),
    Attack(
        "device nodes",
        "for kind in (stat.S_IFBLK, stat.S_IFCHR):\n"
        "    for place in (OUT + 'd', '/tmp/d', '/dev/d'):\n"
        "        tried(os.mknod, place, kind | 0o600, os.makedev(8, 0))\n"
        "print(sorted(set(os.listdir('/dev')) & {'sda', 'vda', 'mem', 'kmsg', 'fuse', 'kvm'}))\n",
        (DENIED, "Permission denied", "[]"),
    ),
    Attack(
        "paths that lead out",
        "for name in ('/etc/cron.d/x', '../x', '..', '%2e%2e%2fx', 'a/../../x', '.receiving',\n"
        "             'x%00', 'a\\\\b', '\\u2025/x'.encode().decode('latin-1')):\n"
        "    ask('PUT', '/file/' + name, 4, [b'data'])\n"
        "for name in ('/etc/passwd', '../inbox/x', '..', ''): submit(name)\n",
        ("not a plain file name: '/etc/cron.d/x'", "not a plain file name: '%2e%2e%2fx'",
         "not a plain file name: '.receiving'"),
    ),
    Attack(
        "a sparse file of 50 GB",
        "with open(OUT + 'sparse', 'wb') as f: tried(f.truncate, 50 << 30)\n"
        "ask('PUT', '/file/sparse', 50 << 30, [bytes(1 << 20)])\n"
        "ask('PUT', '/file/sparse', MAX + 1, (bytes(1 << 20) for _ in range((MAX >> 20) + 1)))\n"
        "ask('PUT', '/file/short', MAX, [bytes(1 << 20)] * 3)\n",
        ("a body of 53687091200 bytes is larger", f"1 to {MAX_FILE_BYTES} bytes, not",
         "bytes too early"),
    ),
    Attack(
        "a fork bomb",
        "started = 0\n"
        "try:\n"
        "    while True:\n"
        "        if os.fork() == 0: time.sleep(600)\n"
        "        started += 1\n"
        "except OSError as error: print(started < 32, error.strerror, flush=True)\n",
        ("True Resource temporarily unavailable",),
        limits={"pids": 32},
    ),
    Attack(
        "all memory",
        "held = []\nwhile True: held.append(bytearray(os.urandom(1 << 20)))\n",
        ("it used more memory than its limit",),
        status=137,
        limits={"memory_mb": 96},
    ),
    Attack(
        "endless output",
        "for _ in range(400): print('z' * (1 << 17), flush=True)\nprint('\\x1b[2Jdone')\n",
        ("done",),
    ),
    Attack(
        "a flood of the bridge",
        "held = []\n"
        "for n in range(400):\n"
        "    try:\n"
        "        held.append(connect())\n"
        "        held[-1].send(b'\\xff\\0' * n + b'GET /run HTTP/1.1\\r\\n')\n"
        "    except OSError as error: pass\n"
        "answers = 0\n"
        "for bridge in held:\n"
        "    bridge.settimeout(0.01)\n"
        "    try: answers += bridge.recv(1) == b''\n"
        "    except TimeoutError: pass\n"
        "    except OSError: answers += 1\n"
        f"print('closed', answers >= 400 - {2 * MAX_CONNECTIONS})\n",
        ("closed True",),
    ),
    Attack(
        "the host's network and its sockets",
        "for to in (('1.1.1.1', 80), ('169.254.169.254', 80), ('172.17.0.1', 22)):\n"
        "    tried(socket.create_connection, to, 2)\n"
        "for name in ('\\0' + NAME, '/var/run/docker.sock', '/run/systemd/notify'):\n"
        "    tried(socket.socket(socket.AF_UNIX).connect, name)\n"
        "tried(socket.socket, socket.AF_PACKET, socket.SOCK_RAW)\n"
        "tried(socket.socket, socket.AF_VSOCK, socket.SOCK_STREAM)\n",
        ("Network is unreachable", "Connection refused", "No such file or directory", DENIED),
    ),
    Attack(
        "the kernel's doors",
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "def call(name, *args):\n"
        "    print(name, getattr(libc, name)(*args), os.strerror(ctypes.get_errno()), flush=True)\n"
        "def write(path):\n"
        "    with open(path, 'w') as file: file.write('|/tmp/x')\n"
        "call('unshare', 0x10000000); call('unshare', 0x00020000); call('chroot', b'/tmp')\n"
        "call('mount', b'none', b'/tmp', b'tmpfs', 0, None); call('setuid', 0)\n"
        "call('ptrace', 16, 1, 0, 0); call('setns', 0, 0)\n"
        "for path in ('/proc/sys/kernel/core_pattern', '/proc/sysrq-trigger', '/proc/kcore',\n"
        "             '/sys/fs/cgroup/memory/release_agent', '/sys/kernel/uevent_helper',\n"
        "             '/proc/1/mem', '/proc/sys/vm/drop_caches'): tried(write, path)\n",
        ("unshare -1 Operation not permitted", "chroot -1 Operation not permitted",
         "mount -1 Operation not permitted", "setuid -1 Operation not permitted", READ_ONLY),
    ),
)  # fmt: skip


@pytest.fixture(scope="module")
def image(engine: docker.DockerClient) -> Iterator[str]:
    """The libraries that this machine's Python loads; Python itself is mounted as the policies."""
    module = load_script(ROOT / "deploy/build_image.py")
    extensions = list((BASE / "lib").glob("python3*/lib-dynload/*.so"))
    libraries = module.shared_libraries(extensions, [])
    made = import_root(engine, {str(place): here for place, here in libraries.items()})
    yield made
    engine.images.remove(made, force=True)


@pytest.fixture
def kit(world: NodeWorld, tmp_path: Path) -> Iterator[Kit]:
    """An agent's bridge and lease broker in front of a served pool."""
    with bridge_kit(world, tmp_path / "k", task_uid=os.getuid() or UNPRIVILEGED_UID) as made:
        yield made


def everything(folder: Path) -> dict[str, tuple[int, int]]:
    """Mode and size of all that lies below a folder but what the pool's own server writes."""
    found = (path for path in folder.rglob("*") if ".sqlite" not in path.name)
    return {str(path): (path.lstat().st_mode, path.lstat().st_size) for path in found}


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_an_attack_ends_with_a_sentence_and_the_agent_lives(
    attack: Attack,
    kit: Kit,
    image: str,
    engine: docker.DockerClient,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "prime")
    before = everything(kit.folder.parent)
    mounts = Mounts(BASE, kit.folder.parent / "unused", kit.socket_path.parent)
    runtime = DockerRuntime(f"test-{uuid.uuid4().hex[:8]}")
    program = f"/prime/policies/bin/{Path(sys.executable).resolve().name}"
    with socket.socket(socket.AF_UNIX) as listener:  # an abstract name: no file stands for it
        name = f"prime-{uuid.uuid4().hex}"
        listener.bind("\0" + name)
        listener.listen()
        source = f"{HELPERS}\nNAME, LEASE = {name!r}, {take_lease(kit)!r}\n{attack.program}"
        task = Task(
            image=image,
            command=(program, "-I", "-S", "-c", source),
            **{"memory_mb": 512, "pids": 64, **attack.limits},
        )
        try:
            handle = runtime.start(task, mounts, WorkerOptions())
            status = handle.wait(60.0)
            words = handle.logs()
            container: dict[str, Any] = engine.api.inspect_container(handle.container_id)
            written = engine.api.containers(
                all=True, size=True, filters={"id": handle.container_id}
            )[0].get("SizeRw", 0)
            kept = (
                list(Path(container["LogPath"]).parent.glob("*.log*")) if os.getuid() == 0 else []
            )
            log_bytes = sum(path.stat().st_size for path in kept)
            handle.stop(1.0)
        finally:
            runtime.clean()
    said = words + caplog.text
    assert status == attack.status, said
    for sentence in attack.says:
        assert sentence in said
    assert len(words) <= LOG_TAIL_BYTES
    assert log_bytes <= LOG_BYTES
    assert written == 0, "it wrote into the container's layer on this machine's disk"
    assert everything(kit.folder.parent) == before
    assert len(caplog.records) < 20, "a task can fill the agent's log"
    assert kit.client.run() == kit.world.backend.context.run
