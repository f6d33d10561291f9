"""What memory is left, by the system and by the limit of a container."""

from __future__ import annotations

from pathlib import Path

from prime_core.memory import available


def test_the_smaller_of_the_system_s_memory_and_the_container_s_is_left(tmp_path: Path) -> None:
    assert available(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    2000 kB\n")
    assert available(tmp_path) == 2000 << 10
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("4096\n")
    (group / "memory.stat").write_text("anon 2000\nfile 1500\ninactive_file 1000\n")
    assert available(tmp_path) == 2000 << 10
    (group / "memory.max").write_text("10000\n")
    assert available(tmp_path) == 10000 - (4096 - 1000)
