"""Wrong chunks: a fetch into a folder of policies says which source sent which."""

from __future__ import annotations

import logging
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from broadcast_world import TRUST, Run, answer, bad_server, same_files

from prime_broadcast.folder import PolicyFolder
from prime_broadcast.server import Origin
from prime_broadcast.sources import Fault
from prime_core.errors import UnavailableError


def lie(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    answer(handler, bytes(byte ^ 1 for byte in body))


@pytest.fixture
def reported() -> list[Fault]:
    return []


@pytest.fixture
def folder(tmp_path: Path) -> PolicyFolder:
    return PolicyFolder(tmp_path / "policies", TRUST)


def test_a_wrong_chunk_is_said_in_one_sentence_that_names_its_sender(
    run: Run, folder: PolicyFolder, reported: list[Fault], caplog: pytest.LogCaptureFixture
) -> None:
    signed = run.publish()
    with (
        caplog.at_level(logging.WARNING),
        bad_server(run.root, lie) as liar,
        Origin(run.root) as origin,
    ):
        stats = folder.ensure(0, signed, [liar, origin.url], on_fault=reported.append).stats
    assert same_files(folder.path(0), run, 0)
    lies = [fault for fault in stats.faults if fault.bad_data]
    assert {fault.url for fault in lies} == {liar}
    assert reported == lies
    said = [r.getMessage() for r in caplog.records if " sent false data: " in r.getMessage()]
    assert len(said) == len(lies) >= 1
    assert f"{liar} sent false data: it sent a wrong chunk" in said[0]
    assert "of /policies/0/" in said[0]


def test_a_liar_is_named_though_nothing_arrived(
    run: Run, folder: PolicyFolder, reported: list[Fault], caplog: pytest.LogCaptureFixture
) -> None:
    signed = run.publish()
    with (
        caplog.at_level(logging.WARNING),
        bad_server(run.root, lie) as liar,
        pytest.raises(UnavailableError),
    ):
        folder.ensure(0, signed, [liar], patience=0.2, on_fault=reported.append)
    assert {fault.url for fault in reported} == {liar}
    assert f"{liar} sent false data: it sent a wrong chunk" in caplog.text


def test_a_source_that_only_fails_is_no_liar(
    run: Run, folder: PolicyFolder, reported: list[Fault], caplog: pytest.LogCaptureFixture
) -> None:
    def cut(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        answer(handler, body[:10], claim=len(body))
        handler.close_connection = True

    signed = run.publish()
    with bad_server(run.root, cut) as broken, Origin(run.root) as origin:
        stats = folder.ensure(0, signed, [broken, origin.url], on_fault=reported.append).stats
    assert {fault.kind for fault in stats.faults} == {"failed"}
    assert reported == []
    assert " lied: " not in caplog.text
