"""What `trainer publish` says: a bar on a terminal, one line, or JSON."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from prime_broadcast import bars
from prime_broadcast.manifest import build_manifest
from prime_trainer.run import publish_and_say


def test_publishing_by_hand_draws_a_bar_or_prints_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = io.StringIO()
    monkeypatch.setattr(bars, "console", lambda: Console(file=drawn, force_terminal=True))
    (tmp_path / "weights").write_bytes(b"w" * 5000)

    def publish(folder: Path, version: int) -> Any:
        return SimpleNamespace(manifest=build_manifest(folder, pool=1, version=version, step=3))

    publisher: Any = SimpleNamespace(publish=publish)
    publish_and_say(publisher, tmp_path, 3, as_json=True)
    facts = json.loads(capsys.readouterr().out)
    assert (facts["version"], facts["bytes"], facts["deltas"]) == (3, 5000, {})
    assert drawn.getvalue() == ""
    publish_and_say(publisher, tmp_path, 3, as_json=False)
    assert capsys.readouterr().out == f"policy 3: {facts['digest']}\n"
    assert "hashing" in drawn.getvalue()
