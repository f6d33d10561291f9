"""A missing or forbidden Docker engine: one sentence and what to type, never a traceback."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from other_user import as_another_user, open_path

from prime_core.errors import PolicyError, UnavailableError, UserError
from prime_core.transport import addresses
from prime_node.config import load
from prime_node.runtime import docker
from prime_node.runtime.docker import ContainerHandle, DockerRuntime, check_registry, registry_of


def test_no_engine_names_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no Docker engine answers") as caught:
        DockerRuntime("test", f"unix://{tmp_path}/nothing.sock").check(None)
    assert "--runtime process" in caught.value.hint


def test_engine_without_rights_names_the_group(tmp_path: Path) -> None:
    path = tmp_path / "docker.sock"

    def check() -> str:
        try:
            DockerRuntime("test", f"unix://{path}").check(None)
        except UserError as error:
            return f"{error.exit_code} {error}; {error.hint}"
        return "it may"

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        path.chmod(0)
        open_path(path)
        said = as_another_user(check) if os.getuid() == 0 else check()  # root is refused nothing
    assert said.startswith("64 ")
    assert "may not use it" in said
    assert "usermod -aG docker" in said


@pytest.mark.parametrize("option", ["name=rootless", "name=userns"])
def test_an_engine_whose_tasks_cannot_reach_their_agent_is_refused(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Engine:
        def info(self) -> dict[str, Any]:
            return {"SecurityOptions": ["name=seccomp,profile=default", option]}

    runtime = DockerRuntime("test")
    monkeypatch.setattr(runtime, "_connected", Engine())
    with pytest.raises(UserError, match=f"maps user ids .{option[5:]}.*cannot reach its agent"):
        runtime.check(None)


def test_refused_rights_are_distinguished_from_a_missing_engine() -> None:
    from prime_node.runtime.docker import _engine_trouble

    refused = _engine_trouble(Exception("PermissionError(13, 'Permission denied')"))
    missing = _engine_trouble(Exception("FileNotFoundError(2, 'No such file or directory')"))
    assert "may not use it" in str(refused)
    assert "no Docker engine" in str(missing)


PIN = "@sha256:" + "0" * 64


@pytest.mark.parametrize(
    ("name", "registry"),
    [
        ("busybox", None),
        ("busybox:1.36", None),
        ("pool/worker", None),
        ("docker.io/pool/worker", None),
        ("index.docker.io/pool/worker", None),
        ("ghcr.io/pool/worker:1", "ghcr.io"),
        ("registry:5000/worker", "registry"),
        ("localhost/worker", "localhost"),
        ("127.1/worker", "127.1"),
    ],
)
def test_an_image_name_says_its_registry_as_docker_reads_it(
    name: str, registry: str | None
) -> None:
    assert registry_of(name + PIN) == registry


def test_only_registries_with_public_addresses_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"inside.example": ["8.8.8.8", "10.0.0.7"], "public.example": ["8.8.8.8"]}

    def resolve(host: str) -> list[str]:
        if host in known:
            return known[host]
        raise OSError("Name or service not known")

    for private in ("localhost:5000", "127.1:5000", "10.0.0.7:5000", "169.254.169.254"):
        with pytest.raises(PolicyError, match="is the private address"):
            check_registry(f"{private}/worker{PIN}")
    monkeypatch.setattr(addresses, "addresses_of", resolve)
    with pytest.raises(PolicyError, match=r"is the private address 10\.0\.0\.7"):
        check_registry(f"inside.example/worker{PIN}")
    with pytest.raises(UnavailableError, match=r"its registry nowhere\.example has no address"):
        check_registry(f"nowhere.example/worker{PIN}")
    check_registry(f"public.example/worker{PIN}")
    check_registry(f"pool/worker{PIN}")


@pytest.mark.parametrize(
    ("orchestrator", "allowed", "public_only"),
    [
        ("https://pool.example", False, True),
        ("https://pool.example", True, False),
        ("http://127.0.0.1:8470", False, False),
    ],
)
def test_private_registries_are_allowed_where_other_private_addresses_are(
    tmp_path: Path, orchestrator: str, allowed: bool, public_only: bool
) -> None:
    flags = {"data": tmp_path, "orchestrator": orchestrator, "allow_private": allowed}
    assert load(flags).public_only is public_only


class Ended:
    """A container that was killed; at each look the engine says whether it was for memory."""

    def __init__(self, looks: Sequence[bool]) -> None:
        self._looks = list(looks)
        self.attrs: dict[str, Any] = {}

    def reload(self) -> None:
        state = {"Running": False, "Status": "exited", "ExitCode": 137}
        self.attrs = {"State": state | {"OOMKilled": self._looks.pop(0)}}


@pytest.mark.parametrize(
    ("looks", "said"), [([True], 1), ([False, True], 1), ([False, False, False], 0)]
)
def test_a_task_killed_for_memory_is_named_also_if_the_engine_learns_of_it_late(
    looks: Sequence[bool],
    said: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(docker, "_POLL_SECONDS", 0.0)
    with caplog.at_level(logging.ERROR):
        assert ContainerHandle(Ended(looks)).wait(60.0) == 137
    assert sum("more memory than its limit" in line for line in caplog.messages) == said
