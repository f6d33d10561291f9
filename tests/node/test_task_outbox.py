"""What a task leaves in the folder that it may write."""

from __future__ import annotations

from pathlib import Path

from prime_node.state import DataFolder


def test_nothing_that_a_task_wrote_outlives_the_next_start(tmp_path: Path) -> None:
    """Files in folders, closed folders, links out: all goes, and nothing beyond the outbox."""
    data = DataFolder(tmp_path / "n")
    data.make()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_bytes(b"kept")
    mode = outside.stat().st_mode
    deep = data.task_outbox / "a" / "b"
    deep.mkdir(parents=True)
    (deep / "filler").write_bytes(b"x" * 1000)
    (data.task_outbox / "plain").write_bytes(b"x")
    (data.task_outbox / "link").symlink_to(outside)
    (deep / "link").symlink_to(outside)
    deep.chmod(0)
    deep.parent.chmod(0)
    data.empty_task_outbox()
    assert not list(data.task_outbox.iterdir())
    assert (outside / "kept").read_bytes() == b"kept"
    assert outside.stat().st_mode == mode
