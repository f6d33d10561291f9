"""The container runtime: a task in Docker with only what it needs.

No network, no capability, no new privileges, read-only root, a user that is not root, bounded
memory, CPU and processes. It sees two folders of the host, both read-only: policies, and the one
with the bridge's socket, which is its only way out; finished files go through it, too (spool.py).
What it writes lies in two file systems in memory, of bounded size, that end with it: /tmp, and its
outbox. Both count as its memory. The engine bounds its log. An image with volumes is refused; its
health check and preloaded libraries are not taken over; its size, the time of its pull, and what
the task asks for, are bounded by the owner's limits. What it unpacks to is known at the end: until
then a pull leaves some of the engine's disk free, if that is on this machine. An image is pulled
from a registry with a public address only, unless private ones are allowed.

Not protected: the host's kernel is shared (a kernel bug allows an escape), a task with GPUs talks
to the driver, and a task may use up its CPU share. The engine, not this program, connects to the
registry: a public one may redirect it, or change its address after the check.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import docker
import psutil
import requests
import urllib3
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from docker.types import DeviceRequest, LogConfig, Mount, Ulimit
from docker.utils import kwargs_from_env

from prime_core.errors import PolicyError, UnavailableError, UserError
from prime_core.rollout import MAX_FILE_BYTES
from prime_core.task import IMAGE_VARIABLE, Task
from prime_core.transport.addresses import PrivateAddressError, public_address
from prime_engine.sizing import SHM_MB_ALONE, SHM_MB_TOGETHER
from prime_node.fingerprint import CPU_ONLY, read_gpus
from prime_node.runtime.base import LOG_TAIL_BYTES, Mounts, NoCardsError, WorkerOptions

log = logging.getLogger("prime.node.docker")

LABEL = "prime-node"
PINNED = re.compile(r"(?:[a-z0-9][a-z0-9._:/-]{0,400}@)?sha256:[0-9a-f]{64}\Z")
"""An image by digest, or a bare image id where there is no registry. Tags are refused."""
UNPRIVILEGED_UID = 65532
"""User id of the task if the agent is root."""
DEFAULT_COMMAND = ("python", "-m", "prime_node.worker")
INSIDE = Mounts(Path("/prime/policies"), Path("/prime/outbox"), Path("/prime/bridge"))
SCRATCH_MB = 512
OUTBOX_MB = 2 * MAX_FILE_BYTES >> 20
"""Room for one finished file and the next."""
GPU_SCRATCH_MB = 4096
"""Compiled kernels lie there too. Both count as the task's memory."""
MOST_MEMORY_SHARE = 0.9
"""Of this machine's memory, where the owner states no limit."""
MAPS_USERS = ("name=rootless", "name=userns")
"""Security options of an engine in whose containers the agent's user id is another user's."""
DOCKER_HUB = ("docker.io", "index.docker.io")
PULL_SILENCE_SECONDS = 600
"""Without a word about a pull the engine is given up."""
KEPT_FREE = 2 << 30
"""Bytes of the engine's disk that a pull leaves free."""
_POLL_SECONDS, _DISK_POLL_SECONDS = 0.5, 0.1
_LOOKS_FOR_CAUSE = 2
"""How often the state of a killed container is read again: Docker may set OOMKilled late."""


@dataclass(frozen=True)
class OwnerLimits:
    """The most that a task of any pool may ask of this machine. Memory in MiB; 0 is
    MOST_MEMORY_SHARE of what the machine has."""

    memory_mb: int = 0
    pids: int = 4096
    image_bytes: int = 64 << 30
    """Of an image that is pulled: its compressed layers, and what they take once unpacked."""
    pull_seconds: int = 3 * 3600
    """How long a pull may take."""
    cpus: float = 0.0
    """CPUs that a container may use; 0: what its task asks for."""

    def nano_cpus(self, task: Task) -> int:
        """Returns the CPU limit of the task's container in Docker's unit (10^-9 CPUs)."""
        asked = task.cpus_milli * 1_000_000
        return min(asked, int(self.cpus * 1e9)) if self.cpus else asked

    def check(self, task: Task) -> None:
        """Raises PolicyError if the task asks for more."""
        machine = int(psutil.virtual_memory().total * MOST_MEMORY_SHARE) >> 20
        for name, wanted, most in (
            ("memory_mb", task.memory_mb, self.memory_mb or machine),
            ("pids", task.pids, self.pids),
        ):
            if wanted > most:
                raise PolicyError(
                    f"the task asks for {name} = {wanted} and this node gives {most} at most "
                    f"(setting task_{name})"
                )


class ContainerHandle:
    """A started container."""

    def __init__(self, container: Any) -> None:
        self._container = container
        self._last_words = ""

    @property
    def name(self) -> str:
        return f"container {self._container.short_id}"

    @property
    def container_id(self) -> str:
        return str(self._container.id)

    def wait(self, timeout: float) -> int | None:
        end = time.monotonic() + timeout
        looks = _LOOKS_FOR_CAUSE
        while True:
            try:
                self._container.reload()
            except NotFound:
                return 137  # removed by another program
            except (DockerException, requests.RequestException) as error:
                log.warning("the Docker engine does not answer: %s", error)
                return None
            state = self._container.attrs["State"]
            if not state["Running"] and state["Status"] in ("exited", "dead"):
                if state.get("OOMKilled"):
                    log.error("the task was killed: it used more memory than its limit")
                elif state["ExitCode"] == 137 and looks:
                    looks -= 1
                    time.sleep(_POLL_SECONDS)
                    continue
                return int(state["ExitCode"])
            left = end - time.monotonic()
            if left <= 0:
                return None
            time.sleep(min(_POLL_SECONDS, left))

    def stop(self, grace: float) -> int:
        try:
            self._container.stop(timeout=max(1, int(grace)))
            status = self.wait(5.0)
            self._last_words = self.logs()
            self._container.remove(force=True, v=True)
        except NotFound:
            return 137
        except (DockerException, requests.RequestException) as error:
            raise UnavailableError(f"the container could not be stopped: {error}") from error
        return 137 if status is None else status

    def logs(self) -> str:
        try:
            raw: bytes = self._container.logs(tail=100)
        except (DockerException, requests.RequestException):
            return self._last_words
        return raw[-LOG_TAIL_BYTES:].decode(errors="replace")


class _Puller(docker.APIClient):
    """A client whose time-out holds for pulls, too; docker-py's own waits for them without end.
    Another thread can break its last request off."""

    last: Any = None

    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        response: requests.Response = super().send(request, **{**options, "timeout": self.timeout})
        self.last = response.raw
        return response

    def hang_up(self) -> None:
        connection = self.last.connection
        if connection is not None and connection.sock is not None:
            with contextlib.suppress(OSError):  # the engine was faster
                connection.sock.shutdown(socket.SHUT_RDWR)


class _DiskGuard:
    """Watches the disk of `folder` from entry to exit. Once less than KEPT_FREE bytes are free,
    sets `full` and calls `end`. A folder that is not on this machine is not watched.

    An engine reports compressed sizes, so how much a layer unpacks to shows on the disk only."""

    def __init__(self, folder: Path, end: Callable[[], None]) -> None:
        self.full = False
        self._folder = folder
        self._end = end
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="prime-disk", daemon=True)

    def __enter__(self) -> _DiskGuard:
        if os.path.isdir(self._folder):  # noqa: PTH112 - False, too, for a parent that is closed
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _watch(self) -> None:
        while True:
            try:
                free = shutil.disk_usage(self._folder).free
            except OSError as error:
                log.warning("the engine's disk is not watched during the pull: %s", error)
                return
            if free < KEPT_FREE:
                self.full = True
                self._end()
                return
            if self._stop.wait(_DISK_POLL_SECONDS):
                return


class DockerRuntime:
    """Tasks as containers of the local engine. `owner` marks them, so that a restarted agent finds
    and ends what it left behind; `base_url` None means the environment's engine; `limits` bound
    what a task may ask for; `shm_mb` is a container's shared memory, 0 for `shared_memory`; with
    `public_only` images come from registries with public addresses; `gpus` are the node's cards
    (config.Settings)."""

    name: Literal["docker"] = "docker"

    def __init__(
        self,
        owner: str,
        base_url: str | None = None,
        limits: OwnerLimits | None = None,
        shm_mb: int = 0,
        public_only: bool = True,
        gpus: str = "all",
    ) -> None:
        self._owner = owner
        self._gpus = gpus
        self._base_url = base_url
        self._limits = limits or OwnerLimits()
        self._shm_mb = shm_mb
        self._public_only = public_only
        self._connected: Any = None

    @property
    def task_uid(self) -> int:
        return os.getuid() or UNPRIVILEGED_UID

    def _engine(self) -> Any:
        """Returns the engine's client. Raises UserError with what is missing."""
        if self._connected is not None:
            return self._connected
        try:
            client = self._new_client(60)
            client.ping()
        except (DockerException, requests.RequestException) as error:
            raise _engine_trouble(error) from error
        self._connected = client
        return client

    def _new_client(self, timeout: int) -> Any:
        if self._base_url is None:
            return docker.from_env(timeout=timeout)
        return docker.DockerClient(base_url=self._base_url, timeout=timeout)

    def _new_puller(self, silence: int) -> Any:
        where = {"base_url": self._base_url} if self._base_url else kwargs_from_env()
        return _Puller(**where, timeout=silence)

    def check(self, task: Task | None) -> str:
        engine = self._engine()
        try:
            info = engine.info()
        except (DockerException, requests.RequestException) as error:  # it did answer before
            raise UnavailableError(f"the Docker engine does not answer: {error}") from error
        mapped = [name for name in info.get("SecurityOptions") or () if name in MAPS_USERS]
        if mapped:
            raise UserError(
                f"the Docker engine maps user ids ({mapped[0].removeprefix('name=')}), so that a "
                "task cannot reach its agent",
                hint="use the system's engine, without userns-remap: "
                "DOCKER_HOST=unix:///var/run/docker.sock",
            )
        if task is not None:
            self._image(task)
        if task is None:
            with_cards = bool(read_gpus(self._gpus))
        else:
            with_cards = task.gpus and self._gpus != "none"
        if with_cards and "nvidia" not in info.get("Runtimes", {}):
            who = "this machine has GPUs" if task is None else "the task asks for GPUs"
            raise NoCardsError(
                f"{who} and the Docker engine has no NVIDIA runtime",
                hint="install nvidia-container-toolkit, then: sudo nvidia-ctk runtime "
                f"configure --runtime=docker && sudo systemctl restart docker; or {CPU_ONLY}",
            )
        return f"Docker {info.get('ServerVersion', '?')} with {info.get('Driver', '?')}"

    def clean(self) -> int:
        engine = self._engine()
        try:
            stale = engine.containers.list(
                all=True, filters={"label": f"{LABEL}={self._owner}"}, ignore_removed=True
            )
            for container in stale:
                with contextlib.suppress(NotFound):
                    container.remove(force=True, v=True)
        except (DockerException, requests.RequestException) as error:
            raise UnavailableError(
                f"what an earlier agent left cannot be ended: {error}"
            ) from error
        return len(stale)

    def _image(self, task: Task) -> str:
        """The task's image, pulled if it is named by a registry's digest and not yet here.

        Raises PolicyError if the task or its image asks for what this node does not give, or if its
        registry is private.
        """
        if not PINNED.match(task.image):
            raise PolicyError(
                f"the task's image {task.image!r} is not pinned by digest or image id; the pool's "
                "operator must correct the run definition"
            )
        self._limits.check(task)
        engine = self._engine()
        try:
            try:
                image = engine.images.get(task.image)
            except ImageNotFound:
                if "@" not in task.image:
                    raise UserError(
                        f"the image {task.image[:19]}… is not on this machine",
                        hint="load it with `docker load`, or build it: "
                        "deploy/build_image.py worker",
                    ) from None
                if self._public_only:
                    check_registry(task.image)
                self._pull(task.image)
                image = engine.images.get(task.image)
                if image.attrs["Size"] > self._limits.image_bytes:
                    engine.images.remove(image.id, force=True)
                    raise self._too_large(task.image) from None
        except ImageNotFound as error:
            raise UnavailableError(f"the image {task.image} cannot be pulled: {error}") from error
        except (DockerException, requests.RequestException) as error:
            raise UnavailableError(f"the Docker engine does not answer: {error}") from error
        if volumes := (image.attrs["Config"] or {}).get("Volumes"):
            raise PolicyError(
                f"the image {task.image} declares volumes ({', '.join(sorted(volumes))[:200]}); a "
                "task could fill this machine's disk through them"
            )
        return task.image

    def _pull(self, image: str) -> None:
        """Pulls an image and breaks off once it proves larger, or takes longer, than the owner's
        limits allow, or fills the engine's disk. The time is looked at with each word of the
        engine.

        Raises PolicyError then, UnavailableError if the engine or the registry fails.
        """
        log.info("pulling %s …", image)
        repository, _, digest = image.rpartition("@")
        layers: dict[str, int] = {}
        most = self._limits.pull_seconds
        end = time.monotonic() + most
        # A client of its own: closing it ends the request, and with that the engine's pull.
        puller = self._new_puller(min(PULL_SILENCE_SECONDS, most))
        pull = partial(puller.pull, repository, tag=digest, stream=True, decode=True)
        guard = _DiskGuard(Path(self._engine().info()["DockerRootDir"]), puller.hang_up)
        try:
            with contextlib.closing(pull()) as progress, guard:
                for event in progress:
                    if guard.full:
                        break
                    if time.monotonic() >= end:
                        raise self._too_slow(image)
                    if "error" in event:
                        raise UnavailableError(
                            f"the image {image} cannot be pulled: {event['error'][:300]}"
                        )
                    detail = event.get("progressDetail") or {}
                    size = max(detail.get("current", 0), detail.get("total", 0))
                    layer = str(event.get("id", ""))
                    layers[layer] = max(layers.get(layer, 0), size)
                    if sum(layers.values()) > self._limits.image_bytes:
                        raise self._too_large(image)
        except (DockerException, requests.RequestException, urllib3.exceptions.HTTPError) as error:
            if time.monotonic() >= end:
                raise self._too_slow(image) from error
            if not guard.full:
                raise UnavailableError(f"the image {image} cannot be pulled: {error}") from error
        finally:
            puller.close()
        if guard.full:
            raise PolicyError(
                f"less than {KEPT_FREE / 2**30:g} GiB were free on the Docker engine's disk "
                f"while the image {image} was pulled; free some space, then start this node again"
            )

    def _too_slow(self, image: str) -> PolicyError:
        return PolicyError(
            f"the image {image} is not here after {self._limits.pull_seconds / 60:g} minutes, the "
            "most that a pull may take (setting pull_minutes); pull it by hand, then start this "
            f"node again: docker pull {image}"
        )

    def _too_large(self, image: str) -> PolicyError:
        return PolicyError(
            f"the image {image} is larger than {self._limits.image_bytes / 2**30:g} GiB, which is "
            "the most that this node takes (setting image_gb)"
        )

    def start(self, task: Task, mounts: Mounts, options: WorkerOptions) -> ContainerHandle:
        image = self._image(task)
        uid = self.task_uid
        gid = os.getgid() or UNPRIVILEGED_UID
        command = [*(task.command or DEFAULT_COMMAND), *options.arguments(INSIDE)]
        with_cards = task.gpus and options.gpus != "none"
        try:
            container = self._engine().containers.create(
                image,
                command,
                user=f"{uid}:{gid}",
                labels={LABEL: self._owner},
                mem_limit=f"{task.memory_mb}m",
                memswap_limit=f"{task.memory_mb}m",  # the same: no swap on top
                nano_cpus=self._limits.nano_cpus(task),
                pids_limit=task.pids,
                cap_drop=["ALL"],
                security_opt=["no-new-privileges:true"],
                read_only=True,
                network_mode="none",
                use_config_proxy=False,  # the owner's proxies may hold a password
                # The engine would run the image's own as often as the image likes, beyond the
                # task's share of the CPU.
                healthcheck={"test": ["NONE"]},
                # runc gives a tmpfs the mode of the image's own folder and ignores `mode`: so
                # the task's user must own it too.
                tmpfs={
                    "/tmp": scratch_options(task.gpus, uid, gid),  # noqa: S108
                    str(INSIDE.outbox): f"rw,nosuid,nodev,noexec,size={OUTBOX_MB}m,mode=700,"
                    f"uid={uid},gid={gid}",
                },
                mounts=[
                    Mount(str(INSIDE.policies), str(mounts.policies), "bind", read_only=True),
                    Mount(str(INSIDE.bridge), str(mounts.bridge), "bind", read_only=True),
                ],
                environment={
                    "HOME": "/tmp",  # noqa: S108 - a tmpfs of its own
                    "USER": "prime",
                    "OMP_NUM_THREADS": str(options.threads or max(1, task.cpus_milli // 1000)),
                    "PYTHONUNBUFFERED": "1",
                    "HF_HUB_OFFLINE": "1",
                    IMAGE_VARIABLE: task.image,
                    "TOKENIZERS_PARALLELISM": "false",
                    # Hooks of the NVIDIA runtime ran on the host with the image's own
                    # (CVE-2025-23266).
                    "LD_PRELOAD": "",
                    "LD_AUDIT": "",
                    **({} if with_cards else {"NVIDIA_VISIBLE_DEVICES": "void"}),
                },
                ulimits=[Ulimit(name="core", soft=0, hard=0)],
                log_config=LogConfig(type="json-file", config={"max-size": "8m", "max-file": "2"}),
                device_requests=[cards(options.gpus)] if with_cards else None,
                shm_size=f"{self._shm_mb or shared_memory(task, options.gpus)}m",
            )
            container.start()
        except APIError as error:
            raise UserError(
                f"the Docker engine refused the task: {error.explanation or error}",
                hint="prime-node doctor names what is missing",
            ) from error
        except (DockerException, requests.RequestException) as error:
            raise UnavailableError(f"the Docker engine does not answer: {error}") from error
        return ContainerHandle(container)


def registry_of(image: str) -> str | None:
    """Returns the host of the registry that the engine asks for an image, by Docker's rule; None
    for Docker Hub, which a name without a host means."""
    first, slash, _ = image.partition("/")
    if not slash or not ("." in first or ":" in first or first == "localhost"):
        return None
    host = first.partition(":")[0]
    return None if host in DOCKER_HUB else host


def check_registry(image: str) -> None:
    """Raises PolicyError if an image's registry has a private address, UnavailableError if it has
    none."""
    host = registry_of(image)
    if host is None:
        return
    try:
        public_address(host)
    except PrivateAddressError as error:
        raise PolicyError(f"the image {image} is not pulled: {error}") from error
    except OSError as error:
        raise UnavailableError(
            f"the image {image} cannot be pulled: its registry {host} has no address ({error})"
        ) from error


def cards(gpus: str) -> DeviceRequest:
    """Returns Docker's request for the node's cards: all, or those of the numbers given."""
    if gpus == "all":
        return DeviceRequest(count=-1, capabilities=[["gpu"]])
    return DeviceRequest(device_ids=gpus.split(","), capabilities=[["gpu"]])


def shared_memory(task: Task, gpus: str) -> int:
    """Returns the shared memory (MiB) for a task: more if its cards exchange data through it."""
    together = task.gpus and len(read_gpus(gpus)) > 1
    return SHM_MB_TOGETHER if together else SHM_MB_ALONE


def scratch_options(gpus: bool, uid: int, gid: int) -> str:
    """Returns the mount options of /tmp. Docker adds `noexec` by default, but on GPUs vLLM loads
    kernels that it compiles into /tmp."""
    size = GPU_SCRATCH_MB if gpus else SCRATCH_MB
    options = f"rw,nosuid,nodev,size={size}m,mode=1777,uid={uid},gid={gid}"
    return f"{options},exec" if gpus else options


def _engine_trouble(error: Exception) -> UserError:
    """Returns an error that says what is wrong with the engine and which command fixes it."""
    text = str(error)
    if "PermissionError" in text or "Permission denied" in text:
        return UserError(
            "the Docker engine runs, but this user may not use it",
            hint="sudo usermod -aG docker $USER, then log in again",
        )
    if "FileNotFoundError" in text or "ConnectionRefusedError" in text or "No such file" in text:
        return UserError(
            "no Docker engine answers on this machine",
            hint="install and start it (Debian: sudo apt-get install docker.io; "
            "sudo systemctl start docker), or for development: --runtime process",
        )
    return UserError(f"the Docker engine does not answer: {text[:300]}", hint="check: docker info")
