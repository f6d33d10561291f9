"""A folder appears before its bytes are on the platter; what the power took is found afterwards."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from broadcast_world import TRUST, Run, same_files, until

from prime_broadcast import layout
from prime_broadcast.durable import NOTE, appear, boot_id, settle
from prime_broadcast.folder import PolicyFolder
from prime_broadcast.server import Origin


@pytest.fixture
def arrived(run: Run, tmp_path: Path) -> Path:
    """A node's folder with policy 0."""
    signed = run.publish()
    with Origin(run.root) as origin:
        PolicyFolder(tmp_path / "node", TRUST).ensure(0, signed, [origin.url])
    until(lambda: not (tmp_path / "node" / f"{NOTE}0").exists(), "the bytes on the platter")
    return tmp_path / "node"


def test_the_note_goes_once_the_bytes_are_on_disk(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "file").write_bytes(b"weights")
    thread = appear(tmp_path / "new", tmp_path / "0")
    assert (tmp_path / "0" / "file").read_bytes() == b"weights"
    thread.join()
    assert {path.name for path in tmp_path.iterdir()} == {"0"}


def test_data_damaged_by_a_power_cut_is_removed_and_refetched(run: Run, arrived: Path) -> None:
    (arrived / f"{NOTE}0").write_text("another boot")
    with (arrived / "0" / "model.safetensors").open("r+b") as file:
        file.seek(5000)
        file.write(bytes(4096))
    folder = PolicyFolder(arrived, TRUST)
    assert folder.versions() == []
    assert not (arrived / f"{NOTE}0").exists()
    with Origin(run.root) as origin:
        folder.ensure(0, layout.manifest_of(run.root, 0), [origin.url])
    assert same_files(arrived / "0", run, 0)


def test_what_a_power_cut_spared_is_kept(run: Run, arrived: Path) -> None:
    (arrived / f"{NOTE}0").write_text("another boot")
    assert settle(arrived) == []
    assert same_files(arrived / "0", run, 0)
    assert not (arrived / f"{NOTE}0").exists()


def test_a_lost_manifest_is_damage_too(arrived: Path) -> None:
    (arrived / f"{NOTE}0").write_text("")
    (arrived / "0" / "manifest.json").write_bytes(b"")
    assert settle(arrived) == ["0"]


def test_a_killed_process_costs_no_second_reading(
    run: Run, arrived: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr("prime_broadcast.durable.verify_folder", never)
    (arrived / f"{NOTE}0").write_text(boot_id() or "this")
    assert settle(arrived, boot=lambda: boot_id() or "this") == []
    assert same_files(arrived / "0", run, 0)


def test_a_note_without_a_folder_is_removed(tmp_path: Path) -> None:
    (tmp_path / f"{NOTE}3").write_text("another boot")
    assert settle(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_relays_deltas_are_verified_with_what_a_power_cut_spared(
    run: Run, tmp_path: Path
) -> None:
    run.publish()
    run.publish()
    shutil.copytree(run.root / "policies", tmp_path / "relay")
    (tmp_path / "relay" / "index.json").unlink()
    for version in "01":
        (tmp_path / "relay" / f"{NOTE}{version}").write_text("another boot")
    assert (tmp_path / "relay" / "1" / "delta-0").exists()
    assert settle(tmp_path / "relay") == []
    (tmp_path / "relay" / f"{NOTE}1").write_text("another boot")
    with (tmp_path / "relay" / "1" / "delta-0").open("r+b") as file:
        file.write(b"rot")
    assert settle(tmp_path / "relay") == ["1"]
