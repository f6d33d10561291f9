"""What a network started ends with it; `make demo-stop` ends what was left, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from devnet.processes import Supervisor, stop_recorded
from prime_core.errors import FatalError

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
PARENT = """
import os, sys, time
from pathlib import Path
from devnet.processes import Supervisor
root = Path(sys.argv[1])
network = Supervisor(root / "logs", root / "pids.json", dict(os.environ))
try:
    for name in ("one", "two"):
        network.start(name, [sys.executable, "-c", "import time; time.sleep(600)"])
    print("up", flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    pass
finally:
    network.stop_all()
"""
"""A demo reduced to its processes; SIGTERM interrupts it as the demo's own handler does."""
SIGNALS = "import signal; signal.signal(signal.SIGTERM, signal.default_int_handler)\n"


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    started = subprocess.Popen(
        [sys.executable, "-c", SIGNALS + PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert started.stdout is not None
    assert started.stdout.readline() == "up\n"
    yield started
    started.kill()
    started.wait(20)
    started.stdout.close()


def children(root: Path) -> list[psutil.Process]:
    recorded = json.loads((root / "pids.json").read_text())["children"]
    return [psutil.Process(one["pid"]) for one in recorded.values()]


def test_a_running_demo_and_all_its_processes_end_at_demo_stop(
    parent: subprocess.Popen[str], tmp_path: Path
) -> None:
    left = children(tmp_path)
    assert len(left) == 2
    assert "the demo" in stop_recorded(tmp_path / "pids.json")
    assert parent.wait(120) == 0
    assert psutil.wait_procs(left, timeout=20)[1] == []
    assert not (tmp_path / "pids.json").exists()
    assert stop_recorded(tmp_path / "pids.json") == [], "and again does no harm"


def test_children_end_when_their_demo_is_killed(
    parent: subprocess.Popen[str], tmp_path: Path
) -> None:
    left = children(tmp_path)
    parent.kill()
    assert psutil.wait_procs(left, timeout=20)[1] == []


def test_a_process_number_that_now_belongs_to_another_program_is_left_alone(tmp_path: Path) -> None:
    other = subprocess.Popen(SLEEP)
    try:
        record = {"pid": other.pid, "started": psutil.Process(other.pid).create_time() - 60}
        (tmp_path / "pids.json").write_text(
            json.dumps({"supervisor": record, "children": {"one": record}})
        )
        assert stop_recorded(tmp_path / "pids.json") == []
        assert other.poll() is None
    finally:
        other.kill()
        other.wait(120)


def test_a_required_process_that_ends_by_itself_is_named_with_its_last_words(
    tmp_path: Path,
) -> None:
    network = Supervisor(tmp_path / "logs", tmp_path / "pids.json", {})
    child = network.start("one", [sys.executable, "-c", "import sys; sys.exit('out of luck')"])
    child.process.wait(120)
    with pytest.raises(FatalError, match=r"(?s)one ended with exit code 1.*out of luck"):
        network.check()
    network.stop_all()
    network.stop_all()
