"""What a task in a container cannot do. The image is a bare busybox, made on the spot."""

from __future__ import annotations

import hashlib
import json
import threading
import uuid
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import docker
import pytest
from docker_images import build, import_root

from prime_core.errors import PolicyError, UserError
from prime_core.task import Task
from prime_node.runtime.base import Mounts, WorkerOptions
from prime_node.runtime.docker import (
    OUTBOX_MB,
    SCRATCH_MB,
    ContainerHandle,
    DockerRuntime,
    OwnerLimits,
    scratch_options,
)

pytestmark = pytest.mark.docker


@pytest.fixture(scope="module")
def busybox(engine: docker.DockerClient) -> Iterator[str]:
    """Image id of a root with nothing but a static busybox."""
    image = import_root(engine)
    yield image
    engine.images.remove(image, force=True)


@pytest.fixture
def mounts(tmp_path: Path) -> Mounts:
    folders = Mounts(tmp_path / "policies", tmp_path / "outbox", tmp_path / "bridge")
    for folder in (folders.policies, folders.outbox, folders.bridge):
        folder.mkdir()
    (folders.policies / "weights").write_text("policy")
    return folders


Shell = Callable[..., tuple[int | None, str]]


@pytest.fixture
def shell(busybox: str, mounts: Mounts) -> Iterator[Shell]:
    """Runs a shell line as a task; its exit status and output."""
    runtime = DockerRuntime(f"test-{uuid.uuid4().hex[:8]}")

    def run(line: str, **limits: int) -> tuple[int | None, str]:
        task = Task(
            image=busybox,
            command=("/bin/busybox", "sh", "-c", line),
            **{"memory_mb": 64, "cpus_milli": 500, "pids": 32, **limits},
        )
        handle = runtime.start(task, mounts, WorkerOptions())
        status = handle.wait(30.0)
        output = handle.logs()
        handle.stop(1.0)
        return status, output

    yield run
    runtime.clean()


def test_task_has_no_capability_and_no_new_privileges(shell: Shell) -> None:
    status, output = shell("/bin/busybox grep -E 'Cap|NoNewPrivs|Seccomp:' /proc/self/status")
    assert status == 0
    fields = dict(line.split(":\t") for line in output.strip().splitlines())
    assert {fields[name] for name in ("CapEff", "CapPrm", "CapBnd", "CapInh")} == {"0" * 16}
    assert fields["NoNewPrivs"] == "1"
    assert fields["Seccomp"] == "2"


def test_task_is_not_root(shell: Shell) -> None:
    _, output = shell("/bin/busybox id -u")
    assert output.strip() not in ("", "0")


def test_task_has_no_network(shell: Shell) -> None:
    _, output = shell("/bin/busybox ls /sys/class/net; /bin/busybox cat /proc/net/route")
    assert output.split()[0] == "lo"
    assert "eth" not in output
    status, _ = shell("/bin/busybox wget -T 3 http://1.1.1.1/")
    assert status != 0


def test_task_root_is_read_only_and_so_are_the_policies(shell: Shell) -> None:
    for path in ("/bin/x", "/etc/x", "/prime/policies/x", "/prime/bridge/x"):
        status, output = shell(f"echo 1 > {path}")
        assert status != 0, path
        assert "Read-only" in output, output


def test_task_may_write_its_outbox_and_scratch_only(shell: Shell, mounts: Mounts) -> None:
    status, output = shell("echo result > /prime/outbox/file && echo 1 > /tmp/x && echo ok")
    assert (status, output.strip()) == (0, "ok")
    assert not list(mounts.outbox.iterdir()), "nothing that it writes lies on this machine's disk"


@pytest.mark.parametrize(
    ("place", "most"), [("/prime/outbox", OUTBOX_MB), ("/tmp", SCRATCH_MB), ("/dev/shm", 64)]
)
def test_a_task_that_writes_endlessly_runs_out_of_its_own_room(
    shell: Shell, place: str, most: int
) -> None:
    """Of its own room, not of this machine's; what it says of it is its last word."""
    line = (
        f"exec 2>&1; /bin/busybox dd if=/dev/zero of={place}/endless bs=1M; status=$?; "
        f"/bin/busybox du -m {place}/endless | /bin/busybox cut -f1; exit $status"
    )
    status, output = shell(line, memory_mb=1024, cpus_milli=2000)
    assert status == 1
    assert "No space left on device" in output
    assert int(output.split()[-1]) == most


def test_a_task_whose_room_is_more_than_its_memory_is_killed(shell: Shell) -> None:
    status, _ = shell("/bin/busybox dd if=/dev/zero of=/prime/outbox/x bs=1M", memory_mb=64)
    assert status == 137


def test_task_sees_the_policies(shell: Shell) -> None:
    assert shell("/bin/busybox cat /prime/policies/weights") == (0, "policy")


@pytest.mark.parametrize("gpus", [False, True])
def test_only_gpu_tasks_may_run_programs_from_their_scratch(
    engine: docker.DockerClient, busybox: str, gpus: bool
) -> None:
    """On GPUs vLLM loads kernels that it compiles into /tmp; no one else runs anything there."""
    line = "/bin/busybox cp /bin/busybox /tmp/busybox && /tmp/busybox true && echo ran"
    container = engine.containers.create(
        busybox, ["/bin/busybox", "sh", "-c", line], user="65532:65532", read_only=True,
        network_mode="none", tmpfs={"/tmp": scratch_options(gpus, 65532, 65532)},
    )  # fmt: skip
    try:
        container.start()
        assert (container.wait(timeout=60)["StatusCode"] == 0) == gpus
        assert (b"ran" in container.logs()) == gpus
    finally:
        container.remove(force=True)


def test_task_beyond_its_memory_is_killed(shell: Shell) -> None:
    status, _ = shell("/bin/busybox tail -c 200m /dev/zero", memory_mb=64)
    assert status == 137


def test_task_cannot_start_more_processes_than_allowed(shell: Shell) -> None:
    line = "i=0; while [ $i -lt 40 ]; do /bin/busybox sleep 5 & i=$((i+1)); done; echo all-started"
    _, output = shell(line, pids=16)
    assert "all-started" not in output
    assert "fork" in output


def test_task_environment_holds_nothing_of_the_agents(
    shell: Shell, busybox: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIME_NODE_WALLET", "/secret/keystore")
    _, output = shell("/bin/busybox env")
    assert "PRIME_NODE" not in output
    assert "secret" not in output
    assert f"PRIME_IMAGE={busybox}\n" in output, "part of its exact class"


def test_stop_asks_first_and_kills_after_the_grace(busybox: str, mounts: Mounts) -> None:
    runtime = DockerRuntime(f"test-{uuid.uuid4().hex[:8]}")
    line = "trap 'exit 7' TERM; while true; do /bin/busybox sleep 0.1; done"
    task = Task(image=busybox, command=("/bin/busybox", "sh", "-c", line), memory_mb=64)
    handle = runtime.start(task, mounts, WorkerOptions())
    assert handle.wait(0.5) is None
    assert handle.stop(10.0) == 7


def test_a_restarted_agent_ends_what_it_left_behind(
    busybox: str, mounts: Mounts, engine: docker.DockerClient
) -> None:
    owner = f"test-{uuid.uuid4().hex[:8]}"
    task = Task(image=busybox, command=("/bin/busybox", "sleep", "600"), memory_mb=64)
    left: ContainerHandle = DockerRuntime(owner).start(task, mounts, WorkerOptions())
    stranger = DockerRuntime(owner + "-other")
    assert stranger.clean() == 0
    assert DockerRuntime(owner).clean() == 1
    with pytest.raises(docker.errors.NotFound):
        engine.containers.get(left.container_id)


def test_image_that_is_not_pinned_is_refused(engine: docker.DockerClient) -> None:
    with pytest.raises(PolicyError, match="not pinned"):
        DockerRuntime("test").check(Task(image="busybox:latest"))


def test_missing_image_names_what_to_do(engine: docker.DockerClient) -> None:
    with pytest.raises(UserError, match="not on this machine") as caught:
        DockerRuntime("test").check(Task(image="sha256:" + "00" * 32))
    assert "build" in caught.value.hint


def test_gpu_task_on_an_engine_without_nvidia_names_the_toolkit(
    engine: docker.DockerClient, busybox: str
) -> None:
    if "nvidia" in engine.info().get("Runtimes", {}):
        pytest.skip("this engine has the NVIDIA runtime")
    with pytest.raises(UserError, match="NVIDIA") as caught:
        DockerRuntime("test").check(Task(image=busybox, gpus=True))
    assert "nvidia-container-toolkit" in caught.value.hint


def test_an_image_with_volumes_is_refused(engine: docker.DockerClient, busybox: str) -> None:
    """The engine makes a folder on the host's disk for each, writable and without a bound."""
    image = build(engine, busybox, 'VOLUME ["/data", "/prime/more"]')
    try:
        with pytest.raises(PolicyError, match="declares volumes \\(/data, /prime/more\\)"):
            DockerRuntime("test").check(Task(image=image, memory_mb=64))
    finally:
        engine.images.remove(image, force=True)


def test_what_an_image_would_run_or_preload_by_itself_is_left_out(
    engine: docker.DockerClient, busybox: str, mounts: Mounts
) -> None:
    image = build(
        engine,
        busybox,
        'HEALTHCHECK --interval=1ms CMD ["/bin/busybox", "touch", "/tmp/checked"]',
        "ENV LD_PRELOAD=/evil.so LD_AUDIT=/evil.so NVIDIA_VISIBLE_DEVICES=all",
    )
    runtime = DockerRuntime(f"test-{uuid.uuid4().hex[:8]}")
    line = "/bin/busybox sleep 1; /bin/busybox ls /tmp; /bin/busybox env"
    task = Task(image=image, command=("/bin/busybox", "sh", "-c", line), memory_mb=64)
    try:
        handle = runtime.start(task, mounts, WorkerOptions())
        assert handle.wait(30.0) == 0
        output = handle.logs()
        assert "Health" not in engine.containers.get(handle.container_id).attrs["State"]
        handle.stop(1.0)
    finally:
        runtime.clean()
        engine.images.remove(image, force=True)
    assert "checked" not in output
    assert "evil" not in output
    assert "NVIDIA_VISIBLE_DEVICES=void" in output


@pytest.mark.parametrize(
    "asked", [{"memory_mb": 1 << 40}, {"memory_mb": 3000}, {"pids": 1 << 20}], ids=str
)
def test_a_task_that_asks_for_more_than_the_owner_gives_is_refused(
    busybox: str, asked: dict[str, int]
) -> None:
    limits = OwnerLimits(memory_mb=2048 if asked.get("memory_mb") == 3000 else 0)
    with pytest.raises(PolicyError, match=f"the task asks for {next(iter(asked))} = "):
        DockerRuntime("test", limits=limits).check(Task(image=busybox, **asked))


def test_a_container_gets_no_more_cpus_than_the_owner_gives() -> None:
    task = Task(image="busybox@sha256:" + "0" * 64, cpus_milli=4000)
    assert OwnerLimits().nano_cpus(task) == 4_000_000_000
    assert OwnerLimits(cpus=1.5).nano_cpus(task) == 1_500_000_000
    assert OwnerLimits(cpus=8).nano_cpus(task) == 4_000_000_000


class Registry:
    """One image behind Docker's registry API, whose only layer claims 1000 bytes and never ends.
    A `silent` registry sends nothing of it."""

    def __init__(self, *, silent: bool = False) -> None:
        config = json.dumps(
            {
                "architecture": "amd64", "os": "linux", "config": {},
                "rootfs": {"type": "layers", "diff_ids": ["sha256:" + "0" * 64]},
            }
        ).encode()  # fmt: skip
        kind = "application/vnd.docker"
        self.manifest = json.dumps(
            {
                "schemaVersion": 2,
                "mediaType": f"{kind}.distribution.manifest.v2+json",
                "config": {
                    "mediaType": f"{kind}.container.image.v1+json",
                    "size": len(config),
                    "digest": digest_of(config),
                },
                "layers": [
                    {
                        "mediaType": f"{kind}.image.rootfs.diff.tar.gzip",
                        "size": 1000,
                        "digest": digest_of(b"endless"),
                    }
                ],
            }
        ).encode()
        self.asked = False
        self.given = 0
        """Bytes of the layer that the engine took."""
        self.ended = threading.Event()
        self.closed = threading.Event()
        registry = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                registry.asked = True
                if self.path == "/v2/":
                    self.answer(b"{}")
                elif "/manifests/" in self.path:
                    self.answer(registry.manifest, f"{kind}.distribution.manifest.v2+json")
                elif digest_of(config) in self.path:
                    self.answer(config)
                else:
                    self.send_response(200)
                    self.end_headers()
                    if silent:
                        registry.closed.wait()
                    else:
                        self.endless()

            def answer(self, content: bytes, media: str = "application/json") -> None:
                self.send_response(200)
                self.send_header("Content-Type", media)
                self.send_header("Docker-Content-Digest", digest_of(content))
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            def endless(self) -> None:
                try:
                    while registry.given < 4 << 30:
                        self.wfile.write(bytes(1 << 20))
                        registry.given += 1 << 20
                except ConnectionError:
                    registry.ended.set()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.image = f"127.0.0.1:{self.server.server_port}/endless@{digest_of(self.manifest)}"
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def close(self) -> None:
        self.closed.set()
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def test_a_pull_that_does_not_end_is_broken_off_at_the_owners_limit(
    engine: docker.DockerClient,
) -> None:
    registry = Registry()
    try:
        limits = OwnerLimits(image_bytes=32 << 20)
        runtime = DockerRuntime("test", limits=limits, public_only=False)
        with pytest.raises(PolicyError, match="is larger than"):
            runtime.check(Task(image=registry.image, memory_mb=64))
        assert registry.ended.wait(30), "the engine goes on pulling"
        assert registry.given < 2 << 30
    finally:
        registry.close()


@pytest.mark.parametrize("silent", [False, True], ids=["progress", "silence"])
def test_a_pull_leaves_some_of_the_engines_disk_free(
    engine: docker.DockerClient, monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:
    monkeypatch.setattr("prime_node.runtime.docker.KEPT_FREE", 1 << 60)
    registry = Registry(silent=silent)
    try:
        runtime = DockerRuntime("test", public_only=False)
        with pytest.raises(PolicyError, match=r"free on the Docker engine's disk.*free some space"):
            runtime.check(Task(image=registry.image, memory_mb=64))
        assert silent or registry.ended.wait(30), "the engine goes on pulling"
    finally:
        registry.close()


@pytest.mark.parametrize("silent", [False, True], ids=["progress", "silence"])
def test_a_pull_ends_at_the_owners_time_limit(engine: docker.DockerClient, silent: bool) -> None:
    registry = Registry(silent=silent)
    try:
        limits = OwnerLimits(pull_seconds=1)
        runtime = DockerRuntime("test", limits=limits, public_only=False)
        with pytest.raises(
            PolicyError, match=r"after 0.0166667 minutes.*pull_minutes.*docker pull"
        ):
            runtime.check(Task(image=registry.image, memory_mb=64))
        assert silent or registry.ended.wait(30), "the engine goes on pulling"
    finally:
        registry.close()


def test_the_engine_is_not_sent_to_a_private_registry(engine: docker.DockerClient) -> None:
    registry = Registry()
    try:
        task = Task(image=registry.image, memory_mb=64)
        with pytest.raises(PolicyError, match=r"private address 127\.0\.0\.1.*--allow-private"):
            DockerRuntime("test").check(task)
    finally:
        registry.close()
    assert not registry.asked


def test_shared_memory_is_as_large_as_the_owner_says(busybox: str, mounts: Mounts) -> None:
    runtime = DockerRuntime(f"test-{uuid.uuid4().hex[:8]}", shm_mb=96)
    line = "/bin/busybox grep /dev/shm /proc/mounts"
    task = Task(image=busybox, command=("/bin/busybox", "sh", "-c", line), memory_mb=64)
    try:
        handle = runtime.start(task, mounts, WorkerOptions())
        assert handle.wait(30.0) == 0
        assert f"size={96 << 10}k" in handle.logs()
    finally:
        runtime.clean()
