"""A defect in a public server's handler is a bare 500, whose text stays in the log. That of the
orchestrator's API: tests/orchestrator/test_api_intake.py."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from starlette.testclient import TestClient

from prime_broadcast.content import DirectoryContent, LiveContent
from prime_broadcast.manifest import Trust
from prime_broadcast.relay import Relay
from prime_broadcast.server import Origin
from prime_chain.mirror import MirrorServer
from prime_core.ids import Address
from prime_core.signing import Domain
from prime_core.storage.directory import DirectoryStore
from prime_core.version import HEADER, SPOKEN
from prime_orchestrator.gateway import service

SECRET = "secret detail"
NO_ONE = Address("0x" + "a4" * 20)
POLICY = "/policies/0/model.safetensors"


def defect(*_: object) -> Any:
    raise ZeroDivisionError(SECRET)


def gateway(_: Path, patch: pytest.MonkeyPatch) -> httpx.Response:
    patch.setattr(service, "parse", defect)
    app = service.create_app(Mock(threads=1))
    client = TestClient(app, raise_server_exceptions=False)
    return client.post("/v1/call", headers={HEADER: str(SPOKEN[-1])})


def origin(folder: Path, patch: pytest.MonkeyPatch) -> httpx.Response:
    patch.setattr(DirectoryContent, "find", defect)
    with Origin(folder) as server:
        return httpx.get(server.url + POLICY)


def relay(folder: Path, patch: pytest.MonkeyPatch) -> httpx.Response:
    patch.setattr(LiveContent, "find", defect)
    with Relay(folder, Trust(NO_ONE, Domain(chain_id=1, contract=NO_ONE), 1)) as server:
        return httpx.get(server.url + POLICY)


def mirror(folder: Path, patch: pytest.MonkeyPatch) -> httpx.Response:
    patch.setattr(DirectoryStore, "get", defect)
    with closing(MirrorServer(folder, "127.0.0.1:0")) as server:
        return httpx.get(f"http://127.0.0.1:{server.port}/v1/pool")


@pytest.mark.parametrize("asked", [gateway, origin, relay, mirror], ids=lambda one: one.__name__)
def test_a_defect_is_a_bare_500(
    asked: Callable[[Path, pytest.MonkeyPatch], httpx.Response],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    answer = asked(tmp_path, monkeypatch)
    assert answer.status_code == 500
    assert SECRET not in answer.text + str(answer.headers)
    assert "Traceback" not in answer.text
    assert "ZeroDivisionError" not in answer.text
    if asked is not gateway:  # its log is uvicorn's
        assert SECRET in caplog.text
