"""A missing or forbidden Docker engine: one sentence and what to type, never a traceback."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from other_user import as_nobody, open_path

from prime_core.errors import UserError
from prime_node.runtime.docker import DockerRuntime


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
        said = as_nobody(check) if os.getuid() == 0 else check()  # root is refused nothing
    assert said.startswith("64 ")
    assert "may not use it" in said
    assert "usermod -aG docker" in said


def test_refused_rights_are_told_from_a_missing_engine() -> None:
    from prime_node.runtime.docker import _engine_trouble

    refused = _engine_trouble(Exception("PermissionError(13, 'Permission denied')"))
    missing = _engine_trouble(Exception("FileNotFoundError(2, 'No such file or directory')"))
    assert "may not use it" in str(refused)
    assert "no Docker engine" in str(missing)
