"""`prime-broadcast`: the broadcast on its own, for any folder."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from broadcast_world import Run, until

from prime_broadcast.cli import main

Call = Callable[..., Any]
COMMAND = [sys.executable, "-m", "prime_broadcast.cli"]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs one command to its end; its last line parsed, or what it said when it failed."""

    def run_it(*arguments: object, code: int = 0) -> Any:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([*map(str, arguments)])
        said = capsys.readouterr()
        assert (ended.value.code or 0) == code, said
        return json.loads(said.out.splitlines()[-1]) if code == 0 else said.err

    return run_it


@contextmanager
def running(*arguments: object) -> Iterator[dict[str, Any]]:
    """A serving command; its first line. Ends by SIGTERM with code 0."""
    child = subprocess.Popen(
        [*COMMAND, *map(str, arguments), "--json", "--port", "0"], stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    try:
        yield json.loads(child.stdout.readline())
        child.send_signal(signal.SIGTERM)
        assert child.wait(120) == 0
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


@pytest.mark.slow
def test_any_folder_can_be_served_relayed_fetched_and_verified(
    call: Call, run: Run, tmp_path: Path
) -> None:
    folder, data, key = run.checkpoint(tmp_path / "c"), tmp_path / "data", tmp_path / "key"
    dest = tmp_path / "dest"
    first = call("serve", folder, "--data", data, "--key", key, "--once", "--json")
    assert first["version"] == 0
    assert key.stat().st_mode & 0o777 == 0o600
    signer = ("--signer", first["signer"])
    with (
        running("serve", folder, "--data", data, "--key", key) as serving,
        running("relay", serving["url"], "--data", tmp_path / "relay", *signer) as relay,
    ):
        assert serving["version"] == 0, "unchanged files are no new version"
        until(lambda: (tmp_path / "relay" / "policies" / "0").exists(), "version 0 at the relay")
        got = call("fetch", relay["url"], serving["url"], dest, *signer, "--json")
        assert got["route"] == "whole"
        assert list(got["by_source"]) == [relay["url"]]

        run.step()
        weights = run.checkpoint(tmp_path / "later") / "model.safetensors"
        weights.replace(folder / "model.safetensors")
        second = call("serve", folder, "--data", data, "--key", key, "--once", "--json")
        assert second["version"] == 1
        assert second["deltas"]["0"] < second["bytes"] / 10
        until(lambda: (tmp_path / "relay" / "policies" / "1").exists(), "version 1 at the relay")
        got = call("fetch", relay["url"], dest, *signer, "--json")
        assert (got["version"], got["route"]) == (1, "delta")
        assert got["bytes_received"] == second["deltas"]["0"]
    facts = call("verify", dest / "1", *signer, "--json")
    assert (facts["version"], facts["signature_checked"]) == (1, True)
    assert (dest / "1" / "model.safetensors").read_bytes() == (
        folder / "model.safetensors"
    ).read_bytes()

    (dest / "1" / "config.json").write_text("{}")
    assert "config.json" in call("verify", dest / "1", code=65)


def test_a_server_that_replays_an_older_version_is_refused(
    call: Call, run: Run, tmp_path: Path
) -> None:
    data, key, dest = tmp_path / "data", tmp_path / "key", tmp_path / "dest"
    for number in range(2):
        folder = run.checkpoint(tmp_path / f"c{number}")
        facts = call("serve", folder, "--data", data, "--key", key, "--once", "--json")
        run.step()
    old = tmp_path / "old"
    call("serve", tmp_path / "c0", "--data", old, "--key", key, "--once", "--json")
    signer = ("--signer", facts["signer"])
    with running("serve", tmp_path / "c1", "--data", data, "--key", key) as serving:
        call("fetch", serving["url"], dest, *signer, "--json")
    with running("serve", tmp_path / "c0", "--data", old, "--key", key) as serving:
        assert "replays old ones" in call("fetch", serving["url"], dest, *signer, code=65)


def test_a_stranger_signature_a_dead_server_and_an_open_key_are_said_in_one_sentence(
    call: Call, run: Run, tmp_path: Path
) -> None:
    folder, data, key = run.checkpoint(tmp_path / "c"), tmp_path / "data", tmp_path / "key"
    stranger = "0x000000000000000000000000000000000000dEaD"
    with running("serve", folder, "--data", data, "--key", key) as serving:
        said = call("fetch", serving["url"], tmp_path / "d", "--signer", stranger, code=65)
        assert "not by the trainer" in said
        url = serving["url"]
    call("fetch", url, tmp_path / "d", "--signer", stranger, code=69)
    assert not (tmp_path / "d").exists()
    key.chmod(0o644)
    said = call("serve", folder, "--data", data, "--key", key, "--once", code=64)
    assert f"chmod 600 {key}" in said


def test_diff_says_how_small_the_delta_is_and_that_it_is_lossless(
    call: Call, run: Run, tmp_path: Path
) -> None:
    old = run.checkpoint(tmp_path / "old")
    run.step()
    facts = call("diff", old, run.checkpoint(tmp_path / "new"), "--json")
    assert facts["identical"] is True
    assert facts["ratio"] == pytest.approx(facts["bytes"] / facts["delta_bytes"], abs=0.01)
    assert facts["ratio"] > 10
