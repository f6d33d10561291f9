"""Which version a relay fetches first, when newer ones appear meanwhile."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from broadcast_world import CHUNK, TRUST, Run, answer, bad_server, same_files, until

from prime_broadcast import layout
from prime_broadcast.relay import Relay, RelayEvent


@pytest.mark.parametrize("needed", [False, True], ids=["not needed", "the newer one's base"])
def test_a_fetch_under_way_gives_way_to_a_newer_version_unless_that_needs_it(
    run: Run, tmp_path: Path, needed: bool
) -> None:
    signed = [run.publish() for _ in range(3)]
    older, newer = (signed[1] if needed else signed[0]), signed[2]
    old = older.manifest.version
    gate, served, events = threading.Event(), list[int](), list[RelayEvent]()

    def slow(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        of_old = f"/{old}/model" in handler.path
        if of_old and handler.span[0] >= 10 * CHUNK:  # type: ignore[attr-defined]
            gate.wait(60)
        served.append(len(body) if of_old else 0)
        answer(handler, body)

    with (
        bad_server(run.root, slow) as upstream,
        Relay(tmp_path / "r", TRUST, on_event=events.append) as relay,
    ):
        try:
            relay.offer([older], [[upstream]])
            until(lambda: sum(served) >= 10 * CHUNK, "ten chunks of the older version")
            relay.offer([newer, older], [[upstream]])
            if not needed:
                until(lambda: relay.complete() == [2], "the newer version before the older")
        finally:
            gate.set()

        def done() -> list[int]:
            return [event.version for event in events if event.kind == "complete"]

        until(lambda: len(done()) == 2, "both versions")
        assert relay.complete() == [old, 2]
        assert done() == ([1, 2] if needed else [2, 0])
        assert "failed" not in {event.kind for event in events}
        size = len(run.file(old))
        assert sum(served) <= size + 2 * CHUNK, "what was verified did not come again"
    for version in (old, 2):
        assert same_files(layout.version_folder(tmp_path / "r", version), run, version)


def test_one_fetch_at_a_time_gives_way_so_that_a_quick_trainer_starves_none(
    run: Run, tmp_path: Path
) -> None:
    signed = [run.publish() for _ in range(5)]
    gate, asked = threading.Event(), set[int]()

    def held(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        named = layout.parse_address(handler.path)
        assert named is not None
        if "model" in named.name:
            asked.add(named.version or 0)
            gate.wait(60)
        answer(handler, body)

    with bad_server(run.root, held) as upstream, Relay(tmp_path / "r", TRUST) as relay:
        try:
            for version in (0, 2, 4):
                relay.offer([signed[version]], [[upstream]])
                if version < 4:
                    until(lambda v=version: v in asked, "the version is being fetched")  # type: ignore[misc]
        finally:
            live = relay._content.get(2)
            assert live is not None
            assert not relay._gives_way(live), "one gave way already"
            gate.set()
        until(lambda: relay.complete() == [0, 2, 4], "all of them")
